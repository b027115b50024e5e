# SPDX-License-Identifier: Apache-2.0
"""A place of another library runs the suite: each checkpoint is one tar file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pytest

from ckptmgr import Checkpoint, CorruptCheckpoint, UnsafePrune, parse_policy, plan
from ckptmgr.io.leases import hold_lease
from ckptmgr.testing.places import Capability, PlaceBehaviours, PlaceUnderTest
from tests.support import api


class TarFiles(PlaceUnderTest):
    can: frozenset[Capability] = frozenset(("overwrites", "locks", "removes", "notes"))

    def __init__(self, directory: Path, look: Callable[[], None] | None = None) -> None:
        self.directory = directory
        self.names = (str(directory),)
        self._look = look or (lambda: None)

    def again(self) -> Self:
        return type(self)(self.directory)

    def watched(self, look: Callable[[], None]) -> Self:
        return type(self)(self.directory, look)

    def entries(self) -> Mapping[str, int]:
        return {path.name: path.stat().st_size for path in self.directory.glob("*")}

    def listed(self) -> Sequence[Checkpoint]:
        found = (self.look(path.name) for path in self.directory.glob("step-*.tar"))
        return sorted((one for one in found if one), key=lambda one: one.step, reverse=True)

    def look(self, name: str) -> Checkpoint | None:
        path, digits = self.directory / name, name.removeprefix("step-").removesuffix(".tar")
        if not digits.isdecimal() or not path.exists():
            return None
        status = path.stat()
        return Checkpoint(
            path=path,
            series="net",
            step=int(digits),
            saved_at=datetime.fromtimestamp(status.st_mtime, UTC),
            size_bytes=status.st_size,
            id=str(status.st_ino),
            state=api.State.OK if self._is_whole(path) else api.State.CORRUPT,
        )

    def _is_whole(self, path: Path) -> bool:
        with contextlib.suppress(CorruptCheckpoint):
            return bool(self._read(path))
        return False

    def _read(self, path: Path) -> bytes:
        try:
            with tarfile.open(path) as archive:
                data, facts = (archive.extractfile(name) for name in ("data", "facts"))
                assert data is not None
                assert facts is not None
                content, crc = data.read(), json.load(facts)["crc"]
        except (tarfile.TarError, OSError, ValueError, KeyError) as error:
            raise CorruptCheckpoint("no whole archive", path=path) from error
        if zlib.crc32(content) != crc:
            raise CorruptCheckpoint("another CRC", path=path)
        return content

    def content(self, checkpoint: Checkpoint) -> bytes:
        return self._read(checkpoint.path)

    def manifest(self, name: str) -> api.Manifest | None:
        return None

    def free_space(self) -> int | None:
        return None

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        self.directory.mkdir(exist_ok=True)
        content = b"weights of step %d" % step
        parts = {"data": content, "facts": json.dumps({"crc": zlib.crc32(content)}).encode()}
        temp = self.directory / f".step-{step}.tmp"
        with tarfile.open(temp, "w") as archive:
            for name, data in parts.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        self._look()
        os.replace(temp, self.directory / f"step-{step}.tar")
        return self.listed()[[one.step for one in self.listed()].index(step)]

    def plan(self, keep: str, now: datetime) -> Callable[[], Sequence[Exception]]:
        listed = self.listed()
        dropped = plan(listed, parse_policy(keep), now).dropped

        def carry_out() -> Sequence[Exception]:
            if self.listed() != listed:
                raise UnsafePrune("changed after the plan", path=self.directory)
            return self.remove(dropped) if dropped else []

        return carry_out

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with hold_lease(api.OsFileSystem(), self.directory, "net"):
            yield

    def lock(self) -> contextlib.AbstractContextManager[None]:
        return self._locked()

    def remove(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Exception]:
        going = {one.name: one for one in checkpoints}
        with self.lock():
            now = self.listed()
            if all(one.name in going for one in now if one.is_countable):
                raise UnsafePrune("the last good one stays", path=self.directory)
            changed = [one for one in now if one.name in going and one != going[one.name]]
            if changed:
                raise UnsafePrune("was saved again", path=changed[0].path)
            for one in checkpoints:
                self._look()
                one.path.unlink(missing_ok=True)
        return []

    def read_note(self, name: str) -> bytes | None:
        path = self.directory / name
        return path.read_bytes() if path.exists() else None

    def write_note(self, name: str, data: bytes) -> None:
        temp = self.directory / f"{name}.tmp"
        temp.write_bytes(data)
        os.replace(temp, self.directory / name)

    def append_note(self, name: str, data: bytes) -> None:
        with (self.directory / name).open("ab") as file:
            file.write(data)

    def plant(self, name: str) -> None:
        (self.directory / name).write_bytes(b"of another program")

    def plant_half_written(self, step: int) -> None:
        self.directory.mkdir(exist_ok=True)
        (self.directory / f".step-{step}.tmp").write_bytes(b"half")

    def damage(self, checkpoint: Checkpoint) -> None:
        data = bytearray(checkpoint.path.read_bytes())
        data[520] ^= 1  # of the content, which follows a header of 512 bytes
        checkpoint.path.write_bytes(data)


class TestTarFiles(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> TarFiles:
        return TarFiles(tmp_path / "run")
