# SPDX-License-Identifier: Apache-2.0
"""The metadata strings of safetensors files: `format`, and those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors

import ckptmgr
from ckptmgr import CheckpointConfig, CheckpointManager, ModelCheckpoint, UnsupportedCheckpoint
from tests.support.surface import Loop

KEY = bytes(range(32))
WEIGHTS = {"w": np.ones(3, np.float32)}


class Tensor:
    """Stands for MindSpore's: an array that is known by the name of its class."""

    name, shape, dtype = "w", (3,), "Float32"

    def asnumpy(self) -> np.ndarray:
        """Return the values."""
        return WEIGHTS["w"]


Tensor.__module__ = "mindspore.common.tensor"
Named: Any = type("Parameter", (Tensor,), {"__module__": "mindspore.common.parameter"})


class Cell:
    """Stands for a MindSpore Cell."""

    def parameters_and_names(self) -> list[tuple[str, Any]]:
        parameter = Named()
        parameter.param_info = SimpleNamespace(is_pipeline_shared_param=False)
        return [("w", parameter)]

    def __getitem__(self, name: str) -> np.ndarray:
        return np.zeros(3)


def strings_of(path: str | Path) -> dict[str, str]:
    """Return the metadata as the library reads it."""
    with safetensors.safe_open(path, framework="np") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize(
    ("saved", "format"),
    [
        (WEIGHTS, "pt"),
        (SimpleNamespace(state_dict=lambda: WEIGHTS), "pt"),
        ([{"name": "w", "data": WEIGHTS["w"]}], "ms"),
        ([Named()], "ms"),
        ({"w": Named()}, "ms"),
        (Cell(), "ms"),
    ],
    ids=["arrays", "module", "list of dicts", "list of parameters", "parameters", "cell"],
)
def test_format_is_that_of_mindspore_for_its_objects_alone(
    tmp_path: Path, saved: object, format: str
) -> None:
    written = ckptmgr.save_checkpoint(saved, tmp_path / "x", format="safetensors")
    assert strings_of(written.path) == {"format": format}


@pytest.mark.parametrize(
    ("network", "strings"),
    [
        ({"w": np.zeros(3)}, {"format": "pt"}),
        (Cell(), {"format": "ms", "remove_redundancy": "False"}),
    ],
    ids=["arrays", "cell"],
)
def test_callback_writes_the_strings_that_the_library_of_the_network_writes(
    tmp_path: Path, network: Any, strings: dict[str, str]
) -> None:
    config = CheckpointConfig(format="safetensors")
    callback = ModelCheckpoint("net", str(tmp_path), config)
    Loop(callbacks=(callback,), network=network).run(1)
    assert strings_of(callback.latest_ckpt_file_name) == strings


def test_manager_writes_the_format_that_other_libraries_load(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, WEIGHTS)
    (saved,) = tmp_path.glob("*.safetensors")
    assert strings_of(saved)["format"] == "pt"


@pytest.mark.parametrize("options", [{}, {"enc_key": KEY}, {"compression": "zstd"}])
def test_strings_of_the_user_are_stored(tmp_path: Path, options: Mapping[str, Any]) -> None:
    given = {"model": "ResNet", "format": "pt"}
    saved = ckptmgr.save_checkpoint(
        WEIGHTS, tmp_path / "x", format="safetensors", metadata=given, **options
    )
    with ckptmgr.open_checkpoint(saved.path, dec_key=options.get("enc_key")) as reader:
        assert reader.metadata == given


def test_strings_of_the_user_stand_beside_the_mark_of_redundancy(tmp_path: Path) -> None:
    saved = ckptmgr.save_checkpoint(
        WEIGHTS, tmp_path / "x", format="safetensors", metadata={"a": "b"}, remove_redundancy=True
    )
    assert strings_of(saved.path) == {"format": "pt", "remove_redundancy": "True", "a": "b"}


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"format": "ms"}, ValueError, "'format' is 'ms', but 'pt' is written"),
        ({"a": 1}, TypeError, "'metadata' must map strings to strings, but got 'a': 1"),
        ({1: "a"}, TypeError, "'metadata' must map strings to strings, but got 1: 'a'"),
        (["a"], TypeError, "'metadata' must be a mapping of strings"),
        (
            {"crc_num": "1"},
            UnsupportedCheckpoint,
            "'crc_num' is reserved; give crc_check=True instead",
        ),
        ({"w": "1"}, UnsupportedCheckpoint, "the name is also a metadata key"),
    ],
)
def test_unusable_metadata_is_refused(
    tmp_path: Path, metadata: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ckptmgr.save_checkpoint(WEIGHTS, tmp_path / "x", format="safetensors", metadata=metadata)
    assert not list(tmp_path.glob("*.safetensors"))


def test_metadata_of_a_ckpt_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'metadata' is stored in safetensors files alone"):
        ckptmgr.save_checkpoint(WEIGHTS, tmp_path / "x.ckpt", metadata={"a": "b"})
