# SPDX-License-Identifier: Apache-2.0
"""Hold signals back while something is half done that an exception would leave so: Ctrl-C comes right after it.

A handler that raises, as Python's own of Ctrl-C does, may do so between any two steps of the main thread: after a file was
created and before anybody noted that it must be removed. Within `defer_signals()` handlers wait; within `deliver_signals()`,
inside of that, they run at once, for what takes long and is cleaned up after. What a handler raises there ends the hearing:
who presses Ctrl-C twice does not interrupt the cleaning up. Other threads never run handlers, so for them both do nothing.

>>> with defer_signals():
...     with deliver_signals():
...         pass
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_Handler = Callable[[int, FrameType | None], object]
# Those that programs give handlers to. Ctrl-C comes last: it is given back when all others are back.
_NUMBERS = (
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
)


class _Hold:
    """Stands between the signals of the process and their handlers, while anything is held."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_heard = True
        self._handlers: dict[int, _Handler] = {}
        self._waiting: list[int] = []

    def begin(self) -> None:
        """Take the place of all handlers."""
        self.is_heard = False
        try:
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler) and handler != self.hear:
                    self._handlers[number] = handler
                    signal.signal(number, self.hear)
        except ValueError:
            pass  # only the main interpreter has handlers
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Give their places back, then handle what waits."""
        try:
            for number in _NUMBERS:
                if signal.getsignal(number) == self.hear:
                    signal.signal(number, self._handlers[number])
        finally:  # one that could not be given back is called by `hear`
            self.is_heard = True
            self.deliver()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, now or later."""
        if not self.is_heard:
            self._waiting.append(number)
            return
        self.is_heard = self.depth == 0
        self._handlers[number](number, frame)
        self.is_heard = True
        self.deliver()

    def deliver(self) -> None:
        """Handle what waits, unless a handler raised and that is being cleaned up after."""
        if self._waiting and self.is_heard:
            try:
                signal.raise_signal(self._waiting.pop(0))
            finally:
                self.deliver()


_hold = _Hold()


class _Held:
    _was_heard: bool | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if _hold.depth == 0:
                _hold.begin()
                was_heard = True
            else:
                was_heard = _hold.is_heard
                _hold.is_heard = False
            # No call from here on: that is where Python looks for signals.
            _hold.depth += 1
            self._was_heard = was_heard

    def __exit__(self, *_: object) -> None:
        was_heard, self._was_heard = self._was_heard, None
        if was_heard is None:
            return
        _hold.depth -= 1
        if _hold.depth == 0:
            _hold.end()
        elif was_heard:
            _hold.is_heard = True
            _hold.deliver()


class _Heard:
    _was_heard: bool | None = None

    def __enter__(self) -> None:
        if _hold.depth and threading.current_thread() is threading.main_thread():
            self._was_heard = _hold.is_heard
            _hold.is_heard = True
            _hold.deliver()

    def __exit__(self, *_: object) -> None:
        if self._was_heard is not None:
            _hold.is_heard = self._was_heard


def defer_signals() -> _Held:
    """Let the handlers of signals wait within a `with` block; blocks may be nested."""
    return _Held()


def deliver_signals() -> _Heard:
    """Let them run within a `with` block inside of one of `defer_signals`; elsewhere they do anyway."""
    return _Heard()
