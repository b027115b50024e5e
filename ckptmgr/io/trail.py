# SPDX-License-Identifier: Apache-2.0
"""Where small reads of a file will go, if they go on as they did.

Each description of a tensor, or head of a cipher block, tells only where the next one is: so each read would wait for the
one before. But layers of a model are alike, and so are the steps from one description to the next.

>>> trail = Trail()
>>> [trail.note(offset << 20) for offset in (0, 1, 2)][-1]
(3145728, 4194304, 5242880, 6291456)
"""

from __future__ import annotations

_MAX_PERIOD = 32
_MAX_AHEAD = 64
_AHEAD_PER_STEP = 4  # of those that were as foreseen: one repetition says little
_LIKE_BYTES = 256  # names and heads differ in length from layer to layer
_SPARSE_BYTES = 64 << 10  # what is closer is read together, or was read ahead by the kernel


class Trail:
    """Offsets of reads, and what they foretell. Safe to use from several threads, whose reads it then mixes up."""

    def __init__(self) -> None:
        self._last = 0
        self._steps: tuple[int, ...] = ()
        self._expected: tuple[int, ...] = ()

    def note(self, offset: int) -> tuple[int, ...]:
        """Take the offset of a read; return those of reads that will probably follow and were not returned before."""
        step, self._last = offset - self._last, offset
        self._steps = steps = (*self._steps[-2 * _MAX_PERIOD :], step)
        expected, self._expected = self._expected, ()
        if len(expected) > 1 and abs(offset - expected[0]) <= _LIKE_BYTES:
            self._expected = expected[1:]
            return ()
        period, repeated = _period_of(steps)
        pattern = steps[-period:]
        if not repeated or sum(pattern) < _SPARSE_BYTES * period:
            return ()
        ahead = []
        for index in range(min(_AHEAD_PER_STEP * repeated, _MAX_AHEAD)):
            offset += pattern[index % period]
            ahead.append(offset)
        self._expected = tuple(ahead)
        return self._expected


def _period_of(steps: tuple[int, ...]) -> tuple[int, int]:
    """Return after how many steps they repeat themselves, and how many of the last ones did: 0, or a period or more."""
    best = (1, 0)
    step = steps[-1]
    for period, before in enumerate(steps[-2 : -2 - _MAX_PERIOD : -1], start=1):
        is_known = best[1] >= period and period % best[0] == 0  # the same, taken several times
        if not is_known and -_LIKE_BYTES <= step - before <= _LIKE_BYTES:
            repeated = _repeated(steps, period)
            if repeated >= period and repeated > best[1]:
                best = (period, repeated)
    return best


def _repeated(steps: tuple[int, ...], period: int) -> int:
    """Return how many of the last steps are like the one a period before."""
    count = 0
    for step, before in zip(reversed(steps), reversed(steps[:-period]), strict=False):
        if abs(step - before) > _LIKE_BYTES:
            break
        count += 1
    return count
