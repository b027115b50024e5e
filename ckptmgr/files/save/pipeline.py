# SPDX-License-Identifier: Apache-2.0
"""Stream an image into a file: gather, CRC, seal, digest and write in one pass, in parallel.

The file is cut into digest ranges of 16 MiB. A few producers take ranges in turn; each moves a
range through 4 MiB buffers (copy or encrypt, then digest while the bytes are in cache) and hands
the buffers to a few writers. The tail (CRC trailer, seal record) depends on all earlier bytes and
is produced last. The head of a safetensors file states the CRC of everything after it: then the
first range is produced after all others.

Reasons for this design (each measured):

* The buffers are page aligned and kept between saves: touching fresh pages costs more than AES, and
  direct I/O needs them.
* 4 MiB per call: each return from a GIL-free call may wait a whole switch interval when the
  training thread is busy.
* A buffer holds whole records, so that encrypted files are written aligned, too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from blake3 import blake3

from ckptmgr.files.save.streams import CHUNK_BYTES, PlainStream
from ckptmgr.formats.image import Image
from ckptmgr.io.buffers import BufferPool
from ckptmgr.io.digest import RANGE_BYTES, FileDigest
from ckptmgr.io.filesystem import OutputFile
from ckptmgr.io.threads import producer_threads, run_in_threads

if TYPE_CHECKING:  # a plain save needs none of this
    from ckptmgr.crypto.container.header import Content
    from ckptmgr.crypto.container.writer import ContainerSealer
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.mindspore.blocks import BlockSealer
    from ckptmgr.files.save.container_stream import ContainerStream
    from ckptmgr.files.save.streams import SealedStream

_BUFFERS = 8
_WRITERS = 4


class Written(NamedTuple):
    """The result of a finished stream.

    Attributes:
        digest: Size and digests of the bytes in the file.
        write_s: Seconds from the first byte to the last, without the sync.
    """

    digest: FileDigest
    write_s: float


def sealer_for(image: Image, key: Keys, mode: str) -> BlockSealer:
    """Return the sealer of an image; whole records fill the chunks that are written.

    Raises:
        KeySourceError: The keys are of a kind that such a file does not accept.
    """
    from ckptmgr.crypto.keys.ring import block_key
    from ckptmgr.crypto.mindspore.blocks import BlockSealer

    return BlockSealer(
        block_key(key), mode, plaintext_size=image.body_size, has_crc_trailer=image.has_crc_trailer
    )


def container_for(
    image: Image, key: Keys, mode: str, *, content: Content | None = None
) -> ContainerSealer:
    """Return the container sealer of an image of the format `content`, by default safetensors."""
    from ckptmgr.crypto.container.header import Content
    from ckptmgr.crypto.container.writer import ContainerSealer
    from ckptmgr.crypto.keys.ring import ring_of

    return ContainerSealer(
        ring_of(key).recipients,
        mode,
        plaintext_size=image.size,
        content=Content.SAFETENSORS if content is None else content,
    )


def write_image(
    image: Image, file: OutputFile, *, sealer: BlockSealer | ContainerSealer | None = None
) -> Written:
    """Write every byte of `image`, sealed if there is a sealer; return the digests of the file.

    The file is new and empty, and is not synced. After an error its content is undefined and no
    thread is left running.

    Raises:
        OSError: From the file.
        FormatError: A tensor gave other bytes than it promised.
    """
    started = time.perf_counter()
    stream = stream_of(image, sealer)
    digests = _Writer(stream, file).run()
    digest = FileDigest(
        size_bytes=stream.size, ranges=tuple(digests), blank_bytes=stream.blank_bytes
    )
    return Written(digest=digest, write_s=time.perf_counter() - started)


_Stream: TypeAlias = "PlainStream | SealedStream | ContainerStream"


def stream_of(image: Image, sealer: BlockSealer | ContainerSealer | None) -> _Stream:
    """Return the bytes of the new file, to be produced chunk by chunk."""
    if sealer is None:
        return PlainStream(image)
    from ckptmgr.crypto.container.writer import ContainerSealer
    from ckptmgr.files.save.container_stream import ContainerStream
    from ckptmgr.files.save.streams import SealedStream

    if isinstance(sealer, ContainerSealer):
        return ContainerStream(image, sealer)
    return SealedStream(image, sealer)


_buffers = BufferPool(_BUFFERS, CHUNK_BYTES)
_Write = tuple[int, memoryview, int]  # offset, buffer, length


class _Writer:
    """Write one stream into one file."""

    def __init__(self, stream: _Stream, file: OutputFile) -> None:
        self._stream = stream
        self._file = file
        self._digests = [b""] * -(-stream.size // RANGE_BYTES)
        ranges = range(-(-stream.tail_start // RANGE_BYTES))
        self._late_ranges = ranges[: stream.is_head_late]
        self._ranges = iter(ranges[stream.is_head_late :])
        self._unfinished = blake3()  # of the range in which the tail starts
        self._lock = threading.Lock()
        self._is_parallel = stream.tail_start > CHUNK_BYTES  # threads take longer than one chunk
        self._producing = 0
        self._failure: BaseException | None = None
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()

    def run(self) -> list[bytes]:
        if self._is_parallel:
            self._write_body_in_parallel()
        else:
            self._guard(self._produce_all)
            self._guard(self._produce_late)
        self._raise_failure()
        self._write_tail()
        return self._digests

    def _write_body_in_parallel(self) -> None:
        self._producing = producer_threads()
        works = [self._produce_and_leave] * self._producing + [self._write_all] * _WRITERS
        run_in_threads([partial(self._guard, work) for work in works], fail=self._fail)

    def _produce_and_leave(self) -> None:
        self._guard(self._produce_all)
        with self._lock:
            self._producing -= 1
            is_last = self._producing == 0
        if is_last:
            self._guard(self._produce_late)
            for _ in range(_WRITERS):
                self._writes.put(None)

    def _guard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # raised by run()
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the cycle through its traceback would keep every tensor alive

    def _next_range(self) -> int | None:
        with self._lock:
            return None if self._failure is not None else next(self._ranges, None)

    def _produce_all(self) -> None:
        while (index := self._next_range()) is not None:
            self._produce_range(index)

    def _produce_late(self) -> None:
        for index in self._late_ranges:
            self._produce_range(index)

    def _produce_range(self, index: int) -> None:
        hasher = blake3()
        offset = index * RANGE_BYTES
        stop = min(offset + RANGE_BYTES, self._stream.tail_start)
        while offset < stop and self._failure is None:
            offset += self._produce(offset, stop, hasher)
        if stop % RANGE_BYTES:
            self._unfinished = hasher
        else:
            self._digests[index] = hasher.digest()

    def _produce(self, offset: int, stop: int, hasher: blake3) -> int:
        chunks = min(self._stream.chunks_from(offset), -(-(stop - offset) // CHUNK_BYTES))
        buffers = _buffers.take_many(chunks)
        try:
            count = self._stream.produce(offset, buffers)
            parts = [buffer[: count - index * CHUNK_BYTES] for index, buffer in enumerate(buffers)]
            blank = 0 if offset else self._stream.blank_bytes  # the first piece is longer
            hasher.update(bytes(blank))
            for part in parts:
                hasher.update(part[blank:])
                blank = 0
        except BaseException:
            for buffer in buffers:
                _buffers.give_back(buffer)
            raise
        for buffer, part in zip(buffers, parts, strict=True):
            self._hand_over((offset, buffer, part.nbytes))
            offset += part.nbytes
        return count

    def _hand_over(self, job: _Write) -> None:
        if self._is_parallel:
            self._writes.put(job)
        else:  # no other thread would, and a thread that holds a buffer must not wait for another
            self._write(job)

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            self._write(job)

    def _write(self, job: _Write) -> None:
        offset, buffer, count = job
        try:
            if self._failure is None:
                self._file.write_at(offset, buffer[:count])
        except BaseException as error:  # the queue must still be drained, or producers starve
            self._fail(error)
        finally:
            _buffers.give_back(buffer)

    def _write_tail(self) -> None:
        offset = self._stream.tail_start
        tail = memoryview(self._stream.tail())
        if tail.nbytes:
            self._file.write_at(offset, tail)
        index, filled = divmod(offset, RANGE_BYTES)
        while filled or tail.nbytes:
            part, tail = tail[: RANGE_BYTES - filled], tail[RANGE_BYTES - filled :]
            self._unfinished.update(part)
            self._digests[index] = self._unfinished.digest()
            self._unfinished, filled, index = blake3(), 0, index + 1
