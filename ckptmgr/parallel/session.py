# SPDX-License-Identifier: Apache-2.0
"""One name for this start of a job, for ranks that meet over a table which an earlier start has used.

Every rank puts a number that nobody has used before, and then a digest of the numbers that it sees. When all digests are its
own, every rank has seen the number of every other one: all of them belong to this start. A rank that has read what an
earlier start left sees another digest, and looks again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from hashlib import blake2s

from ckptmgr.parallel.coordinator import (
    KeyValues,
    RanksMissing,
    RanksOutOfStep,
    checked_rank,
    values_of,
)

_PAUSE_S = 0.01
_HELLO, _SEEN = "hello", "seen"


def agreed_session(
    table: KeyValues,
    *,
    rank: int,
    world: int,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Return a name that all ranks of this start of the job agree on, and no others.

    Args:
        table: A table in which keys may be set again; it may hold what an earlier start has put.
        rank: Number of this rank.
        world: Number of ranks.
        timeout_s: How long to wait for the others.
        monotonic: Seconds that never go back.
        pause: Waits for some seconds.

    Raises:
        ValueError: There is no such rank.
        RanksMissing: Some ranks did not come in time.
        RanksOutOfStep: Another process says that it is this rank.
    """
    checked_rank(rank, world)
    stop = monotonic() + timeout_s

    def heard(about: str) -> list[bytes]:
        keys = [f"{about}/{other}" for other in range(world)]
        said = values_of(table, keys, left_s=lambda: max(0.0, stop - monotonic()))
        missing = [other for other, value in enumerate(said) if value is None]
        if missing:
            raise RanksMissing("the start of the job", ranks=missing, found={}, timeout_s=timeout_s)
        return [value for value in said if value is not None]

    own = secrets.token_hex(16).encode()
    table.put(f"{_HELLO}/{rank}", own)
    while True:
        numbers = heard(_HELLO)
        if numbers[rank] != own:
            raise RanksOutOfStep(
                f"another process is rank {rank} of this job",
                hint="end the processes of the earlier start before starting again",
            )
        name = blake2s(b"".join(numbers), digest_size=16).hexdigest()
        table.put(f"{_SEEN}/{rank}", name.encode())
        seen = heard(_SEEN)
        others = [other for other, value in enumerate(seen) if value != name.encode()]
        if not others:
            return name
        if monotonic() >= stop:
            raise RanksMissing("the start of the job", ranks=others, found={}, timeout_s=timeout_s)
        pause(_PAUSE_S)
