# SPDX-License-Identifier: Apache-2.0
"""An administrator works in the directory of a user: the user's next run reads and writes all that is there."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, save_checkpoint
from ckptmgr.parallel.mindspore.outputs import write_small_file
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.cli.running import run
from tests.support import api
from tests.support.users import GROUP, USER, as_user

KEYS = {"OLD": "00" * 32, "NEW": "11" * 32}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def command(*arguments: str | Path) -> None:
    """Run a command in this process."""
    done = run(*arguments, env=KEYS)
    assert done.exit_code == 0, done.stderr


def train(runs: Path, key: str = "") -> int:
    """Save three steps, and return the one that it began with."""
    plain, secret = CheckpointConfig(), bytes.fromhex(KEYS.get(key, ""))
    config = CheckpointConfig(enc_key=secret, format="safetensors") if key else plain
    state = {"w": np.zeros(3)}
    with CheckpointManager(runs, config, prefix="net") as manager:
        start = manager.resume(state)
        assert not start.skipped, start.skipped
        for step in range(start.step + 1, start.step + 4):
            state["w"] += 1
            manager.save(step, state)
    return start.step


def user_trains(runs: Path, key: str = "") -> object:
    return as_user(lambda: train(runs, key))


@pytest.fixture
def runs() -> Iterator[Path]:
    """Return a directory of the user, in one that the user can reach."""
    above = Path(tempfile.mkdtemp())
    try:
        above.chmod(0o755)
        for key in ("", "OLD"):
            train(above / f"imports of {key}", key)
        directory = above / "runs"
        directory.mkdir(mode=0o700)
        os.chown(directory, USER, GROUP)
        yield directory
    finally:
        shutil.rmtree(above)


def assert_all_of_user(runs: Path) -> None:
    found = {path: path.lstat() for path in runs.rglob("*")}
    assert found
    foreign = {path for path, one in found.items() if (one.st_uid, one.st_gid) != (USER, GROUP)}
    assert foreign == set()


def save_command(runs: Path) -> None:
    state = {"w": np.zeros(3)}
    with CheckpointManager(runs, prefix="net") as manager:
        start = manager.resume(state)
        manager.save(start.step + 1, state)


def newest(runs: Path) -> Path:
    return max(runs.glob("net-*.ckpt"), key=lambda path: int(path.stem.rpartition("-")[2]))


ACTS: dict[str, Callable[[Path], object]] = {
    "prune": lambda runs: command("prune", runs, "--keep", "last(1)", "--yes"),
    "prune at once": lambda runs: command("prune", runs, "--keep", "last(1)", "--yes", "--now"),
    "pin": lambda runs: command("pin", "latest", "--dir", runs),
    "unpin": lambda runs: command("unpin", "latest", "--dir", runs),
    "save": train,
    "save of one file": lambda runs: save_checkpoint({"w": np.ones(3)}, runs / "net-1.ckpt"),
}


@pytest.mark.parametrize("act", ACTS)
def test_user_goes_on_after_root(runs: Path, act: str) -> None:
    assert user_trains(runs) == 0
    ACTS[act](runs)
    assert_all_of_user(runs)
    assert user_trains(runs) in (3, 6)
    assert_all_of_user(runs)


def test_user_goes_on_where_root_began(runs: Path) -> None:
    assert train(runs) == 0
    assert_all_of_user(runs)
    assert user_trains(runs) == 3


def test_user_undoes_what_root_pruned(runs: Path) -> None:
    user_trains(runs)
    before = {path.name for path in runs.glob("net-*")}
    command("prune", runs, "--keep", "last(1)", "--yes")
    batch = next((runs / TRASH_NAME).iterdir())
    assert stat.S_IMODE((runs / TRASH_NAME).stat().st_mode) == 0o700
    assert stat.S_IMODE(batch.stat().st_mode) == 0o700
    command("prune", runs, "--undo", "--dry-run")  # to import what that needs
    as_user(lambda: command("prune", runs, "--undo"))
    assert {path.name for path in runs.glob("net-*")} == before


def test_root_undoes_what_the_user_pruned(runs: Path) -> None:
    user_trains(runs)
    as_user(lambda: command("prune", runs, "--keep", "last(1)", "--yes"))
    command("prune", runs, "--undo")
    assert_all_of_user(runs)
    assert user_trains(runs) == 3


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "rekey": (
        lambda runs: command(
            "rekey", runs, "--key", "env:OLD", "--add", "env:NEW", "--remove", "env:OLD", "--yes"
        ),
        "NEW",
    ),
    "reencrypt": (
        lambda runs: command("reencrypt", runs, "--key", "env:OLD", "--to", "env:NEW", "--yes"),
        "NEW",
    ),
    "compression": (
        lambda runs: command("convert", runs, "--compression", "zstd", "--key", "env:OLD"),
        "OLD",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_user_goes_on_after_root_changed_the_files(runs: Path, change: str) -> None:
    assert user_trains(runs, "OLD") == 0
    act, key = CHANGES[change]
    act(runs)
    assert_all_of_user(runs)
    assert user_trains(runs, key) == 3
    assert_all_of_user(runs)


def test_replaced_file_keeps_its_own_owner(runs: Path) -> None:
    user_trains(runs)
    path = newest(runs)
    os.chown(path.with_name(f"{path.name}.manifest.json"), 777, 888)
    command("pin", "latest", "--dir", runs)
    figures = path.with_name(f"{path.name}.manifest.json").stat()
    assert (figures.st_uid, figures.st_gid) == (777, 888)


def test_output_and_key_of_root_stay_its_own(runs: Path) -> None:
    user_trains(runs, "OLD")
    sealed = next(runs.glob("net-3*.ckpe"))
    target = runs / "plain.safetensors"
    target.touch()
    os.chown(target, USER, GROUP)
    command("decrypt", sealed, "-o", target, "--force", "--key", "env:OLD")
    command("encrypt", target, "-o", runs / "again.safetensors.ckpe", "--key", "env:NEW")
    command("keygen", "--out", runs / "run.key")
    for name in ("plain.safetensors", "again.safetensors.ckpe", "run.key"):
        assert (runs / name).stat().st_uid == 0, name


def test_bundle_of_signatures_is_of_the_user_and_an_output_is_not(runs: Path) -> None:
    write_small_file(runs / "model.sig", b"{}", is_beside_checkpoint=True)
    write_small_file(runs / "strategy.json", b"{}")
    assert [(runs / name).stat().st_uid for name in ("model.sig", "strategy.json")] == [USER, 0]


def test_folder_in_use_in_the_place_of_a_new_one_stays_of_root(tmp_path: Path) -> None:
    # The owner of a directory can rename a folder of root's in it, but must not get it that way.
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    (secret / "file").touch()
    os.chown(tmp_path, USER, GROUP)
    disk = api.OsFileSystem()
    with disk.hold_directory(tmp_path):
        secret.rename(tmp_path / "new")
        disk.make_directory(tmp_path / "new", mode=0o700)
    assert (tmp_path / "new").stat().st_uid == 0


def test_nobody_but_root_gives_files_away(runs: Path) -> None:
    (runs / "old").touch()
    new = runs / "new"
    as_user(lambda: api.OsFileSystem().create(new, mode=0o600, owner_of=runs / "old").close())
    assert new.stat().st_uid == USER
