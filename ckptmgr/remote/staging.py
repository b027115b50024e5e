# SPDX-License-Identifier: Apache-2.0
"""The folder on this machine in which a run writes a file before it is uploaded.

It is the same for each run of one series at one address, so the next one removes what a killed one
left, and the lease in it keeps two runs of one machine apart.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from ckptmgr.io.filesystem import unlink_if_present
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.store import Store

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def staging_directory(url: str, series: str) -> Path:
    """Return the folder for a series at an address, below that of the user in the temporary one."""
    process = os.getpid() if url.startswith("memory:") else ""  # each has a memory of its own
    place = hashlib.sha256(f"{url}\n{series}\n{process}".encode()).hexdigest()[:16]
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    return temporary / f"ckptmgr-{os.geteuid()}" / place


def prepare_folder_of_user(folder: Path) -> None:
    """Make the folder of the user, the parent of the staging folders.

    Raises:
        PermissionError: Its name is taken by something that others can change or read.
    """
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


def clear(store: Store) -> None:
    """Remove what a killed run has staged; its lease must be held."""
    for name in store.fs.names(store.directory):
        if not name.startswith("."):  # a lease, or a note
            unlink_if_present(store.fs, store.directory / name)


def discard_staged(store: Store, name: str) -> None:
    """Remove a staged checkpoint; one that cannot be removed is left to the next run."""
    for one in (name, manifest_name(name)):
        with contextlib.suppress(OSError):
            unlink_if_present(store.fs, store.directory / one)
