# SPDX-License-Identifier: Apache-2.0
"""The bytes of a new encrypted container, produced piece by piece in any order of digest ranges.

A piece is the head, or a segment, encrypted straight into the buffer that is written. The head
shifts the segments against the digest ranges, so one segment in four is in two ranges, which
different threads produce. The first thread encrypts it; the last one gives its memory back. No
segment is encrypted twice, and a thread waits only for the one that encrypts a segment it needs.
Segment 0, which holds a late head, is encrypted last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.crypto.container.writer import SEGMENT_BYTES, ContainerSealer
from ckptmgr.files.save.streams import CHUNKS_OF_A_RANGE, counted_views, gather
from ckptmgr.formats.image import Image
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.digest import RANGE_BYTES


@dataclass(slots=True)
class _Shared:
    """A segment that two ranges need."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    segment: memoryview | None = None
    is_used: bool = False


class ContainerStream:
    """The image in encrypted segments behind the head of the container; there is no tail."""

    def __init__(self, image: Image, sealer: ContainerSealer) -> None:
        self._image = image
        self._crc = image.start_crc()
        self._sealer = sealer
        self._shared: dict[int, _Shared] = {}
        self._lock = threading.Lock()
        self.size = self.tail_start = sealer.sealed_size
        self.blank_bytes = sealer.copies_bytes
        self.is_head_late = image.head_bytes > 0

    def chunks_from(self, offset: int) -> int:
        """Return how many buffers one call fills from `offset` on, at most."""
        is_late = self.is_head_late and offset == len(self._sealer.head)
        return CHUNKS_OF_A_RANGE if is_late else 1

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill each buffer, from its start, with the next piece; return the number of bytes.

        A piece never crosses the end of a digest range; `offset` is the start of one, or the end of
        the previous piece. Each buffer has the length of a segment.
        """
        head = self._sealer.head
        if offset < len(head):
            buffers[0][: len(head)] = head
            return len(head)
        starts = range(offset, self.size, self._sealer.record_bytes)
        return sum(map(self._produce, reversed(starts[: len(buffers)]), reversed(buffers)))

    def _produce(self, offset: int, buffer: memoryview) -> int:
        head = self._sealer.head
        index, at = divmod(offset - len(head), self._sealer.record_bytes)
        length = self._sealer.record_range(index)[1]
        room = RANGE_BYTES - offset % RANGE_BYTES
        if at == 0 and length <= room:
            self._seal(index, buffer[:length])
            return length
        count = min(length - at, room)
        self._copy(index, at, buffer[:count])
        return count

    def tail(self) -> bytes:
        """Return nothing; everything must have been produced."""
        self._sealer.finish()
        return b""

    def _copy(self, index: int, at: int, part: memoryview) -> None:
        """Fill `part` with bytes of a segment that is in two ranges."""
        with self._lock:
            shared = self._shared.setdefault(index, _Shared())
        with shared.lock:
            if shared.segment is None:
                segment = _segments.take()
                self._seal(index, segment[: self._sealer.record_range(index)[1]])
                shared.segment = segment
            copy_into(part, shared.segment[at : at + part.nbytes])
            is_last, shared.is_used = shared.is_used, True
        if is_last:
            with self._lock:
                del self._shared[index]
            _segments.give_back(shared.segment)

    def _seal(self, index: int, segment: memoryview) -> None:
        self._encrypt(index, segment)
        self._image.release(*self._sealer.plaintext_range(index))

    def _encrypt(self, index: int, segment: memoryview) -> None:
        start, size = self._sealer.plaintext_range(index)
        views = counted_views(self._image, self._crc, start, size)
        if len(views) == 1:  # inside one tensor: encrypted straight from its memory
            self._sealer.seal_into(index, views[0], segment)
            return
        scratch = _segments.take()
        try:
            gather(iter(views), scratch)
            self._sealer.seal_into(index, scratch[:size], segment)
        finally:
            self._image.wipe_copy(scratch[:size])
            _segments.give_back(scratch)


_segments = SpareBuffers(SEGMENT_BYTES)
