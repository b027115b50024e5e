# SPDX-License-Identifier: Apache-2.0
"""Lock files of the real disk; the kernel releases a lock when its holder dies.

The name of a lock file is predictable, and other users may write to its directory. So the file is
opened without truncating or following links, and is written to only if it is a regular file with
one name and a plausible owner. Otherwise another user could plant a link and have its target
overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import StoreLocked
from ckptmgr.io.descriptors import above_standard_streams, open_entry
from ckptmgr.io.files import adopt_owner
from ckptmgr.io.permissions import share_lease

_MAX_OWNER_BYTES = 4096
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def locked(path: Path, *, owner: str, dir_fd: int | None = None) -> Iterator[str | None]:
    """Hold an advisory lock (flock) on a file, without waiting, or yield the text of its holder.

    Raises:
        StoreLocked: The file may not be written to, or its file system cannot lock files.
        OSError: From the disk.
    """
    descriptor, is_held = _open_lock(path, dir_fd)
    with contextlib.closing(_LockFile(descriptor, path if is_held else None)):
        if not is_held:
            yield os.pread(descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace")
            return
        _write(descriptor, owner, offset=0)
        yield None


def add_worker_text(descriptor: int, owner: str, text: str) -> None:
    """Append the text of a worker process with a copy of the descriptor to that of the holder.

    If the disk was full when the lock was taken, write both. The text of another process stays.
    """
    there = os.pread(descriptor, _MAX_OWNER_BYTES, 0)
    if not there:
        _write(descriptor, owner + text, offset=0)
    elif there.startswith(owner.encode()):
        _write(descriptor, text, offset=len(owner.encode()))


class _LockFile:
    """An open lock file.

    Forked children close it: a data loader must not keep the lock of a dead trainer.
    """

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

    A worker process with a copy of it holds the lock, too, until both are gone.
    """
    return _LockFile.descriptor_of(path)


os.register_at_fork(after_in_child=_LockFile.close_inherited)


def _open_lock(path: Path, dir_fd: int | None) -> tuple[int, bool]:
    """Return a descriptor of a lock file, and whether this process has the lock."""
    while True:
        try:
            descriptor, is_new = _opened(path, dir_fd)
        except FileExistsError:
            continue  # another process was faster
        try:
            folder = path.parent.stat() if dir_fd is None else os.fstat(dir_fd)
            if is_new:
                adopt_owner(descriptor, folder)
                share_lease(descriptor, folder)
            figures = os.fstat(descriptor)
            _check_owner(path, figures, folder)
            _flock(descriptor, path)
            named = _status(path, dir_fd)
            if os.path.samestat(named, figures) and named.st_nlink > 1:
                raise _refusal(path, named, f"has {named.st_nlink} names (hard links)")
        except BlockingIOError:
            return descriptor, False
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        # Its last holder may have removed the file before it unlocked it: such a lock excludes no
        # process.
        if os.path.samestat(named, figures):
            return descriptor, True
        os.close(descriptor)


def _opened(path: Path, dir_fd: int | None) -> tuple[int, bool]:
    """Open a lock file, or create it; return its descriptor and whether it is new.

    Raises:
        FileExistsError: Another process creates it meanwhile.
        StoreLocked: Its name is taken by something that is no file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return above_standard_streams(open_entry(path, flags, dir_fd=dir_fd)), False
    except FileNotFoundError:
        flags |= os.O_CREAT | os.O_EXCL
        return above_standard_streams(open_entry(path, flags, dir_fd=dir_fd)), True
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            figures = _status(path, dir_fd)
            raise _refusal(path, figures, f"is {_kind_of(figures)}") from error
        raise


def _status(path: Path, dir_fd: int | None) -> os.stat_result:
    name = path if dir_fd is None else path.name
    return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)


def _check_owner(path: Path, figures: os.stat_result, folder: os.stat_result) -> None:
    """Raise unless this is a regular file of a trusted user.

    This user, root and the owner of the directory are trusted, and in a directory that its
    group may write to, the members of the group.
    """
    if not stat.S_ISREG(figures.st_mode):
        raise _refusal(path, figures, f"is {_kind_of(figures)}")
    owner = figures.st_uid
    if owner in (os.geteuid(), 0, folder.st_uid):
        return
    is_shared = folder.st_mode & (stat.S_IWGRP | stat.S_ISGID)
    if not is_shared or folder.st_gid not in _groups_of(owner):
        raise _refusal(path, figures, "is of a user who neither owns this directory nor shares it")


def _groups_of(user: int) -> list[int]:
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return []
    return os.getgrouplist(entry.pw_name, entry.pw_gid)


def _refusal(path: Path, figures: os.stat_result, reason: str) -> StoreLocked:
    owner = _name_of(figures.st_uid)
    return StoreLocked(
        f"is no lock file to be written to: it {reason}; its owner is {owner}",
        path=path,
        hint="nothing was changed; find out who put it there, and remove it",
    )


def _kind_of(figures: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(figures.st_mode), "no regular file")


def _name_of(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    return f"uid {user}"


def _flock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StoreLocked(
            f"the file system of this directory cannot lock files (flock: {error.strerror}), so nothing would keep a second"
            " writer out",
            path=path.parent,
            hint="mount it with locks that all hosts see (Lustre: -o flock; NFS: without nolock and local_lock), or save to"
            " another file system",
        ) from error


def _write(descriptor: int, text: str, *, offset: int) -> None:
    data = text.encode()[: _MAX_OWNER_BYTES - offset]
    try:
        os.pwritev(descriptor, [data], offset)
        os.ftruncate(descriptor, offset + len(data))
    except OSError as error:
        # The lock holds without the text, and a command that frees space on a full disk needs the
        # lock.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.ftruncate(descriptor, offset)
