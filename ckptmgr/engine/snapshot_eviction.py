# SPDX-License-Identifier: Apache-2.0
"""Choose which snapshot to evict: pure, on frozen values.

The victim is the one that is cheap to restore, large and long unused: the least of

    restore_seconds ** time_exponent * restore_bytes ** memory_exponent / size / staleness

Source: `Eviction heuristics`, Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021 (h = cost / (memory * staleness));
the exponents are those of MegEngine's `DTRConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, log

from ckptmgr.config.memory import MemoryConfig

# Below the resolution of any clock or disk; keeps logarithms finite.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictee:
    """What the choice depends on.

    Attributes:
        step: Its step.
        size_bytes: Memory that its eviction frees.
        restore_s: Seconds it would take to load it again.
        restore_bytes: Memory that loading it needs beyond the state itself (decoding buffers).
        used_at_s: When it was put or last asked for, on the clock of `now_s`.
        is_pinned: Whether it must stay.
    """

    step: int
    size_bytes: int
    restore_s: float
    restore_bytes: int
    used_at_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A victim.

    Attributes:
        step: Its step, or None when nothing may be evicted.
        scored: How many candidates were looked at.
    """

    step: int | None
    scored: int


def choose_victim(snapshots: Sequence[Evictee], config: MemoryConfig, *, now_s: float) -> Choice:
    """Return which snapshot to evict.

    Args:
        snapshots: All there are.
        config: Exponents, the size below which nothing is evicted, and whether only about sqrt(n) candidates are looked at.
        now_s: The time.
    """
    candidates = [
        snapshot
        for snapshot in snapshots
        if not snapshot.is_pinned and snapshot.size_bytes >= config.smallest_evictee_bytes
    ]
    if config.is_sampling:
        candidates = candidates[:: max(1, isqrt(len(candidates)))]
    if not candidates:
        return Choice(step=None, scored=0)
    victim = min(candidates, key=lambda snapshot: log_score(snapshot, config, now_s=now_s))
    return Choice(step=victim.step, scored=len(candidates))


def log_score(snapshot: Evictee, config: MemoryConfig, *, now_s: float) -> float:
    """Return the logarithm of the score, which has the same order and cannot overflow.

    >>> old, new = (
    ...     Evictee(step=1, size_bytes=9, restore_s=1, restore_bytes=9, used_at_s=at, is_pinned=False)
    ...     for at in (0, 50)
    ... )
    >>> log_score(old, MemoryConfig(), now_s=60) < log_score(new, MemoryConfig(), now_s=60)
    True
    """
    return (
        config.restore_time_exponent * log(max(snapshot.restore_s, _LEAST_S))
        + config.restore_memory_exponent * log(max(snapshot.restore_bytes, 1))
        - log(max(snapshot.size_bytes, 1))
        - log(max(now_s - snapshot.used_at_s, _LEAST_S))
    )
