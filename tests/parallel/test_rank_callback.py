# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint` as one of many ranks."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    ModelCheckpoint,
    RankFailed,
    Ranks,
    RanksMissing,
    RanksOutOfStep,
    Resumed,
    SaveFailed,
    UnsupportedState,
    load_checkpoint,
)
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel import ParallelLayout
from tests.faults.training import KEY, RUNS, ModelProcesses
from tests.parallel.ranks import (
    TIMEOUT_S,
    Clock,
    Meeting,
    Outcome,
    RankDied,
    RankDisk,
    Seat,
    run_ranks,
)
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, Order
from tests.support.damage import flip_bit, put
from tests.support.runs import callback_on
from tests.support.surface import Loop

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
WORLD = 2
CUT = ParallelLayout(device_matrix=(WORLD,), tensor_map=((0,),))


@dataclass
class Job:
    """A job whose ranks train with a callback each.

    Attributes:
        disk: The disk of all.
        world: How many ranks there are.
        disks: Rank to the disk as that rank sees it; the disk itself by default.
        clock: Seconds since 1970.
        options: Of the callbacks, besides the configuration.
    """

    disk: ModelDisk = field(default_factory=ModelDisk)
    world: int = WORLD
    disks: dict[int, api.FileSystem] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    options: dict[str, Any] = field(default_factory=dict)
    meeting: Meeting = field(init=False)

    def run(self, work: Callable[[ModelCheckpoint, Loop], T], **config: Any) -> list[Outcome[T]]:
        """Start all ranks; each does something with its callback, and a loop whose weights it has drawn."""
        self.meeting = Meeting(self.world)

        def one(rank: int) -> T:
            callback = self.callback(rank, **config)
            with callback:
                return work(callback, loop_of(callback, rank))

        return run_ranks(self.meeting, one)

    def callback(self, rank: int, **config: Any) -> ModelCheckpoint:
        """Return the callback of a rank."""
        return callback_on(
            "net",
            str(RUNS),
            CheckpointConfig(**config),
            clock=self.clock,
            fs=self.disks.get(rank, self.disk),
            processes=ModelProcesses(self.disk),
            ranks=Ranks(Seat(self.meeting, rank), timeout_s=TIMEOUT_S),
            **self.options,
        )

    def restart(self, *, world: int = WORLD, later_s: float = 0.0) -> Job:
        """Return the job as it starts anew after all its processes are gone."""
        clock = Clock(self.clock.now + later_s)
        return Job(self.disk.restart(), world=world, clock=clock, options=self.options)

    def saved(self) -> dict[str, api.State]:
        """Return the listing."""
        return {one.name: one.state for one in api.listed(RUNS, fs=self.disk)}


def loop_of(callback: ModelCheckpoint, rank: int) -> Loop:
    """Return a loop of a rank: `w` is the same on all, `own` is not."""
    network = {"w": np.zeros((4, 2), np.float32), "own": np.full(3, rank, np.float32)}
    return Loop(callbacks=(callback,), network=network)


def rank_of(loop: Loop) -> int:
    return int(loop.network["own"][0])


def train(callback: ModelCheckpoint, loop: Loop) -> str:
    loop.run(2)
    return Path(callback.latest_ckpt_file_name).name


def resumed(callback: ModelCheckpoint, loop: Loop) -> Resumed:
    found = callback.resume()
    assert found is not None
    return found


def listed(found: Resumed, name: str) -> object:
    value = found.values[name]
    assert isinstance(value, np.ndarray)
    return value.tolist()


OK = api.State.OK


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"remove_redundancy": True},
        {"async_save": True, "remove_redundancy": True, "format": "safetensors"},
        {"enc_key": KEY, "remove_redundancy": True, "crc_check": True},
    ],
    ids=["each its own", "shared", "thread", "encrypted"],
)
def test_every_rank_gets_its_own_values_back(config: dict[str, Any]) -> None:
    job = Job()
    names = [outcome.must() for outcome in job.run(train, **config)]
    assert names == ["net-1_2.shards"] * WORLD
    outcomes = job.restart().run(resumed, **config)
    for rank, outcome in enumerate(outcomes):
        found = outcome.must()
        assert (found.checkpoint.name, found.checkpoint.epoch) == ("net-1_2.shards", 1)
        assert listed(found, "w") == [[2, 2]] * 4
        assert listed(found, "own") == [rank] * 3


def stored_bytes(job: Job, name: str) -> int:
    """Return the size of all tensors in the files of a checkpoint."""
    store = api.place(RUNS, fs=job.disk)
    manifest = store.read_manifest(name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=api.reading()) as files:
        return files.piece_bytes


@pytest.mark.parametrize(("remove", "size_bytes"), [(True, 32 + 2 * 12), (False, 2 * (32 + 12))])
def test_what_is_the_same_on_all_ranks_is_written_once(remove: bool, size_bytes: int) -> None:
    job = Job()
    job.run(train, remove_redundancy=remove)
    assert stored_bytes(job, "net-1_2.shards") == size_bytes


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks_get_what_is_the_same_and_never_another_ranks_own(
    world: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.run(train, remove_redundancy=True)
    outcomes = job.restart(world=world).run(resumed, remove_redundancy=True)
    for rank, outcome in enumerate(outcomes):
        found = outcome.must()
        assert listed(found, "w") == [[2, 2]] * 4
        assert ("own" in found.values) == (rank < WORLD)
        assert found.kept == (() if rank < WORLD else ("own",))
    assert ("holds nothing of this rank for own" in caplog.text) == (world == 3)


def test_one_process_without_a_coordinator_resumes_what_many_ranks_saved() -> None:
    job = Job()
    job.run(train, remove_redundancy=True)
    callback = alone(job.disk.restart())
    found = resumed(callback, loop_of(callback, 0))
    assert listed(found, "w") == [[2, 2]] * 4
    assert listed(found, "own") == [0] * 3


def alone(disk: ModelDisk, **config: Any) -> ModelCheckpoint:
    """Return the callback of one process without a coordinator."""
    processes = ModelProcesses(disk)
    return callback_on("net", str(RUNS), CheckpointConfig(**config), fs=disk, processes=processes)


def go_on(callback: ModelCheckpoint, loop: Loop) -> str:
    found = resumed(callback, loop)
    loop.step = found.checkpoint.step
    loop.run(3)
    return found.checkpoint.name


def test_many_ranks_go_on_where_one_process_was_and_prune_its_files() -> None:
    job = Job()
    loop_of(alone(job.disk), 0).run(2)
    again = job.restart()
    names = [outcome.must() for outcome in again.run(go_on, keep_checkpoint_max=1)]
    assert names == ["net-1_2.ckpt"] * WORLD
    assert again.saved() == {"net-1_2.ckpt": OK, "net_1-2_2.shards": OK}


def test_one_process_goes_on_where_many_ranks_were_and_prunes_their_files() -> None:
    job = Job()
    job.run(train, remove_redundancy=True)
    again = job.restart()
    callback = alone(again.disk, keep_checkpoint_max=1)
    assert go_on(callback, loop_of(callback, 0)) == "net-1_2.shards"
    assert again.saved() == {"net-1_2.shards": OK, "net_1-2_2.ckpt": OK}


def test_parameters_that_a_layout_cuts_come_back_cut_for_any_number_of_ranks() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    cut = {"layout": {"w": ParallelLayout(device_matrix=(WORLD,), tensor_map=((0,), ()))}}

    def save(callback: ModelCheckpoint, loop: Loop) -> None:
        rank = rank_of(loop)
        loop.network = {"w": np.zeros((2, 2), np.float32)}
        loop.run(1, end=False)
        loop.network["w"][...] = rows[2 * rank : 2 * rank + 2]
        loop.end()

    config = {"remove_redundancy": True, "save_checkpoint_steps": 2}
    job = Job(options=cut)
    for outcome in job.run(save, **config):
        assert outcome.raised is None, outcome.raised
    for rank, part in enumerate(job.restart().run(resumed, **config)):
        assert listed(part.must(), "w") == rows[2 * rank : 2 * rank + 2].tolist()
    whole = Job(job.disk.restart(), world=1).run(resumed, **config)
    assert listed(whole[0].must(), "w") == rows.tolist()


def test_layout_of_no_parameter_is_an_error_on_all_ranks() -> None:
    job = Job(options={"layout": {"missing": CUT}})
    for outcome in job.run(train):
        assert isinstance(outcome.raised, RankFailed)
        assert "no such tensor" in str(outcome.raised)


def test_ranks_take_the_prefix_that_rank_0_finds_free() -> None:
    job = Job()
    for expected in ("net-1_2.shards", "net_1-1_2.shards", "net_2-1_2.shards"):
        assert [outcome.must() for outcome in job.run(train)] == [expected] * WORLD
        job = job.restart()


def test_run_goes_on_where_another_was_and_prunes_its_files() -> None:
    job = Job()
    job.run(train, keep_checkpoint_max=2)
    again = job.restart()
    for outcome in again.run(go_on, keep_checkpoint_max=2):
        assert outcome.raised is None, outcome.raised
    # The one it was resumed from stays besides the two.
    names = ["net-1_2.shards", "net_1-2_1.shards", "net_1-2_2.shards"]
    assert again.saved() == dict.fromkeys(names, OK)


def test_ranks_never_go_on_from_different_steps() -> None:
    job = Job()
    job.run(train)
    flip_bit(job.disk, next(c for c in api.listed(RUNS, fs=job.disk) if c.step == 2).shards[1])
    for outcome in job.restart().run(resumed):
        found = outcome.must()
        assert found.checkpoint.step == 1
        assert [one.checkpoint.step for one in found.skipped] == [2]


def test_full_disk_of_one_rank_is_an_error_on_all_and_due_again() -> None:
    job = Job()
    job.disks[1] = FailingDisk(job.disk, operation="reserve", call=1)

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.begin()
        with pytest.raises(RankFailed, match="rank 1"):
            loop.run_step()
        loop.end()

    for outcome in job.run(work, save_checkpoint_steps=1):
        assert outcome.raised is None, outcome.raised
    assert job.saved() == {"net-1_1.shards": OK}


@pytest.mark.parametrize("config", [{}, {"async_save": True}], ids=["sync", "thread"])
def test_rank_whose_network_cannot_be_saved_is_named_on_all_at_once(config: dict[str, Any]) -> None:
    job = Job()

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        if rank_of(loop) == 1:
            loop.network["set"] = {1}  # type: ignore[assignment]
        with pytest.raises(RankFailed, match="rank 1: "):
            loop.run(1)

    for outcome in job.run(work, **config):
        assert outcome.raised is None, outcome.raised
    assert job.saved() == {}


def test_text_that_is_to_be_appended_is_refused_at_once() -> None:
    job = Job()
    job.meeting = Meeting(1)
    with pytest.raises(UnsupportedState, match="'note' is no tensor; files of many ranks hold"):
        job.callback(0, append_info=[{"note": "x"}])


def test_text_in_a_network_is_refused_on_all_ranks() -> None:
    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.network["note"] = "x"  # type: ignore[assignment]
        loop.run(1)

    for outcome in Job().run(work):
        assert isinstance(outcome.raised, RankFailed)
        assert "'note' is no tensor" in str(outcome.raised)


def test_name_that_was_saved_is_never_overwritten() -> None:
    job = Job()

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.run(3, end=False)
        loop.step = 0
        loop.run(2)

    for outcome in job.run(work):
        assert outcome.raised is None, outcome.raised
    names = [
        *(f"net-1_{step}.shards" for step in (1, 2, 3)),
        "net-1_1-r1.shards",
        "net-1_2-r1.shards",
    ]
    assert job.saved() == dict.fromkeys(names, OK)
    shard = parse_shard_name("net-1_2-r1.0-of-2.67d2f1a41f0c9a2e.ckpt")
    assert shard is not None
    assert (shard.series, shard.set_name) == ("net", "net-1_2-r1.shards")


def test_rank_that_fails_saves_what_it_holds_alone_and_nobody_resumes_from_that() -> None:
    job = Job()

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.run(2, end=False)
        if rank_of(loop) == 1:
            raise ZeroDivisionError

    outcomes = job.run(work, exception_save=True, save_checkpoint_steps=2)
    assert isinstance(outcomes[1].raised, ZeroDivisionError)
    assert not hasattr(outcomes[1].raised, "__notes__")
    files = {"net-1_2.shards": OK, "net.rank_1-1_2_breakpoint.ckpt": OK}
    assert job.saved() == files
    for outcome in job.restart().run(resumed):
        assert outcome.must().checkpoint.name == "net-1_2.shards"


def test_ranks_that_fail_again_and_again_leave_one_breakpoint_each() -> None:
    job = Job()

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        callback.resume()
        loop.run(3, end=False)
        raise ZeroDivisionError

    for _ in range(3):
        job.run(work, exception_save=True, save_checkpoint_steps=2)
        job = job.restart()
    breakpoints = sorted(name for name in job.saved() if "breakpoint" in name)
    assert breakpoints == [f"net.rank_{rank}_2-1_3_breakpoint.ckpt" for rank in range(WORLD)]


def test_breakpoint_of_one_rank_is_no_reason_to_rename_or_to_resume() -> None:
    job = Job()

    def fail(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.run(1, end=False)
        raise ZeroDivisionError

    job.run(fail, exception_save=True, save_checkpoint_steps=9)
    names = {f"net.rank_{rank}-1_1_breakpoint.ckpt": OK for rank in range(WORLD)}
    assert job.saved() == names
    again = job.restart()
    assert [o.must() for o in again.run(lambda callback, loop: callback.resume() is None)] == [
        True
    ] * WORLD
    assert [o.must() for o in again.restart().run(train)] == ["net-1_2.shards"] * WORLD


def test_rank_that_does_not_come_is_named_when_training_begins() -> None:
    job = Job()

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        if rank_of(loop) == 0:
            loop.begin()

    outcomes = job.run(work)
    assert isinstance(outcomes[0].raised, RanksMissing)
    assert outcomes[0].raised.ranks == (1,)


def test_directory_that_rank_0_cannot_make_is_told_to_all() -> None:
    job = Job()
    job.disks[0] = FailingDisk(job.disk, operation="make_directory", call=1)
    for outcome in job.run(train):
        assert isinstance(outcome.raised, RankFailed)
        assert "no series was chosen: rank 0" in str(outcome.raised)


def test_files_that_an_earlier_run_never_committed_are_collected() -> None:
    job = Job()
    die_at(job, 1, calls_by_save(1)[1])
    job.run(train)
    assert api.State.LEFTOVER in job.saved().values()
    other = "network-1_1.0-of-2.00000001aaaaaaaa.ckpt"  # expired as well, but not of this prefix
    put(job.disk, RUNS / other, b"")
    again = job.restart(later_s=3 * TIMEOUT_S)
    assert [outcome.must() for outcome in again.run(train)] == ["net_1-1_2.shards"] * WORLD
    assert [name for name, state in again.saved().items() if state is api.State.LEFTOVER] == [other]


def test_earlier_run_that_cannot_be_cleaned_up_after_is_no_reason_to_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    die_at(job, 1, calls_by_save(1)[1])
    job.run(train)
    again = job.restart(later_s=3 * TIMEOUT_S)
    again.disks[0] = FailingDisk(again.disk, operation="lock", call=2, error=errno.EACCES)
    assert [outcome.must() for outcome in again.run(train)] == ["net_1-1_2.shards"] * WORLD
    assert "could not clean up after net: [Errno 13]" in caplog.text
    assert api.State.LEFTOVER not in again.saved().values()  # by the next save, which may


@pytest.mark.parametrize("said", ["net", None, [], ["net"], ["net", 7]])
def test_series_that_is_none_is_refused(said: Json) -> None:
    class Rogue(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            return [{"ok": said}] * WORLD

    callback = ModelCheckpoint("net", str(RUNS), ranks=Ranks(Rogue(Meeting(WORLD), 1)))
    with pytest.raises(RanksOutOfStep):
        callback.begin(loop_of(callback, 1))


def test_ranks_with_different_prefixes_are_told_so_at_once() -> None:
    meeting = Meeting(WORLD)

    def one(rank: int) -> None:
        name = f"net_{rank}"
        callback = callback_on(name, str(RUNS), fs=ModelDisk(), ranks=Ranks(Seat(meeting, rank)))
        callback.begin(loop_of(callback, rank))

    for outcome in run_ranks(meeting, one):
        assert isinstance(outcome.raised, RanksOutOfStep)
        text = "rank 1 saves under the prefix 'net_1', but rank 0 under 'net_0'"
        assert text in str(outcome.raised)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"async_save": True, "back_pressure": "skip"}, "use 'wait'"),
        ({"async_save": True, "on_error": "warn"}, "use 'raise' or 'retry"),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(config: dict[str, Any], text: str) -> None:
    job = Job()
    job.meeting = Meeting(1)
    with pytest.raises(ValueError, match=text):
        job.callback(0, **config)


def test_ranks_whose_clocks_differ_save_by_time_at_the_same_steps() -> None:
    @dataclass
    class Ticking(Clock):
        tick_s: float = 1.0

        def __call__(self) -> float:
            self.now += self.tick_s
            return self.now

    job = Job()
    job.meeting = Meeting(WORLD)
    config = CheckpointConfig(
        save_checkpoint_steps=0, save_checkpoint_seconds=10, keep_checkpoint_max=99
    )

    def one(rank: int) -> str:
        with callback_on(
            "net",
            str(RUNS),
            config,
            clock=Ticking(now=1000.0 * rank, tick_s=1.0 + 9.0 * rank),
            fs=job.disk,
            processes=ModelProcesses(job.disk),
            ranks=Ranks(Seat(job.meeting, rank)),
        ) as callback:
            loop_of(callback, rank).run(20)
            return Path(callback.latest_ckpt_file_name).name

    for outcome in run_ranks(job.meeting, one):
        assert outcome.must() == "net-7_2.shards"  # the twentieth step
    assert set(job.saved().values()) == {OK}
    assert 3 <= len(job.saved()) <= 10


@pytest.mark.parametrize("names", [{"prefix": str}, {"directory": str}])
def test_functions_for_names_are_refused(names: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="each rank would call its own"):
        ModelCheckpoint(ranks=Ranks(Seat(Meeting(1), 0)), **names)


def calls_by_save(rank: int) -> list[int]:
    """Return how many calls to the disk a rank has made by the end of each of two saves."""
    job, counts = Job(), []
    disk = job.disks[rank] = RankDisk(job.disk)

    def work(callback: ModelCheckpoint, loop: Loop) -> None:
        loop.begin()
        for _ in range(2):
            loop.run_step()
            if rank_of(loop) == rank:
                counts.append(len(disk.calls))

    for outcome in job.run(work):
        assert outcome.raised is None, outcome.raised
    return counts


def die_at(job: Job, rank: int, call: int) -> None:
    """Let a rank die at a call to the disk."""

    def die() -> None:
        job.meeting.gone(rank)
        raise RankDied

    job.disks[rank] = RankDisk(job.disk, call=call, happens=die)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(WORLD))
def test_death_of_a_rank_leaves_a_whole_checkpoint_or_none(rank: int) -> None:
    first, second = calls_by_save(rank)
    committed = set()
    for call in range(first + 1, second + 1):
        job = Job()
        die_at(job, rank, call)
        outcomes = job.run(train, remove_redundancy=True, keep_checkpoint_max=1)
        assert isinstance(outcomes[rank].raised, RankDied)
        survivor = outcomes[1 - rank]
        again = job.restart()
        assert set(again.saved().values()) <= {OK, api.State.LEFTOVER, api.State.WRITING}
        has_second = again.saved().get("net-1_2.shards") is OK
        for cut in job.disk.crash_states(Order.WEAK, tears=1):
            assert OK in Job(cut).saved().values()
        committed.add(has_second)
        if survivor.raised is not None:
            assert isinstance(survivor.raised, SaveFailed)
            assert f"rank {rank}" in str(survivor.raised)
        else:
            assert has_second
        for outcome in again.run(resumed, remove_redundancy=True):
            assert outcome.must().checkpoint.step == 1 + has_second
    # Rank 0 commits in the middle of its calls; without another rank nothing is committed.
    assert committed == ({False, True} if rank == 0 else {False})


@pytest.mark.slow
def test_ranks_of_a_job_save_in_worker_processes_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "tests.parallel.callback_job", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for rank, one in enumerate(sorted(told, key=lambda one: int(one["rank"]))):
        assert one == {
            "rank": rank,
            "latest": "net-1_3.shards",
            "resumed": "net-1_3.shards",
            "w": 3.0,
            "own": [rank] * 3,
        }
    assert len(told) == WORLD
    values = load_checkpoint(tmp_path / "net-1_3.shards")
    assert values["w"].tolist() == [3] * 1000
    assert sum(file.stat().st_size for file in tmp_path.glob("net-1_3.*.safetensors")) < 6000
