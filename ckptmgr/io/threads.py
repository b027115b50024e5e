# SPDX-License-Identifier: Apache-2.0
"""Work in a few threads; each function returns when none of them runs, despite Ctrl-C.

The caller closes the file that the threads use: a descriptor that is closed too early may already
be that of another file. `Thread.join()` does not ensure this: when it is interrupted, Python 3.11
takes the running thread for finished (bpo-45274).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Generic, TypeVar

from ckptmgr.io.buffers import BufferPool
from ckptmgr.io.cgroups import usable_cpus
from ckptmgr.io.signals import SLICE_S

PIECE_BYTES = 4 << 20
"""The largest cipher block that is read as a whole."""
HASH_STEP_BYTES = 2 << 20
"""Bytes of a digest range that are read and hashed at once: those of all threads stay in the cache."""
MOST_PRODUCERS = 4
"""Two keep a disk busy with plain or GCM bytes; CBC, 1.5 GB/s a core, can use more. Four leave buffers for the writers."""

REMOTE_READERS = 16
"""Reads in flight over a network: a request waits longer than it transfers."""

# More reads in flight than cores: while one thread hashes, the disk must not wait.
_READERS = 4
_buffers = BufferPool(_READERS, PIECE_BYTES)
_thread = threading.local()
_Item = TypeVar("_Item")


def run_in_threads(
    functions: Sequence[Callable[[], None]], *, fail: Callable[[BaseException], None]
) -> None:
    """Call every function once, each in its own thread, and return when all have returned.

    The functions raise nothing, and end soon after `fail` was called: with Ctrl-C, or with the
    error of a thread that cannot be started. Functions without a thread then run in this one, in
    turn.
    """
    _ThreadGroup(functions, fail).run()


class _ThreadGroup:
    def __init__(
        self, functions: Sequence[Callable[[], None]], fail: Callable[[BaseException], None]
    ) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._unfinished = len(functions)
        # A bare lock that the last member opens: an interrupted Event may stay locked, or lose its
        # own lock.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._members = [_once(function, self._leave) for function in functions]
        self._threads: list[threading.Thread] = []
        self._must_take_over = False

    def run(self) -> None:
        if self._members:
            self._guard(self._start)
            while not self._guard(self._finish):
                pass
            self._members.clear()  # they refer to this object, and to all that the functions use

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
        while self._unfinished:
            self._gate.acquire(timeout=SLICE_S)
        for thread in self._threads:  # all functions have returned
            if thread.ident is not None:
                thread.join()

    def _guard(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except BaseException as error:  # raised by the caller, when all threads have stopped
            self._must_take_over = True
            self._fail(error)
            return False
        return True

    def _leave(self) -> None:
        with self._lock:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._gate.release()


def _once(function: Callable[[], None], leave: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `function` and `leave` the first time, and then does nothing."""
    token = threading.Lock()

    def member() -> None:
        if token.acquire(blocking=False):
            try:
                function()
            finally:
                leave()

    return member


def for_each(items: Iterator[_Item], work: Callable[[_Item], None], *, threads: int) -> None:
    """Call `work` with every item, at most `threads` at a time; take items one at a time.

    Raises:
        BaseException: The first failure of `items` or `work`; no item is taken after it.
    """
    _Loop(items, work).run(threads)


class _Loop(Generic[_Item]):
    def __init__(self, items: Iterator[_Item], work: Callable[[_Item], None]) -> None:
        self._items = items
        self._work = work
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def run(self, threads: int) -> None:
        if threads > 1:
            run_in_threads([self._loop] * threads, fail=self._fail)
        else:  # starting a thread takes longer
            self._loop()
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        try:
            while self._failure is None:
                with self._lock:
                    item = next(self._items, None)
                if item is None:
                    return
                self._work(item)
        except BaseException as error:  # raised by run() in the caller
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error


def for_each_unit(
    units: Collection[int],
    work: Callable[[int, memoryview], None],
    *,
    has_latency: bool = False,
) -> None:
    """Call `work` with every unit of a file and a page-aligned buffer of 4 MiB to use.

    With `has_latency` more of them run at a time, because each waits for a network.

    Raises:
        BaseException: The first failure of `work`; no unit is begun after it.
    """
    readers = REMOTE_READERS if has_latency else _READERS
    buffers = BufferPool(readers, PIECE_BYTES) if has_latency else _buffers

    def work_in_buffer(unit: int) -> None:
        with buffers.lent() as buffer:
            work(unit, buffer)

    for_each(iter(units), work_in_buffer, threads=min(readers, len(units)))


def work_beside_training() -> None:
    """Leave one processor to the training loop in all later saves of the calling thread.

    To yield is not enough: a thread that yields still takes its share of a processor, and displaces
    the data of the loop from the caches. On two cores a loop lost three times as many steps beside
    two threads as beside one, and the save was no slower.
    """
    _thread.spared = 1


def producer_threads() -> int:
    """Return how many threads produce the bytes of a file for the calling thread; at least one."""
    available = usable_cpus() - getattr(_thread, "spared", 0)
    return max(1, min(MOST_PRODUCERS, available))
