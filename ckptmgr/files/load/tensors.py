# SPDX-License-Identifier: Apache-2.0
"""The tensors of one open file, each read and checked separately; see `open_checkpoint`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Self

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound, UnsupportedCheckpoint
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.mapped import MappedTensors
from ckptmgr.files.load.named_part import as_framework, converted
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.load.values import MapArrays, Value, read_values, tensor_value
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.formats.mindspore.entries import CkptEntry, MapEntry, TextEntry
from ckptmgr.formats.tensor import ContentPieces, TensorSpec, flat_memory
from ckptmgr.io.arenas import new_array
from ckptmgr.io.digest import RANGE_BYTES
from ckptmgr.io.scatter import Placement
from ckptmgr.io.threads import PIECE_BYTES


class CheckpointReader:
    """The tensors of one open file; made by `open_checkpoint`."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        held: contextlib.ExitStack | None = None,
        mapped: MappedTensors | None = None,
        *,
        framework: str = "np",
    ) -> None:
        self._opened = opened
        self._held = held or contextlib.ExitStack()
        self._mapped = mapped
        self._framework = framework
        self._entries: dict[str, CkptEntry] = {one.name: one for one in opened.index.entries}
        self._heads = _heads(opened)
        self._confirmed: set[int] = set()

    @property
    def format(self) -> str:
        """`ckpt` or `safetensors`."""
        return self._opened.format

    @property
    def is_verified(self) -> bool:
        """Whether a seal or digests verify the data."""
        return self._opened.is_sealed or self._opened.has_digests

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata strings of the file."""
        return self._opened.metadata

    def names(self) -> tuple[str, ...]:
        """Return the names of all values, in file order.

        Raises:
            CorruptCheckpoint: Their description is damaged.
            OSError: From the disk.
        """
        self._confirm_index()
        return tuple(self._entries)

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the tensors, in file order; raises as `names`."""
        return tuple(one for one in self.names() if isinstance(self._entries[one], TensorEntry))

    def spec(self, name: str) -> TensorSpec:
        """Return name, element type and shape of a tensor; `stated_shape` if elements are packed.

        Raises:
            CheckpointNotFound: There is no such value; a LookupError, too.
            UnsupportedCheckpoint: It is a text or a map parameter.
            CorruptCheckpoint: Its description is damaged.
            OSError: From the disk.
        """
        return self._tensor(name).spec

    def read(self, name: str, *, rows: slice | None = None) -> Any:
        """Return one value, checked, as an array or a tensor of the framework.

        Args:
            name: From `names()`.
            rows: Range along the first dimension of a tensor; steps other than 1 are refused.

        Raises:
            CheckpointNotFound: There is no such value; a LookupError, too.
            UnsupportedCheckpoint: `rows` of something without rows; or the framework has no such
                tensor.
            TypeError, ValueError: `rows` is no slice, or has another step.
            CorruptCheckpoint: It is damaged.
            OSError: From the disk.
        """
        return converted(name, self._read(name, rows), self._framework)

    def _read(self, name: str, rows: slice | None) -> Value:
        entry = self._entry(name)
        if rows is not None:
            return self._rows(self._tensor(name), rows)
        if isinstance(entry, TensorEntry):
            return tensor_value(entry.spec, self._part(entry, 0, entry.spec.shape))
        if isinstance(entry, TextEntry):
            self._confirm(entry)
            return entry.text
        parts = (entry.key, entry.value, entry.status)
        return MapArrays(*(self._part(one, 0, one.spec.shape) for one in parts))

    def read_tensors(self) -> dict[str, Any]:
        """Return all tensors, checked, by name in file order; in threads, and never mapped.

        Raises:
            CorruptCheckpoint, OSError: As `read`.
        """
        names = set(self.tensor_names())
        values = read_values(self._opened, choose=names.__contains__)
        return as_framework(values, self._framework)

    def read_block(self, name: str, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return a block of a tensor, checked.

        Args:
            name: From `tensor_names()`; not of packed elements.
            bounds: First index and end along each of the first dimensions, within the shape.

        Raises:
            CheckpointNotFound, UnsupportedCheckpoint, CorruptCheckpoint, OSError: As `read`.
        """
        entry = self._tensor(name)
        self._check_whole_elements(entry)
        shape = entry.spec.shape
        return self._block(entry, 0, (*bounds, *((0, length) for length in shape[len(bounds) :])))

    def content(self, name: str) -> ContentPieces:
        """Return the content of a tensor as pieces of at most 16 MiB, checked when they are read.

        The bytes are in C order and little endian; several threads may read them.

        Raises:
            CheckpointNotFound, UnsupportedCheckpoint, CorruptCheckpoint, OSError: As `spec`; the
                last two also from the reads.
        """
        entry = self._tensor(name)
        return ContentPieces(
            read=lambda start, stop: flat_memory(self._bytes(entry, start, stop)),
            cuts=tuple(_cuts(entry)),
        )

    def _bytes(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        target = np.empty(stop - start, np.uint8)
        self._read_content(entry, start, target)
        return target

    def check_crc(self) -> bool:
        """Check the CRC32 of the file if nothing stronger verifies its data; return whether it did.

        Raises:
            CorruptCheckpoint: It is damaged.
            OSError: From the disk.
        """
        if self._opened.index.crc is None or self.is_verified:
            return False
        with translated_errors(self._opened.path):
            read_through(self._opened, check_crc=True)
        return True

    def _block(
        self, entry: TensorEntry, skipped: int, bounds: tuple[tuple[int, int], ...]
    ) -> np.ndarray:
        """Return a block of the last dimensions, which `bounds` are for, after `skipped` bytes."""
        dtype = entry.spec.dtype
        first_dimension = len(entry.spec.shape) - len(bounds)
        shape = entry.spec.shape[first_dimension:]
        lengths = tuple(stop - start for start, stop in bounds)
        if not prod(lengths):
            return np.empty(lengths, dtype.to_numpy())
        step_bytes = prod(shape[1:]) * dtype.item_bytes
        if lengths[1:] == shape[1:]:
            start = bounds[0][0] if bounds else 0
            return self._part(entry, skipped + start * step_bytes, lengths)
        start, stop = bounds[0]
        if step_bytes >= PIECE_BYTES:  # the bytes between two parts may have units of their own
            places = (skipped + index * step_bytes for index in range(start, stop))
            return np.stack([self._block(entry, place, bounds[1:]) for place in places])
        rows, inner = PIECE_BYTES // step_bytes, tuple(slice(*one) for one in bounds[1:])
        parts = []
        for first in range(start, stop, rows):
            count = min(rows, stop - first)
            part = self._part(entry, skipped + first * step_bytes, (count, *shape[1:]))
            parts.append(part[:, *inner].copy())  # not the whole rows, until all are read
        return np.concatenate(parts)

    def _check_whole_elements(self, entry: TensorEntry) -> None:
        if entry.spec.dtype.packed_shape is not None:
            raise UnsupportedCheckpoint(
                f"{entry.name!r} has rows that may end within a byte: it is {entry.spec.dtype.name}",
                path=self._opened.path,
                hint="read the whole tensor",
            )

    def _rows(self, entry: TensorEntry, rows: slice) -> np.ndarray:
        if not isinstance(rows, slice):  # Python does not check annotations
            raise TypeError(f"rows is a slice, such as slice(0, 2), but got {rows!r}")
        shape = entry.spec.shape
        if not shape:
            raise UnsupportedCheckpoint(
                f"{entry.name!r} has no rows: it is a scalar", path=self._opened.path
            )
        self._check_whole_elements(entry)
        start, stop, step = rows.indices(shape[0])
        if step != 1:
            raise ValueError(f"rows can be read with a step of 1, not of {step}")
        row_bytes = prod(shape[1:]) * entry.spec.dtype.item_bytes
        return self._part(entry, start * row_bytes, (max(0, stop - start), *shape[1:]))

    def _part(self, entry: TensorEntry, skipped: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the part of a tensor with this shape after `skipped` bytes."""
        self._confirm(entry)
        if self._mapped is not None:
            with translated_errors(self._opened.path):
                mapped = self._mapped.part(entry, skipped, shape)
            if mapped is not None:
                return mapped
        array = new_array(shape, entry.spec.dtype.to_numpy())
        self._read_content(entry, skipped, array)
        array.flags.writeable = self._mapped is None
        return array

    def _read_content(self, entry: TensorEntry, skipped: int, array: np.ndarray) -> None:
        """Fill an array with the bytes of a tensor after the first `skipped`, and check them."""
        placements = []
        target = flat_memory(array)
        for piece in entry.pieces:
            start = min(skipped, piece.length)
            length = min(piece.length - start, target.nbytes)
            placements.append(Placement(piece.offset + start, target[:length]))
            skipped, target = skipped - start, target[length:]
        with translated_errors(self._opened.path):
            self._fill(placements)
            for one in placements[:1]:
                check_content(entry, flat_memory(array), offset=one.offset)

    def _fill(self, placements: list[Placement]) -> None:
        if sum(one.target.nbytes for one in placements) > PIECE_BYTES:
            self._opened.read(placements, confirmed=())
            return
        for one in placements:  # the source keeps the range or block for the next tensor
            self._opened.source.read_into(one.offset, one.target)

    def _confirm(self, entry: CkptEntry) -> None:
        """Check the description of a value, unless the opening did."""
        unverified = self._unverified_units()
        self._confirm_units(self._heads.get(id(entry), unverified) & unverified)

    def _confirm_index(self) -> None:
        """Check the descriptions of all values, unless the opening did."""
        self._confirm_units(self._unverified_units())

    def _unverified_units(self) -> set[int]:
        """Return the units with unverified reads."""
        opened = self._opened
        if opened.unverified is None or opened.is_sealed or opened.format == "safetensors":
            return set()
        return opened.unverified.units(opened.unit_bytes)

    def _confirm_units(self, units: set[int]) -> None:
        units = units - self._confirmed
        if not units:
            return
        with translated_errors(self._opened.path):
            self._opened.read([], confirmed=units)
        self._confirmed |= units

    def _entry(self, name: str) -> CkptEntry:
        try:
            return self._entries[name]
        except KeyError:
            self._confirm_index()  # raises if the name is damaged
            raise CheckpointNotFound(
                f"there is no value {name!r} in it", path=self._opened.path
            ) from None

    def _tensor(self, name: str) -> TensorEntry:
        entry = self._entry(name)
        self._confirm(entry)
        if isinstance(entry, TensorEntry):
            return entry
        kind = "map parameter" if isinstance(entry, MapEntry) else "text"
        raise UnsupportedCheckpoint(
            f"{name!r} is a {kind}, not a tensor", path=self._opened.path, hint="use read(name)"
        )

    def close(self) -> None:
        """Close the file; mapped arrays stay valid."""
        self._mapped = None
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cuts(entry: TensorEntry) -> Iterator[int]:
    """Yield the ends of the pieces of a content, which are whole digest ranges where it has them."""
    end = 0
    for piece in entry.pieces:
        start, stop = piece.offset, piece.offset + piece.length
        first = (start // RANGE_BYTES + 1) * RANGE_BYTES
        yield from (end + cut - start for cut in range(first, stop, RANGE_BYTES))
        end += piece.length
        yield end


def _heads(opened: OpenCheckpoint) -> dict[int, set[int]]:
    """Return the units of the description of each tensor, which precedes its content."""
    if not opened.unit_bytes:
        return {}
    tensors: list[TensorEntry] = []
    for entry in opened.index.entries:
        if isinstance(entry, MapEntry):
            tensors += (entry.key, entry.value, entry.status)
        elif isinstance(entry, TensorEntry):
            tensors.append(entry)
    pieces = sorted((piece, id(entry)) for entry in tensors for piece in entry.pieces)
    heads: dict[int, set[int]] = {}
    end = 0
    for piece, owner in pieces:
        units = range(end // opened.unit_bytes, piece.offset // opened.unit_bytes + 1)
        heads.setdefault(owner, set()).update(units)
        end = piece.offset + piece.length
    return heads
