# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a chosen point: where Python looks for signals, which is on entering a function and after a call into C.

Or from another thread, at a moment when the main thread waits.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_OURS = ("/ckptmgr/", "/formats/", "/crypto/")


def is_interrupted(work: Callable[[], object], *, at: int) -> bool:
    """Call a function and press Ctrl-C at the n-th such point in our code, from 1; return whether there was one.

    Raises:
        KeyboardInterrupt: Never.
    """
    left = at

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and any(o in frame.f_code.co_filename for o in _OURS):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt  # which also ends the profiling

    try:
        sys.setprofile(look)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return left <= 0


@contextlib.contextmanager
def pressing_ctrl_c() -> Iterator[Callable[[], None]]:
    """Yield a function that presses Ctrl-C, for another thread; it returns when the main thread has heard it.

    A signal that comes just before a call into C blocks is not heard until that call returns: so it presses again.
    """
    is_heard = threading.Event()
    main = threading.main_thread().ident or 0

    def hear(*_: object) -> None:
        is_heard.set()
        raise KeyboardInterrupt

    def press() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        while not is_heard.wait(1.0):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield press
    finally:
        signal.signal(signal.SIGINT, before)
