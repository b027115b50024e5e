# SPDX-License-Identifier: Apache-2.0
"""Join frames of any length, as they are ready, into chunks of one length; seal and write those.

A frame gets its place in the file when it is appended. Several threads copy frames into chunks at
once; the thread that fills the last byte of a chunk seals it. One thread takes the chunks in order
for the digests, and a few write them.

There is no deadlock: chunks are begun in the order of the file, each with all the memory that it
needs, so the first unfinished chunk can always be finished and then written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.crypto.container.compressed_writer import FramesSealer
from ckptmgr.files.save.streams import CHUNK_BYTES
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.digest import RANGE_BYTES, FileDigest
from ckptmgr.io.filesystem import OutputFile

_MOST_CHUNKS = 6
_WRITERS = 3
_TAIL_BYTES = 1 << 20
_memory = SpareBuffers(CHUNK_BYTES)


class Stopped(Exception):
    """Ends a thread because another one failed."""


@dataclass(slots=True)
class _Chunk:
    """A chunk that is being filled; without a sealer `plain` and `stored` are the same memory."""

    index: int
    plain: memoryview
    stored: memoryview
    filled: int = 0
    length: int = 0


class SequentialDigests:
    """The digests of a file whose bytes come in order.

    Its first `blank_bytes` count as zeros; the first update covers them.
    """

    def __init__(self, blank_bytes: int = 0) -> None:
        self._blank_bytes = blank_bytes
        self._done: list[bytes] = []
        self._hasher = blake3()
        self._size = 0

    def update(self, view: memoryview) -> None:
        """Add the next bytes."""
        while view.nbytes:
            part = view[: RANGE_BYTES - self._size % RANGE_BYTES]
            self._hasher.update(part)
            self._size += part.nbytes
            view = view[part.nbytes :]
            if self._size % RANGE_BYTES == 0:
                self._done.append(self._hasher.digest())
                self._hasher = blake3()

    def value(self) -> FileDigest:
        """Return the digests of all bytes."""
        last = [self._hasher.digest()] if self._size % RANGE_BYTES else []
        return FileDigest(
            size_bytes=self._size, ranges=(*self._done, *last), blank_bytes=self._blank_bytes
        )


class Spool:
    """The file that frames are appended to.

    The sealer, if any, seals each chunk into a segment of 4 MiB; without one the file is plain.
    `wipe` is called with each chunk that was sealed.
    """

    def __init__(
        self,
        file: OutputFile,
        sealer: FramesSealer | None,
        *,
        wipe: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._file = file
        self._wipe = wipe
        self._sealer = sealer
        self._capacity = CHUNK_BYTES if sealer is None else sealer.plaintext_bytes
        self._head = memoryview(b"" if sealer is None else sealer.head)
        self._end = 0
        self._last = (-1, 0)  # index and length of the last chunk, once known
        self._is_stopped = False
        self._appending = threading.Lock()
        self._state = threading.Condition()
        self._free = _MOST_CHUNKS
        self._sealed: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._blank_bytes = 0 if sealer is None else sealer.copies_bytes
        self._digests = SequentialDigests(self._blank_bytes)

    def works(self) -> list[Callable[[], None]]:
        """Return functions to run in threads of their own; they return after `end` or `stop`."""
        return [self._digest_all, *[self._write_all] * _WRITERS]

    def append(self, data: memoryview | bytes) -> int:
        """Append a frame; return its offset. Safe to call from several threads.

        Raises:
            Stopped: `stop` was called.
        """
        view = memoryview(data)
        with self._appending:
            start = self._end
            self._end += view.nbytes
            parts = list(self._parts(start, view.nbytes))
        for chunk, at, length in parts:
            copy_into(chunk.plain[at : at + length], view[:length])
            view = view[length:]
            self._note_filled(chunk, length)
        return start

    def end(self, tail: bytes) -> None:
        """Append the last bytes; everything else must have been appended.

        Raises:
            Stopped: `stop` was called.
        """
        last, before = divmod(self._end + len(tail) - 1, self._capacity)
        self._last = (last, before + 1)
        for start in range(0, len(tail), _TAIL_BYTES):
            self.append(tail[start : start + _TAIL_BYTES])
        self._sealed.put(None)

    def stop(self) -> None:
        """End all threads after a failure of one of them."""
        with self._state:
            self._is_stopped = True
            self._state.notify_all()
        self._sealed.put(None)

    def value(self) -> FileDigest:
        """Return the digests of the file; all threads must have ended."""
        return self._digests.value()

    def _parts(self, start: int, length: int) -> Iterator[tuple[_Chunk, int, int]]:
        """Yield each chunk of a plaintext range, with offset and length of the part in it."""
        while length:
            index, at = divmod(start, self._capacity)
            count = min(length, self._capacity - at)
            yield self._begin(index) if at == 0 else self._current, at, count
            start, length = start + count, length - count

    def _begin(self, index: int) -> _Chunk:
        with self._state:
            while self._free == 0 and not self._is_stopped:
                self._state.wait()
            if self._is_stopped:
                raise Stopped
            self._free -= 1
        stored = _memory.take()
        plain = stored if self._sealer is None else _memory.take()
        self._current = _Chunk(index=index, plain=plain, stored=stored)
        return self._current

    def _note_filled(self, chunk: _Chunk, length: int) -> None:
        last, last_length = self._last
        with self._state:
            chunk.filled += length
            is_final = chunk.index == last
            is_full = chunk.filled == (last_length if is_final else self._capacity)
        if is_full:
            self._seal(chunk, is_final=is_final)
            self._sealed.put(chunk)

    def _seal(self, chunk: _Chunk, *, is_final: bool) -> None:
        chunk.length = chunk.filled
        if self._sealer is None:
            return
        chunk.length = self._sealer.segment_size(chunk.filled)
        plain, segment = chunk.plain[: chunk.filled], chunk.stored[: chunk.length]
        self._sealer.seal_into(chunk.index, plain, segment, is_final=is_final)
        if self._wipe is not None:
            self._wipe(plain)
        _memory.give_back(chunk.plain)

    def _digest_all(self) -> None:
        try:
            if self._head.nbytes:
                blank = memoryview(bytes(self._blank_bytes))
                self._digests.update(blank)
                self._digests.update(self._head[blank.nbytes :])
                self._file.write_at(0, self._head)
            waiting: dict[int, _Chunk] = {}
            following = 0
            while (chunk := self._sealed.get()) is not None:
                waiting[chunk.index] = chunk
                while (ready := waiting.pop(following, None)) is not None:
                    self._digests.update(ready.stored[: ready.length])
                    self._writes.put(ready)
                    following += 1
        finally:
            for _ in range(_WRITERS):
                self._writes.put(None)

    def _write_all(self) -> None:
        while (chunk := self._writes.get()) is not None:
            offset = self._head.nbytes + chunk.index * CHUNK_BYTES
            self._file.write_at(offset, chunk.stored[: chunk.length])
            _memory.give_back(chunk.stored)
            with self._state:
                self._free += 1
                self._state.notify()
