# SPDX-License-Identifier: Apache-2.0
"""Options of `save_checkpoint` that MindSpore takes by keyword without naming them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import load_checkpoint, save_checkpoint

W = {"w": np.ones(2)}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("enc_kye", "enc_key"),
        ("compresion", "compression"),
        ("remove_redundency", "remove_redundancy"),
        ("global_step", "global_step_num"),
    ],
)
def test_misspelt_option_is_refused_with_a_suggestion_and_without_its_value(
    tmp_path: Path, name: str, meant: str
) -> None:
    given: dict[str, Any] = {name: b"sixteen byte key"}
    with pytest.raises(
        TypeError, match=f"^save_checkpoint has no option '{name}'; did you mean '{meant}'"
    ) as caught:
        save_checkpoint(W, tmp_path / "x.ckpt", **given)
    assert "sixteen" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("ckpt", {"incremental": True}, "^incremental has no effect in save_checkpoint"),
        ("ckpt", {"remove_redundancy": True}, "^remove_redundancy has no effect on a .ckpt"),
        ("safetensors", {"global_step_num": 3}, "'global_step_num' must be set to default value"),
        ("ckpt", {"global_step_num": -1}, "must be int and must >= 0"),
    ],
)
def test_option_without_effect_is_refused_by_name(
    tmp_path: Path, format: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_checkpoint(W, tmp_path / "x", format=format, **given)
    assert list(tmp_path.iterdir()) == []


def test_defaults_of_mindspore_are_taken(tmp_path: Path) -> None:
    defaults: dict[str, Any] = {"incremental": False, "global_step_num": None}
    for format in ("ckpt", "safetensors"):
        save_checkpoint(W, tmp_path / "x", format=format, remove_redundancy=False, **defaults)


@pytest.mark.parametrize(("append", "step"), [(None, 7), ({"step_num": 9}, 9)])
def test_global_step_is_the_step_of_the_checkpoint_unless_it_is_appended(
    tmp_path: Path, append: dict[str, object] | None, step: int
) -> None:
    saved = save_checkpoint(W, tmp_path / "x.ckpt", append_dict=append, global_step_num=7)
    assert saved.step == step


@pytest.mark.parametrize("noted", [True, False])
def test_load_that_expects_another_redundancy_gets_the_warning_of_mindspore(
    tmp_path: Path, noted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.safetensors"
    save_checkpoint(W, path, format="safetensors", remove_redundancy=noted)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(path, remove_redundancy=noted)
        assert caplog.messages == []
        load_checkpoint(path, remove_redundancy=not noted)
    kind = "deduplicated" if noted else "non-deduplicated"
    (message,) = caplog.messages
    assert f"file is {kind}, but remove_redundancy is set to {not noted}" in message
