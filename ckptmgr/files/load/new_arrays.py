# SPDX-License-Identifier: Apache-2.0
"""The arrays that a load makes: in arenas, of NumPy, or copied out of batches of small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.formats.index import TensorEntry
from ckptmgr.io.arenas import Arena, make_arrays, new_array
from ckptmgr.io.scatter import SmallTensorBatch, SmallTensorBatches, piece_bytes_of


class NewArrays:
    """New arrays for tensors of a file, in file order.

    Attributes:
        arrays: The `id` of an entry to its array, with undefined content; those of small tensors
            are added when their batch is read.
        large: The entries of all but the small tensors.
        arenas: Those to be filled.
        batches: Those to be read.
    """

    def __init__(self, opened: OpenCheckpoint, entries: Iterable[TensorEntry]) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.large = list(entries)
        self.batches: list[SmallTensorBatch] = []
        is_in_pieces = opened.unit_bytes and opened.frames is None
        if is_in_pieces:
            small = SmallTensorBatches(self.arrays, grid_bytes=piece_bytes_of(opened.unit_bytes))
            self.large = small.take(self.large)
            self.batches = small.found
        arenas = make_arrays(self.large, self.arrays)
        self.arenas: Sequence[Arena] = arenas if is_in_pieces else ()
        self._in_arenas = frozenset(self.arrays) if is_in_pieces else frozenset()
        for one in self.large:
            if id(one) not in self.arrays:
                self.arrays[id(one)] = new_array(one.spec.shape, one.spec.dtype.to_numpy())

    def outside_arenas(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Return the entries whose arrays no arena fills."""
        return [one for one in entries if id(one) not in self._in_arenas]
