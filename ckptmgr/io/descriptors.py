# SPDX-License-Identifier: Apache-2.0
"""File descriptors above those of the standard streams.

In a process that was started without standard streams, descriptors 0 to 2 are free. Libraries still
print to them, and would print into the file or memory that gets the number.
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
    """Open a file by its path, or by its name in `dir_fd`; errors name the whole path."""
    if dir_fd is None:
        return os.open(path, flags, mode)
    try:
        return os.open(path.name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the path of a file to errors of calls on its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def reserve_standard_descriptors() -> Iterator[None]:
    """Occupy the free descriptors up to 2, so that no file opened within the block gets one."""
    with contextlib.ExitStack() as reserved:
        with contextlib.suppress(OSError):  # without /dev/null none is reserved
            descriptor = -1
            while descriptor <= _LAST_STANDARD_DESCRIPTOR:
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                reserved.callback(os.close, descriptor)
        yield
