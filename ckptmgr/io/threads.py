# SPDX-License-Identifier: Apache-2.0
"""Run functions in threads and return when none of them runs any more, however often Ctrl-C is pressed.

The caller closes the file that the threads write to: a descriptor closed too early may already be another file's. And
`Thread.join()` cannot be trusted with that: interrupted, Python 3.11 takes the running thread for finished (bpo-45274).

Take the units of a file in turn, in a few threads, each with a buffer that is kept.

Do many pieces of GIL-free work in a few threads, and hand the first failure to the caller.

How many threads make the bytes of a file: all that help, or, beside a training loop, all but one processor's.

Giving way is not enough. A thread that yields still takes its share of the processor it shares with the loop, and its data
out of the caches; on two cores a loop lost three times as many steps beside two threads as beside one, and the save was no
slower: one core digests and encrypts about as fast as a disk writes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, TypeVar

from ckptmgr.io.buffers import Buffers


def run_in_threads(
    works: Sequence[Callable[[], None]], *, fail: Callable[[BaseException], None]
) -> None:
    """Call every work exactly once, each in a thread of its own, and return when all have returned.

    Args:
        works: They raise nothing, and end soon after `fail` was called.
        fail: Takes what stops them early: Ctrl-C, or that a thread cannot be started. Works without a thread are then
            called one after the other in this one.
    """
    _Crew(works, fail).run()


class _Crew:
    def __init__(
        self, works: Sequence[Callable[[], None]], fail: Callable[[BaseException], None]
    ) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._working = len(works)
        # A bare lock that the last one out opens: an interrupted Event can be left locked, or lose its own lock.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._members = [_once(work, self._leave) for work in works]
        self._threads: list[threading.Thread] = []
        self._must_take_over = False

    def run(self) -> None:
        if self._members:
            self._guard(self._start)
            while not self._guard(self._finish):
                pass
            self._members.clear()  # they hold this object, and the works what they work on

    def _start(self) -> None:
        for member in self._members:
            thread = threading.Thread(target=member, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _finish(self) -> None:
        if self._must_take_over:
            for member in self._members:
                member()
        # Ctrl-C may come after the gate was passed, and then it is closed again
        while self._working:
            self._gate.acquire()
        for thread in self._threads:  # nobody works any more; this only tidies up
            if thread.ident is not None:
                thread.join()

    def _guard(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except BaseException as error:  # raised by the caller, when everybody has stopped
            self._must_take_over = True
            self._fail(error)
            return False
        return True

    def _leave(self) -> None:
        with self._lock:
            self._working -= 1
            if self._working == 0:
                self._gate.release()


def _once(work: Callable[[], None], leave: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does the work for the first who calls it, and nothing for anybody else."""
    token = threading.Lock()

    def member() -> None:
        if token.acquire(blocking=False):
            try:
                work()
            finally:
                leave()

    return member


PIECE_BYTES = 4 << 20
"""The largest cipher block that is read as a whole."""
HASH_STEP_BYTES = 2 << 20
"""What is read and hashed at once of a digest range: so much of each thread stays in the cache."""

# More reads in flight than cores: while one thread hashes, the disk must not wait.
_THREADS = 4
_buffers = Buffers(_THREADS, PIECE_BYTES)


def for_each(units: Collection[int], work: Callable[[int, memoryview], None]) -> None:
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
            run_in_threads([self._guard] * min(_THREADS, self._count), fail=self._fail)
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


Piece = TypeVar("Piece")


def drain(pieces: Iterator[Piece], work: Callable[[Piece], None], *, threads: int) -> None:
    """Call `work` with every piece, at most `threads` at a time.

    Pieces are made one at a time. No thread is left when this returns.

    Raises:
        BaseException: The first failure of `pieces` or `work`; the pieces after it are left undone.
    """
    _Drain(pieces, work).run(threads)


class _Drain(Generic[Piece]):
    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, threads: int) -> None:
        if threads > 1:
            run_in_threads([self._loop] * threads, fail=self._fail)
        else:
            self._loop()
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        try:
            while self._failure is None:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                self._work(piece)
        except BaseException as error:  # raised by run() in the caller
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error


# Two keep a disk busy with plain or GCM bytes; CBC, 1.5 GB/s a core, can use more. Four leave buffers for the writers.
MOST_PRODUCERS = 4

_thread = threading.local()


def work_beside_training() -> None:
    """Leave one processor to others in whatever the calling thread saves from now on."""
    _thread.spared = 1


def producer_threads() -> int:
    """Return how many threads make the bytes of a file that the calling thread saves; at least one."""
    available = len(os.sched_getaffinity(0)) - getattr(_thread, "spared", 0)
    return max(1, min(MOST_PRODUCERS, available))
