# SPDX-License-Identifier: Apache-2.0
"""Slabs: page-aligned memory that is kept between saves.

The first touch of a page costs more than encrypting it. A slab is never part of a core dump. It is
private memory (backed by transparent huge pages where the system has them), or, for a worker
process, a memfd. It can be locked, and it can use the reserved huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import StagingExhausted
from ckptmgr.engine.budget import Ledger, next_region_id
from ckptmgr.io.descriptors import reserve_standard_descriptors
from ckptmgr.state.devices import DeviceMemory, accelerators

_HUGE_PAGE_BYTES = 2 << 20
# Not in the mmap module before Python 3.13; the same on every architecture but alpha, mips, parisc.
_MAP_HUGETLB = 0x40000

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Slab:
    """One region of staging memory.

    With `is_shared` another process can map it. `device`: the accelerators that also lock a locked
    slab. The `id` is never used again for another region of this process.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        config: MemoryConfig,
        is_shared: bool,
        device: DeviceMemory | None = None,
    ) -> None:
        self.id = next_region_id()
        self.size_bytes = size_bytes
        self._file: int | None = None
        self._unlock: Callable[[], object] | None = None
        self._memory = self._map(config, is_shared=is_shared)
        self.view = memoryview(self._memory)[:size_bytes]
        try:
            # Kernels without core dumps or transparent huge pages refuse this, without harm.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_DONTDUMP)
                if not is_shared:
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
            if config.is_page_locked:
                self._lock(device)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The memfd of a shared slab."""
        if self._file is None:
            raise ValueError("a private slab has no descriptor")
        return self._file

    def wipe(self, start: int, stop: int) -> None:
        """Overwrite a range of at least one byte with zeros."""
        np.frombuffer(self.view[start:stop], np.uint8).fill(0)

    def close(self) -> None:
        """Give the memory back; while views of it exist, after the last of them is released."""
        self.close_descriptor()
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()
        self.view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def forget_parent(self) -> None:
        """Close the memfd, if any; the memory stays, unlocked. For a forked child."""
        self._unlock = None
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Close the memfd, if any; the memory stays."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            os.close(descriptor)

    def _map(self, config: MemoryConfig, *, is_shared: bool) -> mmap.mmap:
        if config.huge_pages:
            try:
                return self._mapped(is_shared=is_shared, is_huge=True)
            except OSError as error:
                if config.huge_pages == 1:
                    raise StagingExhausted(
                        f"no reserved huge pages for {self.size_bytes} bytes of staging memory:"
                        f" {error.strerror}",
                        hint="reserve them (sysctl vm.nr_hugepages), or take huge_pages=2"
                        " (variable_use_1g_huge_page=2) to fall back",
                    ) from error
        try:
            return self._mapped(is_shared=is_shared, is_huge=False)
        except (OSError, OverflowError) as error:
            raise StagingExhausted(
                f"the system does not give {self.size_bytes} bytes of staging memory: {error}",
                hint="set host_budget_bytes (offload_cpu_size) and a spill_directory (offload_path)",
            ) from error

    def _mapped(self, *, is_shared: bool, is_huge: bool) -> mmap.mmap:
        size = self.size_bytes
        if is_huge:  # such mappings end at huge pages
            size = -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        if not is_shared:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_HUGETLB if is_huge else 0)
            return mmap.mmap(-1, size, flags=flags)
        flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if is_huge else 0)
        with reserve_standard_descriptors():
            descriptor = os.memfd_create("ckptmgr-staging", flags)
            try:
                os.ftruncate(descriptor, size)
                memory = mmap.mmap(descriptor, size)  # has a descriptor of its own
            except BaseException:
                os.close(descriptor)
                raise
        self._file = descriptor
        return memory

    def _lock(self, device: DeviceMemory | None) -> None:
        if device is not None:
            self._unlock = device.lock(self.view)
            if self._unlock is not None:
                return  # such memory cannot reach the swap either
        address = np.frombuffer(self.view, np.uint8).ctypes.data
        if _LIBC.mlock(address, self.size_bytes) != 0:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise StagingExhausted(
                f"{self.size_bytes} bytes of staging memory cannot be locked:"
                f" {os.strerror(ctypes.get_errno())}; the limit of this process is {limit} bytes",
                hint="raise the limit (ulimit -l, LimitMEMLOCK= of systemd), or do not ask for"
                " is_page_locked (enable_pinned_mem)",
            )


@dataclass(slots=True, kw_only=True)
class Usage:
    """How often and how much a pool has allocated.

    Attributes:
        allocations: Number of slabs made so far.
        kept_bytes: Bytes of slabs that no state uses now.
    """

    allocations: int = 0
    kept_bytes: int = 0


class SlabPool:
    """Slabs of one kind, kept between states.

    With `is_shared` the slabs are memfds. `device` returns the present accelerators, for which
    locked slabs are locked.
    """

    def __init__(
        self,
        config: MemoryConfig,
        *,
        ledger: Ledger,
        is_shared: bool,
        device: Callable[[], DeviceMemory | None] = accelerators,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._is_shared = is_shared
        self._device = device
        self._lock = threading.Lock()
        self._all: list[Slab] = []
        self._kept: list[Slab] = []
        self._is_closed = False
        self.usage = Usage()

    @property
    def all(self) -> list[Slab]:
        """The slabs of the pool, the oldest first."""
        with self._lock:
            return list(self._all)

    def take(self, sizes: list[int]) -> list[Slab]:
        """Return slabs of at least the given sizes, kept ones first.

        Raises:
            StagingExhausted: The system refuses.
        """
        taken: list[Slab] = []
        try:
            with self._lock:
                slabs: list[Slab] = []
                for slab, size in zip(self._reused(sizes, taken), sizes, strict=True):
                    slabs.append(self._make(size, taken) if slab is None else slab)
                return slabs
        except BaseException:
            self.give_back(taken)
            raise

    def give_back(self, slabs: list[Slab]) -> None:
        """Keep slabs for the next state, or free them."""
        with self._lock:
            self._kept += slabs
            self.usage.kept_bytes = sum(slab.size_bytes for slab in self._kept)
            if self._is_closed or self._config.allocation == "exact":
                self._drop_kept()

    def close(self) -> None:
        """Free kept slabs, now and from now on."""
        with self._lock:
            self._is_closed = True
            self._drop_kept()

    def forget_parent(self) -> None:
        """Release the parent's memory, slabs in use when given back; for a forked child."""
        self._lock = threading.Lock()  # a thread that held it is missing here
        for slab in self._all:
            slab.forget_parent()
        for slab in self._kept:
            slab.close()
        self._all = [slab for slab in self._all if slab not in self._kept]
        self._kept = []
        self._is_closed = True

    def _reused(self, sizes: list[int], taken: list[Slab]) -> list[Slab | None]:
        """Move kept slabs to `taken`; return for each size the slab for it, if any."""
        left = list(self._kept)
        found = [_take_fitting(left, size) for size in sizes]
        reused = [slab for slab in found if slab is not None]
        taken[:], self._kept = reused, left  # one line: an interrupt between two loses slabs
        self.usage.kept_bytes = sum(slab.size_bytes for slab in left)
        missing = sum(size for slab, size in zip(found, sizes, strict=True) if slab is None)
        if missing == 0:
            return found
        # The other kept slabs fit nothing: they must not add to the new ones.
        self._drop_kept()
        room = self._ledger.host_room_bytes()
        if room is None or missing <= room:
            return found
        # Reused slabs that are larger than necessary take the room.
        self._kept, taken[:] = reused, []
        self._drop_kept()
        return [None] * len(sizes)

    def _make(self, size_bytes: int, taken: list[Slab]) -> Slab:
        if not self._ledger.add_host(size_bytes):
            raise StagingExhausted(
                f"{size_bytes} bytes of host memory are no longer there: of"
                f" {self._ledger.host_limit_bytes} usable bytes {self._ledger.host_bytes} are taken",
                hint="raise host_budget_bytes (offload_cpu_size)",
            )
        try:
            slab = Slab(
                size_bytes, config=self._config, is_shared=self._is_shared, device=self._device()
            )
        except BaseException:
            self._ledger.add_host(-size_bytes)
            raise
        self.usage.allocations += 1
        taken += [slab]
        self._all += [slab]
        return slab

    def _drop_kept(self) -> None:
        while self._kept:
            slab = self._kept[-1]
            del self._kept[-1]  # first: a closed slab must not be taken again
            self._all.remove(slab)
            self._ledger.add_host(-slab.size_bytes)
            slab.close()
        self.usage.kept_bytes = 0


def _take_fitting(slabs: list[Slab], size_bytes: int) -> Slab | None:
    """Remove the smallest slab that is large enough and return it; None when there is none."""
    fitting = [slab for slab in slabs if slab.size_bytes >= size_bytes]
    if not fitting:
        return None
    slab = min(fitting, key=lambda slab: slab.size_bytes)
    slabs.remove(slab)
    return slab
