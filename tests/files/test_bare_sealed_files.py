# SPDX-License-Identifier: Apache-2.0
"""A sealed file without a manifest opens by its seal alone, also after a power cut in a save over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CorruptCheckpoint,
    KeyProblem,
    load_checkpoint,
    load_state,
    open_checkpoint,
    save_state,
)
from tests.cli.running import run
from tests.support import api
from tests.support.cut_overwrites import NAME, WRITERS, fail
from tests.support.rekeying import OLD
from tests.support.saved import flip


def bare(directory: Path, enc_key: bytes | None = OLD.raw) -> Path:
    """Return a sealed file, or a plain one, whose manifest was lost, e.g. by a copy."""
    path = directory / NAME
    save_state({"w": np.arange(4.0)}, path, enc_key=enc_key)
    (directory / api.manifest_name(NAME)).unlink()
    return path


@pytest.mark.parametrize("writer", WRITERS)
def test_sealed_file_without_manifest_opens_after_a_power_cut_in_a_save_over_it(
    tmp_path: Path, writer: str
) -> None:
    path = bare(tmp_path)
    fail(tmp_path, writer, is_power_cut=True)
    assert (tmp_path / api.manifest_name(NAME)).exists()
    state: Any = load_state(path, dec_key=OLD.raw)
    loaded = load_checkpoint(path, dec_key=OLD.raw)
    with open_checkpoint(path, dec_key=OLD.raw) as opened:
        read = opened.read("w")
    for one in (state["w"], loaded["w"], read):
        np.testing.assert_array_equal(one, [0, 1, 2, 3])


def test_sealed_file_under_a_placeholder_verifies_as_one_without_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLD", OLD.raw.hex())
    path = bare(tmp_path)
    before = run("verify", path, "--key", "env:OLD")
    fail(tmp_path, "old key", is_power_cut=True)
    after = run("verify", path, "--key", "env:OLD")
    assert (after.exit_code, after.stdout) == (before.exit_code, before.stdout)


def test_damaged_file_under_a_placeholder_is_damaged(tmp_path: Path) -> None:
    path = bare(tmp_path)
    fail(tmp_path, "old key", is_power_cut=True)
    flip(path, -20)
    with pytest.raises((CorruptCheckpoint, KeyProblem)):
        load_state(path, dec_key=OLD.raw)


def test_plain_file_under_a_placeholder_is_refused_by_readers_with_a_key(tmp_path: Path) -> None:
    path = bare(tmp_path, enc_key=None)
    fail(tmp_path, "old key", is_power_cut=True)
    with pytest.raises(KeyProblem):
        load_state(path, dec_key=OLD.raw)
