# SPDX-License-Identifier: Apache-2.0
"""Names that changed in a directory, as the kernel reports them (inotify).

A modification time could not separate changes of others from those of this process, nor two
changes within one tick of the clock. The kernel reports every change on this host before the call
that made it returns. Not watched are file systems that other hosts can change, and those that are
unknown here. The kernel reports a change of content under the name through which it is made: not
under other hard links of the file, in this directory or another.

`ckptmgr watch` follows directories through watchdog instead, which passes events on in a thread of
its own: it cannot say that there are no more by now, as retention needs to know.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import weakref
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO = 0x2, 0x4, 0x40, 0x80
_CREATE, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x100, 0x200, 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED, _ONLY_DIRECTORIES = 0x2000, 0x4000, 0x8000, 0x0100_0000
_WATCHED = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_ENDS = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _OVERFLOW | _IGNORED
_EVENT = struct.Struct("iIII")
_READ_BYTES = 1 << 16
_LONGEST_EVENT_BYTES = _EVENT.size + 256
# File systems of one host, by the numbers of statfs(2).
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x5846_5342,  # xfs
        0x9123_683E,  # btrfs
        0x0102_1994,  # tmpfs
        0xF2F5_2010,  # f2fs
        0x2FC1_2FC1,  # zfs
        0xCA45_1A4E,  # bcachefs
    }
)
_STATFS_BYTES = 256
_HAS_LONG_TYPE = sys.maxsize > 2**32 and os.uname().machine in ("x86_64", "aarch64")


class DirectoryWatch:
    """The changes in a directory since the last question; not for several threads at once."""

    def __init__(self, path: Path, descriptor: int, identity: tuple[int, int]) -> None:
        self._path = path
        self._descriptor = descriptor
        self._identity = identity
        self._pid = os.getpid()
        self._closed = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, path: Path) -> DirectoryWatch | None:
        """Watch a directory from now on; None where not every change of it would be reported."""
        with contextlib.suppress(OSError):
            if not _is_local(path):
                return None
            before = _identity_of(path)
            descriptor = _checked(_LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
            watch = cls(path, descriptor, before)
            try:
                mask = _WATCHED | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORIES
                _checked(_LIBC.inotify_add_watch(descriptor, os.fsencode(path), mask))
                if _identity_of(path) == before:
                    return watch
            except OSError:
                pass
            watch.close()
        return None

    def changed_names(self) -> set[str] | None:
        """Return the names that may have changed since the last call, or None: perhaps all did.

        After None the watch reports nothing more.
        """
        names: set[str] = set()
        try:
            # A forked child would take the reports of its parent.
            if os.getpid() != self._pid or not self._closed.alive:
                return None
            is_complete = self._identity == _identity_of(self._path) and self._read(names)
        except OSError:
            return None
        return names if is_complete else None

    def _read(self, names: set[str]) -> bool:
        """Add the reported names; return False where changes were lost."""
        while True:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return True
            start = 0
            while start < len(data):
                _, mask, _, length = _EVENT.unpack_from(data, start)
                if mask & _ENDS:
                    return False
                start += _EVENT.size
                names.add(os.fsdecode(data[start : start + length].rstrip(b"\0")))
                start += length
            if len(data) + _LONGEST_EVENT_BYTES < _READ_BYTES:  # there was nothing more
                return True

    def close(self) -> None:
        """Stop watching."""
        self._closed()


def _identity_of(path: Path) -> tuple[int, int]:
    figures = path.stat()
    return (figures.st_dev, figures.st_ino)


def _is_local(path: Path) -> bool:
    figures = ctypes.create_string_buffer(_STATFS_BYTES)
    if not _HAS_LONG_TYPE or _LIBC.statfs(os.fsencode(path), figures):
        return False
    return ctypes.c_ulong.from_buffer(figures).value in _LOCAL


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
