# SPDX-License-Identifier: Apache-2.0
"""A directory as the table of a coordinator: Slurm arrays, `msrun`, processes started by hand.

Every value is a small file that appears under its name by a rename, so readers see all of it or
nothing. Nothing is synced: a job that loses power starts over anyway.

```
<directory>/<session>/4f0c9a2e67d2f1a4.3.json    the value of rank 3; the tag is hashed, and inside
```

`agreed_session` finds a name for this start of a job over a table that an earlier start has used.
Every rank puts a fresh random number, and then a digest of the numbers that it sees. When all
digests equal its own, every rank has seen the number of every other one: all of them belong to this
start. A rank that has read values of an earlier start sees another digest, and reads again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2s
from pathlib import Path

from ckptmgr.core.urls import refuse_url
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.filesystem import FileSystem, OsFileSystem, discard
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.owners import about_stranger, is_of_stranger
from ckptmgr.io.temp_names import temp_name
from ckptmgr.parallel.coordinator import (
    KeyValueCoordinator,
    KeyValues,
    RanksMissing,
    RanksOutOfStep,
    checked_rank,
    poll,
    values_of,
)

_LOG = logging.getLogger(__name__)
_AGREEMENT_PAUSE_S = 0.01
_PAUSES_S = 0.001, 0.1  # the first, the longest
_MAX_VALUE_BYTES = 16 << 20
_HELLO, _SEEN = "hello", "seen"
_begun: Counter[tuple[str, int]] = Counter()


def agreed_session(
    table: KeyValues,
    *,
    rank: int,
    world: int,
    timeout_s: float,
    monotonic: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Return a name that the ranks of this start of the job agree on, and no other processes.

    Keys of the table may be set again; it may hold values of an earlier start.

    Raises:
        ValueError: There is no such rank.
        RanksMissing: Some ranks did not come in time.
        RanksOutOfStep: Another process has the number of this rank.
    """
    checked_rank(rank, world)
    stop = monotonic() + timeout_s

    def values_for(kind: str) -> list[bytes]:
        keys = [f"{kind}/{other}" for other in range(world)]
        values = values_of(table, keys, left_s=lambda: max(0.0, stop - monotonic()))
        missing = [other for other, value in enumerate(values) if value is None]
        if missing:
            raise RanksMissing("the start of the job", ranks=missing, found={}, timeout_s=timeout_s)
        return [value for value in values if value is not None]

    own = secrets.token_hex(16).encode()
    table.put(f"{_HELLO}/{rank}", own)
    while True:
        numbers = values_for(_HELLO)
        if numbers[rank] != own:
            raise RanksOutOfStep(
                f"another process is rank {rank} of this job",
                hint="end the processes of the earlier start before starting again",
            )
        name = blake2s(b"".join(numbers), digest_size=16).hexdigest()
        table.put(f"{_SEEN}/{rank}", name.encode())
        seen = values_for(_SEEN)
        others = [other for other, value in enumerate(seen) if value != name.encode()]
        if not others:
            return name
        if monotonic() >= stop:
            raise RanksMissing("the start of the job", ranks=others, found={}, timeout_s=timeout_s)
        pause(_AGREEMENT_PAUSE_S)


class SharedDirectory(KeyValueCoordinator):
    """Coordinate ranks through a directory that all of them see.

    Args:
        directory: The directory; created when missing. It may be removed after the job.
        rank: Number of this rank.
        world: Number of ranks.
        session: Names this start of the job, the same on all ranks and another one after a restart
            (with Slurm `f"{SLURM_JOB_ID}.{SLURM_RESTART_COUNT}"`). Ranks of different sessions
            never see each other's values. None lets the ranks agree on a name; then no other job
            may use the directory.
        timeout_s: How long to wait for the other ranks to agree.
        fs: The disk.
        monotonic: Seconds that never go back.
        pause: Waits for some seconds.

    Raises:
        ValueError: There is no such rank, the session cannot be part of a path, or the directory is
            an address, or a path that a shell should have expanded.
        RanksMissing: Some ranks did not come in time to agree on a session.
        OSError: The directory cannot be created; or the folder of the session is a link, or of a
            stranger.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        world: int,
        session: str | None = None,
        timeout_s: float = 60.0,
        fs: FileSystem | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        refuse_url(directory)
        disk = fs if fs is not None else OsFileSystem()

        def table(name: str) -> _Folder:
            path = Path(os.path.realpath(directory)) / name
            return _Folder(path, fs=disk, monotonic=monotonic, pause=pause)

        checked_rank(rank, world)
        if session is None:
            # The same number on the other ranks, which run the same program.
            begun = (os.path.realpath(directory), rank)
            _begun[begun] += 1
            session = agreed_session(
                table(f"start-{_begun[begun]}"),
                rank=rank,
                world=world,
                timeout_s=timeout_s,
                monotonic=monotonic,
                pause=pause,
            )
        if not session or "/" in session or "\0" in session or session.startswith("."):
            raise ValueError(f"the session {session!r} is not a name that a folder can have")
        super().__init__(table(session), rank=rank, world=world, monotonic=monotonic)


class _Folder:
    def __init__(
        self,
        path: Path,
        *,
        fs: FileSystem,
        monotonic: Callable[[], float],
        pause: Callable[[float], None],
    ) -> None:
        self._path = path
        self._fs = fs
        self._monotonic = monotonic
        self._pause = pause
        self._token = ProcProcesses().token()
        fs.make_directory(path, mode=0o700)
        status = fs.status(path)
        if status is None or not status.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "is a link or no directory", os.fspath(path))
        if is_of_stranger(status, fs.status(path.parent)):
            raise PermissionError(errno.EPERM, about_stranger(status), os.fspath(path))

    def put(self, key: str, value: bytes) -> None:
        # A failing directory counts as missing ranks: the storage then decides about the save.
        try:
            self._put(key, value)
        except OSError as error:
            _LOG.warning("%s: the other ranks do not hear this one: %s", self._path, error)

    def _put(self, key: str, value: bytes) -> None:
        target = self._path_of(key)
        temp = target.with_name(temp_name(target.name, token=self._token, series="ranks"))
        file = self._fs.create(temp, mode=0o600)
        try:
            try:
                file.write_at(0, json.dumps([key, value.decode()]).encode())
            finally:
                file.close()
            self._fs.replace(temp, target)
        except BaseException:
            discard(self._fs, temp)
            raise

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        return poll(
            lambda: self._read(key),
            timeout_s=timeout_s,
            pauses_s=_PAUSES_S,
            monotonic=self._monotonic,
            pause=self._pause,
        )

    def drop(self, key: str) -> None:
        discard(self._fs, self._path_of(key))

    def _read(self, key: str) -> bytes | None:
        try:
            with contextlib.closing(self._fs.open(self._path_of(key))) as file:
                data = read_bytes(file, 0, min(file.size, _MAX_VALUE_BYTES))
        except OSError:  # not there yet, or the file system fails: the caller retries
            return None
        try:
            found, value = json.loads(data)
            if found != key:
                raise ValueError("it is about something else")
            return str(value).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise RanksOutOfStep(
                f"not what a rank says: {error}", path=self._path_of(key)
            ) from error

    def _path_of(self, key: str) -> Path:
        tag, _, rank = key.rpartition("/")
        return self._path / f"{blake2s(tag.encode(), digest_size=8).hexdigest()}.{rank}.json"
