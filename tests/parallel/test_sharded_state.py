# SPDX-License-Identifier: Apache-2.0
"""Saves of many ranks without redundancy, loaded by as many, fewer and more."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    Ranks,
    Resumption,
    SaveFailed,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel import LayoutError, ParallelLayout
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses
from tests.parallel.mindspore.layouts import held_by, layouts, shape_for
from tests.parallel.ranks import Clock, Meeting, RankDied, Seat, run_ranks
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import flip_bit
from tests.support.runs import manager_on

T = TypeVar("T")
Layouts = Mapping[str, ParallelLayout]


def job(
    disk: ModelDisk,
    world: int,
    work: Callable[[CheckpointManager, int], T],
    *,
    layout: Layouts | None = None,
    options: Mapping[str, Any] | None = None,
    **config: Any,
) -> list[T]:
    """Start a job of some ranks, and return what each of them did."""
    meeting = Meeting(world)

    def one(rank: int) -> list[T]:
        with manager_on(
            RUNS,
            CheckpointConfig(**{"keep": "all", "remove_redundancy": True, **config}),
            fs=disk,
            processes=ModelProcesses(disk),
            clock=Clock(),
            ranks=Ranks(Seat(meeting, rank), layout=layout),
            prefix=SERIES,
            **options or {},
        ) as ours:
            return [work(ours, rank)]

    return [outcome.must()[0] for outcome in run_ranks(meeting, one)]


def alone(disk: ModelDisk, state: object = None, **config: Any) -> Resumption:
    """Resume in one process without a coordinator."""
    with manager_on(
        RUNS, CheckpointConfig(**config), fs=disk, processes=ModelProcesses(disk), prefix=SERIES
    ) as ours:
        return ours.resume(state)


def state_of(rank: int) -> dict[str, Any]:
    """What all ranks have alike, and what differs."""
    return {
        "weights": np.arange(60, dtype=np.float32).reshape(20, 3),
        "step": 7,
        "random": np.random.default_rng(rank),
        "position": np.array([10 * rank]),
        "name": f"rank {rank}",
    }


def fresh() -> dict[str, Any]:
    return {
        "weights": np.zeros((20, 3), np.float32),
        "step": 0,
        "random": np.random.default_rng(99),
        "position": np.array([-1]),
        "name": "new",
    }


def values_of(state: Any) -> tuple[Any, ...]:
    return (
        state["weights"].tolist(),
        state["step"],
        state["random"].bit_generator.state,
        state["position"].tolist(),
        state["name"],
    )


def saved(world: int, disk: ModelDisk | None = None, **config: Any) -> ModelDisk:
    disk = ModelDisk() if disk is None else disk
    job(disk, world, lambda ours, rank: ours.save(7, state_of(rank)), **config)
    return disk.restart()


CONFIGS: list[dict[str, Any]] = [
    {},
    {"format": "safetensors"},
    {"enc_key": KEY},
    {"enc_key": KEY, "format": "safetensors"},
    {"async_save": True},
    {"options": {"balance": "round_robin"}},
    {"options": {"keep_redundancy": 2}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_as_many_ranks_get_their_own_state_back(config: dict[str, Any]) -> None:
    disk = saved(3, **config)
    found = job(disk, 3, lambda ours, rank: values_of(ours.resume(fresh()).state), **config)
    assert found == [values_of(state_of(rank)) for rank in range(3)]


@pytest.mark.parametrize("world", [1, 2])
def test_fewer_ranks_get_the_state_of_the_first_ranks(world: int) -> None:
    disk = saved(3)
    found = job(disk, world, lambda ours, rank: values_of(ours.resume(fresh()).state))
    assert found == [values_of(state_of(rank)) for rank in range(world)]


def test_one_process_without_coordinator_gets_the_state_of_rank_0() -> None:
    disk = saved(3)
    assert values_of(alone(disk, fresh()).state) == values_of(state_of(0))
    assert values_of(alone(disk).state) == values_of(state_of(0))


def test_rank_that_did_not_save_keeps_what_differs_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = saved(2)
    with caplog.at_level(logging.WARNING):
        found = job(disk, 4, lambda ours, rank: ours.resume(fresh()))
    assert [values_of(one.state) for one in found[:2]] == [values_of(state_of(r)) for r in (0, 1)]
    same, own = values_of(state_of(0)), values_of(fresh())
    for one in found[2:]:
        assert values_of(one.state) == (*same[:2], *own[2:])
        assert one.kept == ("state['random']", "state['position']", "state['name']")
    assert found[0].kept == ()
    assert "holds nothing of this rank for" in caplog.text


def test_rank_that_did_not_save_gets_none_where_it_has_nothing_itself() -> None:
    found = job(saved(2), 3, lambda ours, rank: ours.resume())[2]
    assert isinstance(found.state, dict)
    assert (found.state["random"], found.state["position"], found.state["name"]) == (None,) * 3
    assert found.state["step"] == 7


def payload(disk: ModelDisk) -> list[int]:
    """Bytes of tensors in the file of each rank of the only checkpoint."""
    return payload_of(api.place(RUNS, fs=disk))


def payload_of(store: api.Place) -> list[int]:
    pass
    from ckptmgr.files.load.shards import ShardedCheckpoint

    found = max(store.scan(), key=lambda checkpoint: checkpoint.step)
    manifest = store.read_manifest(found.name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=api.reading()) as files:
        return [
            sum(
                one.spec.size_bytes for pieces in files.file(rank).pieces.values() for one in pieces
            )
            for rank in range(files.world)
        ]


@pytest.mark.parametrize(("copies", "balance"), [(1, "bytes"), (2, "bytes"), (2, "round_robin")])
def test_replicated_bytes_are_written_as_often_as_asked_for(copies: int, balance: str) -> None:
    disk = ModelDisk()
    state = {"w": np.arange(3000, dtype=np.float32).reshape(1000, 3), "v": np.ones(17)}
    job(
        disk,
        4,
        lambda ours, rank: ours.save(1, state),
        options={"keep_redundancy": copies, "balance": balance},
    )
    written = payload(disk)
    assert sum(written) == copies * (12000 + 136)
    if balance == "bytes":
        assert max(written) <= 1.02 * sum(written) / 4 + 12


def test_ranks_with_one_value_in_common_write_it_once() -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> None:
        ours.save(1, {"half": np.full(100, rank // 2, np.float64)})

    job(disk, 4, work)
    assert sum(payload(disk)) == 2 * 800
    found = job(disk, 4, lambda ours, rank: ours.resume().state)
    assert [one["half"][0] for one in found] == [0, 0, 1, 1]  # type: ignore[index]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layout_is_loaded_into_any_other(data: st.DataObject) -> None:
    source = data.draw(layouts(dimensions=2))
    target = data.draw(layouts(dimensions=2))
    times = [max(a, b) for a, b in zip(shape_for(source), shape_for(target), strict=True)]
    shape = tuple(
        a * b * c
        for a, b, c in zip(
            shape_for(source), shape_for(target), [data.draw(st.integers(1, 2))] * 2, strict=True
        )
    )
    assert times
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    disk = ModelDisk()
    kind = data.draw(st.sampled_from(["ckpt", "safetensors"]))
    removes = data.draw(st.booleans())

    def save(ours: CheckpointManager, rank: int) -> None:
        ours.save(1, {"w": np.ascontiguousarray(held_by(source, rank, whole)), "same": 5})

    job(
        disk,
        source.device_count,
        save,
        layout={"w": source},
        format=kind,
        remove_redundancy=removes,
        options={"keep_redundancy": 2} if removes and data.draw(st.booleans()) else {},
    )

    def load(ours: CheckpointManager, rank: int) -> Any:
        empty = np.zeros_like(held_by(target, rank, whole))
        return ours.resume({"w": empty, "same": 0}).state

    found = job(disk, target.device_count, load, layout={"w": target}, format=kind)
    for rank, state in enumerate(found):
        np.testing.assert_array_equal(state["w"], held_by(target, rank, whole))
        assert state["same"] == 5
    if not removes or target.device_count != 1:
        one: Any = alone(disk, format=kind).state
        np.testing.assert_array_equal(one["w"], whole)


def test_copies_that_a_layout_calls_equal_and_that_differ_are_all_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = {"w": ParallelLayout(device_matrix=(2, 2), tensor_map=((0,),))}
    disk = ModelDisk()
    with caplog.at_level(logging.WARNING):
        job(
            disk,
            4,
            lambda ours, rank: ours.save(1, {"w": np.full(3, rank)}),
            layout=layout,
        )
    assert "but it differs; each keeps its own" in caplog.text
    found = job(
        disk, 4, lambda ours, rank: ours.resume({"w": np.zeros(3, int)}).state, layout=layout
    )
    assert [one["w"].tolist() for one in found] == [[rank] * 3 for rank in range(4)]  # type: ignore[index]


def test_states_saved_whole_by_each_rank_load_on_any_number_where_they_are_equal() -> None:
    disk = ModelDisk()
    state = {"w": np.arange(5), "step": 3}
    job(disk, 3, lambda ours, rank: ours.save(3, state), remove_redundancy=False)
    for world in (1, 2, 4):
        found = job(disk, world, lambda ours, rank: ours.resume().state)
        assert [one["w"].tolist() for one in found] == [[0, 1, 2, 3, 4]] * world  # type: ignore[index]


def test_states_saved_whole_that_differ_are_refused_on_another_number() -> None:
    disk = ModelDisk()
    job(
        disk,
        3,
        lambda ours, rank: ours.save(3, {"w": np.full(5, min(rank, 1))}),
        remove_redundancy=False,
    )
    with pytest.raises(UnsupportedCheckpoint, match="'w' differs between ranks 0 and 1"):
        alone(disk)


def test_damaged_file_is_made_up_for_by_a_copy(caplog: pytest.LogCaptureFixture) -> None:
    disk = ModelDisk()
    state = {"w": np.arange(4000, dtype=np.float32)}
    options = {"keep_redundancy": 2}
    job(disk, 4, lambda ours, rank: ours.save(1, state), options=options)
    (found,) = api.listed(RUNS, fs=disk)
    flip_bit(disk, found.shards[2])
    with caplog.at_level(logging.WARNING):
        one: Any = alone(disk).state
    assert one["w"].tolist() == state["w"].tolist()
    assert "is left out" in caplog.text


def test_damaged_file_without_a_copy_is_an_error() -> None:
    disk = ModelDisk()
    job(disk, 4, lambda ours, rank: ours.save(1, {"w": np.arange(4000)}))
    (found,) = api.listed(RUNS, fs=disk)
    flip_bit(disk, found.shards[2])
    with (
        manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix=SERIES) as ours,
        pytest.raises(CorruptCheckpoint),
    ):
        ours.load(1)


def test_file_of_one_process_is_cut_for_many_ranks() -> None:
    disk = ModelDisk()
    whole = np.arange(12).reshape(4, 3)
    with manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix=SERIES) as ours:
        ours.save(1, {"w": whole, "lr": 0.5})
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))}

    def load(ours: CheckpointManager, rank: int) -> Any:
        return ours.resume({"w": np.zeros((2, 3), int), "lr": 0.0}).state

    found = job(disk.restart(), 2, load, layout=layout)
    assert [one["w"].tolist() for one in found] == [whole[:2].tolist(), whole[2:].tolist()]
    assert [one["lr"] for one in found] == [0.5, 0.5]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_load_checkpoint_takes_the_name_of_a_checkpoint_of_many_ranks(
    key: bytes | None, tmp_path: Path
) -> None:
    whole = np.arange(24).reshape(8, 3)
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))}
    meeting = Meeting(2)
    config = CheckpointConfig(enc_key=key, remove_redundancy=True)

    def save(rank: int) -> None:
        with CheckpointManager(
            tmp_path, config, ranks=Ranks(Seat(meeting, rank), layout=layout), prefix=SERIES
        ) as ours:
            ours.save(1, {"w": whole[4 * rank : 4 * rank + 4], "own": np.array([rank])})

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    path = tmp_path / "net-1.shards"
    values = load_checkpoint(path, dec_key=key)
    assert values["w"].tolist() == whole.tolist()
    assert values["own"].tolist() == [0]
    assert set(load_checkpoint(path, dec_key=key, specify_prefix="w")) == {"w"}
    with pytest.raises(ValueError, match="'into' takes one file"):
        load_checkpoint(path, dec_key=key, into={"w": np.zeros((8, 3), int)})
    with pytest.raises(CheckpointNotFound, match="no such checkpoint"):
        load_checkpoint(tmp_path / "net-2.shards")


def test_rollback_goes_back_to_slices_in_memory_and_on_disk() -> None:
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> list[list[int]]:
        state = {"w": np.full(3, rank)}
        ours.save(1, state)
        state["w"][:] = 10 + rank
        ours.snapshot(2, state)
        found: list[list[int]] = []
        for steps_back in (1, 2):
            state["w"][:] = -1
            ours.step_end(3, state)
            ours.rollback(state, steps_back=steps_back)
            found.append(state["w"].tolist())
        return found

    found = job(disk, 2, work, layout=layout, save_checkpoint_steps=100)
    assert found == [[[10 + rank] * 3, [rank] * 3] for rank in range(2)]


def test_layout_of_no_tensor_is_an_error_on_all_ranks() -> None:
    layout = {"weihgts": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}

    def work(ours: CheckpointManager, rank: int) -> str:
        with pytest.raises(SaveFailed) as raised:
            ours.save(1, {"weights": np.zeros(3)})
        return str(raised.value)

    for text in job(ModelDisk(), 2, work, layout=layout):
        assert "there is a layout of 'weihgts', but no such tensor" in text


def test_slices_that_are_not_what_the_layout_says_are_an_error() -> None:
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),), shape=(6,))}

    def work(ours: CheckpointManager, rank: int) -> str:
        with pytest.raises(SaveFailed) as raised:
            ours.save(1, {"w": np.zeros(2 + rank)})
        return str(raised.value)

    for text in job(ModelDisk(), 2, work, layout=layout):
        assert "rank 0 holds [2], but by its layout [3] of [6]" in text


def test_slices_that_nobody_saves_are_an_error_on_all_ranks() -> None:
    layout = {"w": ParallelLayout(device_matrix=(3,), tensor_map=((0,),))}

    def work(ours: CheckpointManager, rank: int) -> str:
        with pytest.raises(LayoutError) as raised:
            ours.save(1, {"w": np.zeros(2)})
        return str(raised.value)

    disk = ModelDisk()
    for text in job(disk, 2, work, layout=layout):
        assert "do not make up its shape [6]" in text
    assert api.listed(RUNS, fs=disk) == []


def test_tied_slices_stay_tied() -> None:
    layout = {"a": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))}
    layout["b"] = layout["a"]
    disk = ModelDisk()

    def save(ours: CheckpointManager, rank: int) -> None:
        array = np.full((2, 2), rank)
        ours.save(1, {"a": array, "b": array})

    job(disk, 2, save, layout=layout)
    assert sum(payload(disk)) == 4 * 2 * 8
    whole: Any = alone(disk).state
    assert whole["a"] is whole["b"]
    assert whole["a"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_slice_that_shares_memory_with_something_else_is_refused() -> None:
    layout = {"a": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}

    def work(ours: CheckpointManager, rank: int) -> str:
        array = np.zeros(4)
        with pytest.raises(SaveFailed) as raised:
            ours.save(1, {"a": array, "b": array[:2]})
        return str(raised.value)

    for text in job(ModelDisk(), 2, work, layout=layout):
        assert "shares memory with a slice of a tensor" in text


def test_elements_that_no_format_knows_are_cut_and_joined() -> None:
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
    whole = np.array([1 + 2j, 3, 4j, 5], np.complex64)
    strange = whole.view("V8")
    disk = ModelDisk()
    job(disk, 2, lambda ours, r: ours.save(1, {"w": strange[2 * r : 2 * r + 2]}), layout=layout)
    found: Any = alone(disk).state
    assert found["w"].tobytes() == strange.tobytes()
    three = {"w": ParallelLayout(device_matrix=(4,), tensor_map=((0,),))}
    parts = job(disk, 4, lambda ours, r: ours.resume({"w": np.zeros(1, "V8")}).state, layout=three)
    assert b"".join(one["w"].tobytes() for one in parts) == strange.tobytes()  # type: ignore[index]


def test_layout_without_ranks_and_redundancy_without_removal_are_refused() -> None:
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
    with pytest.raises(ValueError, match="give a coordinator, too"):
        manager_on(RUNS, fs=ModelDisk(), ranks=Ranks(layout=layout))
    with pytest.raises(ValueError, match="say how redundancy is removed"):
        manager_on(RUNS, fs=ModelDisk(), ranks=Ranks(keep_redundancy=2))
    removing = CheckpointConfig(remove_redundancy=True)
    with pytest.raises(ValueError, match="at least one copy"):
        manager_on(RUNS, removing, fs=ModelDisk(), ranks=Ranks(keep_redundancy=0))
    with pytest.raises(ValueError, match="'bytes' or 'round_robin'"):
        manager_on(RUNS, removing, fs=ModelDisk(), ranks=Ranks(balance="name"))  # type: ignore[arg-type]


@pytest.mark.parametrize("balance", ["bytes", "round_robin"])
@pytest.mark.parametrize("zero_stall", [False, True])
def test_worker_processes_write_the_shares_of_the_ranks(
    balance: Any, zero_stall: bool, tmp_path: Path
) -> None:
    config = CheckpointConfig(
        async_save="process", remove_redundancy=True, zero_stall=zero_stall, keep="all"
    )
    meeting = Meeting(2)

    def save(rank: int) -> None:
        with CheckpointManager(
            tmp_path, config, ranks=Ranks(Seat(meeting, rank), balance=balance), prefix=SERIES
        ) as ours:
            for step in (6, 7):
                ours.save(step, state_of(rank))
                ours.before_update()

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    assert sum(payload_of(api.place(tmp_path))) == state_of(0)["weights"].nbytes + 2 * 8
    with CheckpointManager(tmp_path, prefix=SERIES) as ours:
        assert values_of(ours.resume(fresh()).state) == values_of(state_of(0))


def test_without_a_state_the_layout_says_what_a_rank_gets() -> None:
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
    disk = ModelDisk()
    job(disk, 1, lambda ours, rank: ours.save(1, {"w": np.arange(6)}))
    found = job(disk, 2, lambda ours, rank: ours.resume().state, layout=layout)
    assert [one["w"].tolist() for one in found] == [[0, 1, 2], [3, 4, 5]]  # type: ignore[index]
    wrong = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),), shape=(8,))}

    def load(ours: CheckpointManager, rank: int) -> str:
        with pytest.raises(LayoutError) as raised:
            ours.load(1)
        return str(raised.value)

    for text in job(disk, 2, load, layout=wrong):
        assert "'w' has the shape [6], but its layout says [8]" in text


def test_ranks_may_hold_nothing_of_a_tensor() -> None:
    uneven = ParallelLayout(device_matrix=(4,), tensor_map=((0,),), shape=(3,), is_uneven=True)
    some = ParallelLayout(device_matrix=(2,), tensor_map=((0,),), shape=(4,), ranks=(0, 2))
    sizes = {"uneven": (1, 1, 1, 0), "some": (2, 0, 2, 0)}
    layout = {"uneven": uneven, "some": some}

    def state(rank: int, value: int) -> dict[str, Any]:
        return {name: np.full(sizes[name][rank], value) for name in sizes}

    disk = ModelDisk()
    job(disk, 4, lambda ours, rank: ours.save(1, state(rank, rank)), layout=layout)
    found: Any = alone(disk).state
    assert (found["uneven"].tolist(), found["some"].tolist()) == ([0, 1, 2], [0, 0, 2, 2])
    back = job(disk, 4, lambda ours, rank: ours.resume(state(rank, -1)).state, layout=layout)
    for rank, one in enumerate(back):
        assert values_in(one) == values_in(state(rank, rank))


def values_in(state: Any) -> dict[str, list[int]]:
    return {name: array.tolist() for name, array in state.items()}


@dataclass(frozen=True)
class Mortal(Seat):
    """A rank that dies when it comes to a round."""

    dies_at: str = ""

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        if self.dies_at and tag.endswith(f"/{self.dies_at}"):
            raise RankDied
        return super().all_gather(tag, value, timeout_s=timeout_s)


@pytest.mark.parametrize("round_name", ["tensors", "digests"])
@pytest.mark.parametrize("dead", [0, 1])
def test_rank_that_dies_before_the_writing_leaves_nothing(round_name: str, dead: int) -> None:
    disk, meeting = saved(3), Meeting(3)

    def save(rank: int) -> None:
        ours = manager_on(
            RUNS,
            CheckpointConfig(remove_redundancy=True, keep="all"),
            fs=disk,
            processes=ModelProcesses(disk),
            clock=Clock(),
            ranks=Ranks(Mortal(meeting, rank, dies_at=round_name if rank == dead else "")),
            prefix=SERIES,
        )
        ours.save(8, state_of(rank))

    for rank, outcome in enumerate(run_ranks(meeting, save)):
        assert isinstance(outcome.raised, RankDied if rank == dead else SaveFailed)
    after = disk.restart()
    present = api.listed(RUNS, fs=after)
    assert [(one.name, one.state) for one in present] == [("net-7.shards", api.State.OK)]
    found = job(after, 3, lambda ours, rank: values_of(ours.resume(fresh()).state))
    assert found == [values_of(state_of(rank)) for rank in range(3)]


def test_manifest_that_was_stripped_of_its_proof_is_refused(tmp_path: Path) -> None:
    meeting = Meeting(2)
    config = CheckpointConfig(enc_key=KEY, remove_redundancy=True)

    def save(rank: int) -> None:
        with CheckpointManager(
            tmp_path, config, ranks=Ranks(Seat(meeting, rank)), prefix=SERIES
        ) as ours:
            ours.save(1, {"w": np.arange(8)})

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    page = tmp_path / "net-1.shards.manifest.json"
    document = json.loads(page.read_bytes())
    del document["auth"]
    page.chmod(0o600)
    page.write_text(json.dumps(document))
    with pytest.raises(UnsealedCheckpoint):
        load_checkpoint(tmp_path / "net-1.shards", dec_key=KEY)
    found = load_checkpoint(tmp_path / "net-1.shards", dec_key=KEY, allow_unsealed=True)
    assert found["w"].tolist() == list(range(8))


def test_object_that_can_only_be_filled_is_filled_on_every_rank() -> None:
    class Sink:
        got: object = None

        def load_state_dict(self, state: object) -> None:
            self.got = state

    disk = ModelDisk()
    with manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix=SERIES) as ours:
        ours.save(1, {"sink": {"a": 1}})

    def load(ours: CheckpointManager, rank: int) -> object:
        state = {"sink": Sink()}
        ours.resume(state)
        return state["sink"].got

    assert job(disk.restart(), 2, load) == [{"a": 1}] * 2
    job(disk, 2, lambda ours, rank: ours.save(2, {"sink": {"a": 2}}))
    assert job(disk, 3, load) == [{"a": 2}] * 3
    job(disk, 2, lambda ours, rank: ours.save(3, {"sink": {"a": rank}}))

    def skipped(ours: CheckpointManager, rank: int) -> str:
        return ours.resume({"sink": Sink()}).skipped[0].reason

    assert all("UnsupportedState: state['sink'] is a" in text for text in job(disk, 3, skipped))
