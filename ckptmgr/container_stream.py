# SPDX-License-Identifier: Apache-2.0
"""The bytes of an encrypted container to be, made chunk by chunk in any order.

The head shifts every segment by a few KiB against the chunks that are written, so nearly every segment lies in two chunks,
and these may be made by different threads. Whoever comes first encrypts the segment; whoever comes last gives its memory
back. Nothing is encrypted twice, and a thread never waits but for the one that is encrypting what it needs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckptmgr.aligned import copy_into
from ckptmgr.crypto.block_reader import Buffers
from ckptmgr.crypto.container import SEGMENT_BYTES, ContainerSealer
from ckptmgr.formats.image import Image
from ckptmgr.streams import CHUNK_BYTES, gather


@dataclass(slots=True)
class _Shared:
    """A segment on its way: how many chunks still need it, and its bytes once they are there."""

    uses_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    segment: memoryview | None = None


class ContainerStream:
    """The image in encrypted segments behind the head of the container; there is no tail."""

    chunks_at_once = 1

    def __init__(self, image: Image, sealer: ContainerSealer) -> None:
        self._image = image
        self._sealer = sealer
        self._shared: dict[int, _Shared] = {}
        self._lock = threading.Lock()
        self.size = self.tail_start = sealer.sealed_size

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the one buffer with the file's bytes from `offset`, a multiple of its size, on; return how many."""
        room = buffers[0][: self.size - offset]
        count = room.nbytes
        while room.nbytes:
            copied = self._copy(offset, room)
            offset += copied
            room = room[copied:]
        return count

    def tail(self) -> bytes:
        """Return nothing; everything must have been produced."""
        self._sealer.finish()
        return b""

    def _copy(self, offset: int, room: memoryview) -> int:
        """Fill the start of `room` from the head or from one segment; return how many bytes."""
        head = self._sealer.head
        if offset < len(head):
            part = memoryview(head)[offset : offset + room.nbytes]
            room[: part.nbytes] = part
            return part.nbytes
        index, at = divmod(offset - len(head), self._sealer.record_bytes)
        with self._segment(index) as segment:
            part = segment[at : at + room.nbytes]
            copy_into(room[: part.nbytes], part)
            return part.nbytes

    @contextlib.contextmanager
    def _segment(self, index: int) -> Iterator[memoryview]:
        start, length = self._sealer.record_range(index)
        with self._lock:
            chunks = (start + length - 1) // CHUNK_BYTES - start // CHUNK_BYTES + 1
            shared = self._shared.setdefault(index, _Shared(uses_left=chunks))
        with shared.lock:
            if shared.segment is None:
                shared.segment = self._sealed(index, length)
        yield shared.segment[:length]
        with self._lock:
            shared.uses_left -= 1
            if shared.uses_left == 0:
                del self._shared[index]
                _segments.give(shared.segment)

    def _sealed(self, index: int, length: int) -> memoryview:
        start, size = self._sealer.plaintext_range(index)
        views = list(self._image.views(start, size))
        segment = _segments.take()
        if len(views) == 1:  # inside one tensor: encrypted straight from the tensor's memory
            self._sealer.seal_into(index, views[0], segment[:length])
            return segment
        scratch = _segments.take()
        gather(iter(views), scratch)
        self._sealer.seal_into(index, scratch[:size], segment[:length])
        _segments.give(scratch)
        return segment


_segments = Buffers(SEGMENT_BYTES)
