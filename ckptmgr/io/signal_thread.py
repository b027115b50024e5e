# SPDX-License-Identifier: Apache-2.0
"""A thread that learns of signals, also while the main thread runs compiled code.

No handler of Python runs while the main thread waits in a collective or compiles. The thread learns of
a signal from the descriptor of `signal.set_wakeup_fd`, where no other part of the program has set
one, or else from the handlers, which call `tell`. It exists while there are listeners.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from weakref import WeakMethod

from ckptmgr.core.forks import keep_in_child, reset_in_child

HANDLED, AGAIN, CHANGED = b"\xff", b"\xfe", b"\x00"
"""What `tell` is given beside the numbers of signals: a handler has noted one; noted another one; look again."""

Listener = Callable[[bytes], float | None]
"""A method, held weakly. It is called with the numbers of the signals that came; with none after the
seconds that it returned."""


class _SignalThread:
    def __init__(self) -> None:
        self._listeners: list[WeakMethod[Listener]] = []
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        reset_in_child(self)
        self._thread = threading.Thread(target=self._run, name="ckptmgr-signals", daemon=True)
        self._thread.start()

    def add(self, listener: Listener) -> None:
        self._listeners = [*self._listeners, WeakMethod(listener)]
        earlier = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if earlier not in (-1, self._writing):
            signal.set_wakeup_fd(earlier)

    def remove(self, listener: Listener) -> bool:
        """Return whether there are others."""
        self._listeners = [one for one in self._listeners if one() not in (None, listener)]
        return bool(self._listeners)

    def tell(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # it has enough to read, or has ended
            os.write(self._writing, what)

    def _run(self) -> None:
        wait_s: float | None = None
        while True:
            told = b""
            if select.select([self._reading], [], [], wait_s)[0]:
                told = os.read(self._reading, 4096)
                if not told:
                    os.close(self._reading)
                    return
            waits = [self._call(one, told) for one in self._listeners]
            wait_s = max(0.0, min(waits, default=math.inf))
            wait_s = None if wait_s == math.inf else wait_s

    @staticmethod
    def _call(reference: WeakMethod[Listener], told: bytes) -> float:
        listener = reference()
        wait_s = None if listener is None else listener(told)
        return math.inf if wait_s is None else wait_s

    def close(self) -> None:
        """End the thread; call it in the main thread."""
        self._leave_descriptor()
        keep_in_child(self)
        os.close(self._writing)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _leave_descriptor(self) -> None:
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, self._writing):
            signal.set_wakeup_fd(present)

    def forget_parent(self) -> None:
        """Leave the pipe to the parent; a forked child has no thread for it."""
        global _present
        _present = None
        self._leave_descriptor()
        os.close(self._writing)
        os.close(self._reading)


_present: _SignalThread | None = None
_CAUGHT = (signal.SIGTERM, signal.SIGUSR1)
_masks: dict[int, Collection[int]] = {}  # of threads that fork


def _hold_back() -> None:
    """Hold signals back while a process is forked: a child has the pipe of its parent at first."""
    if _present is not None:
        earlier = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
        _masks[threading.get_ident()] = earlier


def _let_through() -> None:
    earlier = _masks.pop(threading.get_ident(), None)
    if earlier is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


os.register_at_fork(
    before=_hold_back, after_in_parent=_let_through, after_in_child=_let_through
)  # after those of `forks`


def listen(listener: Listener) -> None:
    """Have the thread call a listener, after those that were there before; call it in the main thread."""
    global _present
    if _present is None:
        _present = _SignalThread()
    _present.add(listener)


def tell(what: bytes) -> None:
    """Have the thread call its listeners, if there are any; from any thread."""
    if _present is not None:
        _present.tell(what)


def leave(listener: Listener) -> None:
    """End the calls of a listener; the last one ends the thread, if this is the main thread."""
    global _present
    if _present is None or _present.remove(listener):
        return
    if threading.current_thread() is threading.main_thread():
        ended, _present = _present, None
        ended.close()
