# SPDX-License-Identifier: Apache-2.0
"""Stream an image into a file: gather, CRC, seal, digest and write in one pass, in parallel.

The file is cut into digest ranges of 16 MiB. A few producers take ranges in turn; each moves a range through 4 MiB buffers
(copy or encrypt, then digest while the bytes are in cache) and hands the buffers to a few writers. What depends on
everything before it (the CRC trailer, the seal record) is the tail and is produced last.

Why it looks like this (each measured):
* The buffers are page aligned and kept between saves: touching fresh pages costs more than AES, and direct I/O needs them.
* 4 MiB per call: each return from a GIL-free call may wait a whole switch interval when the training thread is busy.
* Records are exactly 4 MiB long, so that encrypted files are written aligned, too.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from ckptmgr.crypto.key import Key
from ckptmgr.crypto.mindspore_blocks import BlockSealer
from ckptmgr.digest import RANGE_BYTES, FileDigest
from ckptmgr.formats.image import Image
from ckptmgr.formats.trailer import crc32, crc32_combine
from ckptmgr.fsio import OutputFile

CHUNK_BYTES = 4 << 20
_BUFFERS = 8
_PRODUCERS = max(1, min(2, os.cpu_count() or 1))
_WRITERS = 4
_GIL_FREE_COPY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a finished stream reports.

    Attributes:
        digest: Size and digests of the bytes in the file.
        write_s: Seconds from the first byte to the last, without the sync.
    """

    digest: FileDigest
    write_s: float


def sealer_for(image: Image, key: Key, mode: str) -> BlockSealer:
    """Return the sealer of an image; its records are as long as the chunks that are written."""
    return BlockSealer(
        key, mode, plaintext_size=image.body_size, has_crc_trailer=image.has_crc_trailer
    )


def write_image(image: Image, file: OutputFile, *, sealer: BlockSealer | None = None) -> Written:
    """Write every byte of `image`, sealed if there is a sealer, and return the digests of what was written.

    The file is not synced. After an error its content is undefined and no thread is left running.

    Args:
        image: The plaintext.
        file: A new, empty file.
        sealer: Made for this image by `sealer_for`.

    Raises:
        OSError: From the file.
        FormatError: A tensor gave other bytes than it promised.
    """
    started = time.perf_counter()
    stream = _SealedStream(image, sealer) if sealer is not None else _PlainStream(image)
    digests = _Writer(stream, file).run()
    digest = FileDigest(size_bytes=stream.size, ranges=tuple(digests))
    return Written(digest=digest, write_s=time.perf_counter() - started)


class _CrcOfRanges:
    """CRC-32 of the body, put together from pieces that are computed in any order."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, view: memoryview) -> None:
        if self._is_wanted:
            self._pieces[offset] = (crc32(view), view.nbytes)

    def value(self) -> int:
        total = 0
        for offset in sorted(self._pieces):
            piece, length = self._pieces[offset]
            total = crc32_combine(total, piece, length)
        return total


class _PlainStream:
    """The image as it is. Chunk k is the bytes `[k * 4 MiB, ...)`."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._crc = _CrcOfRanges(is_wanted=image.has_crc_trailer)
        self.size = image.size
        self.tail_start = image.body_size

    def produce(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` with the file's bytes from `offset` on; return how many."""
        count = min(buffer.nbytes, self._image.body_size - offset)
        gather(self._image.views(offset, count), buffer)
        self._crc.add(offset, buffer[:count])
        return count

    def tail(self) -> bytes:
        """Return the bytes after the body; everything else must have been produced."""
        return self._image.trailer(self._crc.value())


class _SealedStream:
    """The image in encrypted records; the seal record carries the CRC trailer, if any."""

    def __init__(self, image: Image, sealer: BlockSealer) -> None:
        self._image = image
        self._sealer = sealer
        self._crc = _CrcOfRanges(is_wanted=image.has_crc_trailer)
        self.size = sealer.sealed_size
        self.tail_start = 0
        if sealer.block_count:
            self.tail_start = sum(sealer.record_range(sealer.block_count - 1))

    def produce(self, offset: int, buffer: memoryview) -> int:
        """Encrypt the record at `offset` into `buffer`; return its length."""
        block = offset // CHUNK_BYTES
        start, length = self._sealer.plaintext_range(block)
        count = self._sealer.record_range(block)[1]
        with self._plaintext(start, length) as plaintext:
            self._crc.add(start, plaintext)
            self._sealer.seal_into(block, plaintext, buffer[:count])
        return count

    @contextmanager
    def _plaintext(self, start: int, length: int) -> Iterator[memoryview]:
        views = list(self._image.views(start, length))
        if len(views) == 1:  # inside one tensor: encrypted straight from the tensor's memory
            yield views[0]
            return
        scratch = _scratch.take()
        try:
            gather(iter(views), scratch)
            yield scratch[:length]
        finally:
            _scratch.give_back(scratch)

    def tail(self) -> bytes:
        """Return the seal; everything else must have been produced."""
        return self._sealer.finish(crc=self._crc.value() if self._image.has_crc_trailer else None)


def gather(views: Iterator[memoryview], buffer: memoryview) -> None:
    """Copy `views` one after the other into `buffer`."""
    position = 0
    for view in views:
        end = position + view.nbytes
        if view.nbytes >= _GIL_FREE_COPY_BYTES:
            # NumPy releases the GIL while it copies; slice assignment does not.
            np.copyto(np.frombuffer(buffer[position:end], np.uint8), np.frombuffer(view, np.uint8))
        else:
            buffer[position:end] = view
        position = end


class _Buffers:
    """Page-aligned buffers, kept between saves and shared by all of them."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._unmade = count
        self._size_bytes = size_bytes
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            make, self._unmade = self._unmade > 0, max(0, self._unmade - 1)
        if make:
            return memoryview(
                mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            )
        return self._free.get()

    def give_back(self, buffer: memoryview) -> None:
        self._free.put(buffer)


_buffers = _Buffers(_BUFFERS, CHUNK_BYTES)
_scratch = _Buffers(_PRODUCERS, CHUNK_BYTES)


class _Writer:
    """Drive one stream into one file."""

    def __init__(self, stream: _PlainStream | _SealedStream, file: OutputFile) -> None:
        self._stream = stream
        self._file = file
        self._digests = [b""] * -(-stream.size // RANGE_BYTES)
        # Ranges before the tail are independent of each other.
        self._free_ranges = iter(range(stream.tail_start // RANGE_BYTES))
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._writes: queue.SimpleQueue[tuple[int, memoryview, int] | None] = queue.SimpleQueue()

    def run(self) -> list[bytes]:
        tail_range = self._stream.tail_start // RANGE_BYTES
        if tail_range:
            self._run_parallel()
        self._run_tail(tail_range * RANGE_BYTES)
        return self._digests

    def _run_parallel(self) -> None:
        producers = [
            threading.Thread(target=self._guard, args=(self._produce_all,))
            for _ in range(_PRODUCERS)
        ]
        writers = [
            threading.Thread(target=self._guard, args=(self._write_all,)) for _ in range(_WRITERS)
        ]
        try:
            for thread in (*writers, *producers):
                thread.daemon = True
                thread.start()
            _join(producers)
        except (
            BaseException
        ) as error:  # Ctrl-C while waiting: stop the threads before passing it on
            self._failure = self._failure or error
            _join(producers)
        finally:
            for _ in writers:
                self._writes.put(None)
            _join(writers)
        if self._failure is not None:
            raise self._failure

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller of run()
            with self._lock:
                self._failure = self._failure or error

    def _next_range(self) -> int | None:
        with self._lock:
            return None if self._failure is not None else next(self._free_ranges, None)

    def _produce_all(self) -> None:
        while (index := self._next_range()) is not None:
            hasher = blake3()
            offset = index * RANGE_BYTES
            while offset < (index + 1) * RANGE_BYTES and self._failure is None:
                buffer = _buffers.take()
                try:
                    count = self._stream.produce(offset, buffer)
                    hasher.update(buffer[:count])
                except BaseException:
                    _buffers.give_back(buffer)
                    raise
                self._writes.put((offset, buffer, count))
                offset += count
            self._digests[index] = hasher.digest()

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            offset, buffer, count = job
            try:
                if self._failure is None:
                    self._file.write_at(offset, buffer[:count])
            except BaseException as error:  # the queue must still be drained, or producers starve
                with self._lock:
                    self._failure = self._failure or error
            finally:
                _buffers.give_back(buffer)

    def _run_tail(self, offset: int) -> None:
        with _digesting(self._digests, offset) as update:
            while offset < self._stream.tail_start:
                buffer = _buffers.take()
                try:
                    count = self._stream.produce(offset, buffer)
                    update(buffer[:count])
                    self._file.write_at(offset, buffer[:count])
                finally:
                    _buffers.give_back(buffer)
                offset += count
            tail = self._stream.tail()
            update(memoryview(tail))
            if tail:
                self._file.write_at(offset, tail)


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join()


@contextmanager
def _digesting(digests: list[bytes], offset: int) -> Iterator[Callable[[memoryview], None]]:
    """Give a function that takes the file's bytes from `offset` (a range start) on and fills in the digests."""
    hasher = blake3()
    room = RANGE_BYTES
    index = offset // RANGE_BYTES

    def update(view: memoryview) -> None:
        nonlocal hasher, room, index
        while view.nbytes:
            count = min(room, view.nbytes)
            hasher.update(view[:count])
            room -= count
            view = view[count:]
            if room == 0:
                digests[index] = hasher.digest()
                hasher, room, index = blake3(), RANGE_BYTES, index + 1

    yield update
    if room < RANGE_BYTES:
        digests[index] = hasher.digest()
