# SPDX-License-Identifier: Apache-2.0
"""Small tensors that lie side by side in a file: read together, and made into new arrays while they are in the cache.

A place of its own for each of ten thousands of tensors would cost more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from ckptmgr.formats.index import TensorEntry
from ckptmgr.io.scatter import Cluster

# Above, a place of its own costs nothing beside the copy of the bytes.
_SMALL_BYTES = 16 << 10


class Clusters:
    """Collects small tensors.

    Args:
        arrays: Takes the new arrays, by the `id` of their entry. Each has memory of its own.
        grid_bytes: The file is read in pieces that start at multiples of it; a cluster lies in one of them.

    Attributes:
        found: The clusters, in file order.
    """

    def __init__(self, arrays: dict[int, np.ndarray], *, grid_bytes: int) -> None:
        self._arrays = arrays
        self._grid_bytes = grid_bytes
        self.found: list[Cluster] = []

    def take(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Take tensors, given in file order; return those that need an array before the file is read."""
        others: list[TensorEntry] = []
        run: list[TensorEntry] = []
        run_stop = run_limit = 0
        for entry in entries:
            spec, pieces = entry
            if len(pieces) == 1:
                start, length = pieces[0]
                stop = start + length
                # Bools are checked afterwards.
                if 0 < length <= _SMALL_BYTES and spec.dtype.name != "bool":
                    if run_stop <= start and stop <= run_limit:
                        run.append(entry)
                        run_stop = stop
                        continue
                    limit = (start // self._grid_bytes + 1) * self._grid_bytes
                    if stop <= limit:
                        self._add(run)
                        run, run_stop, run_limit = [entry], stop, limit
                        continue
            others.append(entry)
            run_limit = 0  # nothing else may lie within a cluster
        self._add(run)
        return others

    def _add(self, run: list[TensorEntry]) -> None:
        if run:
            start, last = run[0].pieces[0].offset, run[-1].pieces[0]
            make = partial(_make_arrays, run, start, self._arrays)
            self.found.append(Cluster(start, last.offset + last.length, make))


def _make_arrays(
    entries: list[TensorEntry], start: int, arrays: dict[int, np.ndarray], view: memoryview
) -> None:
    stored, dtype = None, np.dtype(np.uint8)
    for entry in entries:
        (_, row, shape), ((offset, _),) = entry
        if row is not stored:
            stored, dtype = row, row.to_numpy()
        seen: np.ndarray = np.ndarray(shape, dtype, view, offset - start)
        arrays[id(entry)] = seen.copy()
