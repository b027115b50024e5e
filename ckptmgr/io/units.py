# SPDX-License-Identifier: Apache-2.0
"""Take the units of a file in turn, in a few threads, each with a buffer that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from ckptmgr.io.buffers import Buffers
from ckptmgr.io.threads import run_together

PIECE_BYTES = 4 << 20
"""The largest cipher block that is read as a whole."""
HASHED_BYTES = 2 << 20
"""What is read and hashed at once of a digest range: so much of each thread stays in the cache."""

# More reads in flight than cores: while one thread hashes, the disk must not wait.
_THREADS = 4
_buffers = Buffers(_THREADS, PIECE_BYTES)


def each_unit(units: Collection[int], work: Callable[[int, memoryview], None]) -> None:
    """Call `work` once for every unit, in this order, several at a time; return when nothing runs any more.

    Args:
        units: Numbers of whatever the work is cut into.
        work: Takes a unit and a page-aligned buffer of 4 MiB, which is its own until it returns.

    Raises:
        BaseException: The first error of `work`; no unit is started after it.
    """
    _Turns(units, work).run()


class _Turns:
    def __init__(self, units: Collection[int], work: Callable[[int, memoryview], None]) -> None:
        self._work = work
        self._count = len(units)
        self._units = iter(units)
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self) -> None:
        if self._count > 1:
            run_together([self._guard] * min(_THREADS, self._count), fail=self._fail)
        else:  # starting a thread takes longer
            self._guard()
        if self._failure is not None:
            raise self._failure

    def _guard(self) -> None:
        try:
            with _buffers.lent() as buffer:
                while (unit := self._next()) is not None:
                    self._work(unit, buffer)
        except BaseException as error:  # raised by run(), in the caller's thread
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _next(self) -> int | None:
        with self._lock:
            return None if self._failure is not None else next(self._units, None)
