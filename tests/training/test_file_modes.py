# SPDX-License-Identifier: Apache-2.0
"""Permission bits of all that a run and the commands make in its directory: `CheckpointConfig(file_mode=...)`."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Ranks,
    UnsupportedCheckpoint,
    save_checkpoint,
    save_state,
)
from ckptmgr.io import permissions
from ckptmgr.io.permissions import inherit_directory_mode, share_lease
from ckptmgr.parallel.mindspore.outputs import write_small_file
from tests.cli.running import run
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.surface import Loop

LEASES, GRAPH = ".lease", "-graph.meta"


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def modes(directory: Path) -> dict[str, set[int]]:
    """Return the modes of a directory and all that is in it, by kind."""
    found: dict[str, set[int]] = {}
    for path in (directory, *directory.rglob("*")):
        is_small = path.name.startswith(".") or path.parent.name == ".ckptmgr-checks"
        kind = "lease" if path.name.endswith(LEASES) else "note" if is_small else "data"
        found.setdefault("folder" if path.is_dir() else kind, set()).add(mode_of(path))
    return found


def train(runs: Path, *, starts: int = 2, **options: Any) -> dict[str, set[int]]:
    """Save, go on, look while the run goes on; then check, pin, and throw one into the trash."""
    config = CheckpointConfig(keep="last(2)", **options)
    found: dict[str, set[int]] = {}
    for first in (1, 4)[-starts:]:
        with CheckpointManager(runs, config) as manager:
            state = {"w": np.zeros(8)}
            manager.resume(state)
            for step in range(first, first + 3):
                manager.save(step, state)
            manager.wait()
            found = modes(runs)
    for command in (
        ("verify", runs),
        ("pin", "6", "--dir", runs, "--reason", "x"),
        ("prune", runs, "--keep", "last(1)", "--yes"),
    ):
        done = run(*command)
        assert done.exit_code == 0, done.stderr
    return {**modes(runs), "lease": found["lease"]}


EXPECTED = [
    (0o400, {"data": 0o400, "note": 0o600, "folder": 0o700, "lease": 0o600}),
    (0o440, {"data": 0o440, "note": 0o640, "folder": 0o750, "lease": 0o600}),
    (0o640, {"data": 0o640, "note": 0o640, "folder": 0o750, "lease": 0o600}),
    (0o644, {"data": 0o644, "note": 0o644, "folder": 0o755, "lease": 0o600}),
    (0o660, {"data": 0o660, "note": 0o660, "folder": 0o2770, "lease": 0o660}),
]


@pytest.mark.parametrize("mask", [0o077, 0o022])
@pytest.mark.parametrize(("file_mode", "expected"), EXPECTED, ids=lambda v: f"{v}"[:4])
def test_run_gives_all_its_entries_the_chosen_modes_whatever_the_umask(
    tmp_path: Path, file_mode: int, expected: dict[str, int], mask: int
) -> None:
    with umask(mask):
        found = train(tmp_path / "a" / "runs", file_mode=file_mode)
    assert found == {kind: {mode} for kind, mode in expected.items()}
    assert mode_of(tmp_path / "a") == expected["folder"]
    assert (tmp_path / "a" / "runs" / ".ckptmgr-trash").is_dir()
    assert list((tmp_path / "a" / "runs" / ".ckptmgr-checks").iterdir())


@pytest.mark.parametrize("async_save", ["thread", "process"])
@pytest.mark.parametrize("mask", [0o077, 0o022])
def test_background_saves_give_the_chosen_modes_whatever_the_umask(
    tmp_path: Path, async_save: str, mask: int
) -> None:
    with umask(mask):  # a worker process, which starts in a second, has that, too
        found = train(tmp_path / "runs", starts=1, file_mode=0o640, async_save=async_save)
    assert found == {"data": {0o640}, "note": {0o640}, "folder": {0o750}, "lease": {0o600}}


def test_ranks_give_the_chosen_modes(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    meeting = Meeting(2)

    def save(rank: int) -> bool:
        config = CheckpointConfig(file_mode=0o640)
        with CheckpointManager(runs, config, ranks=Ranks(Seat(meeting, rank))) as manager:
            manager.save(1, {"w": np.full(4, rank)})
        return True

    with umask(0o077):
        for outcome in run_ranks(meeting, save):
            outcome.must()
    assert len(list(runs.iterdir())) == 3
    assert modes(runs) == {"data": {0o640}, "folder": {0o750}}


class _Network(dict[str, Any]):
    def get_func_graph_proto(self) -> bytes:
        return b"graph"


def test_callback_gives_the_chosen_modes(tmp_path: Path) -> None:
    config = CheckpointConfig(file_mode=0o640)
    with umask(0o077):
        callback = ModelCheckpoint("net", str(tmp_path / "runs"), config)
        Loop(callbacks=(callback,), network=_Network(w=np.zeros(3))).run(3)
    assert (tmp_path / "runs" / f"net{GRAPH}").exists()
    assert modes(tmp_path / "runs") == {"data": {0o640}, "folder": {0o750}}


@pytest.mark.parametrize("save", [save_checkpoint, save_state])
def test_single_file_gets_the_chosen_mode_and_so_does_its_manifest(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    state, path = {"w": np.zeros(3)}, tmp_path / "x.ckpt"
    with umask(0o077):
        save(state, path, file_mode=0o644)
        assert modes(tmp_path) == {"data": {0o644}, "folder": {0o700}}
        save(state, path)  # without the option it is private again
    assert modes(tmp_path) == {"data": {0o400}, "folder": {0o700}}


def test_commands_keep_the_modes_of_what_they_replace(tmp_path: Path) -> None:
    runs, keys = tmp_path / "runs", {"OLD": "00" * 32, "NEW": "11" * 32}
    config = CheckpointConfig(file_mode=0o640, format="safetensors", enc_key=bytes(32))
    with CheckpointManager(runs, config) as manager:
        manager.save(1, {"w": np.zeros(3)})
        manager.save(2, {"w": np.zeros(3)})
    old, new = ("--key", "env:OLD"), ("--key", "env:NEW")
    with umask(0o077):
        for command in (
            ("rekey", runs, *old, "--add", "env:NEW", "--remove", "env:OLD", "--yes"),
            ("reencrypt", runs, *new, "--to", "env:OLD", "--yes"),
            ("convert", runs, "--compression", "zstd", *old),
            ("tag", "1", "best-ever", "--dir", runs, *old),
        ):
            done = run(*command, env=keys)
            assert done.exit_code == 0, (command, done.stderr)
    assert {path.suffix for path in runs.iterdir()} == {".ckpe", ".json"}
    assert modes(runs) == {"data": {0o640}, "folder": {0o750}}


def test_folder_of_a_run_keeps_the_group_of_a_setgid_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    if os.geteuid() == 0:
        os.chown(shared, -1, 23456)
        shared.chmod(0o2770)
    with CheckpointManager(shared / "runs", CheckpointConfig(file_mode=0o640)) as manager:
        manager.save(1, {"w": np.zeros(3)})
        manager.save(2, {"w": np.zeros(3)})
    assert run("prune", shared / "runs", "--keep", "last(1)", "--yes").exit_code == 0
    entries = [shared / "runs", *(shared / "runs").rglob("*")]
    assert {path.stat().st_gid for path in entries} == {shared.stat().st_gid}
    assert modes(shared / "runs")["folder"] == {0o2750}


def test_directory_that_is_there_keeps_its_mode_and_gives_it_to_the_trash(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o757)
    with umask(0o077):
        found = train(runs, file_mode=0o440)
    assert mode_of(runs) == 0o757
    assert mode_of(runs / ".ckptmgr-trash") == 0o755  # others put nothing into it
    assert (found["data"], found["lease"]) == ({0o440}, {0o600})


def test_small_file_beside_no_run_stays_private(tmp_path: Path) -> None:
    write_small_file(tmp_path / "a" / "x", b"x")
    assert (mode_of(tmp_path / "a"), mode_of(tmp_path / "a" / "x")) == (0o700, 0o600)


def test_directory_without_a_mode_follows_the_umask(tmp_path: Path) -> None:
    with umask(0o027):
        api.OsFileSystem().make_directory(tmp_path / "a", mode=None)
    assert mode_of(tmp_path / "a") == 0o750


def test_group_of_another_directory_gets_nothing(tmp_path: Path) -> None:
    parent = os.stat_result((0o40775, 0, 0, 0, 0, os.getgid() + 1, 0, 0, 0, 0))
    (tmp_path / "trash").mkdir()
    for name in ("trash", "lease"):
        if name == "lease":
            (tmp_path / name).touch(mode=0o600)
        descriptor = os.open(tmp_path / name, os.O_RDONLY)
        try:
            (inherit_directory_mode if name == "trash" else share_lease)(descriptor, parent)
        finally:
            os.close(descriptor)
    assert [mode_of(tmp_path / name) for name in ("trash", "lease")] == [0o705, 0o600]


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EPERM, False), (errno.EIO, True)])
def test_file_system_without_permission_bits_is_used_as_it_is(
    number: int, is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fchmod", refused)
    with (
        umask(0o077),
        pytest.raises(OSError, match="error") if is_raised else nullcontext(),
    ):
        api.OsFileSystem().make_directory(tmp_path / "a", mode=0o750)
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (640, r"file_mode 0o1200 has other bits than r and w; .*; write 0o640"),
        (440, "; write 0o440"),
        (0o750, "directories get x where there is r; usual are 0o400, 0o440"),
        (0o666, "lets every user of the machine write"),
        (0o200, "does not let its owner read"),
        (0o000, "does not let its owner read"),
        (0o460, "the group more than the owner"),
        (0o604, "others more than the group"),
        (0o620, "lets the group write, but not read"),
        (-1, "has other bits"),
    ],
)
def test_useless_mode_is_refused_by_name(given: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(file_mode=given)


@pytest.mark.parametrize("given", ["0640", True, 6.5, None])
def test_mode_that_is_no_number_is_refused_by_name(given: object) -> None:
    with pytest.raises(TypeError, match=re.escape("file_mode must be an int such as 0o640")):
        CheckpointConfig(file_mode=given)  # type: ignore[arg-type]


@pytest.fixture(params=[errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS])
def no_chmod(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the file system refuse to change permission bits, as CIFS and mountpoint-s3 do."""

    def refused(descriptor: int, mode: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "fchmod", refused)
    monkeypatch.setattr(permissions, "_warned", set())


@pytest.mark.usefixtures("no_chmod")
def test_run_saves_where_permission_bits_cannot_be_changed_and_warns_once_of_those_of_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with umask(0o022), CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.ones(2)})
    assert [one.step for one in manager.checkpoints()] == [1, 2]
    assert mode_of(tmp_path / "run" / "ckpt-2.ckpt") == 0o600
    [warning] = [one.getMessage() for one in caplog.records if "permission bits" in one.message]
    assert "files have mode 0600, not 0400" in warning


@pytest.mark.usefixtures("no_chmod")
def test_mode_that_the_file_system_does_not_give_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    config = CheckpointConfig(file_mode=0o660)
    with umask(0o022), CheckpointManager(tmp_path / "run", config) as manager:
        with pytest.raises(UnsupportedCheckpoint, match=r"file_mode 0o660 cannot be had") as caught:
            manager.save(1, {"w": np.ones(2)})
        assert "leave file_mode out" in str(caught.value)
        assert [name for name in os.listdir(tmp_path / "run") if not name.startswith(".")] == []
        assert manager.latest() is None


@pytest.mark.usefixtures("no_chmod")
def test_mode_that_new_files_have_anyway_is_taken(tmp_path: Path) -> None:
    config = CheckpointConfig(file_mode=0o640)
    with umask(0o022), CheckpointManager(tmp_path / "run", config) as manager:
        manager.save(1, {"w": np.ones(2)})
    assert mode_of(tmp_path / "run" / "ckpt-1.ckpt") == 0o640


def test_change_of_permission_bits_without_effect_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    config = CheckpointConfig(file_mode=0o660)
    manager = CheckpointManager(tmp_path / "run", config)
    with umask(0o022), pytest.raises(UnsupportedCheckpoint, match="gives its files 0o640"):
        manager.save(1, {"w": np.ones(2)})


def test_failed_change_of_permission_bits_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, mode: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fchmod", broken)
    with pytest.raises(OSError, match="Input/output"):
        api.OsFileSystem().create(tmp_path / "file", mode=0o400)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_chmod")
def test_secret_key_is_not_written_where_others_could_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run("keygen", "--out", tmp_path / "mine.key")
    assert made.exit_code == 0, made.stderr
    real = os.open
    open_to_all = lambda path, flags, mode=0o777, **how: real(path, flags, mode | 0o044, **how)  # noqa: E731
    monkeypatch.setattr(os, "open", open_to_all)
    with umask(0):
        result = run("keygen", "--out", tmp_path / "shared.key")
    assert result.exit_code != 0
    assert "others could read it" in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["mine.key"]
