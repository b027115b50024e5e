# SPDX-License-Identifier: Apache-2.0
"""An image: the exact bytes of a file to be written, without a copy of them.

An image is an ordered list of extents (small headers, and tensor contents that stay in their
memory) whose total length is known before the first byte is written. Copy, digest, cipher and write
address it by offset, in parallel and in any order.

A file may state a CRC32 of itself, in a trailer or in its head. The writer passes the other bytes
to `start_crc()` and then calls `trailer(crc)` or `head(crc)`: a late head is written last, although
it comes first.

An extent for each small tensor would cost more than its bytes. So heads and small tensors that
follow each other form one extent, which is joined each time its bytes are needed.

>>> builder = ImageBuilder()
>>> builder.add(b"head")
>>> builder.add(b"more")
>>> [bytes(extent.content()) for extent in builder.finish()]
[b'headmore']
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .errors import FormatError
from .file_crc import TRAILER_BYTES, BodyCrc, FileCrc, encode_trailer
from .finite import FiniteWatch
from .image_uses import TensorUses
from .tensor import JOINERS, ContentPieces, Tensor, content_of

MOST_LATE_BYTES = (4 << 20) - (4 << 10)
"""A late head and the bytes behind it fit into one chunk of 4 MiB, sealed or not."""
_CACHED_CONTENTS = 4


class Extent(NamedTuple):
    """A run of bytes: `content()[start:stop]`.

    `content` returns a flat view and is called again when the bytes are needed and no longer
    cached. `data` is that view where it is in memory anyway; `tensors` have their bytes there.
    """

    content: Callable[[], memoryview]
    start: int
    stop: int
    data: memoryview | None = None
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, data: bytes) -> Extent:
        """Return an extent over bytes in memory."""
        view = memoryview(data)
        return cls(lambda: view, 0, view.nbytes, view)


class LateHead(NamedTuple):
    """The first bytes of a file that state a CRC32 of the bytes behind them, and so are known last.

    `size_bytes` does not depend on the CRC32 and is at most `MOST_LATE_BYTES`. `start_crc` returns
    a new computation each time the file is written; `encode` returns the head for a CRC32.
    """

    size_bytes: int
    start_crc: Callable[[], FileCrc]
    encode: Callable[[int], bytes]


class Image:
    """The bytes of a file to be written, addressed by offset.

    `extents` leave out a late head and a trailer; `body_size` counts the late head, but not the
    trailer.

    >>> image = Image([Extent.of(b"head"), Extent.of(b"body")])
    >>> image.size, b"".join(bytes(view) for view in image.views(2, 4))
    (8, b'adbo')
    """

    def __init__(
        self,
        extents: Iterable[Extent],
        *,
        has_crc_trailer: bool = False,
        late_head: LateHead | None = None,
    ) -> None:
        self._late_head = late_head
        self.head_bytes = 0 if late_head is None else late_head.size_bytes
        self._extents = [extent for extent in extents if extent.stop > extent.start]
        self._starts: list[int] = []
        offset = self.head_bytes
        for extent in self._extents:
            self._starts.append(offset)
            offset += extent.stop - extent.start
        self.body_size = offset
        self.has_crc_trailer = has_crc_trailer
        self._cache: OrderedDict[int, memoryview] = OrderedDict()
        self._joined: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()
        self._uses: TensorUses | None = None
        self._finite: FiniteWatch | None = None

    @property
    def size(self) -> int:
        """Bytes of the finished file, including the trailer."""
        return self.body_size + (TRAILER_BYTES if self.has_crc_trailer else 0)

    def views(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield views of the body bytes `[offset, offset + length)`, behind a late head."""
        if offset < self.head_bytes or length < 0 or offset + length > self.body_size:
            raise ValueError(
                f"[{offset}, {offset + length}) is outside the {self.body_size}-byte body or in its late head"
            )
        index = bisect_right(self._starts, offset) - 1
        while length > 0:
            extent = self._extents[index]
            start = extent.start + offset - self._starts[index]
            stop = min(extent.stop, start + length)
            content = self._content(index)
            if self._finite is not None:
                self._see(self._finite, index, content, start, stop)
            yield content[start:stop]
            offset += stop - start
            length -= stop - start
            index += 1

    def release(self, offset: int, length: int) -> None:
        """End the use of views of these bytes; an image that reads a file reuses their memory."""
        if self._uses is not None:
            self._uses.add(offset, length)

    def watch_uses(self, on_used: Callable[[Tensor], object]) -> None:
        """Call `on_used` with each tensor once the use of all its bytes has ended.

        Before that, the copies of small tensors that were joined are overwritten with zeros.
        """
        self._uses = TensorUses(self._extents, self._starts, self._wipe_joined, on_used)

    def watch_finite(self, watch: FiniteWatch) -> None:
        """Have the floats of the tensors looked at by `watch` whenever `views` yields their bytes."""
        self._finite = watch

    def _see(
        self, watch: FiniteWatch, index: int, content: memoryview, start: int, stop: int
    ) -> None:
        extent = self._extents[index]
        if not isinstance(extent.content, _Run):
            for tensor in extent.tensors:
                watch.see(index, tensor, content, start, stop)
        elif start == extent.start:  # all of it, as it is small
            run = extent.content
            watch.see_parts(index, run.parts, run.starts, content)

    def wipe_copy(self, copy: memoryview) -> None:
        """Overwrite a copy of bytes of the image with zeros if the uses of its tensors are watched."""
        if self._uses is not None:
            copy[:] = bytes(copy.nbytes)

    def _wipe_joined(self, index: int) -> None:
        with self._lock:
            views = self._joined.pop(index, [])
            self._cache.pop(id(self._extents[index].content), None)
        for view in views:
            view[:] = bytes(view.nbytes)

    def start_crc(self) -> FileCrc:
        """Return the computation of the CRC32 that the file states, over the bytes of `views`."""
        if self._late_head is not None:
            return self._late_head.start_crc()
        return BodyCrc(self.body_size if self.has_crc_trailer else 0)

    def head(self, crc: int) -> bytes:
        """Return the late head for the CRC32 of the bytes behind it; empty without a late head."""
        return b"" if self._late_head is None else self._late_head.encode(crc)

    def trailer(self, crc: int) -> bytes:
        """Return the bytes after the body for the CRC32 of the body; empty without a trailer."""
        return encode_trailer(crc) if self.has_crc_trailer else b""

    def _content(self, index: int) -> memoryview:
        # Views of live arrays cost nothing to get again; a content that is made on demand would be
        # made once per range without this small cache.
        extent = self._extents[index]
        if extent.data is not None:
            return extent.data
        key = id(extent.content)
        with self._lock:
            view = self._cache.get(key)
            if view is not None:
                self._cache.move_to_end(key)
                return view
        view = extent.content() if self._uses is None else self._wipeable(index)
        if view.nbytes < extent.stop:
            raise FormatError(
                f"a tensor gave {view.nbytes} bytes where its shape and type need {extent.stop}"
            )
        with self._lock:
            self._cache[key] = view
            while len(self._cache) > _CACHED_CONTENTS:
                self._cache.popitem(last=False)
        return view

    def _wipeable(self, index: int) -> memoryview:
        """Return the content of an extent, which `_wipe_joined` overwrites if it is a copy."""
        content = self._extents[index].content
        if not isinstance(content, _Run):
            return content()
        view = memoryview(content.joined())
        with self._lock:
            self._joined.setdefault(index, []).append(view)
        return view


# Above, an extent of its own costs nothing beside the copy of the bytes.
_SMALL_BYTES = 16 << 10
# Made again for each chunk that it touches, so it is small beside a chunk of some MiB.
_RUN_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class _Run:
    """The content of an extent of small parts."""

    parts: tuple[bytes | Tensor, ...]
    tensors: tuple[Tensor, ...]  # those among the parts
    starts: tuple[int, ...]  # of the parts, in bytes

    def __call__(self) -> memoryview:
        # As bytes: the garbage collector would visit each of many views, several times.
        joined = _joined(self.tensors) if len(self.tensors) == len(self.parts) else None
        contents = (one if isinstance(one, bytes) else bytes(content_of(one)) for one in self.parts)
        return memoryview(b"".join(contents if joined is None else joined))

    def joined(self) -> bytearray:
        """Return the same content in memory that can be overwritten, without other copies."""
        parts = self.parts
        return bytearray().join(one if isinstance(one, bytes) else content_of(one) for one in parts)


def _joined(tensors: Sequence[Tensor]) -> Sequence[memoryview] | None:
    content = tensors[0].content
    join = JOINERS.get(content.func) if isinstance(content, partial) else None
    return None if join is None else join(tensors)


class ImageBuilder:
    """Builds the extents of an image, in the order of its bytes."""

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._run: list[bytes | Tensor] = []
        self._starts: list[int] = []
        self._run_bytes = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        if len(data) > _SMALL_BYTES:
            self._end_run()
            self._extents.append(Extent.of(data))
        else:
            self._run.append(data)
            self._starts.append(self._run_bytes)
            self._run_bytes += len(data)

    def add_tensor(self, tensor: Tensor, *, size_bytes: int) -> None:
        """Append the content of a tensor of `size_bytes` bytes."""
        if size_bytes > _SMALL_BYTES and isinstance(tensor.content, ContentPieces):
            self.add_pieces(tensor, tensor.content, 0, size_bytes)
        elif size_bytes > _SMALL_BYTES:
            content = partial(content_of, tensor)
            self.add_extent(Extent(content, 0, size_bytes, tensors=(tensor,)))
        elif size_bytes:
            self._run.append(tensor)
            self._starts.append(self._run_bytes)
            self._run_bytes += size_bytes
            if self._run_bytes >= _RUN_BYTES:
                self._end_run()

    def add_pieces(self, tensor: Tensor, content: ContentPieces, start: int, stop: int) -> None:
        """Append the bytes `[start, stop)` of a tensor whose content is made in pieces."""
        for cut in (*(one for one in content.cuts if start < one < stop), stop):
            made = partial(content.read, start, cut)
            self.add_extent(Extent(made, 0, cut - start, tensors=(tensor,)))
            start = cut

    def add_extent(self, extent: Extent) -> None:
        """Append an extent as it is."""
        self._end_run()
        self._extents.append(extent)

    def finish(self) -> list[Extent]:
        """Return all extents."""
        self._end_run()
        return self._extents

    def _end_run(self) -> None:
        if not self._run:
            return
        tensors = tuple([part for part in self._run if isinstance(part, Tensor)])
        run = _Run(tuple(self._run), tensors, tuple(self._starts))
        if tensors:
            self._extents.append(Extent(run, 0, self._run_bytes, tensors=tensors))
        else:
            self._extents.append(Extent.of(bytes(run())))
        self._run, self._starts, self._run_bytes = [], [], 0
