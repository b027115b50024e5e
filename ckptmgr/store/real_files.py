# SPDX-License-Identifier: Apache-2.0
"""The file that a path leads to: links are followed, but for one that took the place of the data of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmgr.core.errors import CorruptCheckpoint
from ckptmgr.store.manifest.codec import manifest_name

NO_REGULAR_FILE = "the data file is a link or no regular file"
_MAX_LINKS = 40


def real_file(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path leads to, which need not exist.

    Raises:
        CorruptCheckpoint: A link on the way has a manifest, which is of the file that should be there.
    """
    at = Path(path)
    for _ in range(
        _MAX_LINKS
    ):  # as many as Linux follows; of more it says so when the file is opened
        at = Path(os.path.realpath(at.parent)) / at.name
        if not at.is_symlink():
            break
        if at.with_name(manifest_name(at.name)).exists():
            raise no_regular_file(at)
        at = at.parent / at.readlink()
    return Path(os.path.realpath(path))


def no_regular_file(path: Path) -> CorruptCheckpoint:
    """Return the error of a link, or another thing, in place of a data file that a manifest describes."""
    # It would be followed out of the directory, where another file may take the place of its target unnoticed.
    return CorruptCheckpoint(
        NO_REGULAR_FILE,
        path=path,
        hint="put the file itself here, in place of the link; or read the file that it points to by its own path",
    )
