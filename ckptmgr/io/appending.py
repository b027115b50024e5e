# SPDX-License-Identifier: Apache-2.0
"""Append to a file that is kept beside checkpoints, such as one of events, and read it.

Other users may be able to add entries to its directory. So it is opened through the directory, and
must be a regular file without a second name, of this user, root or the owner of the directory; of
any user only where a group shares it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.io.descriptors import HeldDirectories, check_owner, open_entry
from ckptmgr.io.files import NoRegularFile, adopt_owner

_PRIVATE_DIRECTORY = 0o700
_SHARED = 0o066
# O_NONBLOCK: opening a pipe must not wait, although it is refused.
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MOST_TRIES = 20


@contextmanager
def opened_to_append(path: Path) -> Iterator[int]:
    """Yield a descriptor that appends to a file and reads it; make the file where it is missing.

    Others get the rights on it that they have on the directory, less the umask and `w`; what root
    makes gets the owner of the directory. A missing directory is made for this user alone.

    Raises:
        NoRegularFile: A link, a pipe or another kind of entry is in its place, or it has two names.
        PermissionError: It belongs to an untrusted user.
        OSError: From the disk.
    """
    held = HeldDirectories()
    path = path.absolute()
    with contextlib.ExitStack() as opened:
        try:
            opened.enter_context(held.hold(path.parent))
        except FileNotFoundError:
            path.parent.mkdir(mode=_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            opened.enter_context(held.hold(path.parent))
        with held.descriptor(path.parent) as directory:
            descriptor = _opened(path, directory)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


@contextmanager
def opened_to_read(path: Path) -> Iterator[int]:
    """Yield a descriptor that reads such a file; the same entries are refused.

    Raises:
        FileNotFoundError: There is no such file.
        NoRegularFile, PermissionError, OSError: As `opened_to_append`.
    """
    held = HeldDirectories()
    path = path.absolute()
    with held.hold(path.parent), held.descriptor(path.parent) as directory:
        descriptor = _checked(path, directory, _READING)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _opened(path: Path, directory: int) -> int:
    figures = os.fstat(directory)
    mode = 0o600 | figures.st_mode & _SHARED & ~stat.S_IWOTH
    for _ in range(_MOST_TRIES):  # it may be rotated meanwhile
        try:
            return _checked(path, directory, _FLAGS)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                flags = _FLAGS | os.O_CREAT | os.O_EXCL
                descriptor = open_entry(path, flags, mode, dir_fd=directory)
                adopt_owner(descriptor, figures)
                return descriptor
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _checked(path: Path, directory: int, flags: int) -> int:
    """Return a descriptor of a file that is there and may be used."""
    try:
        descriptor = open_entry(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_regular_file(path) from None
        raise
    try:
        _check(path, os.fstat(descriptor), os.fstat(directory))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, figures: os.stat_result, directory: os.stat_result) -> None:
    if not stat.S_ISREG(figures.st_mode) or figures.st_nlink > 1:
        raise _no_regular_file(path)
    check_owner(path, figures, directory)


def _no_regular_file(path: Path) -> NoRegularFile:
    reason = "is a link, no regular file, or has a second name, so it is neither written nor read"
    return NoRegularFile(errno.EPERM, reason, os.fspath(path))
