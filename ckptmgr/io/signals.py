# SPDX-License-Identifier: Apache-2.0
"""Defer signals during steps that an exception must not interrupt.

A handler that raises, such as Python's own for Ctrl-C, may do so between any two steps of the main
thread: after a file was created and before its removal was registered. Within `defer_signals()`
handlers wait. Within `deliver_signals()`, inside of that, they run at once, for long steps that are
cleaned up after. When a handler raises there, delivery ends: a second Ctrl-C does not interrupt the
cleanup. Other threads never run handlers, so for them both do nothing.

>>> with defer_signals():
...     with deliver_signals():
...         pass
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

SLICE_S = 1.0
"""The longest single wait of a loop that Ctrl-C is to end: a signal that comes just before Python blocks, or that another
thread receives, is handled when the main thread wakes."""

_Handler = Callable[[int, FrameType | None], object]
# Signals that programs set handlers for. SIGINT is last: its handler is restored after all others.
_NUMBERS = (
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
)


class _Deferral:
    """The handler of all signals while any block defers them; calls the real handlers."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_delivering = True
        self.handlers: dict[int, _Handler] = {}
        self._replaced: list[signal.Signals] = []
        self._waiting: list[int] = []

    def begin(self) -> None:
        """Replace all handlers."""
        self.is_delivering = False
        try:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self.handle:
                    self.handlers[number] = handler
                    self._replaced.append(number)  # first: a signal may interrupt the next call
                    signal.signal(number, self.handle)
        except ValueError:
            pass  # only the main interpreter has handlers
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Restore the handlers, then deliver the signals that wait."""
        try:
            while self._replaced:  # a handler that raises leaves the rest to the next block
                number = self._replaced[0]
                if signal.getsignal(number) == self.handle:
                    signal.signal(number, self.handlers[number])
                self._replaced.pop(0)
        finally:  # `handle` calls a handler that could not be restored
            self.is_delivering = True
            self.deliver()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, now or later."""
        if not self.is_delivering:
            self._waiting.append(number)
            return
        self.is_delivering = self.depth == 0
        self.handlers[number](number, frame)
        self.is_delivering = True
        self.deliver()

    def deliver(self) -> None:
        """Deliver the signals that wait, unless a handler raised and the cleanup is running."""
        if self._waiting and self.is_delivering:
            try:
                signal.raise_signal(self._waiting.pop(0))
            finally:
                self.deliver()


_deferral = _Deferral()


def handler_behind(number: int) -> object:
    """Return the handler of a signal, also while it is deferred; from any thread."""
    present = signal.getsignal(number)
    return _deferral.handlers.get(number) if present == _deferral.handle else present


class defer_signals:
    """Let the handlers of signals wait within a `with` block; blocks may be nested."""

    _was_delivering: bool | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if _deferral.depth == 0:
                _deferral.begin()
                was_delivering = True
            else:
                was_delivering = _deferral.is_delivering
                _deferral.is_delivering = False
            # No call from here on: Python checks for signals at calls.
            _deferral.depth += 1
            self._was_delivering = was_delivering

    def __exit__(self, *_: object) -> None:
        was_delivering, self._was_delivering = self._was_delivering, None
        if was_delivering is None:
            return
        _deferral.depth -= 1
        if _deferral.depth == 0:
            _deferral.end()
        elif was_delivering:
            _deferral.is_delivering = True
            _deferral.deliver()


class deliver_signals:
    """Let handlers run within a `with` block inside `defer_signals`."""

    _was_delivering: bool | None = None

    def __enter__(self) -> None:
        if _deferral.depth and threading.current_thread() is threading.main_thread():
            self._was_delivering = _deferral.is_delivering
            _deferral.is_delivering = True
            _deferral.deliver()

    def __exit__(self, *_: object) -> None:
        if self._was_delivering is not None:
            _deferral.is_delivering = self._was_delivering
