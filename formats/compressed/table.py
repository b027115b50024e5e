# SPDX-License-Identifier: Apache-2.0
"""The layout of a compressed file: frames that are expanded one by one, and their table at the end.

```
head     magic 8F 43 4B 50 5A 0D 0A 1A || version(1) || content(1) = 1 safetensors || 0(6)
frames   in any order, without gaps
padding  zeros up to a multiple of 16
table    for each frame, in the order of its expanded bytes:
         offset(8) || stored bytes(4) || raw bytes(4) || group(1) || method(1) || 0(6) || digest(32)
end      number of frames(8) || raw bytes of all(8) || 0(8) || digest of the table(32) || "CKPZTBL1"
```
Little-endian. Frames are written as soon as they are compressed, so one pass makes the file
although no compressed size is known before. Every byte is accounted for:

* Digests are BLAKE3: of a stored frame, and of head, table and the first 24 bytes of the end.
* A frame is expanded only after its digest was checked, and never to more than 4 MiB.
* Frames do not overlap, leave no gap, and expand to exactly the raw bytes that the end states.

Version 2 is written; version 1, which has no frames of planes (`planes`), is read for ever.

No other reader accepts the file: no protobuf field starts like the magic, and as the length of a
safetensors header it is too large.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from ..errors import ChecksumError, FormatError, TruncatedError, UnsupportedError
from ..source import Source, read_bytes

COMPRESSED_MAGIC = b"\x8fCKPZ\r\n\x1a"
FRAME_BYTES = 4 << 20
"""The most raw bytes of a frame."""
MAX_FRAMES = 1 << 21
"""8 TiB of full frames; a table has at most 112 MiB, about as much as a safetensors header."""
ALIGNMENT_BYTES = 16
FRAME_DIGEST_BYTES = 32
STORED, ZSTD, PLANES = 0, 1, 2
PLANES_GROUPS = (2, 4, 8)
"""Sizes of elements that can be divided into planes, in bytes."""

_SAFETENSORS = 1
_HEADS = {
    version: COMPRESSED_MAGIC + bytes((version, _SAFETENSORS)) + bytes(6) for version in (1, 2)
}
_METHODS = {_HEADS[1]: (STORED, ZSTD), _HEADS[2]: (STORED, ZSTD, PLANES)}
HEAD = _HEADS[2]
"""The first bytes of a new file."""
_ENTRY = struct.Struct(f"<QIIBB6s{FRAME_DIGEST_BYTES}s")
_COUNTS = struct.Struct("<QQQ")
_END_MAGIC = b"CKPZTBL1"
_END_BYTES = _COUNTS.size + FRAME_DIGEST_BYTES + len(_END_MAGIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """An entry of the table.

    `offset` and `stored_bytes` are its range in the file, `raw_bytes` its expanded length.
    `group_bytes` is the size of the elements whose bytes are grouped, or 1 for ungrouped; `method`
    is `STORED`, `ZSTD` or `PLANES`; `digest` is that of the stored bytes.
    """

    offset: int
    stored_bytes: int
    raw_bytes: int
    group_bytes: int
    method: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """The frames of a file, in the order of their `raw_bytes` expanded bytes."""

    frames: tuple[Frame, ...]
    raw_bytes: int


def frame_digest(stored: bytes | memoryview) -> bytes:
    """Return the digest of a stored frame."""
    return blake3(stored).digest()


def encode_tail(frames: Sequence[Frame], *, offset: int) -> bytes:
    """Return padding, table and end for frames in the order of their expanded bytes.

    `offset` is the end of the last frame.
    """
    table = b"".join(
        _ENTRY.pack(
            frame.offset,
            frame.stored_bytes,
            frame.raw_bytes,
            frame.group_bytes,
            frame.method,
            bytes(6),
            frame.digest,
        )
        for frame in frames
    )
    counts = _COUNTS.pack(len(frames), sum(frame.raw_bytes for frame in frames), 0)
    padding = bytes(-(offset + len(table) + _END_BYTES) % ALIGNMENT_BYTES)
    return padding + table + counts + _table_digest(HEAD, table, counts) + _END_MAGIC


def read_table(source: Source) -> FrameTable:
    """Return the table of a file, checked against its digest, the size of the file and itself.

    Raises:
        TruncatedError: The file ends too early.
        ChecksumError: The table or the head was changed.
        UnsupportedError: A newer version wrote it, or it has too many frames.
        FormatError: The table contradicts itself.
    """
    head = _read_head(source)
    end_at = source.size - _END_BYTES
    if end_at < len(HEAD):
        raise TruncatedError("the file ends before its table of frames", offset=source.size)
    end = read_bytes(source, end_at, _END_BYTES)
    if not end.endswith(_END_MAGIC):
        raise TruncatedError(
            "no table of frames stands at the end: the file was cut off, or something was added",
            offset=end_at,
        )
    count, raw_bytes, zeros = _COUNTS.unpack_from(end)
    check_frame_count(count)
    table_at = end_at - count * _ENTRY.size
    if table_at < len(HEAD):
        raise FormatError(
            f"a table of {count} frames does not fit into {source.size} bytes", offset=end_at
        )
    table = read_bytes(source, table_at, end_at - table_at)
    counts = end[: _COUNTS.size]
    if _table_digest(head, table, counts) != end[_COUNTS.size : -len(_END_MAGIC)]:
        raise ChecksumError("the table of frames does not match its digest", offset=table_at)
    if zeros:
        raise UnsupportedError("the end of the table is of a newer version", offset=end_at)
    methods = _METHODS[head]
    frames = tuple(_parse_entry(one, methods, table_at) for one in _ENTRY.iter_unpack(table))
    if sum(frame.raw_bytes for frame in frames) != raw_bytes:
        raise FormatError(
            f"the frames do not stand for the {raw_bytes} bytes that the end states", offset=end_at
        )
    _check_layout(source, frames, table_at)
    return FrameTable(frames=frames, raw_bytes=raw_bytes)


def check_frame_count(count: int) -> None:
    """Raise UnsupportedError unless a file may have `count` frames."""
    if count > MAX_FRAMES:
        raise UnsupportedError(f"{count} compressed frames are more than {MAX_FRAMES}")


def _read_head(source: Source) -> bytes:
    head = read_bytes(source, 0, min(len(HEAD), source.size))
    if not head.startswith(COMPRESSED_MAGIC):
        raise FormatError("this is no compressed file", offset=0)
    if len(head) < len(HEAD):
        raise TruncatedError("the file ends in its head", offset=len(head))
    if head not in _METHODS:
        raise UnsupportedError(
            f"a compressed file of version {head[8]} with content {head[9]}: a newer ckptmgr wrote "
            "it, or its head is damaged",
            offset=len(COMPRESSED_MAGIC),
        )
    return head


def _parse_entry(
    fields: tuple[int, int, int, int, int, bytes, bytes], methods: tuple[int, ...], table_at: int
) -> Frame:
    offset, stored, raw, group, method, zeros, digest = fields
    if method not in methods or zeros != bytes(6):
        raise UnsupportedError(f"a frame is stored by the unknown method {method}", offset=table_at)
    if not 0 < raw <= FRAME_BYTES or not 0 < stored <= raw:
        raise FormatError(
            f"a frame of {stored} bytes stands for {raw}; at most {FRAME_BYTES}, and never more than it "
            "stands for",
            offset=table_at,
        )
    if (
        group == 0
        or raw % group
        or (method == STORED and (stored != raw or group != 1))
        or (method == PLANES and group not in PLANES_GROUPS)
    ):
        raise FormatError(
            f"a frame of {stored} bytes stands for {raw} in groups of {group}", offset=table_at
        )
    return Frame(
        offset=offset,
        stored_bytes=stored,
        raw_bytes=raw,
        group_bytes=group,
        method=method,
        digest=digest,
    )


def _check_layout(source: Source, frames: Sequence[Frame], table_at: int) -> None:
    end = len(HEAD)
    for frame in sorted(frames, key=lambda one: one.offset):
        if frame.offset != end:
            raise FormatError("frames overlap, or leave a gap", offset=end)
        end += frame.stored_bytes
    padding = table_at - end
    if not 0 <= padding < ALIGNMENT_BYTES or source.size % ALIGNMENT_BYTES:
        raise FormatError(f"{padding} bytes between the frames and their table", offset=table_at)
    if any(read_bytes(source, end, padding)):
        raise FormatError("the padding before the table is not zero", offset=end)


def _table_digest(head: bytes, table: bytes, counts: bytes) -> bytes:
    return blake3(head + table + counts).digest()
