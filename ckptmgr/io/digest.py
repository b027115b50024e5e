# SPDX-License-Identifier: Apache-2.0
"""Digests of a file in ranges of 16 MiB, and sources that check them as they read.

Ranges make the digest parallel when writing and lazy when reading: to read one tensor, only the
ranges that it is in are hashed. The total is the digest of (size, range digests), so it commits to
every byte without a second pass.

The two header copies at the start of a container change with its keys, and are authenticated
separately. They count as zeros (`blank_bytes`), so the digest of a file never changes.

Source: BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs); four times faster than SHA-256 on one
core, so it takes no longer than the disk.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from ckptmgr.core.errors import ChecksumMismatch, TruncatedCheckpoint
from ckptmgr.crypto.buffers import new_pages
from ckptmgr.formats.source import Source, is_remote
from ckptmgr.io.threads import HASH_STEP_BYTES, for_each_unit
from ckptmgr.io.whole_ranges import WholeRanges

ALGORITHM = "blake3"
RANGE_BYTES = 16 << 20
MAX_RANGE_BYTES = 1 << 30
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The digests of one file.

    Attributes:
        size_bytes: Size of the file.
        ranges: One 32-byte digest per started 16 MiB.
        range_bytes: Length of all ranges but the last.
        algorithm: Always `blake3` in this version.
        blank_bytes: The number of bytes at the start of the file that count as zeros.
    """

    size_bytes: int
    ranges: tuple[bytes, ...]
    range_bytes: int = RANGE_BYTES
    algorithm: str = ALGORITHM
    blank_bytes: int = 0

    @property
    def total(self) -> bytes:
        """The digest that commits to the whole file."""
        ranges = b"".join(self.ranges)
        return total_digest(self.size_bytes, self.range_bytes, ranges, self.blank_bytes)


def total_digest(size_bytes: int, range_bytes: int, ranges: bytes, blank_bytes: int = 0) -> bytes:
    """Return the digest that commits to a whole file, from those of its ranges."""
    head = b"ckptmgr.digest/1" + size_bytes.to_bytes(8, "little")
    head += range_bytes.to_bytes(8, "little")
    blank = blank_bytes.to_bytes(8, "little") if blank_bytes else b""
    return blake3(head + ranges + blank).digest()


def digest_of(source: Source, *, blank_bytes: int = 0) -> FileDigest:
    """Return the digests of `source`, its first `blank_bytes` as zeros; hash in parallel."""
    blanked = _blanked(source, blank_bytes)
    ranges = _range_digests(blanked, source.size, RANGE_BYTES)
    return FileDigest(size_bytes=source.size, ranges=tuple(ranges), blank_bytes=blank_bytes)


def differing_ranges(source: Source, digest: FileDigest) -> list[tuple[int, int]]:
    """Read a source of the right size; return the ranges (start, end) that fail `digest`."""
    length = digest.range_bytes
    found = _range_digests(_blanked(source, digest.blank_bytes), digest.size_bytes, length)
    return [
        (index * length, min((index + 1) * length, digest.size_bytes))
        for index, (one, expected) in enumerate(zip(found, digest.ranges, strict=True))
        if one != expected
    ]


def checked_ranges(source: Source, digest: FileDigest, *, path: str) -> Iterator[bytes]:
    """Yield the stored bytes of a source range by range, each read once and checked.

    Unlike a `VerifyingSource` it yields the bytes that the digest leaves out, too: for copies.

    Raises:
        CorruptCheckpoint: The source does not match the digest; bytes yielded before match.
    """
    check_size(source.size, digest, path=path)
    for index in range(len(digest.ranges)):
        start = index * digest.range_bytes
        data = bytearray(min(digest.range_bytes, digest.size_bytes - start))
        source.read_into(start, memoryview(data))
        check_range(data, digest, index, path=path)
        yield bytes(data)


def check_range(
    data: bytes | bytearray | memoryview, digest: FileDigest, index: int, *, path: str
) -> None:
    """Raise ChecksumMismatch unless the stored bytes of one range match its digest."""
    start = index * digest.range_bytes
    blank = max(0, min(digest.blank_bytes - start, len(data)))
    hasher = blake3(bytes(blank))
    hasher.update(memoryview(data)[blank:])
    _compare(hasher.digest(), digest.ranges[index], start, start + len(data), path=path)


def _compare(found: bytes, expected: bytes, start: int, end: int, *, path: str) -> None:
    if not hmac.compare_digest(found, expected):
        raise ChecksumMismatch(
            f"the bytes {start}..{end} do not match the digest in the manifest",
            path=path,
            offset=start,
            hint="the file was damaged or replaced after it was saved; use an older checkpoint, or, if you "
            "replaced it on purpose, remove its .manifest.json",
        )


class _Blanked:
    """A source whose first bytes read as zeros."""

    def __init__(self, source: Source, blank_bytes: int) -> None:
        self._source = source
        self.is_remote = is_remote(source)
        self._blank_bytes = blank_bytes
        self.size = source.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._source.read_into(offset, buffer)
        count = min(self._blank_bytes - offset, buffer.nbytes)
        if count > 0:
            buffer[:count] = bytes(count)


def _blanked(source: Source, blank_bytes: int) -> Source:
    return _Blanked(source, blank_bytes) if blank_bytes else source


def _range_digests(source: Source, size: int, range_bytes: int) -> list[bytes]:
    digests = [b""] * -(-size // range_bytes)

    def work(index: int, buffer: memoryview) -> None:
        hasher = blake3()
        stop = min((index + 1) * range_bytes, size)
        for start in range(index * range_bytes, stop, HASH_STEP_BYTES):
            view = buffer[: min(HASH_STEP_BYTES, stop - start)]
            source.read_into(start, view)
            hasher.update(view)
        digests[index] = hasher.digest()

    for_each_unit(range(len(digests)), work, has_latency=is_remote(source))
    return digests


class VerifyingSource:
    """A source that returns no byte of a range before the digest of the range was checked.

    A whole range is read into the caller's memory and checked there. Of a range that is read in
    parts one copy is kept, so that a walk through a file checks each range once. The bytes that
    were checked are the bytes that are returned: nothing is read twice. A caller that discards its
    data after an error can read a range in pieces, with `open_range`.

    Raises:
        TruncatedCheckpoint: The file is shorter than the manifest says.
        ChecksumMismatch: It is longer.
    """

    def __init__(self, raw: Source, digest: FileDigest, *, path: str) -> None:
        self.is_remote = is_remote(raw)
        if self.is_remote and digest.range_bytes == RANGE_BYTES:
            raw = WholeRanges(raw, RANGE_BYTES)
        self._raw = _blanked(raw, digest.blank_bytes)
        self._digest = digest
        self._path = path
        self._lock = threading.Lock()
        self._cached_index = -1
        self._cached = memoryview(b"")
        check_size(raw.size, digest, path=path)

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._digest.size_bytes

    @property
    def range_bytes(self) -> int:
        """Length of all ranges but the last."""
        return self._digest.range_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with checked bytes.

        Raises:
            ChecksumMismatch: A touched range does not match its digest; the buffer's content is
                then undefined.
        """
        length = self._digest.range_bytes
        while buffer.nbytes:
            index, skip = divmod(offset, length)
            range_size = min(length, self.size - index * length)
            count = min(buffer.nbytes, range_size - skip)
            if skip == 0 and count == range_size and index != self._cached_index:
                self._fill(index, buffer[:count])
            else:
                with self._lock:
                    buffer[:count] = self._cached_range(index, range_size)[skip : skip + count]
            offset += count
            buffer = buffer[count:]

    def read_unchecked(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with UNCHECKED bytes; call `RangeReader.take` with them, then `finish`."""
        self._raw.read_into(offset, buffer)

    def open_range(self, index: int) -> RangeReader:
        """Return a reader of one range."""
        return RangeReader(self._raw, self._digest, index, path=self._path)

    def _cached_range(self, index: int, size: int) -> memoryview:
        if index != self._cached_index:
            self._cached_index = -1
            if self._cached.nbytes < size:
                self._cached = new_pages(size)
            self._fill(index, self._cached[:size])
            self._cached_index = index
        return self._cached

    def _fill(self, index: int, view: memoryview) -> None:
        reader = self.open_range(index)
        reader.read_into(view)
        reader.finish()


class RangeReader:
    """Reads one range in order, in pieces of any length; its bytes are checked only by `finish`."""

    def __init__(self, raw: Source, digest: FileDigest, index: int, *, path: str) -> None:
        self._raw = raw
        self._path = path
        self._expected = digest.ranges[index]
        self._start = self._offset = index * digest.range_bytes
        self._hasher = blake3()

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes."""
        self._raw.read_into(self._offset, view)
        self.take(view)

    def take(self, view: memoryview) -> None:
        """Hash the next bytes, which the caller has read."""
        self._hasher.update(view)
        self._offset += view.nbytes

    def finish(self) -> None:
        """Compare the digest, after the whole range was read.

        Raises:
            ChecksumMismatch: It differs.
        """
        found = self._hasher.digest()
        _compare(found, self._expected, self._start, self._offset, path=self._path)


def check_size(size_bytes: int, digest: FileDigest, *, path: str) -> None:
    """Raise unless a file has the size in its manifest.

    Raises:
        TruncatedCheckpoint: It is shorter.
        ChecksumMismatch: It is longer.
    """
    if size_bytes < digest.size_bytes:
        raise TruncatedCheckpoint(
            f"{size_bytes} bytes, but the manifest says {digest.size_bytes}",
            path=path,
            offset=size_bytes,
        )
    if size_bytes > digest.size_bytes:
        raise ChecksumMismatch(
            f"{size_bytes} bytes, but the manifest says {digest.size_bytes}",
            path=path,
            offset=digest.size_bytes,
        )


class RangeDigests:
    """Checks ranges of a source whose pieces arrive in any order, from several threads."""

    def __init__(self, source: VerifyingSource) -> None:
        self._source = source
        self._ranges: dict[int, _Range] = {}
        self._lock = threading.Lock()
        self.checked_count = 0

    def read(self, offset: int, view: memoryview) -> list[tuple[int, memoryview]]:
        """Fill `view` with unchecked bytes; return the pieces to pass to `take`."""
        self._source.read_unchecked(offset, view)
        return self.pieces(offset, view)

    def pieces(self, offset: int, view: memoryview) -> list[tuple[int, memoryview]]:
        """Cut bytes, at most a range of them, at the end of the range in which they start."""
        room = RANGE_BYTES - offset % RANGE_BYTES
        pieces = [(offset, view[:room]), (offset + room, view[room:])]
        return [piece for piece in pieces if piece[1].nbytes]

    def next_in(self, index: int) -> int:
        """Return the offset of the next byte of a range to be hashed."""
        return self._range(index).next

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> None:
        """Take a piece of one range; call `done` when it was hashed, now or before.

        Raises:
            ChecksumMismatch: With this piece the range is complete, and does not match its digest.
        """
        found = self._range(offset // RANGE_BYTES)
        if found.take(offset, view, done):
            found.reader.finish()
            with self._lock:
                self.checked_count += 1

    def _range(self, index: int) -> _Range:
        with self._lock:
            found = self._ranges.get(index)
            if found is None:
                reader = self._source.open_range(index)
                start = index * RANGE_BYTES
                stop = min(start + RANGE_BYTES, self._source.size)
                found = self._ranges[index] = _Range(reader, start, stop)
            return found


class _Range:
    def __init__(self, reader: RangeReader, start: int, stop: int) -> None:
        self.reader = reader
        self.next = start
        self._stop = stop
        self._early: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        self._lock = threading.Lock()

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> bool:
        """Hash all pieces that are next in order; return whether that completes the range."""
        with self._lock:
            if offset < self.next:
                done()
                return False
            self._early[offset] = (view, done)
            while self.next in self._early:
                view, done = self._early.pop(self.next)
                self.reader.take(view)
                self.next += view.nbytes
                done()
            return self.next == self._stop
