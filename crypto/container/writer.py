# SPDX-License-Identifier: Apache-2.0
r"""Writes a container: any bytes, encrypted for its recipients, in segments.

```
header copy A | header copy B | zeros | FLOE header(74) | segment 0 | segment 1 | ...
```
* The segments start at a multiple of 4096, and all but the last are exactly `segment_bytes` long:
  aligned for direct I/O.
* From the FLOE header on, the file is one FLOE message whose associated data are the 64 immutable
  bytes of the header.
* The size of the file and its head are known before the first segment is sealed.
* The data key is new for every file and never leaves memory but wrapped, in the key slots.

>>> from ..slots.secret import RawKey
>>> from .source import open_container
>>> data, me = b"weights and biases", RawKey(Key(bytes(16)))
>>> sealer = ContainerSealer([me], plaintext_size=len(data))
>>> file = bytearray(sealer.head) + bytearray(sealer.sealed_size - len(sealer.head))
>>> for index in range(sealer.block_count):
...     start, size = sealer.plaintext_range(index)
...     at, length = sealer.record_range(index)
...     segment = memoryview(file)[at : at + length]
...     sealer.seal_into(index, memoryview(data)[start : start + size], segment)
>>> sealer.finish()
>>> file[:5]
bytearray(b'\x8fCKPE')
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ciphers import Random
from ..keys.key import Key
from ..slots import DATA_KEY_BYTES, Recipient
from .floe import FloeMessage, start_encryption
from .header import (
    COPY_SIZES,
    FILE_ID_BYTES,
    FRAMES_ALIGNMENT_BYTES,
    Content,
    FixedHeader,
    HeaderCopy,
    smallest_copy_size,
)
from .suites import suite_of

SEGMENT_BYTES = 4 * 2**20
"""Long enough to make the cost of a call into the cipher small."""


class ContainerSealer:
    """Encrypts one plaintext for its recipients. Several threads may seal segments, in any order.

    Args:
        recipients: The keys that open the file; 1 to 16.
        mode: `AES-GCM`, `SM4-GCM`, `AES-CBC` or `SM4-CBC`; the last two are encrypt-then-MAC.
        plaintext_size: Bytes of the plaintext.
        content: Kind of the plaintext.
        raw_size: Expanded bytes of frames; None for other contents.
        segment_bytes: Length of a segment; a multiple of 16 up to 64 MiB.
        copy_bytes: Size of a header copy, 4096 to 65536, with room for later slots; by default the
            smallest.
        random: Returns that many unpredictable bytes.

    Attributes:
        head: Everything before the first segment.
        copies_bytes: Bytes of the two header copies at the start of the head.
        block_count: The number of segments, at least 1.
        record_bytes: Bytes of every segment but the last.
        sealed_size: Bytes of the finished file.

    Raises:
        UnsupportedSuiteError: There is no such mode.
        ValueError: A size or the number of recipients is out of range, or `raw_size` does not fit
            the content.
    """

    def __init__(
        self,
        recipients: Sequence[Recipient],
        mode: str = "AES-GCM",
        *,
        plaintext_size: int,
        content: Content = Content.OPAQUE,
        raw_size: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        copy_bytes: int | None = None,
        random: Random = os.urandom,
    ) -> None:
        self._random = random
        start = start_container(
            recipients,
            mode,
            stated_size=_stated_size(plaintext_size, content, raw_size),
            content=content,
            segment_bytes=segment_bytes,
            copy_bytes=copy_bytes,
            random=random,
        )
        self._message, self.head = start.message, start.head
        self._fixed = replace(start.fixed, plaintext_size=plaintext_size)
        self.copies_bytes = 2 * self._fixed.copy_bytes
        self.block_count = self._fixed.segment_count
        self.record_bytes = segment_bytes
        self.sealed_size = self._fixed.file_size
        self._sealed = bytearray(self.block_count)
        self._claimed = bytearray(self.block_count)
        self._lock = threading.Lock()

    def plaintext_range(self, index: int) -> tuple[int, int]:
        """Return offset and length of segment `index` in the plaintext."""
        return plaintext_range(self._fixed, index)

    def record_range(self, index: int) -> tuple[int, int]:
        """Return offset and length of segment `index` in the file."""
        return segment_range(self._fixed, index)

    def seal_into(self, index: int, plaintext: memoryview, segment: memoryview) -> None:
        """Encrypt segment `index`. Safe to call from several threads, for different segments.

        `plaintext` are the contiguous bytes of `plaintext_range(index)`, `segment` is memory for
        those of `record_range(index)`; they must not overlap.

        Raises:
            ValueError: A length is wrong, or the segment was sealed before.
        """
        wanted = (self.plaintext_range(index)[1], self.record_range(index)[1])
        if (plaintext.nbytes, segment.nbytes) != wanted:
            raise ValueError(
                f"segment {index} has {wanted[1]} bytes for {wanted[0]}, not {segment.nbytes} for {plaintext.nbytes}"
            )
        with self._lock:
            if self._claimed[index]:
                raise ValueError(f"segment {index} is sealed twice")
            self._claimed[index] = 1
        is_final = index == self.block_count - 1
        self._message.seal_into(index, plaintext, segment, is_final=is_final, random=self._random)
        self._sealed[index] = 1

    def finish(self) -> None:
        """Raise ValueError unless every segment was sealed."""
        missing = self._sealed.find(0)
        if missing >= 0:
            raise ValueError(f"segment {missing} of {self.block_count} was not sealed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedContainer:
    """A new container: immutable header, payload to be encrypted, bytes before the segments."""

    fixed: FixedHeader
    message: FloeMessage
    head: bytes


def start_container(
    recipients: Sequence[Recipient],
    mode: str,
    *,
    stated_size: int,
    content: Content,
    segment_bytes: int,
    copy_bytes: int | None,
    random: Random,
) -> StartedContainer:
    """Start a container under a new data key; without `copy_bytes`, the slots decide that size.

    Raises:
        UnsupportedSuiteError: There is no such mode.
        ValueError: A size or the number of recipients is out of range.
    """
    data_key = Key(random(DATA_KEY_BYTES))
    fixed = FixedHeader(
        copy_bytes=copy_bytes or COPY_SIZES[0],
        suite=suite_of(mode),
        file_id=random(FILE_ID_BYTES),
        plaintext_size=stated_size,
        content=content,
        segment_bytes=segment_bytes,
    )
    header = _wrap_header(fixed, recipients, data_key, may_grow=copy_bytes is None)
    message = start_encryption(
        fixed.parameters, data_key.raw, aad=header.fixed.pack(), random=random
    )
    copy = header.pack(data_key)
    zeros = header.fixed.segments_offset - 2 * len(copy) - len(message.header)
    head = copy + copy + bytes(zeros) + message.header
    return StartedContainer(fixed=header.fixed, message=message, head=head)


def _stated_size(plaintext_size: int, content: Content, raw_size: int | None) -> int:
    """Return the size for the header."""
    if (raw_size is not None) != (content is Content.FRAMES):
        raise ValueError("the size that frames expand to belongs to frames, and to nothing else")
    if raw_size is None:
        return plaintext_size
    if not plaintext_size or plaintext_size % FRAMES_ALIGNMENT_BYTES:
        raise ValueError(f"frames of {plaintext_size} bytes do not end where they must")
    return raw_size


def _wrap_header(
    fixed: FixedHeader, recipients: Sequence[Recipient], data_key: Key, *, may_grow: bool
) -> HeaderCopy:
    """Return the first header of a file, in larger copies if the slots need them and `may_grow`."""
    bound = fixed.pack()
    slots = tuple(recipient.wrap(data_key, bound=bound) for recipient in recipients)
    needed = smallest_copy_size(slots)
    if may_grow and needed is not None and needed > fixed.copy_bytes:
        # The slots are bound to the size of the copies: they are made again.
        return _wrap_header(replace(fixed, copy_bytes=needed), recipients, data_key, may_grow=False)
    return HeaderCopy(fixed=fixed, generation=1, slots=slots)


def plaintext_range(fixed: FixedHeader, index: int) -> tuple[int, int]:
    """Return offset and length of segment `index` in the plaintext."""
    _check_index(fixed, index)
    full = fixed.parameters.plaintext_bytes
    start = index * full
    return start, min(full, fixed.plaintext_size - start)


def segment_range(fixed: FixedHeader, index: int) -> tuple[int, int]:
    """Return offset and length of segment `index` in the file."""
    size = plaintext_range(fixed, index)[1]
    start = fixed.segments_offset + index * fixed.segment_bytes
    return start, fixed.parameters.segment_size(size)


def _check_index(fixed: FixedHeader, index: int) -> None:
    if not 0 <= index < fixed.segment_count:
        raise ValueError(f"there is no segment {index} of {fixed.segment_count}")
