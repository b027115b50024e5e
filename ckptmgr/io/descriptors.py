# SPDX-License-Identifier: Apache-2.0
"""File descriptors that nobody takes for the standard streams.

Those are free in a process that was started without them, where libraries still print to them: into the file, or the memory,
that got their number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_LAST_STANDARD_DESCRIPTOR = 2


def above_standard_streams(descriptor: int) -> int:
    """Return a descriptor above 2 in place of one that is not."""
    if descriptor > _LAST_STANDARD_DESCRIPTOR:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD_DESCRIPTOR + 1)
    finally:
        os.close(descriptor)


def open_entry(path: Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a file by its path, or by its name alone in a directory that is open; errors name the whole path."""
    if dir_fd is None:
        return os.open(path, flags, mode)
    try:
        return os.open(path.name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Let errors of calls on a descriptor name its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def reserve_standard_descriptors() -> Iterator[None]:
    """Let nothing that is opened within the block have one of the numbers up to 2; also not what duplicates descriptors."""
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # without /dev/null nothing is taken
            descriptor = -1
            while descriptor <= _LAST_STANDARD_DESCRIPTOR:
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                taken.callback(os.close, descriptor)
        yield
