# SPDX-License-Identifier: Apache-2.0
"""The header of a container: its immutable parameters and its key slots.

```
 0   8  magic 8F 43 4B 50 45 0D 0A 1A
 8   1  version = 1               9   1  log2 of the size of a header copy, 12 to 16
10   2  cipher suite             12   4  flags = 0
16  16  file id                  32   8  plaintext bytes
40   2  content                  42   2  0
44   4  bytes of a segment       48  16  0                  -- bytes 0 to 63: immutable
64   8  generation               72   2  number of slots    74   2  0
76   4  bytes of all slots       80      slots, then zeros
-32  32 header MAC over everything before it
```
Little-endian. A file begins with two copies of this header, so that one of them is whole at every
instant of a rewrite. The immutable bytes are associated data of the payload, of every slot and of
the MAC key.

Nothing here is authenticated before `is_authentic` says so; every value is checked before it is
used.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives import constant_time, hmac
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ..errors import TamperedError, UnsupportedSuiteError
from ..keys.key import Key
from ..slots import Slot, pack_slots, parse_slots
from .floe import MAX_SEGMENTS, FloeParameters
from .suites import Suite, suite_with

CONTAINER_MAGIC = b"\x8fCKPE\r\n\x1a"
FIXED_BYTES = 64
FILE_ID_BYTES = 16
COPY_SIZES = tuple(1 << log2 for log2 in range(12, 17))
MAX_SEGMENT_BYTES = 64 * 2**20
FRAMES_ALIGNMENT_BYTES = 16
"""Of the length of frames: the last segment then gives its plaintext length in CBC, too."""

_VERSION = 1
_MAC_BYTES = 32
_MAC_INFO = b"ckptmgr/v1/header-mac"
_FIXED = struct.Struct(f"<8sBBHI{FILE_ID_BYTES}sQHHI16s")
_MUTABLE = struct.Struct("<QHHI")
_SLOTS_OFFSET = FIXED_BYTES + _MUTABLE.size
_MAX_PLAINTEXT_BYTES = 2**63 - 1
_MAX_GENERATION = 2**64 - 1


class Content(enum.IntEnum):
    """The kind of the plaintext."""

    SAFETENSORS = 1
    MINDSPORE_CKPT = 2
    OPAQUE = 3
    FRAMES = 4
    """Compressed frames and their table; `plaintext_size` is their expanded size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedHeader:
    """The immutable part of the header of a container.

    `copy_bytes` is the size of one header copy. `plaintext_size` of frames is their expanded size,
    because their own size is known last. `segment_bytes` is the length of every segment but the
    last.

    Raises:
        ValueError: A size is out of range.
    """

    copy_bytes: int
    suite: Suite
    file_id: bytes
    plaintext_size: int
    content: Content
    segment_bytes: int

    def __post_init__(self) -> None:
        if self.copy_bytes not in COPY_SIZES:
            raise ValueError(f"a header copy of {self.copy_bytes} bytes is none of {COPY_SIZES}")
        if not 0 < self.segment_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment of {self.segment_bytes} bytes is out of range")
        if not 0 <= self.plaintext_size <= _MAX_PLAINTEXT_BYTES:
            raise ValueError(f"a plaintext of {self.plaintext_size} bytes is out of range")
        if self.content is Content.FRAMES and self.segment_bytes % FRAMES_ALIGNMENT_BYTES:
            raise ValueError(
                f"the length of frames is not told by segments of {self.segment_bytes}"
            )
        if self.segment_count > MAX_SEGMENTS:
            raise ValueError(f"{self.segment_count} segments are more than {MAX_SEGMENTS}")

    @property
    def parameters(self) -> FloeParameters:
        """The parameters of the payload."""
        return self.suite.parameters(self.segment_bytes)

    @property
    def segment_count(self) -> int:
        """At least 1: the final segment may be empty."""
        return max(1, -(-self.plaintext_size // self.parameters.plaintext_bytes))

    @property
    def segments_offset(self) -> int:
        """Offset of the first segment: a multiple of 4096."""
        return 2 * self.copy_bytes + COPY_SIZES[0]

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        full = self.segment_count - 1
        rest = self.plaintext_size - full * self.parameters.plaintext_bytes
        last = self.parameters.segment_size(rest)
        return self.segments_offset + full * self.segment_bytes + last

    def with_stored_size(self, file_size: int) -> FixedHeader:
        """Return this header with the stored size of frames, from the size of the file.

        Raises ValueError if no file with frames has that size.
        """
        if self.content is not Content.FRAMES:
            return self
        full, rest = divmod(file_size - self.segments_offset, self.segment_bytes)
        if rest == 0:
            full, rest = full - 1, self.segment_bytes
        last = rest - self.parameters.segment_size(0)
        if full < 0 or last < 0 or last % FRAMES_ALIGNMENT_BYTES:
            raise ValueError(f"{file_size} bytes end inside a segment")
        return replace(self, plaintext_size=full * self.parameters.plaintext_bytes + last)

    def pack(self) -> bytes:
        """Return the 64 immutable bytes."""
        return _FIXED.pack(
            CONTAINER_MAGIC,
            _VERSION,
            self.copy_bytes.bit_length() - 1,
            self.suite.code,
            0,
            self.file_id,
            self.plaintext_size,
            self.content,
            0,
            self.segment_bytes,
            bytes(16),
        )


def parse_fixed(data: bytes, *, offset: int) -> FixedHeader:
    """Parse 64 immutable bytes, which are at `offset` of the file.

    Raises:
        UnsupportedSuiteError: A newer version wrote them.
        TamperedError: They contradict themselves.
    """
    magic, version, log2, code, flags, file_id, plaintext_size, content, zero, segment, rest = (
        _FIXED.unpack(data)
    )
    if magic != CONTAINER_MAGIC:
        raise TamperedError("no header starts here", offset=offset)
    if version != _VERSION or flags or content not in iter(Content):
        raise UnsupportedSuiteError(
            f"the container is of version {version} with flags {flags:#x} and content {content}",
            offset=offset,
            hint="a newer ckptmgr wrote it, or its header is damaged",
        )
    suite = suite_with(code, offset=offset)
    if zero or any(rest):
        raise TamperedError("reserved bytes of the header are not zero", offset=offset)
    try:
        return FixedHeader(
            copy_bytes=1 << min(log2, 63),
            suite=suite,
            file_id=file_id,
            plaintext_size=plaintext_size,
            content=Content(content),
            segment_bytes=segment,
        )
    except ValueError as error:
        raise TamperedError(f"the header is inconsistent: {error}", offset=offset) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderCopy:
    """One of the two copies of a header; `generation` counts the rewrites, from 1."""

    fixed: FixedHeader
    generation: int
    slots: tuple[Slot, ...]

    def pack(self, data_key: Key) -> bytes:
        """Return the bytes of a copy, or raise ValueError if the slots do not fit."""
        if self.generation > _MAX_GENERATION:
            raise ValueError("its header says that it was rewritten as often as can be")
        slots = pack_slots(self.slots)
        room = self.fixed.copy_bytes - _SLOTS_OFFSET - _MAC_BYTES
        if len(slots) > room:
            raise ValueError(f"key slots of {len(slots)} bytes do not fit into {room}")
        mutable = _MUTABLE.pack(self.generation, len(self.slots), 0, len(slots))
        content = self.fixed.pack() + mutable + slots + bytes(room - len(slots))
        return content + _mac(self.fixed, data_key, content)


def parse_copy(data: bytes, *, offset: int) -> HeaderCopy:
    """Parse one header copy; raises as `parse_fixed` does. Not authenticated."""
    fixed = parse_fixed(data[:FIXED_BYTES], offset=offset)
    generation, count, zero, slots_size = _MUTABLE.unpack_from(data, FIXED_BYTES)
    end = _SLOTS_OFFSET + slots_size
    if len(data) != fixed.copy_bytes or zero or end > len(data) - _MAC_BYTES:
        raise TamperedError("the header is inconsistent", offset=offset)
    if any(data[end:-_MAC_BYTES]):
        raise TamperedError("reserved bytes of the header are not zero", offset=offset + end)
    slots = parse_slots(data[_SLOTS_OFFSET:end], count=count, offset=offset + _SLOTS_OFFSET)
    return HeaderCopy(fixed=fixed, generation=generation, slots=slots)


def is_authentic(data: bytes, fixed: FixedHeader, data_key: Key) -> bool:
    """Return whether the MAC at the end of a header copy is right under `data_key`."""
    expected = _mac(fixed, data_key, data[:-_MAC_BYTES])
    return constant_time.bytes_eq(expected, data[-_MAC_BYTES:])


def smallest_copy_size(slots: Sequence[Slot]) -> int | None:
    """Return the size of a header copy for these slots, or None if they are too long."""
    needed = _SLOTS_OFFSET + sum(slot.size for slot in slots) + _MAC_BYTES
    return next((size for size in COPY_SIZES if size >= needed), None)


def _mac(fixed: FixedHeader, data_key: Key, content: bytes) -> bytes:
    suite = fixed.suite
    kdf = HKDFExpand(algorithm=suite.kdf_digest, length=_MAC_BYTES, info=_MAC_INFO + fixed.pack())
    mac = hmac.HMAC(kdf.derive(data_key.raw), suite.mac_digest)
    mac.update(content)
    return mac.finalize()
