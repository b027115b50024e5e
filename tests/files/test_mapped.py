# SPDX-License-Identifier: Apache-2.0
"""`open_checkpoint(mmap=True)`: the memory of the file instead of a copy, and checked like one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptmgr import (
    ChecksumMismatch,
    CorruptCheckpoint,
    TruncatedError,
    UnsupportedCheckpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.io.files import CachedFile
from tests.formats.test_mutations import ITEMS
from tests.support import api
from tests.support.saved import flip
from tests.support.stored import image_bytes
from tests.support.surface import KEY, comparable

MIB = 1 << 20


def saved(directory: Path, state: dict[str, Any], name: str = "x.safetensors") -> Path:
    path = directory / name
    save_checkpoint(state, path, format=name.partition(".")[2])
    return path


def is_mapped(array: np.ndarray) -> bool:
    """Return whether the memory of an array belongs to something else than NumPy."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return isinstance(array.base, memoryview)


@pytest.fixture
def state() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "large": rng.random((5 * MIB,)),
        "half": rng.random((3, 5)).astype(ml_dtypes.bfloat16),
        "flags": rng.random(8) > 0.5,
        "scalar": np.array(7.5),
        "empty": np.zeros((0, 4)),
    }


@pytest.mark.parametrize("name", ["x.safetensors", "x.ckpt"])
@pytest.mark.parametrize("has_manifest", [True, False], ids=["manifest", "bare"])
def test_mapped_file_reads_like_any_other(
    tmp_path: Path, state: dict[str, np.ndarray], name: str, has_manifest: bool
) -> None:
    path = saved(tmp_path, state, name)
    if not has_manifest:
        (tmp_path / api.manifest_name(name)).unlink()
    with open_checkpoint(path, mmap=True) as reader:
        assert reader.is_verified is has_manifest
        for key, array in state.items():
            found = reader.read(key)
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert np.array_equal(found, array)
            assert not found.flags.writeable
            assert found.flags.aligned
        rows = reader.read("large", rows=slice(3 * MIB, 3 * MIB + 9))
        assert np.array_equal(rows, state["large"][3 * MIB :][:9])


def test_tensor_of_a_safetensors_file_is_not_copied(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.ones(2000), "b": np.ones(3)})
    with open_checkpoint(path, mmap=True) as reader, open_checkpoint(path) as other:
        for name in reader.names():
            mapped, copied = reader.read(name), other.read(name)
            assert isinstance(mapped, np.ndarray)
            assert isinstance(copied, np.ndarray)
            assert is_mapped(mapped)
            assert not is_mapped(copied)
            assert copied.flags.writeable


def test_tensor_that_does_not_lie_aligned_is_copied(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [5], "data_offsets": [1, 21]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        len(header).to_bytes(8, "little") + header + b"\1" + np.arange(5.0, dtype="f4").tobytes()
    )
    with open_checkpoint(path, mmap=True) as reader:
        first, second = reader.read("a"), reader.read("b")
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert (is_mapped(first), is_mapped(second)) == (True, False)
    assert second.flags.aligned
    assert np.array_equal(second, np.arange(5.0))


def test_mapped_array_outlives_reader_and_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.arange(4 * MIB)})
    with open_checkpoint(path, mmap=True) as reader:
        array = reader.read("w")
    path.unlink()
    assert np.array_equal(array, np.arange(4 * MIB))


def test_closed_reader_reads_nothing_more(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.arange(9)})
    with open_checkpoint(path, mmap=True) as reader:
        reader.read("w")
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.read("w")


@pytest.mark.parametrize("position", [-1, -20 * MIB])
def test_damaged_range_is_never_handed_out(tmp_path: Path, position: int) -> None:
    path = saved(tmp_path, {"w": np.zeros(40 * MIB, np.uint8)})
    with open_checkpoint(path, mmap=True) as reader:
        flip(path, path.stat().st_size + position)
        with pytest.raises(ChecksumMismatch, match="do not match the digest"):
            reader.read("w")


def test_damage_elsewhere_does_not_keep_a_tensor_from_being_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": np.zeros(20 * MIB, np.uint8), "b": np.zeros(20 * MIB, np.uint8)})
    flip(path, path.stat().st_size - 1)
    with open_checkpoint(path, mmap=True) as reader:
        first, last = reader.names()
        assert np.array_equal(reader.read(first), np.zeros(20 * MIB))
        with pytest.raises(ChecksumMismatch):
            reader.read(last)


def test_bool_that_is_neither_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.zeros(4, np.bool_)})
    (tmp_path / api.manifest_name(path.name)).unlink()
    content = bytearray(path.read_bytes())
    content[-1] = 2
    path.chmod(0o600)
    path.write_bytes(content)
    with (
        open_checkpoint(path, mmap=True) as reader,
        pytest.raises(CorruptCheckpoint, match="a bool has the value 2"),
    ):
        reader.read("w")


def test_encrypted_file_cannot_be_mapped(tmp_path: Path) -> None:
    save_checkpoint({"w": np.zeros(4)}, tmp_path / "x.ckpt", enc_key=KEY)
    with pytest.raises(UnsupportedCheckpoint, match="only plain files can be mapped"):
        open_checkpoint(tmp_path / "x.ckpt", dec_key=KEY, mmap=True)


def test_file_that_was_cut_short_meanwhile_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(9))
    file = CachedFile(path)
    os.truncate(path, 5)
    with pytest.raises(TruncatedError):
        file.map()
    file.close()


def test_tensor_in_pieces_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(image_bytes(build_ckpt_image(ITEMS, slice_bytes=16)))
    with open_checkpoint(path) as plain, open_checkpoint(path, mmap=True) as mapped:
        expected = {name: plain.read(name) for name in plain.names()}
        found = {name: mapped.read(name) for name in mapped.names()}
    assert comparable(found) == comparable(expected)
