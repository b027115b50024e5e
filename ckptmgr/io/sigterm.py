# SPDX-License-Identifier: Apache-2.0
"""`SigtermHold`: holds SIGTERM back until the program has saved, in place of the default action.

A second SIGTERM, or a time without an answer, ends the process by the signal. A thread sees to
that: while the main thread is in compiled code, such as a collective that waits for a dead rank, no
handler of Python runs. The thread learns of the signal from the descriptor of
`signal.set_wakeup_fd`, where no other part of the program has set one.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import threading
import time
from types import FrameType

from ckptmgr.core.forks import keep_in_child, reset_in_child
from ckptmgr.io.signals import handler_behind

_NOTED, _CHANGED = b"\xff", b"\x00"  # beside the numbers of signals
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
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        reset_in_child(self)
        self._thread = threading.Thread(target=self._run, name="ckptmgr-sigterm", daemon=True)
        self._thread.start()
        earlier = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if earlier != -1:
            signal.set_wakeup_fd(earlier)
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
            if self.is_noted:
                _end()
            self.is_noted = True
            self._tell(_NOTED)

    @property
    def _is_in_place(self) -> bool:
        return not self._is_closed and handler_behind(signal.SIGTERM) == self.handle

    def pause(self) -> None:
        """Let no time pass: the program answers."""
        self._is_paused, self._deadline = True, math.inf
        self._tell(_CHANGED)

    def resume(self) -> None:
        """Let the time begin again."""
        self._is_paused, self._deadline = False, time.monotonic() + self._grace_s
        self._tell(_CHANGED)

    def _tell(self, what: bytes) -> None:
        try:
            os.write(self._writing, what)
        except BlockingIOError:  # the thread has enough to read
            return

    def _run(self) -> None:
        signals = 0
        while True:
            left_s = self._deadline - time.monotonic()
            timeout = None if left_s == math.inf else max(0.0, left_s)
            if not select.select([self._reading], [], [], timeout)[0]:
                if self._deadline <= time.monotonic() and self._is_in_place:
                    _end()
                self._deadline = math.inf
                continue
            told = os.read(self._reading, 4096)
            if not told:
                os.close(self._reading)
                return
            if not self._is_in_place:
                continue
            signals += told.count(signal.SIGTERM)
            if signals > 1:
                _end()
            is_new = signal.SIGTERM in told or _NOTED in told
            if is_new and not self._is_paused and self._deadline == math.inf:
                self._deadline = time.monotonic() + self._grace_s

    def close(self) -> None:
        """Put the default action back; elsewhere than in the main thread, at the next signal."""
        if self._is_closed:
            return
        is_in_place, self._is_closed = self._is_in_place, True
        if threading.current_thread() is not threading.main_thread():
            return
        if is_in_place:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._leave_descriptor()
        keep_in_child(self)
        os.close(self._writing)
        self._thread.join()

    def _leave_descriptor(self) -> None:
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, self._writing):
            signal.set_wakeup_fd(present)

    def forget_parent(self) -> None:
        """Put the default action back in a forked child, which has no thread for it."""
        if self._is_in_place:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_closed = True
        self._leave_descriptor()
        os.close(self._writing)
        os.close(self._reading)


def _end() -> None:
    """End the process by SIGTERM, from any thread."""
    _set_handler(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
