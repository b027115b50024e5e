# SPDX-License-Identifier: Apache-2.0
"""Lock files of the real disk: the kernel lets go of one when its holder dies, so a stale one needs no guessing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from ckptmgr.descriptors import beyond_standard, open_entry
from ckptmgr.output_files import adopt_owner

_MAX_OWNER_BYTES = 4096


@contextlib.contextmanager
def locked(path: Path, *, owner: str, dir_fd: int | None = None) -> Iterator[str | None]:
    """Hold an advisory lock (flock) on a file, without waiting; yields the text of its holder when that is somebody else."""
    descriptor, is_held = _open_lock(path, dir_fd)
    with contextlib.closing(_LockFile(descriptor, path if is_held else None)):
        if not is_held:
            yield os.pread(descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace")
            return
        os.ftruncate(descriptor, 0)
        _write_owner(descriptor, owner)
        yield None


class _LockFile:
    """An open lock file. Forked children close theirs at once: a data loader must not keep the lock of a dead trainer."""

    _open: ClassVar[set[_LockFile]] = set()

    def __init__(self, descriptor: int, held: Path | None) -> None:
        self._descriptor = descriptor
        self._held = held
        self._open.add(self)

    def close(self) -> None:
        self._open.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @classmethod
    def close_inherited(cls) -> None:
        for file in list(cls._open):
            file.close()

    @classmethod
    def descriptor_of(cls, path: Path) -> int | None:
        return next((file._descriptor for file in list(cls._open) if file._held == path), None)


def lock_descriptor(path: Path) -> int | None:
    """Return the descriptor of a lock that `OsFileSystem` holds, or None.

    A worker process that has a copy of it holds the lock, too: it is free only when both are gone.
    """
    return _LockFile.descriptor_of(path)


os.register_at_fork(after_in_child=_LockFile.close_inherited)


def _open_lock(path: Path, dir_fd: int | None) -> tuple[int, bool]:
    """Return a descriptor of a lock file, and whether the lock is ours."""
    while True:
        try:
            descriptor = _opened(path, dir_fd)
        except FileExistsError:
            continue  # another process was faster
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = path if dir_fd is None else path.name
            named = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except BlockingIOError:
            return descriptor, False
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        # Its last holder may remove the file before letting go: a lock on a file without a name keeps nobody out.
        if os.path.samestat(named, os.fstat(descriptor)):
            return descriptor, True
        os.close(descriptor)


def _opened(path: Path, dir_fd: int | None) -> int:
    """Open a lock file, or make it; FileExistsError where another process makes it meanwhile."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return beyond_standard(open_entry(path, flags, dir_fd=dir_fd))
    except FileNotFoundError:
        descriptor = open_entry(path, flags | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd)
    adopt_owner(descriptor, path.parent.stat() if dir_fd is None else os.fstat(dir_fd))
    return beyond_standard(descriptor)


def _write_owner(descriptor: int, owner: str) -> None:
    try:
        os.pwrite(descriptor, owner.encode()[:_MAX_OWNER_BYTES], 0)
    except OSError as error:
        # The lock holds without the text, and whoever wants to free space on a full disk needs the lock.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
