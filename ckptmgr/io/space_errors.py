# SPDX-License-Identifier: Apache-2.0
"""Errors of a failed save: they name the file and, for a full disk, the figures and the way out."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, StoreFull
from ckptmgr.io.filesystem import FileSystem

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WAY_OUT = (
    "ckptmgr prune --now frees what its policy drops, and with --grace 0s also what is in the trash; or keep fewer"
    " checkpoints"
)


def not_enough_space(path: Path, needed: int, free: int) -> StoreFull:
    """Return the error for a save that was not begun."""
    error = StoreFull(
        f"not enough disk space: {needed} bytes needed, {free} free, {needed - free} missing",
        path=path,
        hint=f"nothing was changed; {_WAY_OUT}",
    )
    error.errno = errno.ENOSPC
    error.missing_bytes = needed - free
    return error


def is_helped_by_removal(error: StoreFull) -> bool:
    """Return whether removed files make room: bytes are missing, of the disk or of a quota.

    A disk that refuses a write and reports room for it lacks something else (metadata, a set of
    reserved blocks, a faulty device), and the longest file stays the longest.
    """
    return error.errno == errno.EDQUOT or error.missing_bytes > 0


def explain_error(error: OSError, path: Path, needed: int, fs: FileSystem) -> OSError:
    """Return the error of a failed save with the file name and, for a full disk, figures."""
    if isinstance(error, CkptmgrError):
        return error
    if error.errno in _NO_SPACE:
        free = inodes = None
        with contextlib.suppress(OSError):
            free = fs.free_bytes(path.parent)
            inodes = fs.free_inodes(path.parent)
        if error.errno == errno.ENOSPC and inodes == 0:
            return _no_inodes(error, path, free)
        full = StoreFull(
            f"the disk became full while saving ({error.strerror}): "
            f"{f'{needed} bytes needed, ' if needed else ''}"
            f"{'unknown' if free is None else free} free after cleaning up",
            path=path,
            hint=f"the previous checkpoints are intact; {_WAY_OUT}",
        )
        full.errno, full.was_begun = error.errno, True
        if error.errno == errno.ENOSPC and free is not None:
            full.missing_bytes = max(0, needed - free)
        return full
    if error.filename is None:
        return type(error)(error.errno, error.strerror, str(path))
    return error


def _no_inodes(error: OSError, path: Path, free: int | None) -> StoreFull:
    full = StoreFull(
        f"the file system has no inodes left ({error.strerror}): each file takes one, however small; "
        f"{'unknown' if free is None else free} bytes are free",
        path=path,
        hint="the previous checkpoints are intact; remove files that nothing needs anywhere on this file system (df -i), by"
        f" hand at first, because a removal takes a lease, which is a file; then {_WAY_OUT}",
    )
    full.errno = error.errno
    return full


@contextmanager
def explain_errors(path: Path, fs: FileSystem) -> Iterator[None]:
    """Apply `explain_error` to errors of the disk while a small file of a checkpoint is written."""
    try:
        yield
    except OSError as error:
        raise explain_error(error, path, 0, fs) from error
