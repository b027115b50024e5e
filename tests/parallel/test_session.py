# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on a name for this start of the job, whatever an earlier start has left in their table."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptmgr import RanksMissing, RanksOutOfStep
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.shared_directory import agreed_session
from tests.parallel.test_coordinator import together

WORLD = 3
HANG_S = 60.0


class Table:
    """A table in memory that waits until somebody sets a key."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)

    def drop(self, key: str) -> None:
        raise AssertionError


def names(table: Table) -> list[str]:
    """Start a job of some ranks, and return the names that they agree on."""

    def agree(rank: int) -> Callable[[], list[Json]]:
        return lambda: [agreed_session(table, rank=rank, world=WORLD, timeout_s=HANG_S)]

    return [str(name) for (name,) in together(*(agree(rank) for rank in range(WORLD)))]


def test_all_ranks_agree_on_a_name_of_their_own_start() -> None:
    table = Table()
    starts = [names(table) for _ in range(5)]
    assert all(len(set(start)) == 1 for start in starts)
    assert len({start[0] for start in starts}) == 5


def test_rank_that_takes_what_an_earlier_start_left_agrees_with_nobody() -> None:
    table = Table()
    names(table)
    with pytest.raises(RanksMissing, match="ranks 0, 2 did not come to 'the start of the job'"):
        agreed_session(table, rank=1, world=WORLD, timeout_s=0.0)


def test_rank_that_never_came_is_named() -> None:
    table = Table()
    table.put("hello/0", b"0")
    with pytest.raises(RanksMissing, match="rank 2 did not come"):
        agreed_session(table, rank=1, world=WORLD, timeout_s=0.0)


def test_second_process_with_the_same_rank_is_told() -> None:
    class Contested(Table):
        def put(self, key: str, value: bytes) -> None:
            super().put(key, b"of another process")

    with pytest.raises(RanksOutOfStep, match="another process is rank 0"):
        agreed_session(Contested(), rank=0, world=1, timeout_s=0.0)


def test_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no rank 3 of 3"):
        agreed_session(Table(), rank=3, world=WORLD, timeout_s=0.0)
