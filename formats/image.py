# SPDX-License-Identifier: Apache-2.0
"""An image: the exact bytes a file will hold, without holding them.

An image is an ordered list of segments (small headers, and tensor contents that stay where they are) whose total length
is known before the first byte is written. Everything after it (copy, digest, cipher, write) addresses it by offset, in
parallel and in any order. Nothing is ever concatenated.

A file may state a CRC32 of itself, in a trailer or in its head. Whoever streams the image gives `start_crc()` the other bytes
while they pass, and then asks for `trailer(crc)` or `head(crc)`: a late head is written last, although it comes first.

Collect the parts of an image so that small tensors cost little.

A segment for each small tensor would cost more than its bytes. So heads and small tensors that follow each other form a
run, one segment, which is put together by a single join each time it is needed. Large tensors stay where they are.

>>> segments = Segments()
>>> segments.add(b"head")
>>> segments.add(b"more")
>>> [bytes(segment.content()) for segment in segments.finish()]
[b'headmore']
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .errors import FormatError
from .file_crc import TRAILER_BYTES, BodyCrc, FileCrc, encode_trailer
from .tensor import Tensor, checked_content, content_of

MOST_LATE_BYTES = (4 << 20) - (4 << 10)
"""A late head fits into a chunk of 4 MiB, sealed or not, so that it is made together with what follows it."""
_MATERIALISED_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes: `content()[start:stop]`.

    Attributes:
        content: Returns a flat view; called again whenever the bytes are needed and no longer cached.
        start: First byte of the view that belongs to this segment.
        stop: One past the last byte.
        data: What `content` returns, where that is in memory anyway.
    """

    content: Callable[[], memoryview]
    start: int
    stop: int
    data: memoryview | None = None

    @classmethod
    def of(cls, data: bytes) -> Segment:
        """Return a segment over bytes in memory."""
        view = memoryview(data)
        return cls(lambda: view, 0, view.nbytes, view)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateHead:
    """The first bytes of a file that state a CRC32 of what follows them, so that they are known last.

    Attributes:
        size_bytes: How many, whatever the CRC32 is; at most `MOST_LATE_BYTES`.
        start_crc: Returns what computes it from the bytes that follow; another one each time the file is written.
        encode: Returns the head, given the CRC32.
    """

    size_bytes: int
    start_crc: Callable[[], FileCrc]
    encode: Callable[[int], bytes]


class Image:
    """The bytes of a file to be, addressed by offset.

    Args:
        segments: Its bytes, but for a late head and a trailer.
        has_crc_trailer: Whether a trailer states the CRC32 of the body.
        late_head: What comes before the segments, known after them.

    Attributes:
        body_size: Bytes of the file without a trailer.
        head_bytes: Bytes of a late head, or 0.

    >>> image = Image([Segment.of(b"head"), Segment.of(b"body")])
    >>> image.size, b"".join(bytes(view) for view in image.views(2, 4))
    (8, b'adbo')
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        *,
        has_crc_trailer: bool = False,
        late_head: LateHead | None = None,
    ) -> None:
        self._late_head = late_head
        self.head_bytes = 0 if late_head is None else late_head.size_bytes
        self._segments = [segment for segment in segments if segment.stop > segment.start]
        self._starts: list[int] = []
        offset = self.head_bytes
        for segment in self._segments:
            self._starts.append(offset)
            offset += segment.stop - segment.start
        self.body_size = offset
        self.has_crc_trailer = has_crc_trailer
        self._cache: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the finished file, trailer included."""
        return self.body_size + (TRAILER_BYTES if self.has_crc_trailer else 0)

    def views(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield zero-copy views that together are the bytes `[offset, offset + length)` of the body behind a late head."""
        if offset < self.head_bytes or length < 0 or offset + length > self.body_size:
            raise ValueError(
                f"[{offset}, {offset + length}) is outside the {self.body_size}-byte body or in its late head"
            )
        index = bisect_right(self._starts, offset) - 1
        while length > 0:
            segment = self._segments[index]
            start = segment.start + offset - self._starts[index]
            stop = min(segment.stop, start + length)
            yield self._content(index)[start:stop]
            offset += stop - start
            length -= stop - start
            index += 1

    def done_with(self, offset: int, length: int) -> None:
        """Say that the views of these bytes are not used any more; an image that reads a file then has room for others."""

    def start_crc(self) -> FileCrc:
        """Return what takes the bytes that `views` gives, for the CRC32 that the file states, if it does."""
        if self._late_head is not None:
            return self._late_head.start_crc()
        return BodyCrc(self.body_size if self.has_crc_trailer else 0)

    def head(self, crc: int) -> bytes:
        """Return the late head, given the CRC32 of what follows it; nothing where there is none."""
        return b"" if self._late_head is None else self._late_head.encode(crc)

    def trailer(self, crc: int) -> bytes:
        """Return the bytes after the body, given the CRC32 of the body."""
        return encode_trailer(crc) if self.has_crc_trailer else b""

    def _content(self, index: int) -> memoryview:
        # Contents that are views of live arrays cost nothing to ask for again; those that are made on demand would be
        # made once per range without this small cache.
        segment = self._segments[index]
        if segment.data is not None:
            return segment.data
        key = id(segment.content)
        with self._lock:
            view = self._cache.get(key)
            if view is not None:
                self._cache.move_to_end(key)
                return view
        view = segment.content()
        if view.nbytes < segment.stop:
            raise FormatError(
                f"a tensor gave {view.nbytes} bytes where its shape and type need {segment.stop}"
            )
        with self._lock:
            self._cache[key] = view
            while len(self._cache) > _MATERIALISED_SEGMENTS:
                self._cache.popitem(last=False)
        return view


# Above, a segment of its own costs nothing beside the copy of the bytes.
_SMALL_BYTES = 16 << 10
# Made again for each chunk that it touches, so it is small beside a chunk of some MiB.
_RUN_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class _Run:
    """The content of a segment: small parts side by side."""

    parts: tuple[bytes | Tensor, ...]

    def __call__(self) -> memoryview:
        # As bytes, which the collector of garbage never looks at; of many views it would look at each, several times.
        contents = [
            part if isinstance(part, bytes) else bytes(content_of(part)) for part in self.parts
        ]
        return memoryview(b"".join(contents))


class Segments:
    """The segments of an image in the making, in the order of its bytes."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._run: list[bytes | Tensor] = []
        self._run_bytes = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        if len(data) > _SMALL_BYTES:
            self._end_run()
            self._segments.append(Segment.of(data))
        else:
            self._run.append(data)
            self._run_bytes += len(data)

    def add_tensor(self, tensor: Tensor, *, size_bytes: int) -> None:
        """Append the content of a tensor, whose specification says that it has so many bytes."""
        if size_bytes > _SMALL_BYTES:
            self.add_segment(Segment(checked_content(tensor), 0, size_bytes))
        elif size_bytes:
            self._run.append(tensor)
            self._run_bytes += size_bytes
            if self._run_bytes >= _RUN_BYTES:
                self._end_run()

    def add_segment(self, segment: Segment) -> None:
        """Append a segment as it is."""
        self._end_run()
        self._segments.append(segment)

    def finish(self) -> list[Segment]:
        """Return all segments."""
        self._end_run()
        return self._segments

    def _end_run(self) -> None:
        if not self._run:
            return
        run = _Run(tuple(self._run))
        if any(isinstance(part, Tensor) for part in self._run):
            self._segments.append(Segment(run, 0, self._run_bytes))
        else:
            self._segments.append(Segment.of(bytes(run())))
        self._run, self._run_bytes = [], 0
