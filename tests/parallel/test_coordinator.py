# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet over a table of values, and over a shared directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptmgr import RanksMissing, RanksOutOfStep
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel import Coordinator, KeyValueCoordinator, SharedDirectory, shared_directory
from ckptmgr.parallel.coordinator import shown_ranks
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import put

ROOT = Path("/job")
SESSION = ROOT / "42.0"


@dataclass
class Time:
    """A stopwatch that waiting moves."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Table:
    """A table in memory in which nobody waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        assert key not in self.values
        self.values[key] = value

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        assert timeout_s >= 0
        return self.values.get(key)

    def drop(self, key: str) -> None:
        del self.values[key]


def together(*calls: Callable[[], list[Json]]) -> list[list[Json]]:
    """Call functions at the same time and return their results."""
    results: dict[int, list[Json]] = {}

    def call(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(len(calls))]


def in_directory(
    disk: ModelDisk, rank: int, *, world: int = 2, time: Time | None = None
) -> SharedDirectory:
    clock = time or Time()
    return SharedDirectory(
        ROOT, rank=rank, world=world, session="42.0", fs=disk, monotonic=clock, pause=clock.pause
    )


def test_every_rank_hears_every_rank_in_order(tmp_path: Path) -> None:
    def gather(rank: int) -> list[Json]:
        ranks = SharedDirectory(tmp_path / "job", rank=rank, world=3, session="1")
        first = ranks.all_gather("a", {"rank": rank}, timeout_s=60)
        assert ranks.all_gather("b", [rank, None], timeout_s=60) == [
            [0, None],
            [1, None],
            [2, None],
        ]
        return first

    said: list[Json] = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert together(lambda: gather(0), lambda: gather(1), lambda: gather(2)) == [said] * 3


def test_what_everybody_has_heard_is_forgotten(tmp_path: Path) -> None:
    def gather(rank: int) -> list[Json]:
        ranks = SharedDirectory(tmp_path, rank=rank, world=2, session="1")
        for tag in "abc":
            ranks.all_gather(tag, rank, timeout_s=60)
        return []

    together(lambda: gather(0), lambda: gather(1))
    assert len(list((tmp_path / "1").iterdir())) == 2


def test_missing_ranks_are_named_and_the_others_heard() -> None:
    time = Time()
    table = Table()
    for rank in (0, 3):
        table.put(f"save 7/{rank}", b'"here"')
    ranks = KeyValueCoordinator(table, rank=1, world=5, monotonic=time)
    with pytest.raises(RanksMissing) as raised:
        ranks.all_gather("save 7", "me", timeout_s=5)
    assert raised.value.ranks == (2, 4)
    assert raised.value.found == {0: "here", 1: "me", 3: "here"}
    assert "ranks 2, 4 did not come to 'save 7' within 5 s" in str(raised.value)
    assert isinstance(raised.value, TimeoutError)


def test_table_that_tells_many_values_is_asked_once() -> None:
    asked: list[Sequence[str]] = []

    class Many(Table):
        def get(self, key: str, *, timeout_s: float) -> bytes | None:
            raise AssertionError

        def get_many(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, bytes]:
            asked.append(keys)
            return {key: self.values[key] for key in keys if key in self.values}

    table = Many()
    table.put("a/1", b"1")
    ranks = KeyValueCoordinator(table, rank=0, world=2, monotonic=Time())
    assert ranks.all_gather("a", 0, timeout_s=1) == [0, 1]
    with pytest.raises(RanksMissing, match="rank 1 did not come to 'b'"):
        ranks.all_gather("b", 0, timeout_s=1)
    assert asked == [["a/0", "a/1"], ["b/0", "b/1"]]


def test_waiting_ends_with_the_time_for_all_ranks_together() -> None:
    time = Time()
    ranks = in_directory(ModelDisk(), 0, world=4, time=time)
    with pytest.raises(RanksMissing, match="ranks 1, 2, 3 did not"):
        ranks.all_gather("a", 0, timeout_s=3)
    assert time.now == pytest.approx(3)
    assert max(time.pauses) <= 0.1


def test_what_was_said_in_vain_is_forgotten_once_the_ranks_meet_again() -> None:
    table = Table()
    ranks = KeyValueCoordinator(table, rank=0, world=2, monotonic=Time())
    with pytest.raises(RanksMissing):
        ranks.all_gather("a", 0, timeout_s=1)
    table.put("b/1", b"1")
    assert ranks.all_gather("b", 0, timeout_s=1) == [0, 1]
    assert set(table.values) == {"b/0", "b/1"}


def test_what_one_speaker_said_is_not_forgotten_because_of_another() -> None:
    table = Table()
    ranks = KeyValueCoordinator(table, rank=0, world=1, monotonic=Time())
    for tag in ("net/1", "other/1", "other/2"):
        ranks.all_gather(tag, 0, timeout_s=1)
    assert set(table.values) == {"net/1/0", "other/2/0"}


def test_ranks_that_meet_in_a_directory_twice_tell_the_meetings_apart(tmp_path: Path) -> None:
    def start(rank: int) -> list[Json]:
        meetings = [SharedDirectory(tmp_path, rank=rank, world=2) for _ in range(5)]
        return [m.all_gather("a", [n, rank], timeout_s=60) for n, m in enumerate(meetings)]

    apart = [[[n, 0], [n, 1]] for n in range(5)]
    assert together(lambda: start(0), lambda: start(1)) == [apart] * 2


def test_ranks_without_a_session_agree_on_one_for_every_start(tmp_path: Path) -> None:
    def start(rank: int) -> list[Json]:
        ranks = SharedDirectory(tmp_path, rank=rank, world=2)
        return ranks.all_gather("a", rank, timeout_s=60)

    for _ in range(2):
        assert together(lambda: start(0), lambda: start(1)) == [[0, 1]] * 2
        shared_directory._begun.clear()  # as in new processes
    with pytest.raises(RanksMissing, match="rank 1 did not come to 'the start of the job'"):
        SharedDirectory(tmp_path, rank=0, world=2, timeout_s=0)


def test_sessions_do_not_hear_each_other() -> None:
    disk = ModelDisk()
    time = Time()
    with pytest.raises(RanksMissing):
        in_directory(disk, 1).all_gather("a", 1, timeout_s=0)
    other = SharedDirectory(
        ROOT, rank=0, world=2, session="42.1", fs=disk, monotonic=time, pause=time.pause
    )
    with pytest.raises(RanksMissing, match="rank 1 did not"):
        other.all_gather("a", 0, timeout_s=1)


@pytest.mark.parametrize("content", [b"", b"{", b'["other/1", "1"]', b"7", b"[" * 100_000])
def test_file_that_no_rank_wrote_is_named(content: bytes) -> None:
    disk = ModelDisk()
    ranks = in_directory(disk, 0)
    with pytest.raises(RanksMissing):
        ranks.all_gather("a", 0, timeout_s=0)
    (own,) = disk.list(SESSION)
    put(disk, SESSION / own.replace(".0.json", ".1.json"), content)
    with pytest.raises(RanksOutOfStep, match=r"\.1\.json: not what a rank says"):
        ranks.all_gather("a", 0, timeout_s=0)


def test_value_that_is_no_json_names_its_rank() -> None:
    table = Table()
    table.put("a/1", b"{")
    ranks = KeyValueCoordinator(table, rank=0, world=2, monotonic=Time())
    with pytest.raises(RanksOutOfStep, match="what rank 1 said about 'a' is not JSON"):
        ranks.all_gather("a", 0, timeout_s=1)


def test_disk_that_fails_is_like_ranks_that_do_not_come(caplog: pytest.LogCaptureFixture) -> None:
    disk = ModelDisk()
    ranks = in_directory(disk, 0)
    failing = SharedDirectory(
        ROOT, rank=0, world=2, session="42.0", fs=FailingDisk(disk, operation="replace", call=1)
    )
    with pytest.raises(RanksMissing, match="ranks 0, 1 did not come"):
        failing.all_gather("a", 0, timeout_s=0)
    assert "the other ranks do not hear this one" in caplog.text
    assert disk.list(SESSION) == {}
    assert isinstance(ranks, KeyValueCoordinator)


def test_file_that_cannot_be_read_is_looked_for_again() -> None:
    disk = ModelDisk()
    with pytest.raises(RanksMissing):
        in_directory(disk, 1).all_gather("a", 1, timeout_s=0)
    time = Time()
    failing = SharedDirectory(
        ROOT,
        rank=0,
        world=2,
        session="42.0",
        fs=FailingDisk(disk, operation="open", call=2),
        monotonic=time,
        pause=time.pause,
    )
    assert failing.all_gather("a", 0, timeout_s=60) == [0, 1]


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_rank_outside_the_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="there is no rank"):
        in_directory(ModelDisk(), rank, world=world)


@pytest.mark.parametrize("session", ["", "a/b", ".hidden", "a\0"])
def test_session_that_is_no_name_is_refused(session: str) -> None:
    with pytest.raises(ValueError, match="is not a name that a folder can have"):
        SharedDirectory(ROOT, rank=0, world=1, session=session, fs=ModelDisk())


def test_many_missing_ranks_are_counted() -> None:
    assert shown_ranks(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_shared_directory_is_a_coordinator(tmp_path: Path) -> None:
    alone: Coordinator = SharedDirectory(tmp_path, rank=0, world=1, session="1")
    assert alone.all_gather("a", "x", timeout_s=0) == ["x"]
