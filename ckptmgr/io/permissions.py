# SPDX-License-Identifier: Apache-2.0
"""Permission bits of the entries that ckptmgr makes; each follows from the mode of the data files.

| entry | mode |
|---|---|
| data, manifest | that of the data files |
| small files that are replaced as a whole: notes, records of checks | the same for group and others, 0600 for the owner |
| the checkpoint directory | 0700, and for group and others their rights on the files (x where r) |
| folders in it: trash, quarantine, records | those of the directory, without w for others |
| leases | 0600; 0660 where the group may write to the directory |

No umask changes them. Where the file system refuses to change permission bits, or has none, files
have those that it gives to new ones; a warning names them, once for each file system.

A lease is not for those who only read: flock needs no write permission, so any user who can open a
lease could stop the run.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

_LOG = logging.getLogger(__name__)

DEFAULT_FILE_MODE = 0o400

_SHARED = stat.S_IRWXG | stat.S_IRWXO
_REFUSALS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Of file systems without permission bits (vfat, CIFS, object stores that are mounted by FUSE)."""
_warned: set[int] = set()


def new_file_mode(mode: int) -> int:
    """Return the mode with which a file is created, as it may stay; its writer can open it."""
    return mode | stat.S_IRUSR | stat.S_IWUSR


def set_file_mode(descriptor: int, mode: int, path: Path) -> None:
    """Give a new file its mode whatever the umask, or warn of the one that it has."""
    _change(descriptor, mode)
    figures = os.fstat(descriptor)
    held = stat.S_IMODE(figures.st_mode)
    if held != mode and figures.st_dev not in _warned:
        _warned.add(figures.st_dev)
        _LOG.warning(
            "%s: the file system keeps no permission bits: files have mode %04o, not %04o"
            "\nhint: who may read them is decided where it is mounted, such as by umask= and uid=",
            path.parent,
            held,
            mode,
        )


def is_for_others(mode: int) -> bool:
    """Return whether files of a mode are meant for other users, too: the mode was asked for."""
    return bool(mode & _SHARED)


def note_mode(file_mode: int) -> int:
    """Return the mode of a small file beside data files of a mode."""
    return 0o600 | file_mode & _SHARED & ~stat.S_IWOTH


def directory_mode(file_mode: int) -> int:
    """Return the mode of a directory for data files of a mode; x where r.

    Where the group may write, files get the group of the directory (setgid): it need not be the
    first group of each of its members.
    """
    shared = file_mode & _SHARED
    mode = stat.S_IRWXU | shared | (shared & (stat.S_IRGRP | stat.S_IROTH)) >> 2
    return mode | stat.S_ISGID if file_mode & stat.S_IWGRP else mode


def set_directory_mode(descriptor: int, mode: int) -> None:
    """Give a new directory its mode whatever the umask; it keeps an inherited setgid bit."""
    figures = os.fstat(descriptor)
    wanted = mode | figures.st_mode & stat.S_ISGID
    if stat.S_IMODE(figures.st_mode) != wanted:
        _change(descriptor, wanted)


def inherit_directory_mode(descriptor: int, parent: os.stat_result) -> None:
    """Give a new folder the permissions of its directory, without w for others."""
    shared = parent.st_mode & _SHARED & ~stat.S_IWOTH
    if os.fstat(descriptor).st_gid != parent.st_gid:  # they are of the group of the directory
        shared &= ~stat.S_IRWXG
    set_directory_mode(descriptor, stat.S_IRWXU | shared)


def share_lease(descriptor: int, directory: os.stat_result) -> None:
    """Let a group that may write to the directory open a new lease, too: its members are writers."""
    is_shared = directory.st_mode & stat.S_IWGRP and not directory.st_mode & stat.S_ISVTX
    if is_shared and os.fstat(descriptor).st_gid == directory.st_gid:
        _change(descriptor, 0o660)


def _change(descriptor: int, mode: int) -> None:
    try:
        os.fchmod(descriptor, mode)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
