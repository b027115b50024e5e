# SPDX-License-Identifier: Apache-2.0
"""The account of staging memory, shared by all pools on the same budget."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from ckptmgr.config.failure import OnError, parse_on_error
from ckptmgr.config.memory import MemoryConfig
from ckptmgr.io.cgroups import GroupMemory, memory_limit

_LOG = logging.getLogger(__name__)

_ids = itertools.count()


def next_region_id() -> int:
    """Return an id that no other memory region of this process has or had."""
    return next(_ids)


def has_no_room() -> bool:
    """Return False: there is no other user of the budget."""
    return False


class Ledger:
    """Counts the memory in use against a shared budget. Safe to use from several threads.

    `limit_of_group` returns the memory of the control group; None without a limit.

    Attributes:
        config: The configuration with the budgets.
        planning: A lock, held from the query of the free room until it is taken.
    """

    def __init__(
        self,
        config: MemoryConfig,
        *,
        limit_of_group: Callable[[], GroupMemory | None] = memory_limit,
    ) -> None:
        self.config = config
        self._limit_of_group = limit_of_group
        self.host_limit_bytes = config.usable_host_bytes
        self.disk_limit_bytes = config.disk_budget_bytes
        self.planning = threading.Lock()
        # Reentrant: the garbage collector may release memory while this thread takes some.
        self._lock = threading.RLock()
        self._host_bytes = 0
        self._disk_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of all spill files."""
        return self._disk_bytes

    def host_room_bytes(self) -> int | None:
        """Return how many more bytes of host memory are free; None without a limit."""
        limit = self.host_limit_bytes
        return None if limit is None else max(0, limit - self._host_bytes)

    def group_room_bytes(self) -> int | None:
        """Return how much more memory the system gives before it kills; None without a limit."""
        memory = self._limit_of_group()
        return None if memory is None else memory.room

    def add_host(self, size_bytes: int) -> bool:
        """Add bytes of memory (negative: give back); return False if that exceeds the budget."""
        with self._lock:
            total = self._host_bytes + size_bytes
            if (
                size_bytes > 0
                and self.host_limit_bytes is not None
                and total > self.host_limit_bytes
            ):
                return False
            self._host_bytes += size_bytes
            return True

    def add_disk(self, size_bytes: int) -> bool:
        """Add bytes of disk (negative: give back); return False if that exceeds the budget."""
        with self._lock:
            total = self._disk_bytes + size_bytes
            if (
                size_bytes > 0
                and self.disk_limit_bytes is not None
                and total > self.disk_limit_bytes
            ):
                return False
            self._disk_bytes += size_bytes
            return True


def without_spilling(memory: MemoryConfig, *, has_staging: bool) -> MemoryConfig:
    """Return the memory of a run with a key; warn of the states that no longer fit.

    `has_staging` says whether saves run in the background.

    Raises:
        ValueError: Background saves could stage nothing, as only the disk is allowed.
    """
    limit = ""
    if has_staging and memory.may_spill_staging:
        if not memory.is_automatic:
            raise ValueError(
                "staging_place='disk' (offload_param) together with a key: a spill file would hold the plaintext, so every "
                "background save would fail; use 'host', or async_save=False"
            )
        if memory.usable_host_bytes is not None:
            from ckptmgr.core.sizes import size_text

            limit = (
                f", so every background save of a state above {size_text(memory.usable_host_bytes)} will fail: raise "
                "host_budget_bytes (offload_cpu_size), or save with async_save=False"
            )
    _LOG.warning(
        "staging and snapshots do not spill to %s: the state is saved encrypted%s",
        memory.spill_directory,
        limit,
    )
    return replace(memory, spill_directory=None)


def check_wipe(memory: MemoryConfig, on_error: OnError) -> None:
    """Raise ValueError if a failed save would be tried again from buffers that are wiped."""
    if memory.wipe == "each_buffer" and parse_on_error(on_error).attempts > 1:
        raise ValueError(
            f"wipe='each_buffer' (atomic_clean_policy=1) with on_error={on_error!r}: the buffers of a failed save are "
            "overwritten, so it cannot be tried again; use wipe='at_end', or another on_error"
        )
