# SPDX-License-Identifier: Apache-2.0
"""Run functions in threads and return when none of them runs any more, however often Ctrl-C is pressed.

The caller closes the file that the threads write to: a descriptor closed too early may already be another file's. And
`Thread.join()` cannot be trusted with that: interrupted, Python 3.11 takes the running thread for finished (bpo-45274).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def run_together(
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
