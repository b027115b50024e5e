# SPDX-License-Identifier: Apache-2.0
"""Write a safetensors file as compressed frames, in parallel.

One pass groups, compresses, seals, digests and writes. The final size is known only at the end, so
no disk space is reserved. Memory is bounded: a few chunks of 4 MiB (`compressed_chunks`), and for
each producer the buffers that gather, group and compress one frame.

The first frame holds the header. A late header is compressed after all other frames and stored
behind them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.crypto.container.compressed_writer import FramesSealer
from ckptmgr.crypto.keys.ring import Keys, ring_of
from ckptmgr.files.save.compressed_chunks import Spool, Stopped
from ckptmgr.files.save.streams import counted_views, gather
from ckptmgr.formats.compressed.packer import FramePacker
from ckptmgr.formats.compressed.plan import PlannedFrame, plan_frames, runs_of
from ckptmgr.formats.compressed.table import FRAME_BYTES, HEAD, Frame, encode_tail, frame_digest
from ckptmgr.formats.image import Image
from ckptmgr.formats.safetensors_file import read_safetensors_index
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import OutputFile
from ckptmgr.io.threads import producer_threads, run_in_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameFigures:
    """Sizes and time of the compression of one element type; `seconds` are of one core."""

    raw_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: FrameFigures) -> FrameFigures:
        """Return the sum of both."""
        return FrameFigures(
            raw_bytes=self.raw_bytes + other.raw_bytes,
            stored_bytes=self.stored_bytes + other.stored_bytes,
            seconds=self.seconds + other.seconds,
        )

    @property
    def ratio(self) -> float:
        """Stored bytes as a share of raw bytes."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @property
    def gigabytes_per_s(self) -> float:
        """Raw bytes that one core compressed in a second."""
        return self.raw_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFrames:
    """The result of a finished stream.

    Attributes:
        digest: Size and digests of the bytes in the file.
        write_s: Seconds from the first byte to the last, without the sync.
        by_dtype: Name of an element type, `header` or `mixed` to its figures.
    """

    digest: FileDigest
    write_s: float
    by_dtype: Mapping[str, FrameFigures]


class ImageSource:
    """An image as a source, to parse its index; a late head states a CRC32 of 0."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._head = image.head(0)
        self.size = image.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, with bytes of a late head or of the content behind it."""
        if offset < len(self._head):
            buffer[:] = self._head[offset : offset + buffer.nbytes]
        else:
            gather(self._image.views(offset, buffer.nbytes), buffer)


def plan_of(image: Image) -> list[PlannedFrame]:
    """Return the frames of the image of a safetensors file.

    Raises:
        FormatError: It is no safetensors image.
    """
    return plan_frames(runs_of(read_safetensors_index(ImageSource(image)), image.size))


def frames_sealer(raw_size: int, keys: Keys, mode: str) -> FramesSealer:
    """Return the sealer of a file that expands to `raw_size` bytes."""
    return FramesSealer(ring_of(keys).recipients, mode, raw_size=raw_size)


class Read(Protocol):
    """Reads bytes to be compressed."""

    def __call__(self, offset: int, size: int, room: memoryview, /) -> memoryview:
        """Return `size` bytes, in `room` or at their own place.

        They stay valid until the next call with this `room`.
        """
        ...


def read_image(image: Image) -> Read:
    """Return a reader of an image; a late head must be read last.

    Bytes inside one tensor are views of its memory.
    """
    crc = image.start_crc()

    def read(offset: int, size: int, room: memoryview) -> memoryview:
        views = counted_views(image, crc, offset, size)
        if len(views) == 1:
            return views[0]
        gather(iter(views), room)
        return room[:size]

    return read


def read_once(image: Image) -> Read:
    """Return a reader of an image whose views must be released; each byte is read once."""

    def read(offset: int, size: int, room: memoryview) -> memoryview:
        gather(image.views(offset, size), room)
        image.release(offset, size)
        return room[:size]

    return read


def write_frames(
    plan: Sequence[PlannedFrame],
    read: Read,
    file: OutputFile,
    *,
    level: int,
    sealer: FramesSealer | None = None,
    is_head_late: bool = False,
    release: Callable[[int, int], None] | None = None,
    wipe: Callable[[memoryview], None] | None = None,
) -> WrittenFrames:
    """Write a file compressed, sealed if there is a sealer, and return the digests of its bytes.

    The file is not synced. After an error its content is undefined and no thread is left running.

    Args:
        plan: Its frames.
        read: Reads the image; called from several threads.
        file: A new, empty file.
        level: Of zstd.
        sealer: Made for this plaintext.
        is_head_late: Whether the first frame can only be read after all others.
        release: Called with offset and size of the bytes read, once they are compressed.
        wipe: Called with each buffer of plaintext, compressed or not, once it is used.

    Raises:
        OSError: From the file.
        CkptmgrError, FormatError, CryptoError: From `read`.
    """
    started = time.perf_counter()
    writer = _Writer(
        plan,
        read,
        Spool(file, sealer, wipe=wipe),
        level,
        is_head_late=is_head_late,
        release=release,
        wipe=wipe,
    )
    digest = writer.run()
    elapsed_s = time.perf_counter() - started
    return WrittenFrames(digest=digest, write_s=elapsed_s, by_dtype=writer.figures())


class _Writer:
    def __init__(
        self,
        plan: Sequence[PlannedFrame],
        read: Read,
        spool: Spool,
        level: int,
        *,
        is_head_late: bool,
        release: Callable[[int, int], None] | None,
        wipe: Callable[[memoryview], None] | None,
    ) -> None:
        self._plan = plan
        self._read = read
        self._release = release
        self._wipe = wipe
        self._spool = spool
        self._level = level
        self._frames: list[Frame | None] = [None] * len(plan)
        self._seconds = [0.0] * len(plan)
        turns = range(len(plan))
        self._late_turns = turns[:is_head_late]
        self._turns = iter(turns[is_head_late:])
        self._lock = threading.Lock()
        self._producing = producer_threads()
        self._failure: BaseException | None = None

    def run(self) -> FileDigest:
        self._spool.append(HEAD)
        works = [*[self._pack_and_leave] * self._producing, *self._spool.works()]
        run_in_threads([partial(self._guard, work) for work in works], fail=self._fail)
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the cycle through its traceback would keep every tensor alive
        return self._spool.value()

    def figures(self) -> Mapping[str, FrameFigures]:
        found: dict[str, FrameFigures] = {}
        for planned, frame, seconds in zip(self._plan, self._made(), self._seconds, strict=True):
            figures = FrameFigures(
                raw_bytes=frame.raw_bytes, stored_bytes=frame.stored_bytes, seconds=seconds
            )
            found[planned.label] = found.get(planned.label, FrameFigures()) + figures
        return found

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:  # raised by run(), in the caller's thread
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
        self._spool.stop()

    def _next(self) -> int | None:
        with self._lock:
            return None if self._failure is not None else next(self._turns, None)

    def _pack_and_leave(self) -> None:
        packer = FramePacker(level=self._level)
        room = _rooms.take()
        try:
            while (turn := self._next()) is not None:
                self._pack(turn, packer, room)
            if self._is_last():
                for turn in self._late_turns:
                    self._pack(turn, packer, room)
                self._end()
        finally:
            _rooms.give_back(room)
            if self._wipe is not None:
                for memory in packer.memory():
                    self._wipe(memory)

    def _is_last(self) -> bool:
        with self._lock:
            self._producing -= 1
            return self._producing == 0 and self._failure is None

    def _end(self) -> None:
        frames = list(self._made())
        end = len(HEAD) + sum(frame.stored_bytes for frame in frames)
        self._spool.end(encode_tail(frames, offset=end))

    def _pack(self, turn: int, packer: FramePacker, room: memoryview) -> None:
        planned = self._plan[turn]
        raw = self._read(planned.start, planned.size, room)
        started = time.perf_counter()
        packed = packer.pack(raw, item_bytes=planned.item_bytes)
        digest = frame_digest(packed.stored)
        self._seconds[turn] = time.perf_counter() - started
        self._frames[turn] = Frame(
            offset=self._spool.append(packed.stored),
            stored_bytes=len(packed.stored),
            raw_bytes=planned.size,
            group_bytes=packed.group_bytes,
            method=packed.method,
            digest=digest,
        )
        if self._release is not None:
            self._release(planned.start, planned.size)
        if self._wipe is not None:
            self._wipe(room[: planned.size])

    def _made(self) -> Iterator[Frame]:
        return (frame for frame in self._frames if frame is not None)


_rooms = SpareBuffers(FRAME_BYTES)
