# SPDX-License-Identifier: Apache-2.0
"""Pause the cyclic garbage collector while an index of very many objects is made.

An index of 100,000 tensors has some 400,000 objects. The collector scans the newest of them after
every 700, and sometimes all: 2 us a tensor for nothing.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ckptmgr.core.contexts import contextmanager

_is_paused = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector within a `with` block; the first thread to pause it enables it again."""
    global _is_paused
    if not gc.isenabled():
        yield
        return
    try:  # entered before the pause begins: Ctrl-C may come between any two calls
        _is_paused = True
        gc.disable()
        yield
    finally:
        _is_paused = False
        gc.enable()


_SHORT_BYTES = 256 << 20
"""What is read or written in about a second."""


@contextmanager
def gc_paused_if_short() -> Iterator[Callable[[int], None]]:
    """Pause the collector within a `with` block, or until the block turns out to take long.

    The function that is yielded takes the number of bytes that are about to be read or written. The
    collector scans all live objects at the end of a pause: one pause for all steps has one such scan.
    """
    with ExitStack() as pause:
        pause.enter_context(gc_paused())

        def end_if_long(size_bytes: int) -> None:
            if size_bytes > _SHORT_BYTES:
                pause.close()

        yield end_if_long


def _end_in_child() -> None:
    if _is_paused:  # the thread that would enable the collector may not run in a forked child
        gc.enable()


os.register_at_fork(after_in_child=_end_in_child)
