# SPDX-License-Identifier: Apache-2.0
"""Small tensors are made while their bytes are at hand: each as if it had been read alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CorruptCheckpoint, load_checkpoint, save_checkpoint
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.index import ContentRun, TensorEntry
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.io.scatter import SmallTensorBatches, read_scattered

KEY = bytes(32)
GRID = 1024


def entry(name: str, offset: int, length: int, dtype: str = "int8") -> TensorEntry:
    spec = TensorSpec(name=name, dtype=BY_NAME[dtype], shape=(length,))
    return TensorEntry(spec, (ContentRun(offset, length),) if length else ())


@given(
    parts=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 7, 300, 1500, 20_000]))),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_tensors_read_in_clusters_have_their_bytes(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    entries, end = [], 0
    for number, (gap, length) in enumerate(parts):
        entries.append(entry(str(number), end + gap, length))
        end += gap + length
    content = bytes(index * 7 % 251 for index in range(end))
    chosen = [one for one in entries if data.draw(st.booleans())]
    arrays: dict[int, np.ndarray] = {}
    batches = SmallTensorBatches(arrays, grid_bytes=GRID)
    others = batches.take(chosen)
    read_scattered(BytesSource(content), batches.found, unit_bytes=GRID)
    assert {id(one) for one in chosen} == arrays.keys() | {id(one) for one in others}
    for one in (one for one in chosen if one not in others):
        start, length = one.pieces[0]
        assert arrays[id(one)].tobytes() == content[start : start + length]


@pytest.mark.parametrize(
    ("one", "is_taken"),
    [
        (entry("w", 0, 8), True),
        (entry("w", GRID - 8, 8), True),
        (entry("w", GRID - 8, 9), False),
        (entry("w", 0, 0), False),
        (TensorEntry(entry("w", 0, 0).spec, (ContentRun(0, 0),)), False),
        (entry("w", 0, 8, "bool"), False),
        (TensorEntry(entry("w", 0, 8).spec, (ContentRun(0, 4), ContentRun(8, 4))), False),
    ],
    ids=["first", "last", "across-the-grid", "empty", "empty-piece", "bool-is-checked", "pieces"],
)
def test_only_what_lies_in_one_piece_that_is_read_is_taken(
    one: TensorEntry, is_taken: bool
) -> None:
    batches = SmallTensorBatches({}, grid_bytes=GRID)
    assert batches.take([one]) == ([] if is_taken else [one])
    assert len(batches.found) == is_taken


def test_tensors_out_of_order_make_clusters_of_their_own() -> None:
    batches = SmallTensorBatches({}, grid_bytes=GRID)
    assert not batches.take([entry("w", offset, 8) for offset in (100, 200, 0, 50)])
    assert [(one.offset, one.stop) for one in batches.found] == [(100, 208), (0, 58)]


def test_nothing_else_lies_within_a_cluster() -> None:
    batches = SmallTensorBatches({}, grid_bytes=GRID)
    boolean = entry("b", 8, 8, "bool")
    assert batches.take([entry("a", 0, 8), boolean, entry("c", 16, 8)]) == [boolean]
    assert [(one.offset, one.stop) for one in batches.found] == [(0, 8), (16, 24)]


def state(count: int) -> dict[str, Any]:
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 5), (40_000,), (0, 4), (64, 64)]
    return {
        f"w{i}": np.full(shapes[i % 6], i, ("f4", "i8", "f2", "?")[i % 4]) for i in range(count)
    }


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_arrays_loaded_are_writable_and_share_no_memory(
    tmp_path: Path, format: str, key: bytes | None
) -> None:
    saved = state(700)
    path = save_checkpoint(saved, tmp_path / "a", enc_key=key, format=format).path
    loaded = load_checkpoint(path, dec_key=key)
    for name, value in saved.items():
        array = loaded[name]
        assert (array.dtype, array.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(array, value)
        assert array.flags.carray
    filled = [loaded[name] for name in saved if loaded[name].size]
    spans = sorted((one.ctypes.data, one.ctypes.data + one.nbytes) for one in filled)
    assert all(last <= start for (_, last), (start, _) in pairwise(spans))


def test_damage_in_a_cluster_is_found(tmp_path: Path) -> None:
    path = save_checkpoint({f"w{i}": np.full(8, i) for i in range(100)}, tmp_path / "a").path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(path)
