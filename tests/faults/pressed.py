# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, as a real SIGINT, at one of the points of a program where Python looks for signals."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SYSTEM = ("posix", "fcntl")


class Presses:
    """Counts the points of a program, and presses at one of them.

    Attributes:
        points: How many there were so far.
        system: The numbers of those right after a call of the system.
    """

    def __init__(self, at: int | None = None) -> None:
        self.points = 0
        self.system: list[int] = []
        self._at = at

    def hear(self, frame: FrameType, event: str, function: object) -> None:
        """Take an event of the profiler."""
        if event not in ("call", "c_return") or frame.f_code.co_name == "__del__":
            return
        self.points += 1
        if event == "c_return" and getattr(function, "__module__", None) in _SYSTEM:
            self.system.append(self.points)
        if self.points == self._at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def pressed(at: int | None = None) -> Iterator[Presses]:
    """Press Ctrl-C at a point within the block; None only counts."""
    presses = Presses(at)
    before = sys.getprofile()
    sys.setprofile(presses.hear)
    try:
        yield presses
    finally:
        sys.setprofile(before)


def was_interrupted(run: Callable[[], object], *, at: int) -> bool:
    """Run with Ctrl-C at a point; return whether it was raised."""
    try:
        with pressed(at):
            run()
    except KeyboardInterrupt:
        return True
    return False
