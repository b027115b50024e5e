# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a chosen point: where Python looks for signals, which is on entering a function and after a call into C."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
