# SPDX-License-Identifier: Apache-2.0
"""Resolve a path to its file, but refuse a link in the place of a checkpoint's data."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmgr.core.errors import CorruptCheckpoint
from ckptmgr.core.urls import refuse_url
from ckptmgr.store.manifest.codec import manifest_name

NO_REGULAR_FILE = "the data file is a link or no regular file"
_MAX_LINKS = 40  # as many as Linux follows; opening a longer chain fails


def real_file(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path leads to, which need not exist.

    Raises:
        ValueError: It is the address of an object store.
        CorruptCheckpoint: A link on the way has a manifest, which describes the file that the link
            replaced.
    """
    refuse_url(path)
    at = Path(path)
    for _ in range(_MAX_LINKS):
        at = Path(os.path.realpath(at.parent)) / at.name
        if not at.is_symlink():
            break
        if at.with_name(manifest_name(at.name)).exists():
            raise no_regular_file(at)
        at = at.parent / at.readlink()
    return Path(os.path.realpath(path))


def no_regular_file(path: Path) -> CorruptCheckpoint:
    """Return the error for a link, or another kind of entry, in place of a described data file."""
    # A link would lead out of the directory, where another file can replace its target unnoticed.
    return CorruptCheckpoint(
        NO_REGULAR_FILE,
        path=path,
        hint="put the file itself here, in place of the link; or read the file that it points to by its own path",
    )
