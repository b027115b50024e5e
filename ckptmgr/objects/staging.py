# SPDX-License-Identifier: Apache-2.0
"""The folder on this machine in which a run writes a file before it is uploaded.

It is the same for each run of one series at one address, so the next one removes what a killed one
left, and the lease in it keeps two runs of one machine apart. A single file at an address has one,
too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

from ckptmgr.io.filesystem import unlink_if_present
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.requests import open_objects
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.store import Store

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def staging_directory(url: str, series: str) -> Path:
    """Return the folder for a series, or a file, at an address.

    It is in the folder of the user, and that in the temporary one.
    """
    process = os.getpid() if url.startswith("memory:") else ""  # each has a memory of its own
    place = hashlib.sha256(f"{url}\n{series}\n{process}".encode()).hexdigest()[:16]
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    return temporary / f"ckptmgr-{os.geteuid()}" / place


def prepare_staging(directory: Path) -> None:
    """Make a staging folder, in the folder of the user.

    Raises:
        PermissionError: The name of the latter is taken by something that others can change or read.
    """
    folder = directory.parent
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & _OTHERS:
        raise PermissionError(
            errno.EACCES,
            "files are written here before their upload, but it is no folder of this user alone; remove it, or set "
            "TMPDIR to another folder",
            str(folder),
        )
    directory.mkdir(mode=0o700, exist_ok=True)


def clear(store: Store) -> None:
    """Remove the staged files of a killed run; its lease must be held."""
    for name in store.fs.names(store.directory):
        if not name.startswith("."):  # a lease, or a note
            unlink_if_present(store.fs, store.directory / name)


def discard_staged(store: Store, name: str) -> None:
    """Remove a staged checkpoint; one that cannot be removed is left to the next run."""
    for one in (name, manifest_name(name)):
        with contextlib.suppress(OSError):
            unlink_if_present(store.fs, store.directory / one)


def upload_staged(url: str, store: Store, name: str) -> None:
    """Upload a staged file to an address, and remove it here.

    Raises:
        UnsafeWrite: The address has another checkpoint of this name.
        CkptmgrError, OSError: As `RemoteDirectory.upload`.
    """
    try:
        RemoteDirectory(open_objects(url), clock=time.time).upload(store, name)
    finally:
        discard_staged(store, name)
