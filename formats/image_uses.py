# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of an image that are used up: all their bytes were copied or encrypted."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .tensor import Tensor

if TYPE_CHECKING:
    from .image import Extent


class TensorUses:
    """Counts the used bytes of extents that begin at `starts`; each byte is used once.

    `on_ended` is called once with the index of each extent, and `on_used` then once for each tensor,
    in the thread that has used its last bytes. Small tensors that are joined in one extent end
    together.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        starts: Sequence[int],
        on_ended: Callable[[int], object],
        on_used: Callable[[Tensor], object],
    ) -> None:
        self._extents, self._starts = extents, starts
        self._on_ended, self._on_used = on_ended, on_used
        self._unused = [extent.stop - extent.start for extent in extents]
        self._open = Counter(id(tensor) for extent in extents for tensor in extent.tensors)
        self._lock = threading.Lock()

    def add(self, offset: int, length: int) -> None:
        """Count `length` bytes from `offset` on; a late head before the extents is left out."""
        start, end = max(offset, self._starts[0] if self._starts else 0), offset + length
        with self._lock:
            ended = list(self._ended(start, end))
            used = [tensor for index in ended for tensor in self._last_uses(index)]
        for index in ended:
            self._on_ended(index)
        for tensor in used:
            self._on_used(tensor)

    def _ended(self, start: int, end: int) -> Iterator[int]:
        index = bisect_right(self._starts, start) - 1
        while start < end:
            extent = self._extents[index]
            stop = min(end, self._starts[index] + extent.stop - extent.start)
            self._unused[index] -= stop - start
            if not self._unused[index]:
                yield index
            start, index = stop, index + 1

    def _last_uses(self, index: int) -> Iterator[Tensor]:
        for tensor in self._extents[index].tensors:
            self._open[id(tensor)] -= 1
            if not self._open[id(tensor)]:
                yield tensor
