# SPDX-License-Identifier: Apache-2.0
"""The lease on a series, and tokens that identify a process in file names.

A series has one writer at a time. The lease is a locked file, `.<series>.lease`; the kernel drops
the lock when its holder dies, so a lease is never stale. The holder removes the file before it
unlocks it.

The text of the file names the holder, in two lines: a description for people; the token of the
process and a random number, and `cleanup` if it only cleans up. A worker process that saves for the
holder adds two such lines of its own.

A lock is not enough: the file, or its directory, may be removed or replaced during a run, and some
file systems are mounted with locks per host. So before each commit the holder checks that the file
under this name is its own, with its text. If not, it has lost the lease and no longer writes. Only
between this check and the commit can a loss go unnoticed.

Temporary files carry the token of their writer, so that only those of dead writers are removed. A
token is dead if it is from this host and another boot, or from this boot and a process that is gone
(pid and start time, so a reused pid does not count as alive). Of other hosts nothing is known.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import NamedTuple, Protocol

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import StoreLocked
from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileSystem, discard
from ckptmgr.io.space_errors import explain_error

LEASE_SUFFIX = ".lease"

_MAX_TEXT_BYTES = 4096
_MAX_SHOWN = 200
_CLEANING = " cleanup"
_READING = "CheckpointManager.load(), load_checkpoint() and open_checkpoint() read without being the writer"
_OTHER_HINT = (
    "two writers would overwrite each other: stop that process, or use another prefix or directory; "
    + _READING
)
_OWN_HINT = "that is this process: close() the manager or callback that wrote it before, or use it in a with block"
_LOST_HINT = (
    "nothing was committed or removed since. Let only one run go on: end the other one, then close() and resume() this one, or"
    " start it again. If both had the lease, the file system locks files for each host alone (Lustre: localflock; NFS:"
    " local_lock, nolock): mount it with locks that all hosts see"
)


class Processes(Protocol):
    """Information about writing processes."""

    def token(self) -> str:
        """Return the token of this process: only letters, digits and `-`."""
        ...

    def is_dead(self, token: str) -> bool | None:
        """Return whether the process of a token is gone; None if that is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class ProcProcesses:
    """Processes as seen through /proc."""

    proc: Path = Path("/proc")

    def token(self) -> str:
        """Return `<host>-<boot>-<pid>-<start time>`, host and boot hashed."""
        return _own_token(self.proc)

    def is_dead(self, token: str) -> bool | None:
        """Return whether the process of a token is gone.

        None if that is unknown: an odd token, another host, no `/proc`.
        """
        parts = token.split("-")
        if len(parts) != 4 or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return None
        own_host, own_boot, _, own_start = self.token().split("-")
        host, boot, pid, start = parts
        if host != own_host or own_start == "0":
            return None
        return boot != own_boot or _start_time(self.proc, int(pid)) != int(start)


@functools.cache  # neither of these changes while a process lives
def _own_token(proc: Path) -> str:
    pid = os.getpid()
    # The pid namespace belongs to the identity: two containers may share the host name and the
    # boot.
    namespace, boot = "", "0"
    with contextlib.suppress(OSError):
        namespace = str((proc / "self/ns/pid").readlink())
    with contextlib.suppress(OSError):
        boot = _short_hash((proc / "sys/kernel/random/boot_id").read_text())
    host = _short_hash(f"{os.uname().nodename} {namespace}")
    return f"{host}-{boot}-{pid}-{_start_time(proc, pid) or 0}"


os.register_at_fork(after_in_child=_own_token.cache_clear)


def _start_time(proc: Path, pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if gone or a zombie."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may itself contain spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    # A zombie is dead: the init process of a container may never wait for orphans.
    return None if fields[0] in ("Z", "X") else int(fields[19])


def describe_owner() -> str:
    """Return a text that names this process to a person."""
    return f"process {os.getpid()} on {os.uname().nodename}"


def lease_path(directory: Path, series: str) -> Path:
    """Return the path of the lease file of a series."""
    return directory / f".{series}{LEASE_SUFFIX}"


class LeaseHolder(NamedTuple):
    """A process in the text of a lease file: its description for people, and its token or ''.

    `is_cleaning`: it only cleans up after dead writers, and releases the lease at once.
    """

    description: str
    token: str
    is_cleaning: bool = False


def new_owner_text(*, is_cleaning: bool = False) -> str:
    """Return the text of this process for a lease file; the text of every lease is unique."""
    return f"{worker_text()}{secrets.token_hex(8)}{_CLEANING if is_cleaning else ''}\n"


def worker_text() -> str:
    """Return the text that a worker process adds to that of the process it saves for."""
    return f"{describe_owner()}\n{ProcProcesses().token()} "


def holders_in(text: str) -> tuple[LeaseHolder, LeaseHolder | None]:
    """Return the holder in the text of a lease file, and its worker process, if any."""
    lines = [*text.splitlines(), "", "", "", ""]
    owner, worker = (_holder(*lines[at : at + 2]) for at in (0, 2))
    return owner, worker if worker.token else None


def _holder(description: str, token_line: str) -> LeaseHolder:
    shown = "".join(one for one in description if one.isprintable())[:_MAX_SHOWN]
    return LeaseHolder(shown, token_line.partition(" ")[0], token_line.endswith(_CLEANING))


class Lease:
    """A lease that this process holds."""

    def __init__(
        self, fs: FileSystem, path: Path, *, text: str, identity: tuple[int, int] | None
    ) -> None:
        self.text = text
        self.identity = identity
        self._fs = fs
        self._path = path
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise unless the file that was locked still has its name, and the text of this holder.

        Raises:
            StoreLocked: The lease is lost.
            OSError: From the disk.
        """
        # All else is read through the descriptor of the held directory.
        if self._fs.is_moved(self._path.parent):
            raise self._lost("its directory was removed, moved or replaced")
        try:
            # Text and identity of one open: on network file systems only that asks the server.
            head = _head_of(self._fs, self._path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            raise self._lost("its lease file was removed") from error
        text = _decoded(head.data)
        # It is empty where the disk was full when the lease was taken.
        if text and not text.startswith(self.text):
            owner, _ = holders_in(text)
            raise self._lost(f"{owner.description or 'another process'} has taken it")
        if head.identity != self.identity:
            raise self._lost("another file has the name of its lease file")

    def remove(self) -> None:
        """Remove the file if it is still that of this process; ignore errors of the disk."""
        if os.getpid() == self._pid:  # a forked child has no part in the lease of its parent
            with contextlib.suppress(OSError, StoreLocked):
                self.check()
                discard(self._fs, self._path)

    def _lost(self, reason: str) -> StoreLocked:
        series = self._path.name.removeprefix(".").removesuffix(LEASE_SUFFIX)
        return StoreLocked(
            f"this process has lost the right to write {series!r}: {reason}",
            path=self._path.parent,
            hint=_LOST_HINT,
        )


def read_text(fs: FileSystem, path: Path) -> str:
    """Return the text of a lease file.

    Raises:
        OSError: It is not there, or cannot be read.
    """
    return _decoded(_head_of(fs, path).data)


def _head_of(fs: FileSystem, path: Path) -> FileHead:
    return fs.read_head(path.parent, path.name, most_bytes=_MAX_TEXT_BYTES)


def _decoded(data: bytes) -> str:
    return data.decode(errors="replace")


class Leases:
    """The leases that are held in one directory, by name."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._held: dict[str, Lease] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold the lease on a series, or on a file, and its directory; see `hold_lease`."""
        with (
            self._fs.hold_directory(self._directory),
            hold_lease(self._fs, self._directory, name) as lease,
        ):
            self._held[name] = lease
            try:
                yield
            finally:
                self._held.pop(name, None)

    def share(self, name: str, *, text: str, identity: tuple[int, int] | None) -> None:
        """Hold a lease together with the process that took it."""
        path = lease_path(self._directory, name)
        self._held[name] = Lease(self._fs, path, text=text, identity=identity)

    def get(self, name: str) -> Lease | None:
        """Return the lease that is held on a name, or None."""
        return self._held.get(name)

    def check(self, *names: str) -> None:
        """Raise if a held lease on one of the names is lost; called before each commit.

        Raises:
            StoreLocked: It is lost.
            OSError: From the disk.
        """
        for name in dict.fromkeys(names):
            lease = self._held.get(name)
            if lease is not None:
                lease.check()

    def check_all(self) -> None:
        """Raise if any held lease is lost; see `check`."""
        self.check(*self._held)


@contextmanager
def hold_lease(
    fs: FileSystem, directory: Path, series: str, *, is_cleaning: bool = False
) -> Iterator[Lease]:
    """Be the only writer of a series or file; remove the lease file at the end of the block.

    With `is_cleaning` the file says that the lease is held for a moment only, to clean up; a writer
    that is refused meanwhile waits.

    Raises:
        StoreLocked: A live process holds the lease.
        StoreFull: The disk has no room for the lease file.
        OSError: The directory cannot be written to.
    """
    path, text = lease_path(directory, series), new_owner_text(is_cleaning=is_cleaning)
    with contextlib.ExitStack() as stack:
        try:
            other = stack.enter_context(fs.lock(path, owner=text))
            if other is not None:
                raise _locked(series, directory, other)
            status = fs.status(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                error.add_note(f"only writers need this file; {_READING}")
            elif error.errno == errno.ENOSPC:
                raise explain_error(error, path, 0, fs) from error
            raise
        identity = None if status is None else status.identity
        lease = Lease(fs, path, text=text, identity=identity)
        is_dropped = False
        try:
            yield lease
        except GeneratorExit:
            # A manager that was not closed is collected, perhaps at interpreter exit: release the
            # lock, keep the file.
            is_dropped = True
            raise
        finally:
            if not is_dropped:
                lease.remove()


def _locked(series: str, directory: Path, text: str) -> StoreLocked:
    """Return the error for a lease that another process holds; it names a live process."""
    owner, worker = holders_in(text)
    name = owner.description or "another process"
    is_own = owner.token == ProcProcesses().token()
    is_over = ProcProcesses().is_dead(owner.token) is True
    act = "being cleaned up" if owner.is_cleaning else "being written"
    if is_over and worker is not None:
        name = f"{worker.description}, the saving process of {name}, which has ended"
    elif is_over:
        name = f"a process that was started by {name}, which has ended"
    error = StoreLocked(
        f"series {series!r} is {act} by {name}",
        path=directory,
        hint=_OWN_HINT if is_own else _OTHER_HINT,
    )
    # A holder writes its text just after it took the lease: without one it may be cleaning up.
    error.is_ending = is_over or owner.is_cleaning or not text
    return error


def series_tag(series: str) -> str:
    """Return a short tag that ties a temporary file to its series."""
    return _short_hash(series)


def _short_hash(text: str) -> str:
    return blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
