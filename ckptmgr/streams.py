# SPDX-License-Identifier: Apache-2.0
"""The bytes of a file to be, made chunk by chunk in any order: an image as it is, or sealed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptmgr.aligned import Buffers, copy_into
from ckptmgr.crypto.mindspore_blocks import BlockSealer
from ckptmgr.formats.file_crc import BodyCrc
from ckptmgr.formats.image import Image
from ckptmgr.processors import MOST_PRODUCERS

CHUNK_BYTES = 4 << 20
# Plain bytes go through half of every buffer: eight of them then stay in a cache of 32 MiB beside the tensors that stream
# past, and the disk (or the host that plays one) reads them from there. Measured: as fast on an idle host, 1.3 times as
# fast on a busy one. Records of 4 MiB are worth more to encryption than that.
PLAIN_CHUNK_BYTES = 2 << 20


class PlainStream:
    """The image as it is."""

    chunks_at_once = 1
    blank_bytes = 0

    def __init__(self, image: Image) -> None:
        self._image = image
        self._crc = BodyCrc(image.body_size if image.has_crc_trailer else 0)
        self.size = image.size
        self.tail_start = image.body_size

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the start of the one buffer with the file's bytes from `offset` on; return how many."""
        (buffer,) = buffers
        count = min(PLAIN_CHUNK_BYTES, self._image.body_size - offset)
        gather(self._image.views(offset, count), buffer)
        self._crc.add(offset, buffer[:count])
        self._image.done_with(offset, count)
        return count

    def tail(self) -> bytes:
        """Return the bytes after the body; everything else must have been produced."""
        return self._image.trailer(self._crc.value())


class SealedStream:
    """The image in encrypted records; the seal record carries the CRC trailer, if any.

    A chunk holds whole records. Where the sealer takes a batch of blocks, as many chunks are produced at once.
    """

    blank_bytes = 0

    def __init__(self, image: Image, sealer: BlockSealer) -> None:
        self._image = image
        self._sealer = sealer
        self._crc = BodyCrc(image.body_size if image.has_crc_trailer else 0)
        self.chunks_at_once = max(1, sealer.batch * sealer.record_bytes // CHUNK_BYTES)
        self.size = sealer.sealed_size
        self.tail_start = 0
        if sealer.block_count:
            self.tail_start = sum(sealer.record_range(sealer.block_count - 1))

    def produce(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Encrypt the records from `offset` on into `buffers`, all full but the last; return how many bytes."""
        records = list(self._records(offset // self._sealer.record_bytes, buffers))
        if self._sealer.batch > 1:
            self._seal_together(records)
        else:
            for block, record in records:
                self._seal(block, record)
        for block, _ in records:
            self._image.done_with(*self._sealer.plaintext_range(block))
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
        if len(views) == 1:  # inside one tensor: encrypted straight from the tensor's memory
            self._crc.add(start, views[0])
            self._sealer.seal_into(block, views[0], record)
            return
        with _scratch.lent() as scratch:
            gather(iter(views), scratch)
            self._crc.add(start, scratch[:length])
            self._sealer.seal_into(block, scratch[:length], record)

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


def gather(views: Iterator[memoryview], buffer: memoryview) -> None:
    """Copy `views` one after the other into `buffer`."""
    position = 0
    for view in views:
        end = position + view.nbytes
        copy_into(buffer[position:end], view)
        position = end


_scratch = Buffers(MOST_PRODUCERS, CHUNK_BYTES)
