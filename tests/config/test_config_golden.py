# SPDX-License-Identifier: Apache-2.0
"""Every input whose outcome was recorded from the real MindSpore 2.10.0 has the same outcome here, or a listed reason."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from ckptmgr import CheckpointConfig
from ckptmgr.config.config import check_config
from ckptmgr.core.names import check_directory, check_prefix


class _Row(TypedDict):
    group: str
    input: str
    exception: str | None
    message_or_value: str


_ROWS: list[_Row] = json.loads(
    (Path(__file__).parent.parent / "golden" / "validation.json").read_text(encoding="utf-8")
)

# Input -> (our exception, our message, why). Everything else must equal the recording.
_DIFFERENCES: dict[str, tuple[str, str, str]] = {
    "enc_key=bytearray(16)": (
        "ValueError",
        "The parameter 'enc_key' must be isinstance of (<class 'NoneType'>, <class 'bytes'>), "
        "but got <redacted bytearray>.",
        "MindSpore prints the key",
    ),
    "enc_key=b''": (
        "KeyProblem",
        "a key for AES-GCM must be 16 or 24 or 32 bytes long, but got 0",
        "MindSpore fails at the first save, after it has deleted a checkpoint",
    ),
    "enc_key=b'short'": (
        "KeyProblem",
        "a key for AES-GCM must be 16 or 24 or 32 bytes long, but got 5",
        "MindSpore fails at the first save, after it has deleted a checkpoint",
    ),
    "enc_key=b'0'*16,enc_mode='aes-gcm'": (
        "KeyProblem",
        "the cipher mode must be one of AES-GCM, AES-CBC, SM4-CBC, but got aes-gcm\nhint: did you mean 'AES-GCM'?",
        "MindSpore fails at the first save, after it has deleted a checkpoint",
    ),
    "format='pt'": (
        "ValueError",
        "For 'save_checkpoint', the format must be 'safetensors' or 'ckpt', but got pt.",
        "MindSpore fails with this message at the first save, after it has deleted a checkpoint",
    ),
}

# Input -> (extension of the files, its meaning here). MindSpore refuses it.
_ACCEPTED = {
    "format='safetensors',enc_key=b'0'*16": ("safetensors.ckpe", "encrypted, in containers"),
    "format='safetensors',crc_check=True": ("safetensors", "the CRC-32 is in the header"),
    "format='safetensors',exception_save=True": ("safetensors", "so is the breakpoint"),
}


def _rows(*groups: str) -> list[_Row]:
    return [row for row in _ROWS if row["group"] in groups]


def _arguments(text: str) -> dict[str, object]:
    names = {"np": np, "bytearray": bytearray, "complex": complex, "dict": dict}
    return {} if text == "(defaults)" else eval(f"dict({text})", names)  # noqa: S307 - recorded in our own golden file


def _policy(config: CheckpointConfig) -> str:
    policy = config.get_checkpoint_policy()
    del policy["saved_network"]  # not recorded
    return str(policy)


@pytest.mark.parametrize("row", _rows("cfg", "pol"), ids=lambda row: row["input"])
def test_config_outcome_equals_the_recorded_one(row: _Row) -> None:
    name, text = row["exception"], row["message_or_value"]
    if row["input"] in _DIFFERENCES:
        name, text, _ = _DIFFERENCES[row["input"]]
    if name is None:
        assert _policy(CheckpointConfig(**_arguments(row["input"]))) == text  # type: ignore[arg-type]
        return
    if row["input"] in _ACCEPTED:
        extension, _ = _ACCEPTED[row["input"]]
        assert CheckpointConfig(**_arguments(row["input"])).extension == extension  # type: ignore[arg-type]
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        CheckpointConfig(**_arguments(row["input"]))  # type: ignore[arg-type]
    assert (type(caught.value).__name__, str(caught.value)) == (name, text)


def test_listed_differences_all_occur_in_the_recording() -> None:
    assert {*_DIFFERENCES, *_ACCEPTED} <= {row["input"] for row in _rows("cfg")}


def test_properties_equal_the_recorded_ones() -> None:
    config = CheckpointConfig()
    names = [
        *config.get_checkpoint_policy(),
        "enc_key",
        "enc_mode",
        "crc_check",
        "format",
        "append_dict",
    ]
    names[4:4] = ["integrated_save", "async_save"]
    (row,) = _rows("prop")
    # The recording was cut off after 200 characters.
    assert str({name: getattr(config, name) for name in names}).startswith(row["message_or_value"])


@pytest.mark.parametrize("row", _rows("app"), ids=lambda row: row["input"])
def test_append_dict_equals_the_recorded_one(row: _Row) -> None:
    config = CheckpointConfig(append_info=ast.literal_eval(row["input"]))
    assert str(config.append_dict) == row["message_or_value"]


@pytest.mark.parametrize("row", _rows("MC"), ids=lambda row: row["input"])
def test_callback_argument_outcome_equals_the_recorded_one(row: _Row) -> None:
    name, _, value = row["input"].partition("=")
    check = {"prefix": check_prefix, "config": check_config, "directory": check_directory}[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        check(ast.literal_eval(value))
    assert (type(caught.value).__name__, str(caught.value)) == (
        row["exception"],
        row["message_or_value"],
    )
