# SPDX-License-Identifier: Apache-2.0
"""Offload of the tensors that PyTorch keeps for the backward pass, to host memory or to a disk.

Tensors are copied out when autograd saves them and copied back, bit for bit and with the same
strides, when the backward pass needs them. Parameters, small tensors, and tensors whose elements
overlap in memory stay where they are.

With `snapshot_place="disk"` (`offload_checkpoint`) they go to a spill file, with `"host"` to host
memory, bounded by the host budget; when automatic, to the host first and to the disk when the
budget is full.

>>> import torch
>>> from ckptmgr.config.memory import MemoryConfig
>>> weight = torch.ones(3, requires_grad=True)
>>> with SavedTensorOffload(MemoryConfig(snapshot_place="host", smallest_evictee_bytes=0)) as offload:
...     loss = (weight * 2).exp().sum()
...     loss.backward()
>>> offload.offloaded_tensors
1
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from math import prod
from types import TracebackType

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import StagingExhausted
from ckptmgr.engine.budget import Ledger
from ckptmgr.engine.spill import SpillFile
from ckptmgr.state.torch_memory import torch_bytes


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class _Offloaded:
    """An offloaded tensor."""

    place: torch.Tensor | tuple[SpillFile, int]  # elements in memory order, or file and offset
    order: tuple[int, ...]  # its dimensions by stride, the largest first
    shape: tuple[int, ...]  # with the dimensions in that order
    dtype: torch.dtype
    device: torch.device


class _SpillArea:
    """One spill file for many tensors; its space is reused once all of them are dropped."""

    def __init__(self, config: MemoryConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger
        # Reentrant: the garbage collector may drop a tensor while this thread puts another.
        self._lock = threading.RLock()
        self._file: SpillFile | None = None
        self._size_bytes = 0
        self._tensors = 0

    def put(self, content: memoryview) -> tuple[SpillFile, int] | None:
        """Write a content and return its place; None without disk budget or directory."""
        config = self._config
        with self._lock:
            if config.spill_directory is None or not self._ledger.add_disk(content.nbytes):
                return None
            offset = self._size_bytes
            self._size_bytes += content.nbytes
            self._tensors += 1
            try:
                if self._file is None:
                    self._file = SpillFile(
                        config.spill_directory,
                        size_bytes=0,
                        block_bytes=config.write_block_bytes,
                        writes_in_flight=config.writes_in_flight,
                    )
                self._file.write([(offset, lambda: content)], size_bytes=content.nbytes)
            except BaseException:
                self._forget_one()
                raise
            return self._file, offset

    def drop(self) -> None:
        """Drop one content."""
        with self._lock:
            self._forget_one()

    def _forget_one(self) -> None:
        self._tensors -= 1
        if self._tensors == 0:
            self._ledger.add_disk(-self._size_bytes)
            self._size_bytes = 0
            file, self._file = self._file, None
            if file is not None:
                file.close()


class SavedTensorOffload:
    """A context in which tensors that autograd saves are offloaded.

    The forward pass runs inside it; the backward pass may run later. Memory is released with the
    graph.

    Args:
        config: `snapshot_place`, `is_automatic`, budgets, `spill_directory`,
            `smallest_evictee_bytes`.
        ledger: Shared with staging and snapshots when they use one budget; a new one by default.

    Attributes:
        offloaded_tensors: Number of tensors offloaded so far.
        spilled_bytes: Bytes of them that went to spill files.
    """

    def __init__(self, config: MemoryConfig, *, ledger: Ledger | None = None) -> None:
        self._config = config
        self._ledger = Ledger(config) if ledger is None else ledger
        self._area = _SpillArea(config, self._ledger)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self.offloaded_tensors = 0
        self.spilled_bytes = 0

    def __enter__(self) -> SavedTensorOffload:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Offloaded:
        order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        if self._stays(tensor) or not _is_dense(tensor, order):
            # Detached: the graph would otherwise hold its own output and never be freed.
            return tensor.detach()
        dense = tensor.detach().permute(order)
        place = self._host_copy(dense)
        is_spilled = place is None
        offloaded = _Offloaded(
            place=self._disk_copy(dense) if place is None else place,
            order=tuple(order),
            shape=tuple(dense.shape),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        if is_spilled:
            self.spilled_bytes += dense.nbytes
            finalizer = weakref.finalize(offloaded, self._area.drop)
        else:
            finalizer = weakref.finalize(offloaded, partial(self._ledger.add_host, -dense.nbytes))
        finalizer.atexit = False
        self.offloaded_tensors += 1
        return offloaded

    def _unpack(self, packed: torch.Tensor | _Offloaded) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        place = packed.place
        if isinstance(place, tuple):
            file, offset = place
            flat = torch.empty(prod(packed.shape), dtype=packed.dtype)
            file.read_into(offset, torch_bytes(flat))
            flat = flat.to(packed.device)
        else:
            flat = place.to(packed.device, copy=True)
        inverse = [packed.order.index(dim) for dim in range(len(packed.order))]
        return flat.view(packed.shape).permute(inverse)

    def _stays(self, tensor: torch.Tensor) -> bool:
        base = tensor if tensor._base is None else tensor._base
        return (
            tensor.layout is not torch.strided
            or tensor.numel() == 0
            or tensor.nbytes < self._config.smallest_evictee_bytes
            or isinstance(base, torch.nn.Parameter)
        )

    def _host_copy(self, dense: torch.Tensor) -> torch.Tensor | None:
        """Return a copy in host memory, or None when it belongs on the disk or there is no room."""
        config = self._config
        if not config.is_automatic and config.snapshot_place == "disk":
            return None
        if not self._ledger.add_host(dense.nbytes):
            return None
        try:
            flat = torch.empty(
                dense.numel(), dtype=dense.dtype, pin_memory=config.is_page_locked and dense.is_cuda
            )
            return flat.copy_(dense.reshape(-1))
        except BaseException:
            self._ledger.add_host(-dense.nbytes)
            raise

    def _disk_copy(self, dense: torch.Tensor) -> tuple[SpillFile, int]:
        may_spill = self._config.is_automatic or self._config.snapshot_place == "disk"
        place = self._area.put(torch_bytes(dense)) if may_spill else None
        if place is None:
            raise StagingExhausted(
                f"a saved tensor of {dense.nbytes} bytes does not fit: of"
                f" {self._ledger.host_limit_bytes} usable bytes of host memory"
                f" {self._ledger.host_bytes} are taken, of {self._ledger.disk_limit_bytes} bytes of"
                f" disk {self._ledger.disk_bytes}",
                hint="raise host_budget_bytes (offload_cpu_size) or disk_budget_bytes"
                " (offload_disk_size), or allow the disk (snapshot_place and spill_directory;"
                " offload_checkpoint and offload_path)",
            )
        return place


def _is_dense(tensor: torch.Tensor, order: list[int]) -> bool:
    """Return whether the elements fill their memory without gaps and overlaps."""
    expected = 1
    for dim in reversed(order):
        if tensor.size(dim) != 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.size(dim)
    return True
