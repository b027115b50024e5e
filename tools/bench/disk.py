# SPDX-License-Identifier: Apache-2.0
"""What makes saves of other libraries comparable: the same sync, the same cold cache, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_FILL_BYTES = 4 << 20


def sync(path: Path) -> None:
    """Make a file, or every file and directory below a directory, durable, and the entry that leads to it."""
    for each in (*_tree(path), path.parent):
        with _open(each) as descriptor:
            os.fsync(descriptor)


def drop_cache(path: Path) -> None:
    """Drop synced files from the page cache, so that the next load is cold."""
    for each in _tree(path):
        with _open(each) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    """Read files through the page cache, so that the next load is warm."""
    buffer = bytearray(_FILL_BYTES)
    for each in _tree(path):
        if each.is_file():
            with each.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a directory, and files beside it."""
    if path.is_dir():
        shutil.rmtree(path)
        return
    for each in (path, path.with_name(f"{path.name}.manifest.json")):
        with contextlib.suppress(FileNotFoundError):
            each.unlink()


def _tree(path: Path) -> list[Path]:
    return [*sorted(path.rglob("*"), reverse=True), path] if path.is_dir() else [path]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
