# SPDX-License-Identifier: Apache-2.0
"""`SigtermHold`: holds SIGTERM back until the program has saved, in place of the default action.

A second SIGTERM, or a time without an answer, ends the process by the signal; the thread of
`signal_thread` sees to that, after its earlier listeners, such as one that writes a state.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from types import FrameType

from ckptmgr.core.forks import keep_in_child, reset_in_child
from ckptmgr.io.signal_thread import AGAIN, CHANGED, HANDLED, leave, listen, tell
from ckptmgr.io.signals import handler_behind

_set_handler = ctypes.pythonapi.PyOS_setsig  # signal.signal is for the main thread alone
_set_handler.argtypes, _set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


class SigtermHold:
    """Holds SIGTERM back from now on; make it in the main thread, where the default action is set.

    Args:
        grace_s: Seconds from the signal, or from `resume`, to the end of the process.

    Attributes:
        is_noted: Whether the signal came.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s, self._deadline = grace_s, math.inf
        self.is_noted = self._is_paused = self._is_closed = False
        self._signals = 0
        reset_in_child(self)
        listen(self._woken)
        signal.signal(signal.SIGTERM, self.handle)

    @staticmethod
    def is_possible() -> bool:
        """Return whether this is the main thread, and SIGTERM has its default action."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the second one ends the process."""
        if self._is_closed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if self._is_in_place:  # not called by a handler that took its place
            tell(AGAIN if self.is_noted else HANDLED)
            self.is_noted = True

    @property
    def _is_in_place(self) -> bool:
        return not self._is_closed and handler_behind(signal.SIGTERM) == self.handle

    def pause(self) -> None:
        """Let no time pass: the program answers."""
        self._is_paused, self._deadline = True, math.inf
        tell(CHANGED)

    def resume(self) -> None:
        """Let the time begin again."""
        self._is_paused, self._deadline = False, time.monotonic() + self._grace_s
        tell(CHANGED)

    def _woken(self, told: bytes) -> float | None:
        if self._is_in_place:
            self._signals += told.count(signal.SIGTERM)
            if self._signals > 1 or AGAIN in told or self._deadline <= time.monotonic():
                _end()
            is_there = self.is_noted or self._signals > 0
            if is_there and not self._is_paused and self._deadline == math.inf:
                self._deadline = time.monotonic() + self._grace_s
        return self._deadline - time.monotonic()

    def close(self) -> None:
        """Put the default action back; elsewhere than in the main thread, at the next signal."""
        if self._is_closed:
            return
        is_in_place, self._is_closed = self._is_in_place, True
        leave(self._woken)
        if threading.current_thread() is not threading.main_thread():
            return
        if is_in_place:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        keep_in_child(self)

    def forget_parent(self) -> None:
        """Put the default action back in a forked child, which has no thread for it."""
        if self._is_in_place:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_closed = True


def _end() -> None:
    """End the process by SIGTERM, from any thread."""
    _set_handler(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
