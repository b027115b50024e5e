# SPDX-License-Identifier: Apache-2.0
"""The directory that an export makes or replaces, whole or not at all.

* The files are written into `.NAME.export-RANDOM.new` beside the target NAME, which it becomes by a
  rename. An earlier export is renamed to `.NAME.export-RANDOM.old` before that, and removed after.
* A lease on NAME in the parent directory excludes other exports to it. So entries under such
  names when an export begins are leftovers of a killed one. They are removed; an earlier export
  whose place is empty gets that back first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import UnsafeWrite
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.signals import defer_signals
from ckptmgr.io.temp_names import final_name, parse_temp
from ckptmgr.maintenance.convert_target import check_name_and_place
from ckptmgr.maintenance.export_plan import is_name_of_export
from ckptmgr.store.name_leases import hold_name, leased_name

_MODE = 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDirectory:
    """The target of an export, whose lease is held."""

    fs: OsFileSystem
    target: Path
    source: Path
    force: bool

    @contextmanager
    def filled(self) -> Iterator[Path]:
        """Give a directory that is filled in the block the name of the target at its end.

        After an error the new directory is gone, and the earlier one in its place.
        """
        fs, target = self.fs, self.target
        fresh, old = (_beside(target, secrets.token_hex(8), kind) for kind in ("new", "old"))
        try:
            fs.make_directory(fresh, mode=_MODE)
            yield fresh
            fs.sync_directory(fresh)
            with defer_signals():
                _check_target(target, self.source, force=self.force)
                is_replaced = _has_entries(target)
                if is_replaced:
                    fs.replace(target, old)
                try:
                    fs.replace(fresh, target)
                except BaseException:
                    if is_replaced:
                        fs.replace(old, target)
                    raise
                fs.sync_directory(target.parent)
                if is_replaced:
                    _remove(fs, old)
                    fs.sync_directory(target.parent)
        finally:
            with contextlib.suppress(OSError):
                _remove(fs, fresh)


@contextmanager
def held_directory(target: Path, source: Path, *, force: bool) -> Iterator[ExportDirectory]:
    """Hold the target of an export, after cleaning up what killed exports to it left behind.

    Raises:
        CheckpointNotFound: There is no directory for it.
        UnsafeWrite: It is a file, has the name of one that ckptmgr keeps, or is not empty; or a
            directory that a killed export left has files of others.
        StoreLocked: Another export to it is under way.
        OSError: From the disk.
    """
    check_name_and_place(target)
    fs = OsFileSystem(keeps_owner=True)
    with hold_name(fs, target.parent, target.name):
        _put_back(fs, target)
        _check_target(target, source, force=force)
        for left in _left_behind(fs, target, "new|old"):
            _check_own(
                left,
                _is_written,
                hint="an export that was killed left this directory; look into it",
            )
            _remove(fs, left)
        yield ExportDirectory(fs=fs, target=target, source=source, force=force)


def _beside(target: Path, unique: str, kind: str) -> Path:
    return target.parent / f".{target.name}.export-{unique}.{kind}"


def _left_behind(fs: OsFileSystem, target: Path, kinds: str) -> list[Path]:
    """Return the directories that exports to the target left, whose lease is held."""
    shape = re.compile(rf"\.{re.escape(target.name)}\.export-[0-9a-f]{{16}}\.({kinds})")
    names = sorted(filter(shape.fullmatch, fs.names(target.parent)))
    return [path for path in map(target.parent.joinpath, names) if _is_directory(path)]


def _put_back(fs: OsFileSystem, target: Path) -> None:
    """Give an earlier export its name back if an export was killed between its two renames."""
    if os.path.lexists(target) and (not target.is_dir() or _has_entries(target)):
        return
    for earlier in _left_behind(fs, target, "old")[:1]:
        fs.replace(earlier, target)
        fs.sync_directory(target.parent)


def _check_target(target: Path, source: Path, *, force: bool) -> None:
    """Raise UnsafeWrite unless an export may make this directory, or replace it."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UnsafeWrite(
            "exists and is no directory", path=target, hint="choose another directory"
        )
    if _has_entries(target) and not force:
        raise UnsafeWrite(
            "is not empty", path=target, hint="choose a new directory, or pass --force"
        )
    if source.parent == target:
        raise UnsafeWrite("holds the input", path=target, hint="choose another directory")
    _check_own(
        target,
        is_name_of_export,
        hint="export to a new directory, and add the other files to that",
    )


def _check_own(directory: Path, is_own: Callable[[str], bool], *, hint: str) -> None:
    """Raise UnsafeWrite if a directory holds anything that no export writes."""
    for path in sorted(directory.iterdir()):
        if not is_own(path.name) or not stat.S_ISREG(path.lstat().st_mode):
            raise UnsafeWrite(
                f"holds {path.name!r}, which no export wrote, and would be replaced as a whole",
                path=directory,
                hint=hint,
            )


def _is_written(name: str) -> bool:
    """Return whether an export writes a file of this name, or leaves it when it is killed."""
    written = final_name(name) if parse_temp(name) else leased_name(name) or name
    return is_name_of_export(written)


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_entries(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _remove(fs: OsFileSystem, directory: Path) -> None:
    """Remove a directory of files, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        for name in fs.names(directory):
            fs.unlink(directory / name)
        fs.remove_directory(directory)
