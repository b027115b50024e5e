# SPDX-License-Identifier: Apache-2.0
"""Thin adapters of our places for the suite `ckptmgr.testing.places`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

from ckptmgr import Checkpoint, UnsupportedCheckpoint
from ckptmgr.core.place import Place
from ckptmgr.core.shard_names import new_attempt_id, shard_name
from ckptmgr.io.appending import opened_to_append
from ckptmgr.io.leases import lease_path
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.foreign.check import verify_foreign
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
from ckptmgr.maintenance.foreign.place import ForeignPlace
from ckptmgr.maintenance.prune_plan import Planner
from ckptmgr.maintenance.quarantine import quarantine
from ckptmgr.objects.directory import DATA
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.parallel.rank_commit import together
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.change_leases import lease_of_checkpoint
from ckptmgr.store.trash_folder import TRASH_NAME
from ckptmgr.testing.places import Capability, PlaceUnderTest
from tests.cli.running import run
from tests.parallel.ranks import WORLD, Meeting, Seat, run_ranks
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.failingdisk import FailingDisk
from tests.support.foreign import GOLDEN, GOLDEN_RUNS
from tests.support.planted import dead_token
from tests.support.pruning import planner_of
from tests.support.saved import START_S, flip, items

Errors = Sequence[Exception]
_CHANGES = ("create", "write_at", "replace", "link", "unlink", "make_directory", "remove_directory")


class WatchedDisk(FailingDisk):
    """A real disk on which a reader looks before each change; its own calls are not watched."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__(api.OsFileSystem())
        self._look = look
        self._looking = threading.RLock()

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation in _CHANGES:
            with self._looking:  # ranks are threads
                self._look()


class WatchedObjects(CountedObjects):
    """An object store in which a reader looks before each change."""

    def __init__(self, objects: api.Objects, look: Callable[[], None]) -> None:
        super().__init__(objects)
        self._look = look

    def _request(self, kind: str, key: str, carry_out: Callable[[], object]) -> object:  # type: ignore[override]
        if kind in ("put", "create", "delete"):
            self._look()
        return super()._request(kind, key, carry_out)


def refused_command(*arguments: str | Path) -> NoReturn:
    """Run a command that must be refused; raise its refusal."""
    result = run(*arguments)
    assert result.exit_code != 0, result.output
    raise UnsupportedCheckpoint(result.stderr)


class LocalPlace(PlaceUnderTest):
    """A directory on this machine, as a run in one process writes it."""

    can: frozenset[Capability] = frozenset(
        (
            "manifests", "overwrites", "locks", "lost-locks", "removes", "trash", "quarantine",
            "changes", "protects", "notes", "space",
        )
    )  # fmt: skip

    def __init__(self, directory: Path, *, fs: api.FileSystem | None = None) -> None:
        self.directory = directory
        self.names: tuple[str, ...] = (str(directory),)
        self.store = api.place(directory, fs=fs)
        self.place: Place = self.store

    def again(self) -> Self:
        return type(self)(self.directory)

    def watched(self, look: Callable[[], None]) -> Self:
        return type(self)(self.directory, fs=WatchedDisk(look))

    def entries(self) -> Mapping[str, int]:
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.stat().st_size for path in files}

    def planner(self) -> Planner:
        return planner_of(self.place)

    def content(self, checkpoint: Checkpoint) -> bytes:
        return verified(self.store, checkpoint)

    def manifest(self, name: str) -> api.Manifest | None:
        return self.store.read_manifest(name)

    def free_space(self) -> int | None:
        return self.store.fs.free_bytes(self.directory)

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        writer = SeriesWriter(
            self.store,
            series,
            options=api.SaveOptions(),
            clock=self._clock,
            run_id=f"run-of-{series}",
        )
        with contextlib.closing(writer):
            facts = api.SaveFacts(step=step, metrics=metrics)
            return writer.save(f"{series}-{step}.ckpt", items(step), facts)

    def _clock(self) -> float:
        return float(START_S + 60 * (1 + max((c.sequence for c in self.store.scan()), default=0)))

    def plant(self, name: str) -> None:
        (self.directory / name).write_bytes(b"of another program")

    def plant_half_written(self, step: int) -> None:
        self.store.make_directory()
        name = f"net-{step}.ckpt"
        for one in (name, api.manifest_name(name)):
            temp = temp_name(one, token=dead_token(), series="net")
            (self.directory / temp).write_bytes(b"half")

    def damage(self, checkpoint: Checkpoint) -> None:
        flip(self.directory / (checkpoint.shards or (checkpoint.name,))[0], 100)

    def lose_lock(self) -> None:
        lease_path(self.directory, "net").unlink()

    def quarantine(self, checkpoint: Checkpoint) -> None:
        quarantine(self.store, checkpoint, now=checkpoint.saved_at)

    def change(
        self, checkpoint: Checkpoint, change: Callable[[api.Manifest], api.Manifest]
    ) -> None:
        with lease_of_checkpoint(self.store, checkpoint):
            self.store.change_manifest(checkpoint, change)

    def protect(self, checkpoint: Checkpoint) -> None:
        with lease_of_checkpoint(self.store, checkpoint):
            self.store.change_pins(checkpoint, lambda pins: (*pins, api.Pin(name="pinned")))

    def read_note(self, name: str) -> bytes | None:
        path = self.directory / name
        return path.read_bytes() if path.exists() else None

    def write_note(self, name: str, data: bytes) -> None:
        self.store.write_note(self.directory / name, data, series="net")

    def append_note(self, name: str, data: bytes) -> None:
        with opened_to_append(self.directory / name) as descriptor:
            os.write(descriptor, data)


class RanksPlace(LocalPlace):
    """A directory on this machine, as the ranks of a job write it."""

    can = LocalPlace.can - {"overwrites", "quarantine"}

    def __init__(self, directory: Path, *, fs: api.FileSystem | None = None) -> None:
        super().__init__(directory, fs=fs)
        self.names = (str(directory), "rank 0")  # as all ranks say which one of them failed

    def look(self, name: str) -> Checkpoint | None:
        return next((one for one in self.store.scan() if one.name == name), None)

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        meeting = Meeting(WORLD)

        def save(rank: int) -> Checkpoint:
            writer = SeriesWriter(
                self.store,
                series,
                commit=together(Seat(meeting, rank)),
                options=api.SaveOptions(),
                clock=self._clock,
                run_id=f"run-of-{series}",
            )
            with contextlib.closing(writer):
                facts = api.SaveFacts(step=step, metrics=metrics)
                return writer.save(f"{series}-{step}.shards", items(step + rank), facts)

        outcomes = run_ranks(meeting, save)
        return outcomes[0].must()

    def plant_half_written(self, step: int) -> None:
        self.store.make_directory()
        attempt = new_attempt_id(0)
        for rank in range(WORLD - 1):
            name = shard_name(f"net-{step}", rank, world=WORLD, attempt_id=attempt, format="ckpt")
            (self.directory / name).write_bytes(b"half")


class ObjectsPlace(PlaceUnderTest):
    """A prefix of an object store, to which checkpoints of a directory here are uploaded."""

    can: frozenset[Capability] = frozenset(("manifests", "removes"))

    def __init__(self, objects: api.Objects, source: LocalPlace) -> None:
        self.objects = objects
        self.names = (objects.url, "object store")
        self._source = source
        self.store = ObjectPlace(objects, trust=api.DEFAULT_TRUST)
        self.place: Place = self.store

    def again(self) -> Self:
        return type(self)(self.objects, self._source)

    def watched(self, look: Callable[[], None]) -> Self:
        return type(self)(WatchedObjects(self.objects, look), self._source)

    def entries(self) -> Mapping[str, int]:
        return {one.key: one.size_bytes for one in (*self.objects.list(), *self.objects.list(DATA))}

    def planner(self) -> Planner:
        return planner_of(self.place)

    def content(self, checkpoint: Checkpoint) -> bytes:
        return verified(self.store, checkpoint)

    def manifest(self, name: str) -> api.Manifest | None:
        return self.store.read_manifest(name)

    def free_space(self) -> int | None:
        return self.store.fs.free_bytes(self.store.directory)

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        saved = self._source.publish(step, series=series, metrics=metrics)
        self.store.remote.upload(self._source.store, saved.name)
        found = self.look(saved.name)
        assert found is not None
        return found

    def plant(self, name: str) -> None:
        self.objects.put(name, [b"of another one"], 14)

    def plant_half_written(self, step: int) -> None:
        self.objects.put(f"{DATA}{step:064x}/net-{step}.ckpt", [b"half"], 4)

    def damage(self, checkpoint: Checkpoint) -> None:
        key = f"{DATA}{checkpoint.id}/{checkpoint.name}"
        data = bytearray(self.objects.get(key))
        data[100] ^= 1
        self.objects.put(key, [bytes(data)], len(data))

    def restore(self) -> Sequence[str]:
        refused_command("prune", self.objects.url, "--undo")

    def quarantine(self, checkpoint: Checkpoint) -> None:
        refused_command("verify", self.objects.url, "--quarantine")

    def change(
        self, checkpoint: Checkpoint, change: Callable[[api.Manifest], api.Manifest]
    ) -> None:
        refused_command("tag", str(checkpoint.path), "best")

    def protect(self, checkpoint: Checkpoint) -> None:
        refused_command("pin", str(checkpoint.path))

    def write_note(self, name: str, data: bytes) -> None:
        self.store.write_note(self.store.directory / name, data, series="net")


class TrainerPlace(LocalPlace):
    """A directory of the Trainer of Transformers."""

    can: frozenset[Capability] = frozenset(
        ("overwrites", "locks", "trash", "protects", "notes", "space")
    )

    def __init__(self, directory: Path, *, fs: api.FileSystem | None = None) -> None:
        super().__init__(directory, fs=fs)
        self.names = (str(directory), "what another tool wrote")
        self.place = ForeignPlace(self.store)

    def content(self, checkpoint: Checkpoint) -> bytes:
        found = ForeignCheckpoint(checkpoint=checkpoint)
        problems = verify_foreign(self.store.fs, found).problems
        assert not problems, problems
        return b"".join(path.read_bytes() for path in sorted(checkpoint.path.iterdir()))

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        folder = self.directory / f"checkpoint-{step}"
        golden = GOLDEN / GOLDEN_RUNS["transformers"] / "checkpoint-2"
        shutil.copytree(golden, folder, dirs_exist_ok=True)
        self._note(folder, global_step=step, best_model_checkpoint=None, best_global_step=None)
        found = self.look(folder.name)
        assert found is not None
        return found

    def _note(self, folder: Path, **facts: object) -> None:
        path = folder / "trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    def plant_half_written(self, step: int) -> None:
        folder = self.directory / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")

    def damage(self, checkpoint: Checkpoint) -> None:
        flip(checkpoint.path / "model.safetensors", 0)

    def lose_lock(self) -> None:
        lease_path(self.directory, TRASH_NAME).unlink()

    def remove(self, checkpoints: Sequence[Checkpoint]) -> Errors:
        refused_command("rm", "--yes", *(one.path for one in checkpoints))

    def quarantine(self, checkpoint: Checkpoint) -> None:
        refused_command("verify", self.directory, "--quarantine")

    def change(
        self, checkpoint: Checkpoint, change: Callable[[api.Manifest], api.Manifest]
    ) -> None:
        refused_command("tag", str(checkpoint.path), "best")

    def protect(self, checkpoint: Checkpoint) -> None:
        self._note(self.listed()[0].path, best_model_checkpoint=f"/runs/{checkpoint.name}")


def verified(store: api.Place, checkpoint: Checkpoint) -> bytes:
    """Return the bytes of the files of a checkpoint, which passes the check of its digests."""
    problems = api.verify(store, checkpoint).problems
    assert not problems, problems
    found = b""
    for name in checkpoint.shards or (checkpoint.name,):
        with contextlib.closing(store.open_data(store.directory / name)) as file:
            data = bytearray(file.size)
            file.read_into(0, memoryview(data))
            found += bytes(data)
    return found
