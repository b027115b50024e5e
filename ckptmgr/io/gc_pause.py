# SPDX-License-Identifier: Apache-2.0
"""Pause the collector of cyclic garbage while very many objects are made, none of which is garbage.

An index of 100,000 tensors is some 400,000 objects. Python's collector looks at the newest of them after every 700, and now
and then at all that there are: 2 us a tensor, for nothing. Pauses are for the making of objects, not for the transfer of
data, so they last a second for 100,000s of tensors. What garbage other threads make meanwhile is found after them.

>>> import gc
>>> with gc_paused():
...     gc.isenabled()
False
>>> gc.isenabled()
True
"""

from __future__ import annotations

import gc
import os
import threading


class Pauses:
    """The pauses of all threads: the collector rests until the last one is over, and stays off if it was off.

    Who turns it on or off meanwhile, in another thread, is not heard.
    """

    def __init__(self) -> None:
        # A handler of a signal may load or save, too, at any line below: in this very thread, and that must come out even.
        self._lock = threading.RLock()
        self._count = 0
        self._was_enabled = False

    def begin(self, pause: Pause) -> None:
        """Pause the collector, if nobody did."""
        with self._lock:
            self._count += 1
            pause.is_begun = True
            if self._count == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def end(self, pause: Pause) -> None:
        """Let it run again, if nobody else wants it to rest, and it ran before; only once for each pause."""
        with self._lock:
            if not pause.is_begun:
                return
            if self._count == 1 and self._was_enabled:
                gc.enable()
            pause.is_begun = False  # no call from here on: that is where Python looks for Ctrl-C
            if self._count:  # a fork ends all pauses in the child
                self._count -= 1

    def forget_parent(self) -> None:
        """End the pauses of the parent's threads, which do not run in a forked child."""
        if self._count and self._was_enabled:
            gc.enable()
        self._lock = threading.RLock()  # whoever held it is not here to release it
        self._count = 0


class Pause:
    """One pause, which ends at the latest when nothing refers to it: Ctrl-C may come in its beginning and in its end.

    Args:
        pauses: What it is one of.

    Attributes:
        is_begun: Whether it is counted.
    """

    is_begun = False

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses

    def __enter__(self) -> None:
        self._pauses.begin(self)

    def __exit__(self, *_: object) -> None:
        self._pauses.end(self)

    def __del__(self) -> None:
        if self.is_begun:
            self._pauses.end(self)


_pauses = Pauses()
os.register_at_fork(after_in_child=_pauses.forget_parent)


def gc_paused() -> Pause:
    """Pause the collector within a `with` block; blocks may be nested, and several threads may be in one."""
    return Pause(_pauses)
