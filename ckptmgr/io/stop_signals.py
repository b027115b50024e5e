# SPDX-License-Identifier: Apache-2.0
"""Requests by signals: SIGTERM, and SIGUSR1 of Slurm, ask to stop; they are noted and end nothing.

One handler for the process serves all watches of the same signals, and only while there are some. It calls the Python
handler that was there before. In a forked process without a watch, such as a worker of a data
loader, SIGTERM ends the process as ever, and another, which Slurm sends to all processes of a job,
does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ckptmgr.io.signal_thread import HANDLED, tell

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


class StopWatch:
    """Notes when the process gets one of some signals, by default to stop; `close` ends that.

    Only the main thread can install the handlers; begun elsewhere, a watch waits for `install`.

    Attributes:
        requested_at: Seconds of `monotonic` at the first request, or None.
        number: The signal of the first request, or None.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        numbers: tuple[signal.Signals, ...] = NUMBERS,
    ) -> None:
        self.requested_at: float | None = None
        self.number: int | None = None
        self._monotonic = monotonic
        self._handlers = _handlers_of.setdefault(numbers, _Handlers(numbers))
        self._handlers.add(self)

    def install(self) -> bool:
        """Return whether the handlers are installed, which the main thread does now if needed."""
        return self._handlers.install()

    def note(self, number: int) -> None:
        """Record a request."""
        if self.requested_at is None:
            self.requested_at, self.number = self._monotonic(), number
            tell(HANDLED)

    def forget(self) -> None:
        """Forget the request, which is answered."""
        self.requested_at = self.number = None

    def close(self) -> None:
        """End the watch; the last one puts the earlier handlers back."""
        self._handlers.remove(self)


class _Handlers:
    """The handler of the process, and those that it replaced."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        self._watches: list[StopWatch] = []
        self._numbers = numbers
        self._replaced: dict[int, list[Any]] = {number: [] for number in numbers}
        # Of calls by handlers that `handle` called.
        self._depth: dict[int, int] = dict.fromkeys(numbers, 0)
        self._pid = os.getpid()

    def add(self, watch: StopWatch) -> None:
        if self._pid != os.getpid():  # pragma: no cover - a forked process
            self._watches, self._pid = [], os.getpid()
        self._watches.append(watch)
        self.install()

    def install(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return all(self._replaced.values())
        for number in self._numbers:
            present = signal.getsignal(number)
            # It is None for one of a C library, which cannot be called from here.
            if present is not None and present != self.handle:  # pragma: no branch
                signal.signal(number, self.handle)
                self._replaced[number].append(present)
        return True

    def remove(self, watch: StopWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
        is_main = threading.current_thread() is threading.main_thread()
        if self._watches or not is_main:
            return
        for number in self._numbers:
            if signal.getsignal(number) == self.handle:
                signal.signal(number, self._replaced[number].pop())

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: note it for all watches, and go on with the handler before."""
        is_own = self._pid == os.getpid()
        for watch in self._watches if is_own else ():
            watch.note(number)
        outer = self._depth[number]
        # A handler that took the place of ours, and whose place ours took later, may call ours:
        # then it is the turn of the one before it. A signal comes from the frame that it stopped.
        depth = 0 if frame is sys._getframe(1) else outer
        replaced = self._replaced[number]
        before = replaced[-1 - depth] if depth < len(replaced) else signal.SIG_DFL
        if callable(before):
            self._depth[number] = depth + 1
            try:
                before(number, frame)
            finally:
                self._depth[number] = outer
            return
        is_noted = is_own and bool(self._watches)
        is_for_parent = not is_own and number != signal.SIGTERM
        if before == signal.SIG_DFL and not (
            is_noted or is_for_parent
        ):  # pragma: no cover - its end
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


_handlers_of: dict[tuple[signal.Signals, ...], _Handlers] = {}
