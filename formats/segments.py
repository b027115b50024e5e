# SPDX-License-Identifier: Apache-2.0
"""Collect the parts of an image so that small tensors cost little.

A segment for each small tensor would cost more than its bytes. So heads and small tensors that follow each other form a
run, one segment, which is put together by a single join each time it is needed. Large tensors stay where they are.

>>> segments = Segments()
>>> segments.add(b"head")
>>> segments.add(b"more")
>>> [bytes(segment.content()) for segment in segments.finish()]
[b'headmore']
"""

from __future__ import annotations

from dataclasses import dataclass

from .image import Segment
from .tensor import Tensor, checked_content, content_of

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
