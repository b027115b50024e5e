# SPDX-License-Identifier: Apache-2.0
"""Tensors of a plain file as mapped memory: their pages are those of the page cache.

* If the file has digests, the ranges of a tensor are checked once, before it is returned.
* A tensor that is not contiguous, or not aligned for its element type, cannot be mapped.
* The memory exists as long as the last array over it, even if the file is closed or removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.io.digest import RANGE_BYTES, VerifyingSource
from ckptmgr.io.files import CachedFile
from ckptmgr.io.threads import PIECE_BYTES, for_each_unit


class MappedTensors:
    """The tensors of one open file.

    Raises:
        UnsupportedCheckpoint: It is encrypted or compressed.
        TruncatedError: It has become shorter since it was opened.
    """

    def __init__(self, file: CachedFile, opened: OpenCheckpoint) -> None:
        if opened.cipher is not None:
            raise UnsupportedCheckpoint(
                f"is encrypted ({opened.cipher}); only plain files can be mapped",
                path=opened.path,
                hint="open it without mmap",
            )
        if opened.compressed_bytes is not None:
            raise UnsupportedCheckpoint(
                "is compressed; only plain files can be mapped",
                path=opened.path,
                hint="open it without mmap",
            )
        self._file = file
        self._source = opened.source
        self._memory = memoryview(file.map())
        self._checked: set[int] = set()

    def part(self, entry: TensorEntry, skipped: int, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return the part of a tensor after `skipped` bytes, read-only, or None if unmappable.

        Raises:
            ChecksumMismatch: One of its ranges does not match its digest.
            OSError: From the disk.
        """
        dtype = entry.spec.dtype.to_numpy()
        length = prod(shape) * dtype.itemsize
        if len(entry.pieces) != 1 or not length:
            return None
        start = entry.pieces[0].offset + skipped
        if start % dtype.alignment:
            return None
        if isinstance(self._source, VerifyingSource):
            if self._source.range_bytes != RANGE_BYTES:
                return None
            self._check(
                self._source, range(start // RANGE_BYTES, (start + length - 1) // RANGE_BYTES + 1)
            )
        view = self._memory[start : start + length]
        check_content(entry, view, offset=start)
        array: np.ndarray = np.frombuffer(view, dtype)
        return array.reshape(shape)

    def _check(self, source: VerifyingSource, ranges: Iterable[int]) -> None:
        """Compare ranges with their digests, each once, in the mapped memory itself."""

        def check(index: int, buffer: memoryview) -> None:
            del buffer
            start = index * RANGE_BYTES
            stop = min(start + RANGE_BYTES, source.size)
            self._file.will_need(start, stop - start)
            reader = source.open_range(index)
            for first in range(start, stop, PIECE_BYTES):
                reader.take(self._memory[first : min(first + PIECE_BYTES, stop)])
            reader.finish()
            self._checked.add(index)

        for_each_unit([one for one in ranges if one not in self._checked], check)
