# SPDX-License-Identifier: Apache-2.0
"""An atomic writer with its steps to leave out: the fault harness must pass and catch them."""

from __future__ import annotations

import enum
from pathlib import Path

from ckptmgr.io.filesystem import FileSystem

DATA = Path("/data")
TARGET = DATA / "weights"
TEMPORARY = DATA / ".weights.tmp"
OLD, NEW = b"old " * 100, b"new " * 200


class Mistake(enum.Enum):
    """The fault of the writer."""

    NONE = enum.auto()
    NO_FILE_SYNC = enum.auto()
    NO_DIRECTORY_SYNC = enum.auto()
    DELETE_BEFORE_PUBLISH = enum.auto()
    RENAME_BEFORE_SYNC = enum.auto()
    ERRORS_IGNORED = enum.auto()
    TEMPORARY_LEFT = enum.auto()


def write(disk: FileSystem, content: bytes, mistake: Mistake = Mistake.NONE) -> None:
    """Put `content` in place of TARGET."""
    try:
        _write_temporary(disk, content, mistake)
        if mistake is Mistake.DELETE_BEFORE_PUBLISH:
            disk.unlink(TARGET)
        if mistake is not Mistake.RENAME_BEFORE_SYNC:
            disk.replace(TEMPORARY, TARGET)
        if mistake is not Mistake.NO_DIRECTORY_SYNC:
            disk.sync_directory(DATA)
    except OSError:
        if mistake is not Mistake.TEMPORARY_LEFT and disk.status(TEMPORARY) is not None:
            disk.unlink(TEMPORARY)
        if mistake is not Mistake.ERRORS_IGNORED:
            raise


def _write_temporary(disk: FileSystem, content: bytes, mistake: Mistake) -> None:
    file = disk.create(TEMPORARY, mode=0o644)
    try:
        for start in range(0, len(content), 256):
            file.write_at(start, content[start : start + 256])
        if mistake is Mistake.RENAME_BEFORE_SYNC:
            disk.replace(TEMPORARY, TARGET)
        if mistake is not Mistake.NO_FILE_SYNC:
            file.sync()
    finally:
        file.close()
