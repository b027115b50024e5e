# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks that are not as ours are: without a state, incomplete, in contradiction with themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    Checkpoint,
    CkptmgrError,
    CorruptCheckpoint,
    StateMismatch,
    UnsupportedCheckpoint,
)
from ckptmgr.core.regions import Interval
from ckptmgr.files.load import shard_files as open_shards
from ckptmgr.files.load.shard_pieces import StoredPiece
from ckptmgr.files.load.shard_state import read_sharded
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.files.load.state import SKELETON
from ckptmgr.formats.tensor import Item, Text, tensor_from_array
from ckptmgr.parallel import ParallelLayout
from ckptmgr.parallel.slicer import LayoutSlicer
from ckptmgr.state.paths import dump_skeleton
from tests.faults.training import RUNS, SERIES, ModelProcesses
from tests.parallel.ranks import Job, run_ranks
from tests.parallel.test_sharded_state import alone, job
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import put
from tests.support.runs import manager_on

WHOLE = api.reading()


def save_items(
    items: Callable[[int], list[Item]], *, skeleton: str | None = None
) -> tuple[api.Place, api.Manifest]:
    """Save items without a state tree unless one is given, each rank all of its own."""
    metadata = None if skeleton is None else {SKELETON: skeleton}
    work = Job(ModelDisk())

    def save(rank: int) -> Checkpoint:
        writer = work.writer(rank)
        try:
            return writer.save(
                f"{SERIES}-1.shards", items(rank), api.SaveFacts(step=1), metadata=metadata
            )
        finally:
            writer.close()

    for outcome in run_ranks(work.meeting, save):
        outcome.must()
    store = api.place(RUNS, fs=work.disk)
    manifest = store.read_manifest(f"{SERIES}-1.shards")
    assert manifest is not None
    return store, manifest


def test_named_tensors_without_a_state_are_a_dict() -> None:
    store, manifest = save_items(lambda rank: [tensor_from_array("w", np.arange(3))])
    found = read_sharded(store, manifest, options=WHOLE)
    assert found.skeleton is None
    assert found.put_back(None) == {"w": pytest.approx(np.arange(3))}
    own = read_sharded(store, manifest, options=api.reading(rank=2, world=3))
    assert own.arrays["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "items",
    [
        lambda rank: [tensor_from_array("w", np.full(3, rank))],
        lambda rank: [tensor_from_array("w", np.zeros(3))][rank:],
    ],
    ids=["value", "absent"],
)
def test_tensor_that_is_not_the_same_on_all_is_named(items: Callable[[int], list[Item]]) -> None:
    store, manifest = save_items(lambda rank: items(rank) or [tensor_from_array("v", np.ones(1))])
    with pytest.raises(UnsupportedCheckpoint, match="'w' differs between ranks 0 and 1"):
        read_sharded(store, manifest, options=WHOLE)


def test_tensors_of_one_name_and_several_shapes_are_no_tensor() -> None:
    store, manifest = save_items(lambda rank: [tensor_from_array("w", np.zeros(2 + rank))])
    with pytest.raises(UnsupportedCheckpoint, match="'w' differs between ranks 0 and 1"):
        read_sharded(store, manifest, options=WHOLE)


def test_texts_are_refused() -> None:
    store, manifest = save_items(lambda rank: [Text(name="t", text="x")])
    with pytest.raises(UnsupportedCheckpoint, match="'t' is no tensor"):
        read_sharded(store, manifest, options=WHOLE)


def test_slices_that_were_not_saved_are_missed() -> None:
    disk = ModelDisk()
    three = {"w": ParallelLayout(device_matrix=(3,), tensor_map=((0,),))}
    job(
        disk,
        2,
        lambda ours, rank: ours.save(1, {"w": np.full(2, rank)}),
        layout=three,
        remove_redundancy=False,
    )
    (skipped,) = alone(disk).skipped
    assert "a part of the tensor at [4] is in none of the files" in skipped.reason


def test_ranks_that_contradict_each_other_are_no_whole() -> None:
    disk = ModelDisk()

    def save(ours: Any, rank: int) -> None:
        ours.save(1, {"w": np.full((2, 2), rank)})

    job(
        disk,
        2,
        save,
        layout={"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))},
        remove_redundancy=False,
    )
    store = api.place(RUNS, fs=disk)
    (found,) = store.scan()
    manifest = store.read_manifest(found.name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=WHOLE) as files:
        first, second = files.pieces("w", rank=None)
        with pytest.raises(CorruptCheckpoint, match=r"the pieces are of int64\[4, 2\] and"):
            files._check_alike(first, replaced(second, (5, 2)), wanted=None)


def replaced(stored: StoredPiece, shape: tuple[int, ...]) -> StoredPiece:
    from dataclasses import replace

    return replace(stored, piece=replace(stored.piece, shape=shape))


def test_many_files_are_not_all_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_shards, "_OPEN_FILES", 1)
    disk = ModelDisk()
    state = {"w": np.arange(1000)}
    job(disk, 4, lambda ours, rank: ours.save(1, state))
    found: Any = alone(disk).state
    assert found["w"].tolist() == state["w"].tolist()


class LoadsOnly:
    """A part that takes a state and gives none: `resume` accepts it, a save does not."""

    def load_state_dict(self, state: object) -> None:
        raise AssertionError


def test_state_that_cannot_be_flattened_is_compared_all_the_same() -> None:
    disk = ModelDisk()
    job(disk, 2, lambda ours, rank: ours.save(1, {"w": np.arange(4)}))
    with pytest.raises(StateMismatch, match="is only in the checkpoint"):
        alone(disk, {"v": LoadsOnly()})


LEAF = {"tensor": "w", "dtype": "<i8", "shape": [3]}


@pytest.mark.parametrize(
    "leaf",
    [
        {**LEAF, "shape": [4]},
        {**LEAF, "shape": [3, 1]},
        {**LEAF, "shape": [-3]},
        {**LEAF, "shape": "3"},
        {**LEAF, "shape": [1 << 62]},
        {**LEAF, "tensor": "v"},
        {**LEAF, "tensor": 3},
        {**LEAF, "tensor": "\0kept/w"},
    ],
    ids=str,
)
def test_skeleton_that_does_not_fit_its_tensors_is_an_error(leaf: dict[str, Any]) -> None:
    skeleton = dump_skeleton([{"array": leaf}])
    store, manifest = save_items(
        lambda rank: [tensor_from_array("w", np.arange(3))], skeleton=skeleton
    )
    cut = LayoutSlicer(0, {"w": ParallelLayout(device_matrix=(1,), tensor_map=((0,),))})
    with pytest.raises(CkptmgrError):
        read_sharded(store, manifest, options=WHOLE, slicer=cut).put_back(None)


def test_wanted_part_of_other_dimensions_is_an_error() -> None:
    store, manifest = save_items(lambda rank: [tensor_from_array("w", np.arange(3))])
    with (
        ShardedCheckpoint(store, manifest, options=WHOLE) as files,
        pytest.raises(CorruptCheckpoint, match="2 dimensions are wanted"),
    ):
        files.read({"w": (Interval(0, 1), Interval(0, 1))}, rank=0)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2), st.integers(0, 10**6), st.integers(0, 7), st.sampled_from([1, 2]), st.data()
)
def test_flipped_bit_is_made_up_for_or_found(
    rank: int, place: int, bit: int, copies: int, data: st.DataObject
) -> None:
    format = data.draw(st.sampled_from(["ckpt", "safetensors"]))
    disk = ModelDisk()
    state = {"w": np.arange(300, dtype=np.int32), "own": 1, "flag": np.ones(9, bool)}
    options = {"keep_redundancy": copies}
    job(disk, 3, lambda ours, _: ours.save(1, state), format=format, options=options)
    (found,) = api.listed(RUNS, fs=disk)
    path = RUNS / found.shards[rank]
    content = bytearray(disk.read_bytes(path))
    content[place % len(content)] ^= 1 << bit
    put(disk, path, bytes(content))
    with manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix=SERIES) as ours:
        try:
            back: Any = ours.load(1)
        except CorruptCheckpoint:
            return  # what describes the tensors has no copy
    assert (back["w"].tolist(), back["own"]) == (list(range(300)), 1)
    assert back["flag"].tolist() == [True] * 9
