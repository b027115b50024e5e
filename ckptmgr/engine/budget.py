# SPDX-License-Identifier: Apache-2.0
"""The account of staging memory: one for everything that lives on the same budget."""

from __future__ import annotations

import itertools
import threading

from ckptmgr.config.memory import MemoryConfig

_ids = itertools.count()


def next_region_id() -> int:
    """Return a number that no other region of memory of this process has or had."""
    return next(_ids)


class Ledger:
    """Who may have how much: one for everything that shares a budget. Safe to use from several threads.

    Args:
        config: Says the budgets.

    Attributes:
        config: As given.
        planning: Held from asking for room until it is taken.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.host_limit_bytes = config.usable_host_bytes
        self.disk_limit_bytes = config.disk_budget_bytes
        self.planning = threading.Lock()
        # Reentrant: the garbage collector may give memory back while this thread takes some.
        self._lock = threading.RLock()
        self._host_bytes = 0
        self._disk_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of all slabs there are."""
        return self._host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of all spill files there are."""
        return self._disk_bytes

    def host_room_bytes(self) -> int | None:
        """Return how many more bytes of host memory may be taken, or None for any number."""
        limit = self.host_limit_bytes
        return None if limit is None else max(0, limit - self._host_bytes)

    def add_host(self, size_bytes: int) -> bool:
        """Note memory taken (or given back, when negative); False when that would exceed the budget."""
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
        """Note disk space taken (or given back, when negative); False when that would exceed the budget."""
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
