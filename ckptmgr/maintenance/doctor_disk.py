# SPDX-License-Identifier: Apache-2.0
"""Checks of a disk by a small file: written, synced, renamed, locked, and removed again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.io.filesystem import FileSystem, discard
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.mounts import Mount, is_shared, mount_of
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.doctor import Diagnosis

_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0"})
_PROBE = b"ckptmgr doctor\n"
_CLOCK_S = 2.0
_SLOW_SYNC_S = 1.0


@dataclass(slots=True, kw_only=True)
class _Probe:
    """Names of the files that the checks create."""

    temp: Path
    final: Path
    lock: Path


def check_disk(fs: FileSystem, directory: Path, *, now_s: float) -> Iterator[Diagnosis]:
    """Yield the findings about a directory; probe files are removed, also after an error."""
    started = time.perf_counter()
    # Listings know such names: if this process is killed, they show its leftovers.
    token = ProcProcesses().token()
    temp, final, lock = (
        directory / temp_name(f"doctor-{kind}", token=token, series="doctor")
        for kind in ("new", "file", "lock")
    )
    probe = _Probe(temp=temp, final=final, lock=lock)
    try:
        written = _written(fs, probe)
        if isinstance(written, Diagnosis):
            yield written
            return
        yield Diagnosis(
            check="writable",
            grade="ok",
            message="a file was created, written, renamed, read again and removed",
        )
        yield _durability(written, mount_of(directory))
        yield _clock(fs, probe, now_s, started=started)
        yield _locks(fs, probe)
    finally:
        for path in (probe.temp, probe.final, probe.lock):
            discard(fs, path)


def _written(fs: FileSystem, probe: _Probe) -> tuple[float, float] | Diagnosis:
    """Return the seconds of an fsync of a file and of its directory, or why there is none."""
    try:
        with contextlib.closing(fs.create(probe.temp, mode=0o600)) as file:
            file.write_at(0, _PROBE)
            started = time.perf_counter()
            file.sync()
            file_s = time.perf_counter() - started
        fs.replace(probe.temp, probe.final)
        started = time.perf_counter()
        fs.sync_directory(probe.final.parent)
        directory_s = time.perf_counter() - started
        read = memoryview(bytearray(len(_PROBE)))
        with contextlib.closing(fs.open(probe.final)) as stored:
            stored.read_into(0, read)
    except (OSError, CkptmgrError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        hint = (
            "saves need a directory that this user can write to, with space, on a disk that syncs"
        )
        return Diagnosis(
            check="writable", grade="fail", message=f"no file can be saved: {reason}", hint=hint
        )
    if read != _PROBE:
        text = "a file that was written and synced does not have the bytes that were written"
        return Diagnosis(check="writable", grade="fail", message=text, hint="do not save there")
    return file_s, directory_s


def _durability(seconds: tuple[float, float], mount: Mount | None) -> Diagnosis:
    kind = "an unknown file system" if mount is None else mount.kind
    file_s, directory_s = seconds
    figures = {"file_sync_s": file_s, "directory_sync_s": directory_s}
    text = f"fsync of a file took {file_s * 1e3:.1f} ms, of the directory {directory_s * 1e3:.1f} ms, on {kind}"
    problem = hint = None
    if "eatmydata" in os.environ.get("LD_PRELOAD", ""):
        problem, hint = "libeatmydata makes every fsync do nothing", "unset LD_PRELOAD"
    elif mount is not None and mount.kind in _MEMORY:
        problem, hint = "it is in memory: nothing survives a restart", "save to a disk"
    elif mount is not None and not _NO_BARRIERS.isdisjoint(mount.options):
        problem, hint = (
            "write barriers are off: a power cut may undo an fsync",
            "mount it with barriers",
        )
    elif max(seconds) > _SLOW_SYNC_S:
        problem, hint = (
            "that is slow",
            "every save waits for it; look for other writers to the disk",
        )
    if problem is not None:
        return Diagnosis(
            check="fsync", grade="warn", message=f"{text}; {problem}", hint=hint, figures=figures
        )
    text += "; not checked: whether the drive and its controller obey"
    if mount is not None and is_shared(mount.kind):
        text += ", and what the server does"
    return Diagnosis(check="fsync", grade="ok", message=text, figures=figures)


def _clock(fs: FileSystem, probe: _Probe, now_s: float, *, started: float) -> Diagnosis:
    """Compare the time of the probe file with `now_s`, when the checks `started`."""
    status = fs.status(probe.final)
    if status is None:
        return Diagnosis(check="clock", grade="fail", message="a file vanished as it was looked at")
    ahead_s = status.modified_at - now_s
    if ahead_s > 0:  # a busy disk takes a while to create a file
        ahead_s = max(0.0, ahead_s - (time.perf_counter() - started))
    figures = {"ahead_s": ahead_s}
    if abs(ahead_s) <= _CLOCK_S:
        text = f"a new file has the time of this machine, within {abs(ahead_s) + 0.05:.1f} s"
        return Diagnosis(check="clock", grade="ok", message=text, figures=figures)
    word = "ahead of" if ahead_s > 0 else "behind"
    text = f"the clock of the file system is {abs(ahead_s):.0f} s {word} that of this machine"
    hint = "set both by NTP: ages in ls and in rules such as within(2d) are wrong by that much"
    return Diagnosis(check="clock", grade="warn", message=text, hint=hint, figures=figures)


def _locks(fs: FileSystem, probe: _Probe) -> Diagnosis:
    """Check that a second opening of a locked file is refused the lock, and gets it afterwards."""
    try:
        with fs.lock(probe.lock, owner="doctor") as first, fs.lock(probe.lock, owner="x") as second:
            is_refused = first is None and second is not None
        with fs.lock(probe.lock, owner="doctor") as again:
            is_freed = again is None
    except (OSError, CkptmgrError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        hint = "two runs could write one series; mount it with locks (NFS: not -o nolock)"
        return Diagnosis(
            check="locks", grade="fail", message=f"files cannot be locked: {reason}", hint=hint
        )
    if is_refused and is_freed:
        text = "flock keeps a second opening of a file out until the first one is closed"
        text += "; not checked: whether other hosts see it"
        return Diagnosis(check="locks", grade="ok", message=text)
    text = "flock has no effect: a second opening of a locked file got the lock"
    hint = "let only one process write there, or mount it with locks"
    return Diagnosis(check="locks", grade="fail", message=text, hint=hint)
