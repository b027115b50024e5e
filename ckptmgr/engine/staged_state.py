# SPDX-License-Identifier: Apache-2.0
"""One staged state: its items over staging memory, until it is released."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckptmgr.config.memory import MIB, Wipe
from ckptmgr.engine.layout import SPILLED, StagingLayout
from ckptmgr.engine.slabs import Slab
from ckptmgr.engine.spill import SpillFile
from ckptmgr.formats.tensor import Item, Tensor, content_of
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.cgroups import usable_cpus
from ckptmgr.io.threads import for_each
from ckptmgr.state.devices import DeviceMemory
from ckptmgr.state.items import (
    SlabOffset,
    TensorContent,
    TensorPart,
    describe_items,
    replace_contents,
    tensors_in,
)

_LARGE_BYTES = MIB
COPY_PIECE_BYTES = 16 * MIB
_COPIERS = min(2, usable_cpus())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """The memory of one state.

    Attributes:
        layout: The place of each tensor.
        slabs: Its slabs.
        spill: The spill file, if there is one.
        sizes: Bytes of each tensor there; 0 for one that is copied on its device.
        copies: Contents of those, by index.
        device: The accelerators that other tensors may be on, if any.
    """

    layout: StagingLayout
    slabs: list[Slab]
    spill: SpillFile | None
    sizes: list[int]
    copies: dict[int, TensorContent]
    device: DeviceMemory | None = None


class StagedState:
    """A copy of a state, until it is released.

    Made by `StagingPool.stage`, or by `StagingPool.reserve` and `fill`.

    Attributes:
        size_bytes: Bytes of all contents.
        spilled_bytes: How many of them are in a spill file.
    """

    def __init__(
        self,
        items: Sequence[Item],
        lot: Lot,
        *,
        wipe: Wipe | None,
        give_back: Callable[[Lot], None],
    ) -> None:
        tensors = tensors_in(items)
        self._sizes = lot.sizes
        self._places = lot.layout.places
        self._lot = lot
        self._regions = [slab.view for slab in lot.slabs]
        self._wipe = wipe
        self._give_back = give_back
        self._lock = threading.Lock()
        self._is_released = False
        self._discarded: set[int] = set()
        self._indices: dict[int, int] | None = None
        self.size_bytes = sum(lot.sizes) + sum(
            tensors[index].spec.size_bytes for index in lot.copies
        )
        self.spilled_bytes = lot.layout.spill_bytes and sum(
            size
            for (slab, _), size in zip(self._places, self._sizes, strict=True)
            if slab == SPILLED
        )
        # Made on first use, to shorten the caller's wait.
        self._items: list[Item] | None = None
        self._specs = [item.spec for item in items if isinstance(item, Tensor)]
        if len(self._specs) < len(items):
            contents = [partial(self._content, index) for index in range(len(tensors))]
            self._items = replace_contents(items, contents)

    @property
    def items(self) -> list[Item]:
        """The staged items, in the same order; contents are read-only views until the release."""
        if self._items is None:
            self._items = [
                Tensor(spec, partial(self._content, index))
                for index, spec in enumerate(self._specs)
            ]
        return self._items

    def release(self) -> None:
        """Give the memory back, wiped first if so configured. Calling it again is fine.

        No content may be in use.
        """
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        try:
            if self._wipe is not None:
                self._wipe_slabs()
        finally:
            self._regions.clear()
            self._lot.copies.clear()
            self._give_back(self._lot)

    @property
    def wiped_slabs(self) -> int:
        """How many of the regions of `descriptors()` are wiped buffer by buffer: the first ones."""
        return len(self._lot.slabs) if self._wipe == "each_buffer" else 0

    def discard(self, tensor: Tensor) -> None:
        """With `wipe="each_buffer"`, overwrite the plaintext of a tensor of `items`, which is saved.

        A part of one is overwritten alone. Tensors that are not copied stay, and bytes in a spill
        file stay until the release.
        """
        part = tensor.content if isinstance(tensor.content, TensorPart) else None
        index = self._index_of(tensor if part is None else part.whole)
        if self._wipe != "each_buffer" or index is None:
            return
        slab, offset = self._places[index]
        start, stop = (0, self._sizes[index]) if part is None else (part.start, part.stop)
        if part is None:
            self._discarded.add(index)
            self._lot.copies.pop(index, None)
        if slab != SPILLED and stop > start:
            self._lot.slabs[slab].wipe(offset + start, offset + stop)

    def _index_of(self, tensor: Tensor) -> int | None:
        with self._lock:
            indices = self._indices
            if indices is None:
                mine = enumerate(tensors_in(self.items))
                indices = self._indices = {id(one.content): index for index, one in mine}
        return indices.get(id(tensor.content))

    def describe(self, items: Sequence[Item] | None = None) -> list[dict[str, object]]:
        """Return items as plain values for JSON; `items_from` rebuilds them in another process.

        The values refer to slabs by their position in `descriptors()`. `items` are those of this
        state (the default), some of its tensors, or a `TensorPart` of some.
        """
        spill = len(self._lot.slabs)
        places = [(spill if slab == SPILLED else slab, offset) for slab, offset in self._places]
        if items is None or _names(items) == _names(self.items):
            return describe_items(self.items, places)
        by_name = dict(zip(_names(self.items), places, strict=True))
        return describe_items(items, [_place(item, by_name) for item in items])

    def descriptors(self) -> dict[int, int]:
        """Return id and file descriptor of the regions of this state, in the order of `describe`.

        An id is never used again, so a process that has mapped that region need not map it again.
        Only for a shared pool.
        """
        found = {slab.id: slab.descriptor for slab in self._lot.slabs}
        if self._lot.spill is not None:
            found[self._lot.spill.id] = self._lot.spill.descriptor
        return found

    def fill(self, tensors: Sequence[Tensor], *, only: Iterable[int] | None = None) -> None:
        """Copy contents to their places.

        `tensors` are all of the state, in order; `only` has the indices of those to copy. Once all
        are copied the items have their contents.

        Raises:
            StagingExhausted: The disk of a spill file is full.
            FormatError: A content is shorter or longer than its shape and type say.
            BaseException: From a content.
        """
        large = []
        spilled = []
        brought = []
        device = self._lot.device
        for index in range(len(self._places)) if only is None else only:
            slab, offset = self._places[index]
            size = self._sizes[index]
            if size == 0:
                if index not in self._lot.copies:
                    content_of(tensors[index])
            elif slab == SPILLED:
                spilled.append(index)
            elif device is not None and device.device_of(tensors[index]) is not None:
                brought.append(index)
            elif size >= _LARGE_BYTES:
                large.append(index)
            else:
                self._regions[slab][offset : offset + size] = content_of(tensors[index])
        if device is not None and brought:
            targets = [self._region(index) for index in brought]
            device.copy_to_host([tensors[index] for index in brought], targets)
        if large:
            for_each(self._pieces(large, tensors), _copy, threads=_COPIERS)
        if self._lot.spill is not None:
            self._lot.spill.write(
                (
                    (self._places[index][1], partial(content_of, tensors[index]))
                    for index in spilled
                ),
                size_bytes=sum(self._sizes[index] for index in spilled),
            )
            if len(self._regions) == len(self._lot.slabs):
                self._regions.append(self._lot.spill.view())

    def _pieces(
        self, large: Iterable[int], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[memoryview, memoryview]]:
        for index in large:
            source = content_of(tensors[index])
            target = self._region(index)
            for offset in range(0, source.nbytes, COPY_PIECE_BYTES):
                piece = slice(offset, offset + COPY_PIECE_BYTES)
                yield target[piece], source[piece]

    def _region(self, index: int) -> memoryview:
        slab, start = self._places[index]
        return self._regions[slab][start : start + self._sizes[index]]

    def _content(self, index: int) -> memoryview:
        if self._is_released or index in self._discarded:
            raise ValueError("a staged tensor was asked for its content after its release")
        copy = self._lot.copies.get(index)
        if copy is not None:
            return copy()
        slab, offset = self._places[index]
        size = self._sizes[index]
        # The spill file is the last region, and SPILLED is -1.
        return self._regions[slab][offset : offset + size].toreadonly() if size else memoryview(b"")

    def _wipe_slabs(self) -> None:
        ends = [0] * len(self._lot.slabs)
        for (slab, offset), size in zip(self._places, self._sizes, strict=True):
            if slab != SPILLED:
                ends[slab] = max(ends[slab], offset + size)
        for memory, end in zip(self._lot.slabs, ends, strict=True):
            memory.wipe(0, end)


def _names(items: Sequence[Item]) -> list[str]:
    return [item.spec.name if isinstance(item, Tensor) else item.name for item in items]


def _place(item: Item, by_name: Mapping[str, SlabOffset]) -> SlabOffset:
    """Return the place of a tensor, or of a part of one, in a state of tensors only."""
    part = item.content if isinstance(item, Tensor) else None
    if isinstance(part, TensorPart):
        slab, offset = by_name[part.whole.spec.name]
        return slab, offset + part.start
    return by_name[_names([item])[0]]


def _copy(piece: tuple[memoryview, memoryview]) -> None:
    copy_into(*piece)
