# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that this process reads and writes, for a progress display.

There is one counter for the process, because several threads read one file. Without a counter, a
transfer costs one comparison.

>>> counted = []
>>> with counting(lambda direction, count: counted.append((direction, count))):
...     count_bytes("read", 5)
>>> count_bytes("read", 7)
>>> counted
[('read', 5)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ckptmgr.core.contexts import contextmanager

Direction = Literal["read", "write"]
Counter = Callable[[Direction, int], object]

_counter: Counter | None = None


def count_bytes(direction: Direction, count: int) -> None:
    """Report a transfer from or to a file to the counter."""
    counter = _counter
    if counter is not None:
        counter(direction, count)


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Call `counter` for every transfer of any thread within a `with` block; it must not raise.

    Of nested blocks only the innermost counts.
    """
    global _counter
    before, _counter = _counter, counter
    try:
        yield
    finally:
        _counter = before
