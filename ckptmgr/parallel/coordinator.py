# SPDX-License-Identifier: Apache-2.0
"""Exchange of small values between ranks: one operation, `all_gather`, over any transport.

Barriers and broadcasts are special cases of it. Only JSON travels, never a pickle; keys and tensors
never do.

A coordinator need not be reliable. A rank that waits too long gets the list of missing ranks
(`RanksMissing`); the storage alone then decides whether a save was committed (`two_phase_commit`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.formats.strict_json import Json

_FIRST_PIECE_S, _LONGEST_PIECE_S = 1.0, 5.0
_LEAST_SHARE = 0.5
_SHOWN_RANKS = 8


class RanksMissing(CkptmgrError, TimeoutError):
    """Report ranks that did not come in time.

    Attributes:
        tag: The tag of the exchange.
        ranks: The missing ranks.
        found: Rank to value, of those that came.
        timeout_s: How long this rank waited.
    """

    def __init__(
        self, tag: str, *, ranks: Sequence[int], found: Mapping[int, Json], timeout_s: float
    ) -> None:
        self.tag = tag
        self.ranks = tuple(ranks)
        self.found = found
        self.timeout_s = timeout_s
        super().__init__(
            f"{shown_ranks(self.ranks)} did not come to {tag!r} within {timeout_s:.3g} s",
            hint="look at the logs of these ranks; if they are only slow, give a longer timeout",
        )


class RanksOutOfStep(CkptmgrError):
    """Report ranks that are not doing the same thing at the same time."""


class Coordinator(Protocol):
    """The ranks of a job, as seen by one of them. Threads that share it use other tag prefixes."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        """Return the values of all ranks, by rank.

        Args:
            tag: The same on all ranks, and never the same twice in a job. Exchanges whose tags have
                the same first part, up to `/`, come one after the other, in the same order on all
                ranks; others may be concurrent.
            value: The value of this rank; a few KiB.
            timeout_s: How long to wait for the others.

        Raises:
            RanksMissing: Some did not come in time. They may still come, and get the value of this
                rank.
            RanksOutOfStep: The others are in another exchange.
        """
        ...


class KeyValues(Protocol):
    """A table of small values that all ranks share."""

    def put(self, key: str, value: bytes) -> None:
        """Set a key that was not set before."""
        ...

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        """Return a value once it is set, or None after the timeout; looks at least once."""
        ...

    def drop(self, key: str) -> None:
        """Delete a key, as far as the table can."""
        ...


@runtime_checkable
class ManyValues(KeyValues, Protocol):
    """A table that returns many values at once: one request in place of one per rank."""

    def get_many(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, bytes]:
        """Return the values of keys once all are set, or those that are set at the timeout."""
        ...


def values_of(
    table: KeyValues, keys: Sequence[str], *, left_s: Callable[[], float]
) -> list[bytes | None]:
    """Wait for all keys and return their values; None for those not set in time.

    `left_s` returns the seconds to wait from now on.
    """
    if isinstance(table, ManyValues):
        found = table.get_many(keys, timeout_s=left_s())
        return [found.get(key) for key in keys]
    return [table.get(key, timeout_s=left_s()) for key in keys]


def poll(
    look: Callable[[], bytes | None],
    *,
    timeout_s: float,
    pauses_s: tuple[float, float],
    monotonic: Callable[[], float],
    pause: Callable[[float], None],
) -> bytes | None:
    """Call `look` until it returns a value; None after the timeout. Pauses double up to a limit."""
    stop = monotonic() + timeout_s
    pause_s, longest_s = pauses_s
    while (value := look()) is None:
        left_s = stop - monotonic()
        if left_s <= 0:
            return None
        pause(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
    return value


def waited_in_pieces(
    wait: Callable[[float], bool],
    *,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> bool:
    """Call `wait` with a few seconds each until it returns True; False after the timeout.

    For calls that do not return to Python meanwhile: only between them a signal takes effect. One
    that returns False too early cannot wait, because the table is out of reach.
    """
    stop = monotonic() + timeout_s
    piece_s = _FIRST_PIECE_S
    while True:
        began = monotonic()
        wait_s = max(0.0, min(piece_s, stop - began))
        if wait(wait_s):
            return True
        now = monotonic()
        if now >= stop or now - began < wait_s * _LEAST_SHARE:
            return False
        piece_s = min(2 * piece_s, _LONGEST_PIECE_S)


class KeyValueCoordinator:
    """Coordinate ranks over a table: each puts its own value, and waits for those of the others.

    Args:
        table: The table; only this job uses it.
        rank: Number of this rank.
        world: Number of ranks.
        monotonic: Seconds that never go back.

    Raises:
        ValueError: There is no such rank.
    """

    def __init__(
        self,
        table: KeyValues,
        *,
        rank: int,
        world: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world = checked_rank(rank, world)
        self._table = table
        self._monotonic = monotonic
        self._own_keys: dict[str, list[str]] = {}

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        """Return the values of all ranks, by rank; see `Coordinator`."""
        own = _key(tag, self.rank)
        self._table.put(own, to_json(value))
        keys = self._own_keys.setdefault(_prefix(tag), [])
        keys.append(own)
        stop = self._monotonic() + timeout_s
        values = values_of(
            self._table,
            [_key(tag, rank) for rank in range(self.world)],
            left_s=lambda: max(0.0, stop - self._monotonic()),
        )
        found = {
            rank: from_json(data, tag=tag, rank=rank)
            for rank, data in enumerate(values)
            if data is not None
        }
        missing = [rank for rank in range(self.world) if rank not in found]
        if missing:
            raise RanksMissing(tag, ranks=missing, found=found, timeout_s=timeout_s)
        self._forget(keys)
        return [found[rank] for rank in range(self.world)]

    def _forget(self, keys: list[str]) -> None:
        # All ranks came to this exchange, so none waits for earlier values of this prefix.
        earlier = keys[:-1]
        del keys[:-1]
        for key in earlier:
            self._table.drop(key)


def checked_rank(rank: int, world: int) -> tuple[int, int]:
    """Return both, or raise ValueError."""
    if not 0 <= rank < world:
        raise ValueError(f"there is no rank {rank} of {world}")
    return rank, world


def to_json(value: Json) -> bytes:
    """Return a value as it is sent."""
    return json.dumps(value, separators=(",", ":")).encode()


def from_json(data: bytes, *, tag: str, rank: int) -> Json:
    """Return a value that another rank sent; raise RanksOutOfStep unless it is JSON."""
    try:
        value: Json = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RanksOutOfStep(f"what rank {rank} said about {tag!r} is not JSON: {error}") from error
    return value


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _prefix(tag: str) -> str:
    """Return the first part of a tag; exchanges with the same one come one after the other."""
    first, slash, _ = tag.partition("/")
    return first if slash else ""


def _key(tag: str, rank: int) -> str:
    return f"{tag}/{rank}"
