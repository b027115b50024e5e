# SPDX-License-Identifier: Apache-2.0
"""Small tensors that lie side by side in a file: read together, and made into new arrays while they are in the cache.

A place of its own for each of ten thousands of tensors would cost more than its bytes.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ckptmgr.formats.index import TensorEntry
from ckptmgr.scatter import Cluster

# Above, a place of its own costs nothing beside the copy of the bytes.
_SMALL_BYTES = 16 << 10


class Clusters:
    """Collects small tensors, given in file order.

    Args:
        arrays: Takes the new arrays, by the `id` of their entry. Each has memory of its own.
        grid_bytes: The file is read in pieces that start at multiples of it; a cluster lies in one of them.
    """

    def __init__(self, arrays: dict[int, np.ndarray], *, grid_bytes: int) -> None:
        self._arrays = arrays
        self._grid_bytes = grid_bytes
        self._run: list[TensorEntry] = []
        self._run_stop = self._run_limit = 0
        self._found: list[Cluster] = []

    def take(self, entry: TensorEntry) -> bool:
        """Return whether a tensor will be read in a cluster; else it needs an array before the file is read."""
        spec, pieces = entry
        is_small = len(pieces) == 1 and 0 < pieces[0].length <= _SMALL_BYTES
        if not is_small or spec.dtype.name == "bool":  # bools are checked afterwards
            self._end_run()
            return False
        start, length = pieces[0]
        if start + length > self._run_limit or start < self._run_stop:
            self._end_run()
            self._run_limit = (start // self._grid_bytes + 1) * self._grid_bytes
            if start + length > self._run_limit:
                return False
        self._run.append(entry)
        self._run_stop = start + length
        return True

    def end(self) -> list[Cluster]:
        """Return all clusters, in file order."""
        self._end_run()
        return self._found

    def _end_run(self) -> None:
        if self._run:
            start = self._run[0].pieces[0].offset
            make = partial(_make_arrays, self._run, start, self._arrays)
            self._found.append(Cluster(start, self._run_stop, make))
            self._run = []


def _make_arrays(
    entries: list[TensorEntry], start: int, arrays: dict[int, np.ndarray], view: memoryview
) -> None:
    for entry in entries:
        spec, ((offset, length),) = entry
        dtype = spec.dtype.to_numpy()
        array = np.frombuffer(view, dtype, length // dtype.itemsize, offset - start)
        shape = spec.shape
        arrays[id(entry)] = array.copy() if len(shape) == 1 else array.reshape(shape).copy()
