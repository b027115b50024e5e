# SPDX-License-Identifier: Apache-2.0
"""Load the values of an opened checkpoint file into new or existing arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.files.load.bulk import confirm_names, fill_arrays
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.load.options import everything
from ckptmgr.formats.compressed.source import FramesSource
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import CkptEntry, MapEntry
from ckptmgr.formats.tensor import PackedArray, TensorSpec
from ckptmgr.io.scatter import SmallTensorBatches, piece_bytes_of
from ckptmgr.state.destinations import check_overlaps, match_arrays
from ckptmgr.state.paths import StateMismatch


class MapArrays(NamedTuple):
    """The arrays of a MindSpore MapParameter."""

    key: np.ndarray
    value: np.ndarray
    status: np.ndarray


Value = np.ndarray | str | MapArrays | PackedArray


def read_values(
    opened: OpenCheckpoint,
    *,
    choose: Callable[[str], bool] = everything,
    check_crc: bool = False,
) -> dict[str, Value]:
    """Read tensors straight into new arrays, in file order.

    Raises:
        CorruptCheckpoint: Damage was found; nothing is returned.
        ChecksumMismatch: The CRC differs, or is missing in an otherwise unverified plain `.ckpt`,
            whose end may be cut off.
    """
    with translated_errors(opened.path):
        arrays: dict[int, np.ndarray] = {}
        chosen: Sequence[CkptEntry] = opened.index.entries
        if choose is not everything:
            chosen = [entry for entry in chosen if choose(entry.name)]
        entries = list(_tensors_in(chosen))
        batches = _small_tensor_batches(opened, arrays)
        if batches is not None:
            entries = batches.take(entries)
        for one in entries:
            arrays[id(one)] = np.empty(one.spec.shape, one.spec.dtype.to_numpy())
        fill_arrays(opened, entries, arrays, check_crc=check_crc, batches=batches)
        return {entry.name: _value(entry, arrays) for entry in chosen}


def _small_tensor_batches(
    opened: OpenCheckpoint, arrays: dict[int, np.ndarray]
) -> SmallTensorBatches | None:
    """Return batches for small tensors, if the file is read in pieces."""
    if not opened.unit_bytes or isinstance(opened.source, FramesSource):
        return None
    return SmallTensorBatches(arrays, grid_bytes=piece_bytes_of(opened.unit_bytes))


def read_into(
    opened: OpenCheckpoint, into: Mapping[str, object], *, check_crc: bool = False
) -> None:
    """Read the tensors that `into` names straight into the arrays there.

    Raises:
        StateMismatch: The tensors do not fit all arrays; lists every difference. Nothing was
            changed.
        CorruptCheckpoint: Damage was found while reading; the content of the arrays is then
            undefined.
    """
    with translated_errors(opened.path):
        try:
            found = match_arrays(opened.index.entries, into)
        except StateMismatch:
            confirm_names(opened)  # raises if the difference is damage
            raise
    if found.sharing:
        values = read_values(opened, choose=found.sharing.__contains__)
        check_overlaps(into, {n: one for n, one in values.items() if isinstance(one, np.ndarray)})
    try:
        with translated_errors(opened.path):
            fill_arrays(opened, found.entries, found.arrays, check_crc=check_crc)
    except BaseException as error:
        error.add_note("the content of the arrays given as into is undefined now; load them again")
        raise
    found.finish()


def _tensors_in(chosen: Iterable[CkptEntry]) -> Iterator[TensorEntry]:
    for entry in chosen:
        if isinstance(entry, TensorEntry):
            yield entry
        elif isinstance(entry, MapEntry):
            yield from (entry.key, entry.value, entry.status)


def tensor_value(spec: TensorSpec, array: np.ndarray) -> np.ndarray | PackedArray:
    """Return the value of a tensor whose content was read into an array."""
    dtype = spec.dtype
    if dtype.packed_shape is None:
        return array
    return PackedArray(dtype=dtype.name, shape=dtype.packed_shape, data=array)


def _value(entry: CkptEntry, arrays: Mapping[int, np.ndarray]) -> Value:
    if isinstance(entry, TensorEntry):
        return tensor_value(entry.spec, arrays[id(entry)])
    if isinstance(entry, MapEntry):
        return MapArrays(*(arrays[id(part)] for part in (entry.key, entry.value, entry.status)))
    return entry.text
