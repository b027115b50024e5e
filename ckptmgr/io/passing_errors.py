# SPDX-License-Identifier: Apache-2.0
"""Classes of disk errors: transient, damage, and those after which no older file may be used.

| error | tried again | then |
|---|---|---|
| EAGAIN, EINTR, EMFILE, ENFILE, ENOMEM, MemoryError, ESTALE, ETIMEDOUT | yes | raised |
| EIO, EBADMSG, EUCLEAN: unreadable bytes | yes, file opened again | damage of that file |
| no such file, or none of the right kind | no | damage of that file |
| all others, such as EACCES | no | raised |
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint
from ckptmgr.io.filesystem import FileSystem

_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_BAD_MEDIUM = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
_NO_SUCH_FILE = frozenset(
    {errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO}
)
PAUSES_S = (0.05, 0.5)
"""Before each further attempt."""


def may_pass(error: BaseException) -> bool:
    """Return whether the same call may succeed the next time."""
    if isinstance(error, CkptmgrError):
        return False
    if isinstance(error, OSError):
        return error.errno in _PASSING or is_bad_medium(error)
    return isinstance(error, MemoryError)


def is_bad_medium(error: BaseException | None) -> bool:
    """Return whether the disk reports that it cannot read the bytes of a file."""
    return isinstance(error, OSError) and error.errno in _BAD_MEDIUM


def is_damage(error: BaseException) -> bool:
    """Return whether an error, after all attempts, means that stored bytes are damaged or gone."""
    if isinstance(error, OSError) and not isinstance(error, CkptmgrError):
        return error.errno in _BAD_MEDIUM | _NO_SUCH_FILE
    return isinstance(error, CorruptCheckpoint)


def may_be_whole(error: BaseException) -> bool:
    """Return whether the file may be intact despite an error; then no older one replaces it."""
    if isinstance(error, CkptmgrError):
        return False
    return isinstance(error, (OSError, MemoryError)) and not is_damage(error)


def may_return(error: BaseException | None) -> bool:
    """Return whether a file that is gone or unreadable here may be intact elsewhere, or later."""
    return is_gone(error) or is_bad_medium(error)


def is_gone(error: BaseException | None) -> bool:
    """Return whether the disk reports that there is no file; not a path that a caller mistyped."""
    return isinstance(error, FileNotFoundError) and not isinstance(error, CkptmgrError)


def no_such_file(path: Path) -> FileNotFoundError:
    """Return the error of a file that is gone."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def pause_before_retry(error: OSError | MemoryError, disk: FileSystem) -> None:
    """Wait after a transient error, before the caller reopens the file; raise any other error."""
    if not may_pass(error):
        raise error
    disk.pause(PAUSES_S[-1])
