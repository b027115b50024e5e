# SPDX-License-Identifier: Apache-2.0
"""The numbers of the next checkpoint: its sequence, and the attempt at its step.

A number that no key proves, and that this process did not write itself, may be a mistake or an
attack: if it were accepted, one manifest with the largest number of the format would make every
later save impossible. So unproven numbers count up to a lead over the largest proven one; beyond it
they are ignored with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.trust import Trust

_LOG = logging.getLogger(__name__)

MAX_LEAD = 1 << 20
"""How far above the largest proven number an unproven one is accepted."""
LARGEST_FOLLOWED = 1 << 63
"""Larger numbers would soon exhaust the format; only this process, or a key, vouches for them."""


def next_sequence(
    present: Iterable[Checkpoint],
    *,
    trust: Trust,
    saved: Checkpoint | None = None,
    resumed_from: Checkpoint | None = None,
) -> int:
    """Return the sequence of the next commit in a directory.

    `saved` is the last checkpoint of this run; its manifest may be unreadable at the moment.
    """
    others = [*present, *([] if resumed_from is None else [resumed_from])]
    proven = [] if saved is None else [saved.sequence]
    proven += [c.sequence for c in others if trust.proves(c)]
    if resumed_from is not None and resumed_from.sequence <= LARGEST_FOLLOWED:
        proven.append(resumed_from.sequence)
    return 1 + _largest(others, lambda c: c.sequence, floor=max(proven, default=0))


def next_attempt(history: Sequence[Checkpoint], step: int, *, trust: Trust) -> int:
    """Return the attempt of the next save of a step: one more than the highest, damaged or not."""
    ours = [
        c for c in history if c.run_id is not None or c.state is State.CORRUPT or c.is_unreadable
    ]
    same = [c for c in ours if c.step == step]
    floor = max((c.attempt for c in same if trust.proves(c)), default=-1)
    return 1 + _largest(same, lambda c: c.attempt, floor=floor)


def _largest(
    claims: Sequence[Checkpoint], number: Callable[[Checkpoint], int], *, floor: int
) -> int:
    """Return the largest accepted number; warn of ignored ones."""
    ignored = [c for c in claims if number(c) > floor + MAX_LEAD]
    for checkpoint in ignored:
        _LOG.warning(
            "%s: its number %d is ignored: nothing proves it, and it is more than %d above the largest proven one",
            checkpoint.path,
            number(checkpoint),
            MAX_LEAD,
        )
    return max([floor, *(number(c) for c in claims if number(c) <= floor + MAX_LEAD)])
