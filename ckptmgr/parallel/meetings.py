# SPDX-License-Identifier: Apache-2.0
"""The meetings of one writer on many ranks: each thing that they do together has rounds of its own, with names of its own."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable

from ckptmgr.parallel.coordinator import Coordinator, RanksMissing
from ckptmgr.parallel.rounds import Rounds


class Meetings:
    """Begins what the ranks do together. All ranks begin the same things in the same order.

    Args:
        coordinator: The ranks.
        series: What the writer writes.
        timeout_s: How long the ranks wait for each other.
        monotonic: Seconds that never go back.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        series: str,
        *,
        timeout_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._begun: Counter[str] = Counter()
        self._given_up = 0
        number = _writers_before(coordinator)
        self._about = f"{series}.{number}" if number else series
        self._first = f"series.{number}"

    def begin(self, about: str, *, what: str) -> Rounds:
        """Return the rounds of something that all ranks begin now.

        Args:
            about: Tells it from the other things that the ranks do; the same on all.
            what: What it means when it fails, for messages.
        """
        return self._rounds(f"{self._about}/{about}", what=what)

    def begin_first(self, *, what: str) -> Rounds:
        """Return the rounds in which the ranks compare which series they write: they meet also with different ones."""
        return self._rounds(self._first, what=what)

    def stop(self) -> float:
        """Return until when to wait for the others, from now on."""
        return self._monotonic() + self._timeout_s

    def give_up(self, step: int) -> dict[int, int]:
        """Say that this rank waits no longer for the others to come to a step; return who said so before, with which step."""
        self._given_up += 1
        tag = f"{self._about}/given up/{self._given_up}"
        try:
            answers = dict(enumerate(self._coordinator.all_gather(tag, step, timeout_s=0.0)))
        except RanksMissing as missing:
            answers = dict(missing.found)
        own = self._coordinator.rank
        return {r: said for r, said in answers.items() if r != own and isinstance(said, int)}

    def _rounds(self, tag: str, *, what: str) -> Rounds:
        # Ranks that fail apart meet again: at the next step, not at the next number.
        self._begun[tag] += 1
        tag = f"{tag}/{self._begun[tag]}"
        return Rounds(self._coordinator, tag, what=what, monotonic=self._monotonic)


_writers: Counter[int] = Counter()
_kept: list[Coordinator] = []


def _writers_before(coordinator: Coordinator) -> int:
    """Return how many writers this coordinator has: the same on all ranks, which run the same program.

    Two writers of a series, in two directories or one after the other, must not take the values of one for the other's.
    """
    key = id(coordinator)
    if key not in _writers:
        try:
            weakref.finalize(coordinator, _writers.pop, key, None)
        except TypeError:  # it has __slots__: it stays, so that no other coordinator gets its id
            _kept.append(coordinator)
    _writers[key] += 1
    return _writers[key] - 1
