# SPDX-License-Identifier: Apache-2.0
"""Who writes: the identity of a process that survives in file names, and the lease on a series.

A series has one writer at a time. The lease is a locked file, `.<series>.lease`; the kernel drops the lock when its holder
dies, so a stale lease needs no guessing. Its text names the holder for error messages.

Temporary files carry the token of their writer, so that only those of dead writers are reaped. A token is dead when it comes
from this host and another boot, or from this boot and a process that is gone (pid and start time, so a reused pid does not
count as alive). Of other hosts nothing is known.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Protocol

from ckptmgr.errors import StoreLocked
from ckptmgr.fsio import FileSystem

LEASE_SUFFIX = ".lease"

_READING = "CheckpointManager.load(), load_checkpoint() and open_checkpoint() read without being the writer"
_OTHER_HINT = (
    "two writers would overwrite each other: stop that process, or use another prefix or directory; "
    + _READING
)
_OWN_HINT = "that is this process: close() the manager or callback that wrote it before, or use it in a with block"


class Processes(Protocol):
    """What is known about writing processes."""

    def token(self) -> str:
        """Return the token of this process: only letters, digits and `-`."""
        ...

    def is_dead(self, token: str) -> bool | None:
        """Return whether the process of a token is gone; None when that cannot be known."""
        ...


@dataclass(frozen=True, slots=True)
class ProcProcesses:
    """Processes as seen through /proc."""

    proc: Path = Path("/proc")

    def token(self) -> str:
        """Return `<host>-<boot>-<pid>-<start time>`, host and boot hashed."""
        return f"{self._host()}-{self._boot()}-{os.getpid()}-{self._start_time(os.getpid()) or 0}"

    def is_dead(self, token: str) -> bool | None:
        """Return whether the process of a token is gone; None for other hosts, odd spellings, and without /proc."""
        parts = token.split("-")
        if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return None
        host, boot, pid, start = parts
        if host != self._host() or self._start_time(os.getpid()) is None:
            return None
        return boot != self._boot() or self._start_time(int(pid)) != int(start)

    def _host(self) -> str:
        # The pid namespace belongs to the identity: two containers may share the host name and the boot.
        namespace = ""
        with contextlib.suppress(OSError):
            namespace = str((self.proc / "self/ns/pid").readlink())
        return _short_hash(f"{socket.gethostname()} {namespace}")

    def _boot(self) -> str:
        with contextlib.suppress(OSError):
            return _short_hash((self.proc / "sys/kernel/random/boot_id").read_text())
        return "0"

    def _start_time(self, pid: int) -> int | None:
        """Return the start time of a process in clock ticks since boot, or None when it is gone or only waited for."""
        try:
            text = (self.proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The second field is the command in parentheses and may itself contain spaces and parentheses.
        fields = text.rpartition(")")[2].split()
        # The init process of a container may never wait for orphans: a zombie is dead.
        return None if fields[0] in ("Z", "X") else int(fields[19])


def describe_owner() -> str:
    """Return a text that names this process to a person."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def lease_path(directory: Path, series: str) -> Path:
    """Return the path of the lease file of a series."""
    return directory / f".{series}{LEASE_SUFFIX}"


@contextlib.contextmanager
def hold_lease(fs: FileSystem, directory: Path, series: str) -> Iterator[None]:
    """Be the only writer of a series.

    Raises:
        StoreLocked: A live process holds the lease.
        OSError: The directory cannot be written to.
    """
    path = lease_path(directory, series)
    with contextlib.ExitStack() as stack:
        try:
            holder = stack.enter_context(fs.lock(path, owner=describe_owner()))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                error.add_note(f"only writers need this file; {_READING}")
            raise
        if holder is not None:
            raise StoreLocked(
                f"series {series!r} is being written by {holder or 'another process'}",
                path=directory,
                hint=_OTHER_HINT if holder != describe_owner() else _OWN_HINT,
            )
        yield


def series_tag(series: str) -> str:
    """Return a short tag that ties a temporary file to its series."""
    return _short_hash(series)


def _short_hash(text: str) -> str:
    return blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
