# SPDX-License-Identifier: Apache-2.0
"""A place of another library runs the suite: each checkpoint is one tar file."""

from __future__ import annotations

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

from ckptmgr import Checkpoint, CorruptCheckpoint, UnsafePrune
from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.place import Capabilities, Place
from ckptmgr.io.leases import hold_lease
from ckptmgr.testing.places import Capability, PlaceBehaviours, PlaceUnderTest
from tests.support import api


class TarFiles:
    """The place: a directory in which each checkpoint is one tar file. See `core.place.Place`."""

    can = Capabilities(
        name="a directory of tar files",
        trash=False,
        moves=False,
        folders=False,
        changes=False,
        ranks=False,
    )
    trash = None

    def __init__(self, directory: Path, look: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._before_change = look

    def scan(self) -> list[Checkpoint]:
        found = (self.look(path.name) for path in self.directory.glob("step-*.tar"))
        return [one for one in found if one is not None]

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
            state=api.State.OK,
        )

    def publish(self, step: int, content: bytes) -> Checkpoint:
        self.directory.mkdir(exist_ok=True)
        temp, path = self.directory / f".step-{step}.tmp", self.directory / f"step-{step}.tar"
        parts = {"data": content, "facts": json.dumps({"crc": zlib.crc32(content)}).encode()}
        with tarfile.open(temp, "w") as archive:
            for name, data in parts.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        self._before_change()
        os.replace(temp, path)
        found = self.look(path.name)
        assert found is not None
        return found

    def read(self, path: Path) -> bytes:
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

    @contextmanager
    def lease(self, series: str) -> Iterator[None]:
        with hold_lease(api.OsFileSystem(), self.directory, series):
            yield

    def finish_moves(self, series: str) -> Sequence[str]:
        return ()

    def settle(self, series: str) -> Sequence[str]:
        return ()

    def clean_up(self) -> Sequence[str]:
        return ()

    def check_not_all(
        self, checkpoints: Sequence[Checkpoint], present: Sequence[Checkpoint]
    ) -> None:
        going = {one.name for one in checkpoints}
        if going >= {one.name for one in present if one.is_countable}:
            raise UnsafePrune("the last good one stays", path=self.directory)

    def check_needed(self, needed: Sequence[Checkpoint]) -> None:
        for one in needed:
            if self.look(one.name) != one:
                raise UnsafePrune("was saved again", path=one.path)

    def remove(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint] = (),
        present: Sequence[Checkpoint] | None = None,
    ) -> Sequence[Exception]:
        self.check_not_all(checkpoints, self.scan() if present is None else present)
        self.check_needed([*needed, *(one for one in checkpoints if self.look(one.name))])
        for one in checkpoints:
            self._before_change()
            one.path.unlink(missing_ok=True)
        return []

    def note(self, name: str) -> Path:
        return self.directory / name


class TarFilesUnderTest(PlaceUnderTest):
    """Its adapter for the suite."""

    can: frozenset[Capability] = frozenset(("overwrites", "locks", "removes", "notes"))

    def __init__(self, place: TarFiles) -> None:
        self.tar_files = place
        self.place: Place = place
        self.names = (str(place.directory),)

    def again(self) -> Self:
        return type(self)(TarFiles(self.place.directory))

    def watched(self, look: Callable[[], None]) -> Self:
        return type(self)(TarFiles(self.place.directory, look))

    def entries(self) -> Mapping[str, int]:
        return {path.name: path.stat().st_size for path in self.place.directory.glob("*")}

    def content(self, checkpoint: Checkpoint) -> bytes:
        return self.tar_files.read(checkpoint.path)

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        return self.tar_files.publish(step, b"weights of step %d" % step)

    def read_note(self, name: str) -> bytes | None:
        path = self.tar_files.note(name)
        return path.read_bytes() if path.exists() else None

    def write_note(self, name: str, data: bytes) -> None:
        temp = self.tar_files.note(f"{name}.tmp")
        temp.write_bytes(data)
        os.replace(temp, self.tar_files.note(name))

    def append_note(self, name: str, data: bytes) -> None:
        with self.tar_files.note(name).open("ab") as file:
            file.write(data)

    def plant(self, name: str) -> None:
        (self.place.directory / name).write_bytes(b"of another program")

    def plant_half_written(self, step: int) -> None:
        self.place.directory.mkdir(exist_ok=True)
        (self.place.directory / f".step-{step}.tmp").write_bytes(b"half")

    def damage(self, checkpoint: Checkpoint) -> None:
        data = bytearray(checkpoint.path.read_bytes())
        data[520] ^= 1  # of the content, which follows a header of 512 bytes
        checkpoint.path.write_bytes(data)


class TestTarFiles(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> TarFilesUnderTest:
        return TarFilesUnderTest(TarFiles(tmp_path / "run"))
