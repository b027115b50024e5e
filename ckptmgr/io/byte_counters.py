# SPDX-License-Identifier: Apache-2.0
"""How many bytes the files of this process move, for whoever shows progress.

One counter at a time; without one, a file pays for a comparison. Process-wide, because one file is read by several threads.

>>> counted = []
>>> with counting(lambda direction, count: counted.append((direction, count))):
...     count_bytes("read", 5)
>>> count_bytes("read", 7)
>>> counted
[('read', 5)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Direction = Literal["read", "write"]
Counter = Callable[[Direction, int], object]

_counter: Counter | None = None


def count_bytes(direction: Direction, count: int) -> None:
    """Say that so many bytes went from or to a file."""
    counter = _counter
    if counter is not None:
        counter(direction, count)


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Let a function hear of all bytes within a `with` block, from any thread; it must not raise. The innermost hears them."""
    global _counter
    before, _counter = _counter, counter
    try:
        yield
    finally:
        _counter = before
