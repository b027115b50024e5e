# SPDX-License-Identifier: Apache-2.0
"""A run that follows its directory in memory does what one does that lists it each time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, CheckpointNotFound
from ckptmgr.events import Event
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.retrying_filesystem import RetryingFileSystem
from ckptmgr.io.temp_names import is_temp_of
from ckptmgr.store import catalogue
from tests.conftest import MEMORY
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import save_run

POLICIES = (
    "last(2)",
    "all",
    "last(2) | every(3)",
    "best(2, loss, min) | last(1)",
    "best(1, unknown, min)",
    "within(3s) | last(1)",
    "hourly(2) | last(2)",
    "per_minutes(1)",
)


class ListingDisk(api.OsFileSystem):
    """The real disk, counting listings."""

    listed = 0

    def list(self, path: Path) -> dict[str, FileStatus]:
        self.listed += 1
        return super().list(path)


@pytest.fixture(autouse=True, scope="module")
def small_catalogue() -> Iterator[None]:
    """Follow directories from the first checkpoint on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "LEAST_SAVED", 0)
        yield


class Run:
    """A run in a directory of its own, and acts of others there."""

    def __init__(self, directory: Path, keep: str, fs: api.FileSystem | None) -> None:
        self.directory = directory
        self.elsewhere = directory.with_name(f"{directory.name}-elsewhere")
        self.elsewhere.mkdir()
        self.events: list[tuple[object, ...]] = []
        self._config = CheckpointConfig(keep=keep)
        self._fs = fs
        self._now = 1_772_359_200.0
        self._step = 0
        self.manager = self._opened()

    def _opened(self) -> CheckpointManager:
        manager = manager_on(
            self.directory,
            self._config,
            clock=lambda: self._now,
            fs=self._fs,
            prefix="net",
            observe=self._note,
        )
        manager.resume()
        return manager

    def _note(self, event: Event) -> None:
        if event.name == "prune":
            self.events.append((event.error_type, dict(event.figures), sorted(event.notes)))

    def act(self, kind: str, number: int) -> None:
        """Let the run, or another program, do something; the number chooses the file."""
        self._now += number
        if kind in ("save", "restart", "rollback"):
            getattr(self, kind)(number)
            return
        names = sorted(
            p.name for p in self.directory.iterdir() if p.name.endswith(api.MANIFEST_SUFFIX)
        )
        if names:
            name = names[number % len(names)].removesuffix(api.MANIFEST_SUFFIX)
            with suppress(FileNotFoundError):
                getattr(self, kind)(self.directory / name)

    def save(self, number: int) -> None:
        self._step += 1
        self.manager.save(self._step, {"n": self._step}, metrics={"loss": number / 4})

    def restart(self, number: int) -> None:
        self.manager.close()
        self.manager = self._opened()

    def rollback(self, number: int) -> None:
        with suppress(CheckpointNotFound):
            self._step = self.manager.rollback(steps_back=1 + number % 2).step or 0

    def remove(self, data: Path) -> None:
        self.remove_data(data)
        api.manifest_of(data).unlink()

    def remove_data(self, data: Path) -> None:
        data.unlink(missing_ok=True)

    def remove_manifest(self, data: Path) -> None:
        api.manifest_of(data).unlink()

    def truncate(self, data: Path) -> None:
        data.chmod(0o600)
        os.truncate(data, 3)

    def spoil(self, data: Path) -> None:
        manifest = api.manifest_of(data)
        manifest.chmod(0o600)
        manifest.write_text("{}")

    def pin(self, data: Path) -> None:
        store = api.place(self.directory)
        known = [one for one in store.scan() if one.path == data and one.run_id]
        for one in known:
            store.change_pins(one, lambda pins: () if pins else (api.Pin(name="paper"),))

    def away(self, data: Path) -> None:
        for one in (data, api.manifest_of(data)):
            with suppress(FileNotFoundError):
                one.rename(self.elsewhere / one.name)

    def back(self, data: Path) -> None:
        for one in sorted(self.elsewhere.iterdir()):
            one.rename(self.directory / one.name)

    def copy(self, data: Path) -> None:
        shutil.copy(data, self.directory / f"copy-of-{data.name}")

    def copy_manifest(self, data: Path) -> None:
        shutil.copy(api.manifest_of(data), self.elsewhere)

    def other_series(self, data: Path) -> None:
        save_run(self.directory, [self._step + 10], series="other")

    def leave_temporary_file(self, data: Path) -> None:
        temp = f".{data.name}.h-b-1-1.0.1-1.tmp"
        assert is_temp_of(temp, data.name)
        (self.directory / temp).write_bytes(b"x")

    def shown(self) -> list[tuple[object, ...]]:
        """Return the whole listing without what differs between two runs."""
        return sorted(map(_told, api.listed(self.directory)), key=repr)


def _told(one: Checkpoint) -> tuple[object, ...]:
    return (one.name, one.series, one.step, one.attempt, one.sequence, one.state, one.pins)


def unwatched_disk() -> api.FileSystem:
    """Return the real disk as one of another kind, which is never watched."""
    return RetryingFileSystem(RetryingFileSystem(api.OsFileSystem()))


def listed(store: api.Place) -> list[Checkpoint]:
    return sorted(store.scan(), key=lambda one: one.name)


ACTS = st.sampled_from(
    [
        *["save"] * 8,
        "restart",
        "rollback",
        "remove",
        "remove_data",
        "remove_manifest",
        "truncate",
        "spoil",
        "pin",
        "away",
        "back",
        "copy",
        "copy_manifest",
        "other_series",
        "leave_temporary_file",
    ]
)


@settings(max_examples=15)
@example(
    keep="last(2)",  # the sequence of a save whose manifest cannot be read is not used again
    acts=[("save", 0), ("away", 0), ("spoil", 0), ("other_series", 0)],
)
@example(
    keep="last(3)",  # a truncated checkpoint stays, and is counted once among those that stay
    acts=[*[("save", 0)] * 4, ("truncate", 0), ("save", 0), ("save", 0)],
)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(ACTS, st.integers(0, 7)), min_size=1, max_size=14),
)
def test_run_beside_other_programs_does_what_a_run_does_that_lists_each_time(
    keep: str, acts: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as base:
        runs = [Run(Path(base, "a"), keep, None), Run(Path(base, "b"), keep, unwatched_disk())]
        try:
            for kind, number in [("save", 0), *acts, ("save", 1)]:
                for run in runs:
                    run.act(kind, number)
                followed, plain = runs
                assert followed.shown() == plain.shown()
                assert followed.events == plain.events
                assert listed(followed.manager._writer.store) == listed(
                    api.place(followed.directory)
                )
        finally:
            for run in runs:
                run.manager.close()


def test_run_lists_its_directory_once(fast_path: Path) -> None:
    disk = ListingDisk()
    with manager_on(fast_path, CheckpointConfig(keep="last(3)"), fs=disk) as manager:
        manager.save(0, {"n": 0})
        disk.listed = 0
        for step in range(1, 8):
            manager.save(step, {"n": step})
        assert disk.listed <= 1
        assert [one.step for one in manager.checkpoints()] == [5, 6, 7]


def test_pin_that_another_program_sets_is_honoured_at_the_next_save(fast_path: Path) -> None:
    with CheckpointManager(fast_path, CheckpointConfig(keep="last(2)")) as manager:
        for step in range(3):
            manager.save(step, {"n": step})
        other = api.place(fast_path)
        one = next(c for c in other.scan() if c.step == 1)
        other.change_pins(one, lambda pins: (api.Pin(name="paper"),))
        manager.save(3, {"n": 3})
        assert [c.step for c in manager.checkpoints()] == [1, 2, 3]


def save_some(manager: CheckpointManager, steps: range) -> None:
    for step in steps:
        manager.save(step, {"n": step})


def replace_directory(directory: Path) -> None:
    directory.rename(directory.with_name("before"))
    shutil.copytree(directory.with_name("before"), directory)


def overflow(directory: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    first, second = directory / "one", directory / "two"
    first.touch()
    for _ in range(limit // 2 + 1):
        first.rename(second)
        second.rename(first)
    first.unlink()


@pytest.mark.parametrize("disturb", [replace_directory, overflow])
def test_directory_whose_changes_are_lost_is_listed_again(
    fast_path: Path, disturb: Callable[[Path], None]
) -> None:
    shown = []
    for name, fs in (("followed", None), ("listed", unwatched_disk())):
        directory = fast_path / name / "runs"
        with manager_on(directory, CheckpointConfig(keep="all"), fs=fs) as manager:
            save_some(manager, range(3))
            disturb(directory)
            (directory / "ckpt-1.ckpt").unlink()
            shown.append([_told(one) for one in listed(manager._writer.store)])
    assert shown[0] == shown[1]


def test_directory_that_is_gone_has_no_checkpoints(fast_path: Path) -> None:
    directory = fast_path / "runs"
    with CheckpointManager(directory, CheckpointConfig(keep="all")) as manager:
        save_some(manager, range(3))
        directory.rename(fast_path / "elsewhere")
        assert manager.checkpoints() == []
        (fast_path / "elsewhere").rename(directory)


def test_listing_that_fails_in_the_middle_is_repeated_as_a_whole(fast_path: Path) -> None:
    class Disk(api.OsFileSystem):
        is_failing = False

        def status(self, path: Path) -> FileStatus | None:
            if self.is_failing and path.name.startswith("ckpt-"):
                raise PermissionError(13, "no", str(path))
            return super().status(path)

    disk = Disk()
    with manager_on(fast_path, CheckpointConfig(keep="all"), fs=disk) as manager:
        save_some(manager, range(3))
        assert len(manager.checkpoints()) == 3
        (fast_path / "ckpt-1.ckpt").unlink()
        disk.is_failing = True
        with pytest.raises(PermissionError):
            manager.checkpoints()
        disk.is_failing = False
        assert listed(manager._writer.store) == listed(api.place(fast_path))


def test_child_of_a_fork_leaves_the_reports_to_its_parent(fast_path: Path) -> None:
    with CheckpointManager(fast_path, CheckpointConfig(keep="all")) as manager:
        save_some(manager, range(3))
        (fast_path / "ckpt-1.ckpt").unlink()
        child = os.fork()
        if child == 0:
            store = manager._writer.store
            os._exit(0 if listed(store) == listed(api.place(fast_path)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert listed(manager._writer.store) == listed(api.place(fast_path))


def test_run_without_watches_lists_each_time(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptmgr.io import directory_watch

    monkeypatch.setattr(directory_watch, "_LOCAL", frozenset())  # as on a network file system
    disk = ListingDisk()
    with manager_on(fast_path, CheckpointConfig(keep="last(3)"), fs=disk) as manager:
        save_some(manager, range(3))
        disk.listed = 0
        manager.save(3, {"n": 3})
        assert disk.listed == 2


def test_rule_that_could_not_rank_counts_once_a_metric_is_recorded(fast_path: Path) -> None:
    config = CheckpointConfig(keep="best(1, loss, min)")
    with CheckpointManager(fast_path, config) as manager:
        save_some(manager, range(8))
        assert [one.step for one in manager.checkpoints()] == [3, 4, 5, 6, 7]
        manager.save(8, {"n": 8}, metrics={"loss": 1.0})
        assert [one.step for one in manager.checkpoints()] == [8]


def test_checkpoints_that_somebody_removes_use_no_slot(fast_path: Path) -> None:
    with CheckpointManager(fast_path, CheckpointConfig(keep="last(4)")) as manager:
        save_some(manager, range(4))
        for step in (0, 1):
            (fast_path / f"ckpt-{step}.ckpt").unlink()
            (fast_path / api.manifest_name(f"ckpt-{step}.ckpt")).unlink()
        assert [one.step for one in manager.checkpoints()] == [2, 3]
        save_some(manager, range(4, 7))
        assert [one.step for one in manager.checkpoints()] == [3, 4, 5, 6]


def test_newest_data_that_is_missing_is_reported_as_in_a_listing(fast_path: Path) -> None:
    with CheckpointManager(fast_path, CheckpointConfig(keep="all")) as manager:
        save_some(manager, range(3))
        manager.checkpoints()
        (fast_path / "ckpt-2.ckpt").unlink()
        (fast_path / "ckpt-1.ckpt").unlink()
        (fast_path / "ckpt-0.ckpt").unlink()
        assert listed(manager._writer.store) == listed(api.place(fast_path))
