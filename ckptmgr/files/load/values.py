# SPDX-License-Identifier: Apache-2.0
"""Load the values of an opened checkpoint file into new or existing arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.notes import add_note
from ckptmgr.files.load.bulk import confirm_names, fill_arrays
from ckptmgr.files.load.new_arrays import NewArrays
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.load.options import everything
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import CkptEntry, MapEntry
from ckptmgr.formats.tensor import PackedArray, TensorSpec
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
    """Read tensors straight into new arrays, in the order in which they are listed.

    Raises:
        CorruptCheckpoint: Damage was found; nothing is returned.
        ChecksumMismatch: The CRC differs, or is missing in an otherwise unverified plain `.ckpt`,
            whose end may be cut off.
    """
    chosen, arrays = _read(opened, choose, check_crc=check_crc)
    return {entry.name: _value(entry, arrays) for entry in _listed(opened, chosen)}


def read_arrays(
    opened: OpenCheckpoint,
    *,
    choose: Callable[[str], bool] = everything,
    check_crc: bool = False,
) -> dict[str, np.ndarray]:
    """Read the tensors that are arrays into new ones, in file order; raises as `read_values`."""
    chosen, arrays = _read(opened, choose, check_crc=check_crc)
    return {
        entry.spec.name: arrays[id(entry)]
        for entry in chosen
        if isinstance(entry, TensorEntry) and entry.spec.dtype.packed_shape is None
    }


def _read(
    opened: OpenCheckpoint, choose: Callable[[str], bool], *, check_crc: bool
) -> tuple[Sequence[CkptEntry], Mapping[int, np.ndarray]]:
    """Return the chosen entries in file order, and the arrays for the `id` of their tensors."""
    with translated_errors(opened.path):
        chosen: Sequence[CkptEntry] = opened.index.entries
        if choose is not everything:
            chosen = [entry for entry in chosen if choose(entry.name)]
        made = NewArrays(opened, _tensors_in(chosen))
        fill_arrays(opened, made.large, made.arrays, check_crc=check_crc, made=made)
        return chosen, made.arrays


def _listed(opened: OpenCheckpoint, chosen: Sequence[CkptEntry]) -> Iterable[CkptEntry]:
    """Return entries in the order that users see."""
    in_order = opened.entries
    if in_order is opened.index.entries:
        return chosen
    if chosen is opened.index.entries:
        return in_order
    names = {entry.name for entry in chosen}
    return (entry for entry in in_order if entry.name in names)


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
        add_note(error, "the content of the arrays given as into is undefined now; load them again")
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
