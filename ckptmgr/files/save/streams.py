# SPDX-License-Identifier: Apache-2.0
"""The bytes of a new file, produced chunk by chunk in any order: an image as it is, or sealed.

Where the image has a late head, the chunks of the first digest range are produced together, after
all others: the digest needs them in order, and the head needs the CRC of them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.formats.file_crc import FileCrc
from ckptmgr.formats.image import Image
from ckptmgr.io.buffers import BufferPool, copy_into
from ckptmgr.io.digest import RANGE_BYTES
from ckptmgr.io.threads import MOST_PRODUCERS

CHUNK_BYTES = 4 << 20
# Plain bytes use half of every buffer: eight of them then stay in a cache of 32 MiB beside the
# tensors that stream past, and the disk (or the host of a virtual one) reads them from there.
# Measured: as fast on an idle host, 1.3 times as fast on a busy one. For encryption, records of 4
# MiB gain more than that.
PLAIN_CHUNK_BYTES = 2 << 20
CHUNKS_OF_A_RANGE = RANGE_BYTES // CHUNK_BYTES


class PlainStream:
    """The image as it is."""

    blank_bytes = 0

    def __init__(self, image: Image) -> None:
        self._image = image
        self._crc = image.start_crc()
        self.size = image.size
        self.tail_start = image.body_size
        self.is_head_late = image.head_bytes > 0

    def chunks_from(self, offset: int) -> int:
        """Return how many buffers one call fills from `offset` on, at most."""
        return CHUNKS_OF_A_RANGE if offset < self._image.head_bytes else 1

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` from `offset` on, the last one perhaps partly; return the byte count."""
        most = CHUNK_BYTES * len(buffers) if offset < self._image.head_bytes else PLAIN_CHUNK_BYTES
        stop = min(offset + most, self._image.body_size)
        for start in reversed(range(offset, stop, CHUNK_BYTES)):
            buffer = buffers[(start - offset) // CHUNK_BYTES]
            self._fill(start, buffer[: stop - start])
        return stop - offset

    def _fill(self, offset: int, buffer: memoryview) -> None:
        late_bytes = max(0, self._image.head_bytes - offset)
        start, contents = offset + late_bytes, buffer[late_bytes:]
        gather(self._image.views(start, contents.nbytes), contents)
        self._crc.add(start, contents)
        self._image.release(start, contents.nbytes)
        if late_bytes:
            buffer[:late_bytes] = self._image.head(self._crc.value())

    def tail(self) -> bytes:
        """Return the bytes after the body; everything else must have been produced."""
        return self._image.trailer(self._crc.value()) if self._image.has_crc_trailer else b""


class SealedStream:
    """The image in encrypted records; the seal record carries the CRC trailer, if any.

    A chunk holds whole records. Where the sealer encrypts a batch of blocks at once, a call
    produces as many chunks.
    """

    blank_bytes = 0
    is_head_late = False  # only a `.ckpt` image is sealed in records, and its head is not late

    def __init__(self, image: Image, sealer: BlockSealer) -> None:
        self._image = image
        self._sealer = sealer
        self._crc = image.start_crc()
        self._chunks_at_once = max(1, sealer.batch * sealer.record_bytes // CHUNK_BYTES)
        self.size = sealer.sealed_size
        self.tail_start = 0
        if sealer.block_count:
            self.tail_start = sum(sealer.record_range(sealer.block_count - 1))

    def chunks_from(self, offset: int) -> int:
        """Return how many buffers one call fills from `offset` on, at most."""
        return self._chunks_at_once

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Encrypt the records from `offset` on into `buffers`; return the number of bytes.

        All buffers but the last are full.
        """
        records = list(self._records(offset // self._sealer.record_bytes, buffers))
        if self._sealer.batch > 1:
            self._seal_together(records)
        else:
            for block, record in records:
                self._seal(block, record)
        for block, _ in records:
            self._image.release(*self._sealer.plaintext_range(block))
        return sum(record.nbytes for _, record in records)

    def _records(
        self, block: int, buffers: Sequence[memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        for buffer in buffers:
            room = buffer
            while room.nbytes and block < self._sealer.block_count:
                length = self._sealer.record_range(block)[1]
                yield block, room[:length]
                room = room[length:]
                block += 1

    def _seal(self, block: int, record: memoryview) -> None:
        start, length = self._sealer.plaintext_range(block)
        views = list(self._image.views(start, length))
        if len(views) == 1:  # inside one tensor: encrypted straight from its memory
            self._crc.add(start, views[0])
            self._sealer.seal_into(block, views[0], record)
            return
        with _scratch.lent() as scratch:
            gather(iter(views), scratch)
            self._crc.add(start, scratch[:length])
            self._sealer.seal_into(block, scratch[:length], record)
            self._image.wipe_copy(scratch[:length])

    def _seal_together(self, records: Sequence[tuple[int, memoryview]]) -> None:
        plaintexts = []
        for block, record in records:
            start, length = self._sealer.plaintext_range(block)
            views = list(self._image.views(start, length))
            plaintext = views[0]
            if len(views) > 1:
                plaintext = self._sealer.plaintext_room(record, length)
                gather(iter(views), plaintext)
            self._crc.add(start, plaintext)
            plaintexts.append(plaintext)
        self._sealer.seal_many(records[0][0], plaintexts, [record for _, record in records])

    def tail(self) -> bytes:
        """Return the seal; everything else must have been produced."""
        return self._sealer.finish(crc=self._crc.value() if self._image.has_crc_trailer else None)


def counted_views(image: Image, crc: FileCrc, offset: int, length: int) -> list[memoryview]:
    """Return views of bytes of an image, and add them to its CRC; a late head is made last."""
    late_bytes = max(0, image.head_bytes - offset)
    start = offset + late_bytes
    views = list(image.views(start, length - late_bytes))
    for view in views:
        crc.add(start, view)
        start += view.nbytes
    return [memoryview(image.head(crc.value())), *views] if late_bytes else views


def gather(views: Iterator[memoryview], buffer: memoryview) -> None:
    """Copy `views` one after the other into `buffer`."""
    position = 0
    for view in views:
        end = position + view.nbytes
        copy_into(buffer[position:end], view)
        position = end


_scratch = BufferPool(MOST_PRODUCERS, CHUNK_BYTES)
