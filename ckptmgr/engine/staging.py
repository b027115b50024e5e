# SPDX-License-Identifier: Apache-2.0
"""Staging: copy a state into separate memory, so that training goes on while the copy is saved.

* The copy goes into slabs that are kept between saves: warm, it costs about one memcpy.
* Staged items are items like any others; their contents are views of the slabs.
* Memory never exceeds the host budget. A state beyond it is spilled to nameless files, or refused
  with `StagingExhausted`, which names the figures; nothing is ever left out.
* For shared slabs another process can build the same items from a description and the descriptors
  of the memory.

>>> import numpy as np
>>> from ckptmgr.formats.tensor import tensor_from_array
>>> weights = np.arange(4, dtype=np.float32)
>>> with StagingPool() as pool:
...     staged = pool.stage([tensor_from_array("w", weights)])
...     weights += 1
...     print(np.frombuffer(staged.items[0].content(), np.float32))
...     staged.release()
[0. 1. 2. 3.]
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import StagingExhausted
from ckptmgr.engine.budget import Ledger, has_no_room
from ckptmgr.engine.layout import StagingLayout, lay_out
from ckptmgr.engine.slabs import Slab, SlabPool, Usage
from ckptmgr.engine.spill import SpillFile
from ckptmgr.engine.staged_state import Lot, StagedState
from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.state.devices import DeviceMemory, accelerators, copy_on_device
from ckptmgr.state.items import TensorContent, items_from, tensors_in

__all__ = ["Ledger", "StagedState", "StagingPool", "Usage", "items_from"]


class _LaidOut(NamedTuple):
    """A layout and its inputs: the next state often has the same layout."""

    sizes: list[int]
    room_bytes: int | None
    layout: StagingLayout


class StagingPool:
    """Stages states. Safe to use from several threads.

    Args:
        config: Budgets, places, kinds of memory.
        is_shared: Whether another process can map the copies.
        ledger: Shared with others on the same budget; a new one by default.
        most_states: States that may be staged at the same time when there is no host budget; None
            for any number.
        device: Accelerators that tensors may be on; None for those that PyTorch uses. A shared pool
            makes no copies there, whatever `device_copy_share` says.
        make_room: Called when a state does not fit: lets others on the budget give memory back, and
            returns whether they did.
    """

    def __init__(
        self,
        config: MemoryConfig | None = None,
        *,
        is_shared: bool = False,
        ledger: Ledger | None = None,
        most_states: int | None = 2,
        device: DeviceMemory | None = None,
        make_room: Callable[[], bool] = has_no_room,
    ) -> None:
        self._config = MemoryConfig() if config is None else config
        self.ledger = Ledger(self._config) if ledger is None else ledger
        self._device = device
        self._make_room = make_room
        self._is_shared = is_shared
        self._slabs = SlabPool(
            self._config, ledger=self.ledger, is_shared=is_shared, device=self._accelerators
        )
        self._most_states = most_states if self._config.host_budget_bytes is None else None
        if self._config.allocation in ("arena", "arena_and_slabs"):
            self._most_states = 1
        self._lock = threading.Lock()
        self._states: set[object] = set()
        self._is_closed = False
        self._laid_out: _LaidOut | None = None
        self._group_room: int | None = None  # where the last state does not fit into it

    def __enter__(self) -> StagingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def usage(self) -> Usage:
        """Counts of the memory that the pool has allocated and keeps."""
        return self._slabs.usage

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it has now, in use or kept."""
        return sum(slab.size_bytes for slab in self._slabs.all)

    def stage(self, items: Sequence[Item]) -> StagedState:
        """Copy all contents; afterwards the originals may change.

        Raises:
            StagingExhausted: They do not fit. Nothing is left behind.
            FormatError: A content is shorter or longer than its shape and type say.
            BaseException: From a content.
        """
        state = self.reserve(items)
        try:
            state.fill(tensors_in(items))
        except BaseException:
            state.release()
            raise
        return state

    def reserve(self, items: Sequence[Item]) -> StagedState:
        """Return a state that has its memory; `fill` copies the contents there.

        Raises:
            StagingExhausted: They do not fit. Nothing is left behind.
        """
        tensors = tensors_in(items)
        # An interrupt may come at any line: each handler undoes the steps done by then.
        ticket, lot = object(), None
        give_back = partial(self._give_back, ticket)
        try:
            self._admit(ticket)
            device = self._accelerators()
            share = 0.0 if self._is_shared else self._config.device_copy_share
            copies = copy_on_device(tensors, device, share=share)
            lot = self._allocate_in_room(tensors, copies, device)
            return StagedState(items, lot, wipe=self._config.wipe, give_back=give_back)
        except BaseException:
            if lot is None:
                self._leave(ticket)
            else:
                give_back(lot)
            raise

    def descriptors(self) -> list[int]:
        """Return the descriptors of all slabs; only for a shared pool."""
        return [slab.descriptor for slab in self._slabs.all]

    def close(self) -> None:
        """Free all memory; staged states are freed on their release. Calling it again is fine."""
        self._is_closed = True
        self._slabs.close()

    def forget_parent(self) -> None:
        """Release the parent's memory and close the inherited descriptors; for a forked child."""
        self._is_closed = True
        self._slabs.forget_parent()

    def _accelerators(self) -> DeviceMemory | None:
        return accelerators() if self._device is None else self._device

    def _allocate_in_room(
        self,
        tensors: Sequence[Tensor],
        copies: Mapping[int, TensorContent],
        device: DeviceMemory | None,
    ) -> Lot:
        while True:
            try:
                return self._allocate(tensors, copies, device)
            except StagingExhausted:
                if not self._make_room():
                    raise

    def _allocate(
        self,
        tensors: Sequence[Tensor],
        copies: Mapping[int, TensorContent],
        device: DeviceMemory | None,
    ) -> Lot:
        sizes = [
            0 if index in copies else tensor.spec.size_bytes for index, tensor in enumerate(tensors)
        ]
        slabs: list[Slab] = []
        spill, spill_bytes = None, 0
        try:
            with self.ledger.planning:
                layout = self._lay_out(sizes)
                spill_bytes = layout.spill_bytes
                spill = self._spill_file(layout, sum(sizes))
                slabs = self._slabs.take(layout.slabs_bytes)
            return Lot(
                layout=layout,
                slabs=slabs,
                spill=spill,
                sizes=sizes,
                copies=dict(copies),
                device=device,
            )
        except BaseException:
            self._slabs.give_back(slabs)
            self._drop_spill(spill, spill_bytes)
            raise

    def _give_back(self, ticket: object, lot: Lot) -> None:
        self._slabs.give_back(lot.slabs)
        self._drop_spill(lot.spill, lot.layout.spill_bytes)
        self._leave(ticket)

    def _drop_spill(self, spill: SpillFile | None, size_bytes: int) -> None:
        if spill is not None:
            spill.close()
            self.ledger.add_disk(-size_bytes)

    def _admit(self, ticket: object) -> None:
        with self._lock:
            if self._is_closed:
                raise ValueError("the staging pool is closed")
            if self._most_states is not None and len(self._states) >= self._most_states:
                raise StagingExhausted(
                    f"{len(self._states)} staged states are not released yet; without a host budget, and"
                    f" with allocation={self._config.allocation!r}, no more are allowed",
                    hint="wait for the running save, or set host_budget_bytes (offload_cpu_size)"
                    " and allocation='slabs' (static_memory_policy=3)",
                )
            self._states.add(ticket)

    def _leave(self, ticket: object) -> None:
        with self._lock:
            self._states.discard(ticket)

    def _lay_out(self, sizes: list[int]) -> StagingLayout:
        config = self._config
        room = self.ledger.host_room_bytes()
        kept = self.usage.kept_bytes
        group = self._group_room = self._lacking_room(sum(sizes) - kept)
        if group is not None:
            room = group if room is None else min(room, group)
        if room is not None:
            room += kept
        if not config.is_automatic and config.staging_place == "disk":
            room = 0
        before = self._laid_out
        if before is None or before.sizes != sizes or before.room_bytes != room:
            layout = lay_out(
                sizes, allocation=config.allocation, slab_bytes=config.slab_bytes, room_bytes=room
            )
            before = self._laid_out = _LaidOut(sizes, room, layout)
        return before.layout

    def _lacking_room(self, size_bytes: int) -> int | None:
        """Return the room in the control group where so much more memory does not fit; else None."""
        room = self.ledger.group_room_bytes() if size_bytes > 0 else None
        return room if room is not None and size_bytes > room else None

    def _spill_file(self, layout: StagingLayout, size_bytes: int) -> SpillFile | None:
        if layout.spill_bytes == 0:
            return None
        config = self._config
        if not config.may_spill_staging or config.spill_directory is None:
            raise self._exhausted(size_bytes, "nothing may be spilled to a disk")
        if not self.ledger.add_disk(layout.spill_bytes):
            raise self._exhausted(
                size_bytes,
                f"{layout.spill_bytes} bytes for spill files exceed the disk budget, of whose"
                f" {self.ledger.disk_limit_bytes} bytes {self.ledger.disk_bytes} are taken",
            )
        try:
            return SpillFile(
                config.spill_directory,
                size_bytes=layout.spill_bytes,
                block_bytes=config.write_block_bytes,
                writes_in_flight=config.writes_in_flight,
            )
        except BaseException:
            self.ledger.add_disk(-layout.spill_bytes)
            raise

    def _exhausted(self, size_bytes: int, reason: str) -> StagingExhausted:
        taken = self.ledger.host_bytes - self.usage.kept_bytes
        if self._group_room is not None:
            return StagingExhausted(
                f"{size_bytes} bytes do not fit: the memory limit of this container or job (cgroup) has room for"
                f" {self._group_room} more, and {reason}",
                hint="raise the limit, save with async_save=False, which needs no copy, or let it spill without a key"
                " (spill_directory and is_automatic; offload_path and auto_offload)",
            )
        return StagingExhausted(
            f"{size_bytes} bytes do not fit: of {self.ledger.host_limit_bytes} usable bytes of host"
            f" memory {taken} are taken, and {reason}",
            hint="raise host_budget_bytes (offload_cpu_size) or host_share (cpu_ratio), let it spill without a key"
            " (spill_directory and is_automatic; offload_path and auto_offload), or save synchronously",
        )
