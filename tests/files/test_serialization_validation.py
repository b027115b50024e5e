# SPDX-License-Identifier: Apache-2.0
"""The inputs of golden/validation.json, each given to ours: the same exception and message, or a listed difference.

NumPy arrays stand for MindSpore's parameters. The groups cfg, pol, prop, app and MC are replayed in test_config.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointFileNotFound,
    KeyProblem,
    UnprovenCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.files.load.network import load_into
from ckptmgr.formats.dtypes import BY_NAME
from tests.support.surface import GOLDEN, everything_said, shows

_Row = dict[str, Any]
_ROWS: list[_Row] = json.loads((GOLDEN / "validation.json").read_text(encoding="utf-8"))
_NOTHING = type(None)


def _rows(group: str) -> list[_Row]:
    return [row for row in _ROWS if row["group"] == group]


_KEY_CHECKED = "MindSpore removes the older file, fails in C++ and leaves an empty one"
_PLAIN_WORDS = "the message says what is wrong: a key is missing, wrong, or of the wrong length"

# Input: what ours raises (_NOTHING: it returns), part of its message, and why it differs.
DIFFERENCES: dict[str, tuple[type[object], str, str]] = {
    "n,'sv/a.ckpt',bogus=1": (
        TypeError,
        "save_checkpoint has no option 'bogus'",
        "MindSpore ignores it; with enc_kye= it would write plaintext",
    ),
    "[],'sv/e.ckpt'": (
        UnsupportedCheckpoint,
        "nothing to save",
        "MindSpore writes an empty file it cannot load",
    ),
    "{},'sv/e2.ckpt'": (
        UnsupportedCheckpoint,
        "nothing to save",
        "MindSpore writes an empty file it cannot load",
    ),
    "[{'name':'a','data':np.zeros(2)}],'sv/a.ckpt'": (
        _NOTHING,
        "",
        "NumPy arrays are parameters here",
    ),
    "[par,5],'sv/a.ckpt'": (
        TypeError,
        "should be parameter, but got <class 'numpy",
        "a list of arrays has no names",
    ),
    "{'a':5},'sv/a.ckpt'": (
        _NOTHING,
        "",
        "MindSpore fails with UnboundLocalError; numbers are saved here",
    ),
    "n,'nodir/x.ckpt'": (
        FileNotFoundError,
        "/nodir/x.ckpt'",
        "the message names the file, not a temporary one",
    ),
    "n,'sv/a.ckpt',enc_key='k'": (ValueError, "but got <redacted str>", "a key is never shown"),
    "n,'sv/a.ckpt',enc_key=b''": (KeyProblem, "got 0", _KEY_CHECKED),
    "n,'sv/a.ckpt',enc_key=b'short'": (KeyProblem, "got 5", _KEY_CHECKED),
    "n,'sv/a.ckpt',enc_key=b'0'*33": (KeyProblem, "got 33", _KEY_CHECKED),
    "n,'sv/a.ckpt',enc_key=b'0'*16,enc_mode='X'": (KeyProblem, "must be one of", _KEY_CHECKED),
    "n,'sv/a.ckpt',enc_key=b'0'*24,enc_mode='SM4-CBC'": (KeyProblem, "got 24", _KEY_CHECKED),
    "n,'sv/a.ckpt',enc_key=b'0'*32,enc_mode='SM4-CBC'": (KeyProblem, "got 32", _KEY_CHECKED),
    "'ld/none.ckpt'": (
        CheckpointFileNotFound,
        "does not exist, please check",
        "a subclass with the same message",
    ),
    "'ld/a.safetensors'": (_NOTHING, "", "without a format the file decides"),
    "'ld/a.ckpt',choice_func=3": (
        TypeError,
        "'int' object is not callable",
        "as in save_checkpoint",
    ),
    "'ld/enc.ckpt'": (KeyProblem, "a key is needed", _PLAIN_WORDS),
    "'ld/enccrc.ckpt'": (KeyProblem, "a key is needed", _PLAIN_WORDS),
    "'ld/enc.ckpt',dec_key=b'1'*16": (KeyProblem, "the given key is", _PLAIN_WORDS),
    "'ld/enc.ckpt',dec_key=b'0'*5": (KeyProblem, "got 5", _PLAIN_WORDS),
    "'ld/enc.ckpt',dec_key=b''": (KeyProblem, "got 0", _PLAIN_WORDS),
    "'ld/enc.ckpt',dec_key=b'0'*16,dec_mode='zzz'": (KeyProblem, "must be one of", _PLAIN_WORDS),
    "'ld/enccrc.ckpt',dec_key=b'0'*16,crc_check=True": (
        _NOTHING,
        "",
        "CRC and key work together here",
    ),
    "'ld/a.safetensors',format='safetensors',dec_key=b'0'*16": (
        UnprovenCheckpoint,
        "the manifest is not authenticated although a key was given",
        "MindSpore prints the key",
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the files that the rows load."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sv").mkdir()
    (tmp_path / "ld").mkdir()
    network = {"net.w": np.array([1, 2], np.float32)}
    others = {"net.b": np.array([3], np.float32), "opt.m": np.array([4], np.float32)}
    save_checkpoint(network | others, "ld/a.ckpt", append_dict={"epoch_num": 3, "s": "héllo"})
    save_checkpoint(network, "ld/a.safetensors", format="safetensors")
    save_checkpoint(network, "ld/enc.ckpt", enc_key=b"0" * 16)
    save_checkpoint(network, "ld/enccrc.ckpt", enc_key=b"0" * 16, crc_check=True)
    save_checkpoint(network, "ld/crc.ckpt", crc_check=True)
    return Path(os.path.realpath(tmp_path))


def _call(function: Callable[..., object], row: _Row) -> tuple[object, BaseException | None]:
    names = {
        "f": function,
        "io": io,
        "open": lambda name, _: io.BytesIO(Path(name).read_bytes()),
        "np": np,
        "n": {"w": np.zeros((2, 2), np.float32)},
        "par": np.zeros(1, np.float32),
    }
    try:
        # The inputs were recorded as Python text; they are our own file.
        return eval(f"f({row['input']})", names), None  # noqa: S307
    except Exception as error:  # the test compares whatever it is
        return None, error


def _assert_answer(row: _Row, error: BaseException | None, place: Path) -> None:
    difference = DIFFERENCES.get(row["input"])
    said = str(error).replace(str(place), "<dir>")
    expected = str(row["message_or_value"]).replace("abc.Parameter", "numpy.ndarray")
    if difference is None:
        assert type(error).__name__ == (row["exception"] or "NoneType")
        assert error is None or said == expected
        return
    kind, part, _ = difference
    assert type(error) is kind
    assert part in said
    is_different = type(error).__name__ != row["exception"] or said != expected
    assert is_different, "no difference: not to be listed"


@pytest.mark.parametrize("row", _rows("save"), ids=lambda row: row["input"])
def test_save_answers_as_recorded_or_as_listed(row: _Row, place: Path) -> None:
    _, error = _call(save_checkpoint, row)
    _assert_answer(row, error, place)
    if error is None and row["exception"] is None:
        ((name, size),) = ast.literal_eval(row["message_or_value"]).items()
        # Our safetensors start their data at a multiple of 64 bytes.
        assert name.endswith("safetensors") or (place / "sv" / name).stat().st_size == size
        assert (place / "sv" / name).exists()
    elif error is not None:
        assert list((place / "sv").iterdir()) == []


@pytest.mark.parametrize("row", _rows("load"), ids=lambda row: row["input"])
def test_load_answers_as_recorded_or_as_listed(row: _Row, place: Path) -> None:
    values, error = _call(load_checkpoint, row)
    _assert_answer(row, error, place)
    if error is None and row["exception"] is None:
        assert isinstance(values, dict)
        assert {name: _spelled(value) for name, value in values.items()} == _spelled_rows(row)


def _spelled(value: np.ndarray | str) -> object:
    if isinstance(value, str):
        return value
    return (BY_NAME[value.dtype.name].mindspore, value.shape, value.tolist())


def _spelled_rows(row: _Row) -> object:
    return ast.literal_eval(row["message_or_value"])


@pytest.mark.parametrize(
    "row",
    [row for row in [*_rows("save"), *_rows("load")] if re.search("_key=b'[^']", row["input"])],
    ids=lambda row: row["input"],
)
def test_error_of_an_argument_never_shows_the_key(row: _Row, place: Path) -> None:
    (given,) = re.findall(r"_key=(b'.'\*[0-9]+|b'[a-z]+')", row["input"])
    key: bytes = eval(given)  # noqa: S307 - our own file
    _, error = _call(save_checkpoint if row["group"] == "save" else load_checkpoint, row)
    assert len(key) > 4
    assert not shows(everything_said(error), key)


def test_differences_name_rows_that_are_replayed() -> None:
    assert set(DIFFERENCES) <= {row["input"] for row in [*_rows("save"), *_rows("load")]}


# net: the network, the values, whether strict, for each row of the group that is about both.
_F32, _F64, _I32, _U8 = np.float32, np.float64, np.int32, np.uint8
NET_INPUTS: dict[str, tuple[dict[str, np.ndarray], Any, bool]] = {
    "match": ({"w": np.zeros(2, _F32)}, {"w": np.array([1, 2], _F32)}, False),
    "missing in dict": (
        {"w": np.zeros(2, _F32), "b": np.zeros(1, _F32)},
        {"w": np.array([1, 2], _F32)},
        False,
    ),
    "extra in dict": (
        {"w": np.zeros(2, _F32)},
        {"w": np.array([1, 2], _F32), "z": np.zeros(1, _F32)},
        False,
    ),
    "(2,1,1)->(2,) special": (
        {"w": np.zeros(2, _F32)},
        {"w": np.array([[[1]], [[2]]], _F32)},
        False,
    ),
    "f64->f32 lax": ({"w": np.zeros(2, _F32)}, {"w": np.array([1, 2], _F64)}, False),
    "f64->f32 strict": ({"w": np.zeros(2, _F32)}, {"w": np.array([1, 2], _F64)}, True),
    "i32->f32": ({"w": np.zeros(2, _F32)}, {"w": np.array([1, 2], _I32)}, False),
    "u8->i32": ({"w": np.zeros(2, _I32)}, {"w": np.array([1, 2], _U8)}, False),
    'prefix "net."': ({"w": np.zeros(2, _F32)}, {"net.w": np.array([1, 2], _F32)}, False),
    "prefix strict": ({"w": np.zeros(2, _F32)}, {"net.w": np.array([1, 2], _F32)}, True),
    "dict=[]": ({"w": np.zeros(2, _F32)}, [], False),
    "empty dict": ({"w": np.zeros(2, _F32)}, {}, False),
    "scalar () vs (1,)": ({"w": np.zeros(1, _F32)}, {"w": np.array(1, _F32)}, False),
}

NET_DIFFERENCES = {
    "(2,1,1)->(2,) special": (RuntimeError, "MindSpore gives the network another shape"),
    'prefix "net."': (
        _NOTHING,
        "MindSpore guesses that the names of the file have one prefix more",
    ),
}

NET_NOT_REPLAYED = {"remove_redundancy=True alone": "load_into has no such argument"}


@pytest.mark.parametrize(
    "row",
    [row for row in _rows("net") if row["input"] not in NET_NOT_REPLAYED],
    ids=lambda row: row["input"],
)
def test_network_is_filled_as_recorded_or_as_listed(row: _Row) -> None:
    network, values, is_strict = NET_INPUTS[row["input"]]
    network = {name: array.copy() for name, array in network.items()}
    before = {name: array.tolist() for name, array in network.items()}
    error: Exception | None = None
    try:
        load_into(network, values, strict=is_strict)
    except (RuntimeError, TypeError) as raised:
        error = raised
    if row["input"] in NET_DIFFERENCES:
        assert type(error) is NET_DIFFERENCES[row["input"]][0]
    elif row["exception"] is None:
        assert error is None
        _, filled = ast.literal_eval(row["message_or_value"])
        assert {name: array.tolist() for name, array in network.items()} == filled
        return
    else:
        assert (type(error).__name__, str(error)) == (row["exception"], row["message_or_value"])
    assert {name: array.tolist() for name, array in network.items()} == before


def test_inputs_of_networks_name_the_rows_of_the_group() -> None:
    assert {row["input"] for row in _rows("net")} == set(NET_INPUTS) | set(NET_NOT_REPLAYED)
    assert set(NET_DIFFERENCES) <= set(NET_INPUTS)


def _saved_and_loaded(path: Path, obj: object, **options: Any) -> object:
    """Return the loaded values as the rows spell them, or the exception."""
    try:
        save_checkpoint(obj, path, **options)
        return {name: _spelled(value) for name, value in load_checkpoint(path).items()}
    except (TypeError, ValueError) as error:
        return type(error)


_W1, _W2 = np.array([1], _F32), np.array([2], _F32)
_APPENDED = {
    "i": 5,
    "neg": -(2**40),
    "f": 0.1,
    "b": True,
    "s": "",
    "u": "日本",
    "big": 2**62,
}

# What each row of the group does here; where it is not MindSpore's answer, why.
FX: dict[str, tuple[dict[str, Any], object, str]] = {
    "save dict {'x':Parameter,'y':Tensor} -> load": (
        {"obj": {"x": _W1, "y": _W2}},
        {"x": ("Float32", (1,), [1.0]), "y": ("Float32", (1,), [2.0])},
        "MindSpore drops y",
    ),
    "append_dict key equal to a parameter name": (
        {"obj": {"w": _W1}, "append_dict": {"w": 1}},
        UnsupportedState,
        "MindSpore replaces the parameter",
    ),
    "two parameters with the same name in list": (
        {"obj": [{"name": "w", "data": _W1}, {"name": "w", "data": _W2}]},
        UnsupportedState,
        "MindSpore keeps the last one",
    ),
    "append_dict scalar types": ({"obj": [], "append_dict": _APPENDED}, None, ""),
    "empty (0,3), (0,) and scalar ()": (
        {"obj": {"a": np.zeros((0, 3), _F32), "b": np.zeros(0, _F32), "s": np.array(2, _F32)}},
        {"a": ("Float32", (0, 3), []), "b": ("Float32", (0,), []), "s": ("Float32", (), 2.0)},
        "MindSpore drops the empty ones",
    ),
    "complex64 ckpt": (
        {"obj": {"c": np.zeros(2, np.complex64)}},
        UnsupportedCheckpoint,
        "refused when it is saved, not when it is loaded",
    ),
    "only an empty tensor (0,) in the file": (
        {"obj": {"z": np.zeros(0, _F32)}},
        {"z": ("Float32", (0,), [])},
        "MindSpore drops it and cannot load the file",
    ),
    "only an empty tensor (0,) async thread": (
        {"obj": {"z": np.zeros(0, _F32)}, "async_save": "thread"},
        {"z": ("Float32", (0,), [])},
        "MindSpore makes a scalar 0 of it",
    ),
}


@pytest.mark.parametrize("row", _rows("fx"), ids=lambda row: row["input"])
def test_saved_state_loads_as_recorded_or_as_listed(row: _Row, tmp_path: Path) -> None:
    options, expected, why = FX[row["input"]]
    options = dict(options)
    answer = _saved_and_loaded(tmp_path / "a.ckpt", options.pop("obj"), **options)
    if not why:
        assert answer == _spelled_rows(row)
        return
    assert answer == expected
    assert row["exception"] or answer != _spelled_rows(row), "no difference: not to be listed"


def test_states_name_the_rows_of_the_group() -> None:
    assert set(FX) == {row["input"] for row in _rows("fx")}
