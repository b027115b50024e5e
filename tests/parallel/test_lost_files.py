# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks some of whose files are damaged or gone: the knowledge of the others, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CorruptCheckpoint,
    Ranks,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from ckptmgr.files.load.shards import ShardedCheckpoint
from tests.faults.training import RUNS, SERIES
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.parallel.test_sharded_edges import WHOLE
from tests.parallel.test_sharded_state import alone, job
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import put, truncate
from tests.support.runs import manager_on

WORLD = 4
Damage = Callable[[ModelDisk, str], None]


def gone(disk: ModelDisk, name: str) -> None:
    disk.unlink(RUNS / name)


def cut_off(disk: ModelDisk, name: str) -> None:
    truncate(disk, name, 100)


def behead(disk: ModelDisk, name: str) -> None:
    put(disk, RUNS / name, b"\xff" + disk.read_bytes(RUNS / name)[1:])


def unknown_version(disk: ModelDisk, name: str) -> None:
    """Say by one flipped bit that the index is of a later version."""
    _replace(disk, name, b'version\\":1', b'version\\":3')


def uncompared(disk: ModelDisk, name: str) -> None:
    """Hide the index by one flipped bit."""
    _replace(disk, name, b"ckptmgr.pieces", b"ckptmgr.piecer")


def other_shape(disk: ModelDisk, name: str) -> None:
    """Say by one flipped bit that the tensor is larger."""
    _replace(disk, name, b'shape\\":[4000', b'shape\\":[6000')


def _replace(disk: ModelDisk, name: str, old: bytes, new: bytes) -> None:
    content = disk.read_bytes(RUNS / name)
    assert old in content
    put(disk, RUNS / name, content.replace(old, new, 1))


DAMAGES: list[Damage] = [gone, cut_off, behead, unknown_version, uncompared, other_shape]


def save(
    folder: Path, state: Callable[[int], dict[str, Any]], *, world: int = WORLD, **options: Any
) -> Path:
    """Save the state of each rank, and return the name of the checkpoint."""
    meeting = Meeting(world)
    removes = options.pop("remove_redundancy", True)
    config = CheckpointConfig(remove_redundancy=removes, format="safetensors")

    def one(rank: int) -> int:
        with manager_on(
            folder, config, ranks=Ranks(Seat(meeting, rank)), prefix=SERIES, **options
        ) as ours:
            ours.save(1, state(rank))
        return rank

    for outcome in run_ranks(meeting, one):
        outcome.must()
    return folder / "net-1.shards"


def file_of(path: Path, rank: int) -> Path:
    [found] = path.parent.glob(f"net-1.{rank}-of-*.safetensors")
    found.chmod(0o600)
    return found


def flip_every(path: Path, text: bytes, load: Callable[[], Any]) -> list[Any]:
    """Return what loads to what with a bit flipped at each place of a text in a file, errors left out."""
    content, found = path.read_bytes(), []
    places = [at for at in range(len(content)) if content.startswith(text, at)]
    assert places
    for at in places:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            found.append(load())
        except CorruptCheckpoint:
            continue
    return found


@pytest.mark.parametrize("rank", range(WORLD))
def test_flipped_bit_in_a_head_never_loses_a_tensor(rank: int, tmp_path: Path) -> None:
    names = [f"layer{number}" for number in range(WORLD)]
    path = save(tmp_path, lambda _: {name: np.full((1, 300), len(name)) for name in names})
    for name in names:
        found = flip_every(
            file_of(path, rank), name.encode(), lambda: sorted(load_checkpoint(path))
        )
        assert found in ([], [names])


@pytest.mark.parametrize("damage", DAMAGES)
def test_another_number_of_ranks_loads_the_copies_of_a_lost_file(damage: Damage) -> None:
    disk = ModelDisk()
    state = {"w": np.arange(4000, dtype=np.float32)}
    job(
        disk,
        WORLD,
        lambda ours, rank: ours.save(1, state),
        format="safetensors",
        options={"keep_redundancy": 2},
    )
    [found] = api.listed(RUNS, fs=disk)
    damage(disk, found.shards[3])
    whole: list[Any] = job(
        disk, 2, lambda ours, rank: ours.resume({"w": np.zeros(4000, np.float32)})
    )
    assert [one.step for one in whole] == [1, 1]
    assert all(one.state["w"].tolist() == state["w"].tolist() for one in whole)


@pytest.mark.parametrize("damage", DAMAGES)
def test_whole_tensors_are_loaded_from_the_copies_of_a_lost_file(damage: Damage) -> None:
    disk = ModelDisk()
    job(
        disk,
        WORLD,
        lambda ours, rank: ours.save(1, {"w": np.arange(4000), "own": np.full(2, rank // 2)}),
        format="safetensors",
        options={"keep_redundancy": 2},
    )
    store = api.place(RUNS, fs=disk)
    [found] = store.scan()
    damage(disk, found.shards[3])
    manifest = store.read_manifest(found.name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=WHOLE) as files:
        assert files.first_ranks() == {"w": 0, "own": 0}
        assert files.names(2) == ["w", "own"]
        assert files.read({"own": None}, rank=2)["own"].tolist() == [1, 1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_copies_are_taken_where_the_own_file_of_a_rank_is_lost(damage: Damage) -> None:
    disk = ModelDisk()
    job(
        disk,
        WORLD,
        lambda ours, rank: ours.save(1, {"w": np.arange(4000)}),
        format="safetensors",
        options={"keep_redundancy": 2},
    )
    store = api.place(RUNS, fs=disk)
    [found] = store.scan()
    damage(disk, found.shards[0])
    manifest = store.read_manifest(found.name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=WHOLE) as files:
        assert files.read({"w": None}, rank=0)["w"].tolist() == list(range(4000))
        assert 0 not in files.used


def test_tensor_that_only_a_lost_file_could_name_is_not_left_out(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"common": np.ones(2)} | ({"last": np.ones(3)} if rank == 3 else {})

    path = save(tmp_path, state, keep_redundancy=2)
    file_of(path, 3).unlink()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)


def test_lost_file_of_a_save_whose_tensors_were_not_counted_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, lambda _: {"w": np.ones(2)}, remove_redundancy=False)
    file_of(path, 1).unlink()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)


def test_tensors_that_only_other_ranks_have_are_loaded(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {f"layer{rank // 2}": np.full(3, rank // 2), "mine": np.array([rank])}

    found = load_checkpoint(save(tmp_path, state))
    assert {name: array.tolist() for name, array in found.items()} == {
        "layer0": [0, 0, 0],
        "layer1": [1, 1, 1],
        "mine": [0],
    }


def test_tensor_of_other_ranks_only_differs_where_nobody_compared(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"common": np.ones(2)} | ({"last": np.ones(3)} if rank == 3 else {})

    path = save(tmp_path, state, remove_redundancy=False)
    with pytest.raises(UnsupportedCheckpoint, match="'last' differs between ranks 0 and 3"):
        load_checkpoint(path)
    assert set(load_checkpoint(path, specify_prefix="common")) == {"common"}


def test_values_that_differ_are_not_taken_from_another_rank_when_those_of_the_first_are_lost(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, lambda rank: {"mine": np.array([rank])}, keep_redundancy=2)
    file_of(path, 0).unlink()
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path)


def test_rank_that_needs_the_state_of_a_lost_file_starts_from_no_other() -> None:
    disk = ModelDisk()
    state = {"w": np.arange(4000), "random": 1}
    job(disk, WORLD, lambda ours, rank: ours.save(1, state), options={"keep_redundancy": 2})
    [found] = api.listed(RUNS, fs=disk)
    gone(disk, found.shards[0])
    assert alone(disk, {"w": np.zeros(4000, int), "random": 0}).step == 0
