# SPDX-License-Identifier: Apache-2.0
"""A real disk on which somebody else does something just before a chosen call: every order of two programs' calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import lease_path
from tests.support.failingdisk import FailingDisk


class VisitedDisk(FailingDisk):
    """A `FileSystem` that calls `visit` once, before the call of number `at`, from 1.

    Args:
        visit: The act of the other one, whole.
        at: Before which call.
    """

    def __init__(self, visit: Callable[[], None], at: int) -> None:
        super().__init__(OsFileSystem())
        self._visit = visit
        self._at = at

    @property
    def was_visited(self) -> bool:
        """Whether there were so many calls."""
        return len(self.calls) >= self._at

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if len(self.calls) == self._at:
            self._visit()


class DiskVisitedAtLock(FailingDisk):
    """A `FileSystem` that calls `visit` once, before the lease on a name is taken."""

    def __init__(self, visit: Callable[[], None], name: str) -> None:
        super().__init__(OsFileSystem())
        self._visit = visit
        self._lease = lease_path(Path(), name).name
        self.was_visited = False

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation == "lock" and path.name == self._lease and not self.was_visited:
            self.was_visited = True
            self._visit()
