# SPDX-License-Identifier: Apache-2.0
"""Numbers for the writers of a job, the same on all ranks."""

from __future__ import annotations

import weakref
from collections import Counter

from ckptmgr.parallel.coordinator import Coordinator

_writers: Counter[int] = Counter()
_kept: list[Coordinator] = []


def writers_before(coordinator: Coordinator) -> int:
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
