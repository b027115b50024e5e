# SPDX-License-Identifier: Apache-2.0
"""Compresses and expands one frame of at most 4 MiB.

Before compression, the bytes of a tensor's elements are grouped (byte shuffle): all first bytes,
then all second ones, and so on. The last byte of weights (sign and exponent) then compresses well.
Where repeated elements matter more (scattered zeros in optimizer states) grouping harms, so a
sample of the frame decides.

A frame that zstd does not make smaller is stored uncompressed. Before a frame is expanded, its
digest is checked; then zstd must agree that it is one whole frame, without a dictionary, of exactly
the size in the table.

>>> packed = FramePacker(level=1).pack(memoryview(bytes(4000)), item_bytes=4)
>>> len(packed.stored) < 100, packed.group_bytes
(True, 4)

Source: RFC 8878 (zstd).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ChecksumError, FormatError, UnsupportedError
from .table import FRAME_BYTES, STORED, ZSTD, Frame, frame_digest

if TYPE_CHECKING:
    import numpy as np
    import zstandard

LEVELS = range(1, 20)
"""Levels of zstd. Those above 1 are worth their time for sparse states, hardly for weights."""
_MAX_WINDOW_BYTES = 8 << 20  # RFC 8878 3.1.1.1.2: what every decoder should support
# Grouped weights have no repetitions, only bytes of unequal frequency. Short matches that zstd
# finds by chance cost time and space: without them, level 1 is a fifth faster, and smaller than
# all levels up to 15.
_GROUPED = {"min_match": 7}
_GROUPED_HASH_LOG = 12
_SAMPLE_BYTES = 64 << 10
_SMALL_BYTES = 512 << 10
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed frame; `stored` is the caller's own memory if the frame is stored uncompressed."""

    stored: bytes | memoryview
    group_bytes: int
    method: int


def _compressor(level: int, **parameters: int) -> zstandard.ZstdCompressor:
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=FRAME_BYTES, write_content_size=1, write_checksum=0, **parameters
    )
    return zstandard.ZstdCompressor(compression_params=chosen)


class FramePacker:
    """Compresses frames at a zstd level, for one thread at a time; reuses its memory."""

    def __init__(self, *, level: int) -> None:
        check_level(level)
        self._compressors = {False: _compressor(level), True: _compressor(level, **_GROUPED)}
        if level == 1:
            self._compressors[True] = _compressor(level, **_GROUPED, hash_log=_GROUPED_HASH_LOG)
        self._grouped = bytearray()

    def pack(self, raw: memoryview, *, item_bytes: int) -> Packed:
        """Return the frame for `raw` (flat, format B), whose elements have `item_bytes` bytes."""
        size = raw.nbytes
        if not 0 < size <= FRAME_BYTES or size % item_bytes:
            raise ValueError(f"{size} bytes of elements of {item_bytes} are no frame")
        stored, group_bytes = self._best(raw, item_bytes)
        if len(stored) < size:
            return Packed(stored=stored, group_bytes=group_bytes, method=ZSTD)
        return Packed(stored=raw, group_bytes=1, method=STORED)

    def _best(self, raw: memoryview, item_bytes: int) -> tuple[bytes, int]:
        """Return the smaller of grouped and plain; of a large frame only a sample is tried."""
        if item_bytes == 1:
            return self._compress(raw, 1), 1
        if raw.nbytes > _SMALL_BYTES:
            group_bytes = item_bytes if self._gains_by_groups(raw, item_bytes) else 1
            return self._compress(raw, group_bytes), group_bytes
        grouped, plain = self._compress(raw, item_bytes), self._compress(raw, 1)
        return (grouped, item_bytes) if len(grouped) <= len(plain) else (plain, 1)

    def _gains_by_groups(self, raw: memoryview, item_bytes: int) -> bool:
        start = (raw.nbytes - _SAMPLE_BYTES) // 2 // item_bytes * item_bytes
        sample = raw[start : start + _SAMPLE_BYTES]
        plain = len(self._compress(sample, 1))
        # Each group by itself: in a large frame, a group fills its own zstd blocks.
        grouped, group = self._group(sample, item_bytes), _SAMPLE_BYTES // item_bytes
        parts = (grouped[at : at + group] for at in range(0, _SAMPLE_BYTES, group))
        return sum(len(self._compressors[True].compress(part)) for part in parts) <= plain

    def _compress(self, raw: memoryview, group_bytes: int) -> bytes:
        source = raw if group_bytes == 1 else self._group(raw, group_bytes)
        return self._compressors[group_bytes > 1].compress(source)

    def _group(self, raw: memoryview, item_bytes: int) -> memoryview:
        if len(self._grouped) < raw.nbytes:
            self._grouped = bytearray(raw.nbytes)
        grouped = memoryview(self._grouped)[: raw.nbytes]
        _copy(_bytes_of(raw).reshape(-1, item_bytes).T, _bytes_of(grouped).reshape(item_bytes, -1))
        return grouped


def check_level(level: int) -> None:
    """Raise UnsupportedError unless zstd has such a level."""
    if level not in LEVELS:
        raise UnsupportedError(
            f"a zstd level is {LEVELS.start} to {LEVELS.stop - 1}, but got {level}"
        )


def unpack_frame(frame: Frame, stored: memoryview, raw: memoryview) -> None:
    """Expand a compressed frame into `raw`: flat, writable, format B, of `frame.raw_bytes` bytes.

    Raises:
        ChecksumError: It does not match its digest; nothing was expanded.
        UnsupportedError: It needs a dictionary, or more memory than a frame of ours.
        FormatError: It is not one zstd frame of that size.
    """
    check_frame(frame, stored)
    expanded = _expand(frame, stored)
    _ungroup(_bytes_of(expanded).reshape(frame.group_bytes, -1), raw)


def _ungroup(planes: np.ndarray, raw: memoryview) -> None:
    import numpy as np

    # Few long calls, each without the GIL; one transposed copy is slow in NumPy.
    if len(planes) not in (2, 4):
        elements = _bytes_of(raw).reshape(-1, len(planes))
        for index, plane in enumerate(planes):
            _copy(plane, elements[:, index])
        return
    numbers = np.frombuffer(raw, f"<u{len(planes)}")
    _copy(planes[-1], numbers)
    for plane in planes[-2::-1]:
        np.left_shift(numbers, 8, out=numbers)
        np.bitwise_or(numbers, plane, out=numbers)


def check_frame(frame: Frame, stored: memoryview) -> None:
    """Raise ChecksumError unless a stored frame matches its digest."""
    if frame_digest(stored) != frame.digest:
        raise ChecksumError("a compressed frame does not match its digest", offset=frame.offset)


def _expand(frame: Frame, stored: memoryview) -> bytes:
    import zstandard

    if stored[:4] != _ZSTD_MAGIC:  # a skippable frame has another magic and expands to nothing
        raise FormatError("a frame is no zstd frame", offset=frame.offset)
    try:
        said = zstandard.get_frame_parameters(stored)
        if said.dict_id or said.window_size > _MAX_WINDOW_BYTES:
            raise UnsupportedError(
                f"a zstd frame asks for dictionary {said.dict_id} and a window of {said.window_size} bytes",
                offset=frame.offset,
            )
        if said.content_size != frame.raw_bytes:
            raise FormatError(
                f"a zstd frame is of {said.content_size} bytes, the table says {frame.raw_bytes}",
                offset=frame.offset,
            )
        expanded: bytes = _decompressor().decompress(
            stored, max_output_size=frame.raw_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"a zstd frame does not expand: {error}", offset=frame.offset) from error
    return expanded


class _Decompressors(threading.local):
    known: zstandard.ZstdDecompressor | None = None


_decompressors = _Decompressors()


def _decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor: a new one costs as much as expanding a small frame."""
    import zstandard

    if _decompressors.known is None:
        _decompressors.known = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    return _decompressors.known


def _bytes_of(view: bytes | memoryview) -> np.ndarray:
    import numpy as np

    return np.frombuffer(view, np.uint8)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    import numpy as np

    np.copyto(target, source)  # releases the GIL
