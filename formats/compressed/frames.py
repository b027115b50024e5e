# SPDX-License-Identifier: Apache-2.0
"""Expands one frame of at most 4 MiB.

Before a frame is expanded, its digest is checked; then zstd must agree that it is one whole zstd
frame, without a dictionary, of exactly the size in the table. A frame of planes (`planes`) is
checked as a whole, and then each of its zstd frames in this way.

Source: RFC 8878 (zstd).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..errors import ChecksumError, FormatError, UnsupportedError
from .table import PLANES, Frame, frame_digest

if TYPE_CHECKING:
    import numpy as np
    import zstandard

    from .elements import Numbers

_MAX_WINDOW_BYTES = 8 << 20  # RFC 8878 3.1.1.1.2: what every decoder should support
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def unpack_frame(frame: Frame, stored: memoryview, raw: memoryview) -> None:
    """Expand a compressed frame into `raw`: flat, writable, format B, of `frame.raw_bytes` bytes.

    Raises:
        ChecksumError: It does not match its digest; nothing was expanded.
        UnsupportedError: It needs a dictionary, or more memory than a frame of ours.
        FormatError: It is not one zstd frame of that size.
    """
    check_frame(frame, stored)
    if frame.method == PLANES:
        _unpack_planes(frame, stored, raw)
        return
    expanded = _expand(frame, stored, frame.raw_bytes)
    _ungroup(_bytes_of(expanded).reshape(frame.group_bytes, -1), raw)


def _unpack_planes(frame: Frame, stored: memoryview, raw: memoryview) -> None:
    import numpy as np

    from .elements import put_together
    from .planes import CONSTANT, FLOAT, ZSTD, read_head

    count = frame.raw_bytes // frame.group_bytes
    form, planes = read_head(frame, stored)
    parts: list[tuple[int, Numbers | int]] = []
    for plane, part in planes:
        if plane.method == CONSTANT:
            parts.append((plane.first_byte, int.from_bytes(part, "little")))
            continue
        content = _expand(frame, part, count * plane.width) if plane.method == ZSTD else part
        parts.append((plane.first_byte, np.frombuffer(content, f"<u{plane.width}")))
    numbers = np.frombuffer(raw, f"<u{frame.group_bytes}")
    put_together(parts, numbers, is_float=form == FLOAT)


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


def _expand(frame: Frame, stored: memoryview, size: int) -> bytes:
    """Return the `size` bytes that a zstd frame within a frame expands to."""
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
        if said.content_size != size:
            raise FormatError(
                f"a zstd frame is of {said.content_size} bytes, the table says {size}",
                offset=frame.offset,
            )
        expanded: bytes = _decompressor().decompress(
            stored, max_output_size=size, allow_extra_data=False
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
