# SPDX-License-Identifier: Apache-2.0
"""The folder on this machine in which a run writes a file before it is uploaded.

It is the same for each run of one series at one address, so the next one removes what a killed one
left, and the lease in it keeps two runs of one machine apart. A single file at an address has one,
too. A folder goes when its run ends. Of the other folders of the user, those of killed runs go.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from ckptmgr.core.errors import StoreLocked
from ckptmgr.io.filesystem import FileStatus, discard, unlink_if_present
from ckptmgr.io.leases import holders_in, read_text
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.requests import open_objects
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.name_leases import leased_name
from ckptmgr.store.store import Store

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PLACE = re.compile(r"[0-9a-f]{16}")
_NOTE_AGE = timedelta(days=7)
_EMPTY_AGE = timedelta(hours=1)  # a run may be about to take its lease in a younger one
_ATTEMPTS = 10
_Done = TypeVar("_Done")


def staging_directory(url: str, series: str) -> Path:
    """Return the folder for a series, or a file, at an address.

    It is in the folder of the user, and that in the temporary one.
    """
    process = os.getpid() if url.startswith("memory:") else ""  # each has a memory of its own
    place = hashlib.sha256(f"{url}\n{series}\n{process}".encode()).hexdigest()[:16]
    temporary = Path(os.path.realpath(tempfile.gettempdir()))
    return temporary / f"ckptmgr-{os.geteuid()}" / place


def in_staging(directory: Path, carry_out: Callable[[], _Done]) -> _Done:
    """Make a staging folder, in the folder of the user, and take a lease in it by `carry_out`.

    Raises:
        PermissionError: The name of the latter is taken by something that others can change or read.
    """
    left = _ATTEMPTS
    while True:
        left -= 1
        try:
            _make(directory)
            return carry_out()
        except FileNotFoundError as error:
            # Else a process that wrote there before has removed it just before the lease was taken.
            if not left or (directory.is_dir() and not _is_about_lease(error, directory)):
                raise


def _is_about_lease(error: OSError, directory: Path) -> bool:
    """Return whether an error names a staging folder, or a lease in it."""
    path = Path(error.filename or "")
    return path == directory or (path.parent == directory and leased_name(path.name) is not None)


def _make(directory: Path) -> None:
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
    # Not exist_ok: it raises FileExistsError if the folder goes just after it was found.
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)


def clear(store: Store) -> None:
    """Remove the staged files of a killed run; its lease must be held."""
    for name in store.fs.names(store.directory):
        if not name.startswith("."):  # a lease, or a note
            unlink_if_present(store.fs, store.directory / name)


def clear_notes(store: Store) -> None:
    """Remove notes for the next run that tell it nothing; the lease must be held."""
    for name in store.fs.names(store.directory):
        if name.startswith(".") and leased_name(name) is None:
            discard(store.fs, store.directory / name)


def remove_staging(store: Store) -> None:
    """Remove the folder of an ended run, then that of the user, unless something is in them."""
    for folder in (store.directory, store.directory.parent):
        with contextlib.suppress(OSError):
            store.fs.remove_directory(folder)


def sweep_killed(store: Store) -> None:
    """Remove what killed runs have left in other folders of the user; best effort.

    Each lease in such a folder names processes of this machine that have ended, and can be taken.
    It keeps its text meanwhile: a run that begins there waits for the end of such a holder. A note
    for the next run stays for a week.
    """
    with contextlib.suppress(OSError):
        for name in store.fs.names(store.directory.parent):
            other = store.directory.with_name(name)
            if _PLACE.fullmatch(name) and other != store.directory:
                with contextlib.suppress(OSError, StoreLocked):
                    _sweep(Store(other, fs=store.fs, processes=store.processes, clock=store.clock))


def _sweep(left: Store) -> None:
    fs, directory = left.fs, left.directory
    status = fs.status(directory)
    if status is None or not status.is_directory:
        return
    found = fs.list(directory)
    leases = [directory / name for name in found if leased_name(name) is not None]
    texts = {path: read_text(fs, path) for path in leases}
    if not all(_is_of_dead(left, text) for text in texts.values()):
        return
    if not (leases or _is_older(left, status, _EMPTY_AGE)):
        return
    with contextlib.ExitStack() as held:
        held.enter_context(fs.hold_directory(directory))
        for path, text in texts.items():
            if held.enter_context(fs.lock(path, owner=text)) is not None:
                return
        for name, one in found.items():
            is_note = name.startswith(".") and not name.endswith(".tmp")
            if directory / name not in leases and (
                _is_older(left, one, _NOTE_AGE) if is_note else bool(leases)
            ):
                unlink_if_present(fs, directory / name)
        for path in leases:
            unlink_if_present(fs, path)  # before it is unlocked
    remove_staging(left)


def _is_of_dead(left: Store, text: str) -> bool:
    holders = holders_in(text)
    return all(one is None or left.processes.is_dead(one.token) is True for one in holders)


def _is_older(left: Store, status: FileStatus, age: timedelta) -> bool:
    changed_ns = status.changed_ns
    return changed_ns is not None and left.clock() - changed_ns / 1e9 > age.total_seconds()


def discard_staged(store: Store, name: str) -> None:
    """Remove a staged checkpoint; one that cannot be removed is left to the next run."""
    for one in (name, manifest_name(name)):
        with contextlib.suppress(OSError):
            unlink_if_present(store.fs, store.directory / one)


def upload_staged(url: str, store: Store, name: str, *, reads_back: bool) -> None:
    """Upload a staged file to an address, and remove it here; `reads_back` as for an upload.

    Raises:
        UnsafeWrite: The address has another checkpoint of this name.
        CkptmgrError, OSError: As `RemoteDirectory.upload`.
    """
    try:
        there = RemoteDirectory(open_objects(url), clock=time.time)
        there.upload(store, name, reads_back=reads_back)
    finally:
        discard_staged(store, name)
