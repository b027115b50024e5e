# SPDX-License-Identifier: Apache-2.0
"""A disk that leaves out one kind of sync, or deletes too early: faults that the crash tests must catch."""

from __future__ import annotations

import enum
from pathlib import Path

from tests.faults.training import RUNS
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.failingdisk import FailingDisk


class Forgotten(enum.Enum):
    """The step that is left out; of the directory syncs, the one after this change."""

    NOTHING = "nothing"
    DATA_SYNC = "data written"
    MANIFEST_SYNC = "manifest written"
    SYNC_BEFORE_MANIFEST = "manifest created"
    SYNC_BEFORE_COMMIT = "manifest published"
    SYNC_AFTER_COMMIT = "data published"
    SYNC_AFTER_REMOVAL = "data removed"
    SYNC_BEFORE_ACTING = "nothing changed"
    PUBLISH_BEFORE_DELETE = "deleted first"


class ForgetfulDisk(FailingDisk):
    """A disk on which one step of the protocol does nothing."""

    def __init__(self, disk: ModelDisk, forgotten: Forgotten) -> None:
        super().__init__(disk)
        self._model = disk
        self._forgotten = forgotten
        self._last_change = Forgotten.SYNC_BEFORE_ACTING

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> api.OutputFile:
        """Create a file whose sync may be forgotten."""
        if self._forgotten is Forgotten.PUBLISH_BEFORE_DELETE and not _is_manifest(path):
            self._delete_all()
        file = super().create(path, mode=mode, owner_of=owner_of)
        if _is_manifest(path):
            self._last_change = Forgotten.SYNC_BEFORE_MANIFEST
        kind = Forgotten.MANIFEST_SYNC if _is_manifest(path) else Forgotten.DATA_SYNC
        return _Unsynced(file) if kind is self._forgotten else file

    def replace(self, source: Path, target: Path) -> None:
        """Rename."""
        super().replace(source, target)
        is_manifest = _is_manifest(target)
        self._last_change = (
            Forgotten.SYNC_BEFORE_COMMIT if is_manifest else Forgotten.SYNC_AFTER_COMMIT
        )

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        super().unlink(path)
        if not _is_manifest(path) and path.suffix != ".lease":
            self._last_change = Forgotten.SYNC_AFTER_REMOVAL

    def sync_directory(self, path: Path) -> None:
        """Make entries durable, unless this is the sync to forget."""
        if self._last_change is not self._forgotten:
            super().sync_directory(path)
        self._last_change = Forgotten.SYNC_BEFORE_ACTING

    def _delete_all(self) -> None:
        for name, status in self._model.list(RUNS).items():
            if status.is_file and not name.startswith("."):
                self._model.unlink(RUNS / name)


class _Unsynced:
    def __init__(self, file: api.OutputFile) -> None:
        self._file = file
        self.reserve, self.write_at, self.close = file.reserve, file.write_at, file.close

    def sync(self) -> None:
        pass


def _is_manifest(path: Path) -> bool:
    return api.MANIFEST_SUFFIX in path.name
