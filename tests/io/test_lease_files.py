# SPDX-License-Identifier: Apache-2.0
"""What other users put where a lease file belongs, what killed commands leave there, and file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager, StoreLocked, save_checkpoint
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import ProcProcesses, holders_in, lease_path, new_owner_text
from ckptmgr.store.store import Store
from tests.cli.running import run
from tests.support.saved import save_run

STRANGER = 54321
HOLD = """
import sys
from pathlib import Path
from ckptmgr.store.store import Store
with Store(Path(sys.argv[1])).lease("net"):
    print("held", flush=True)
    sys.stdin.read()
"""


def lease_of(directory: Path) -> Path:
    return lease_path(directory, "ckpt")


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def plant_link(path: Path) -> None:
    path.with_name("target").write_text("precious")
    path.symlink_to(path.with_name("target"))


PLANTED: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a symbolic link": plant_link,
    "a socket": plant_socket,
}


def test_target_of_a_hard_link_is_not_overwritten(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    runs = tmp_path / "runs"
    runs.mkdir()
    os.link(precious, lease_of(runs))
    manager = CheckpointManager(runs)
    with pytest.raises(
        StoreLocked, match=r"has 2 names \(hard links\); its owner is .*uid"
    ) as caught:
        manager.save(1, {"w": 1})
    assert caught.value.path == str(lease_of(runs))
    assert precious.read_text() == "precious"
    assert manager.checkpoints() == []


def test_command_does_not_overwrite_the_target_of_a_hard_link(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.link(precious, lease_path(tmp_path, "net"))
    done = run("prune", tmp_path, "--keep", "last(1)", "--yes")
    assert "hard links" in done.stderr
    assert run("pin", "10", "--dir", tmp_path).exit_code == 11
    assert precious.read_text() == "precious"
    assert run("verify", tmp_path).exit_code == 0


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    PLANTED[kind](lease_of(tmp_path))
    manager = CheckpointManager(tmp_path)
    with pytest.raises(StoreLocked, match=f"it is {kind}; its owner is"):
        manager.save(1, {"w": 1})
    if kind == "a symbolic link":
        assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_does_not_keep_others_from_saving(tmp_path: Path, kind: str) -> None:
    PLANTED[kind](lease_of(tmp_path))
    save_checkpoint({"w": np.ones(3)}, tmp_path / "other.ckpt")
    assert run("verify", tmp_path / "other.ckpt").exit_code == 0


@pytest.mark.root
def test_file_of_a_stranger_is_not_written_to(tmp_path: Path) -> None:
    lease_of(tmp_path).write_text("precious")
    os.chown(lease_of(tmp_path), STRANGER, STRANGER)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(StoreLocked, match=f"neither owns this directory .* uid {STRANGER}"):
        manager.save(1, {"w": 1})
    assert lease_of(tmp_path).read_text() == "precious"


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o2775, 0o775, 0o2755, 0o755])
def test_file_of_a_member_of_the_group_is_taken_over_in_a_directory_of_the_group(
    tmp_path: Path, mode: int
) -> None:
    os.chown(tmp_path, 0, 1)
    tmp_path.chmod(mode)
    lease_of(tmp_path).touch()
    os.chown(lease_of(tmp_path), 1, 1)  # `daemon`, whose group that is
    manager = CheckpointManager(tmp_path)
    if mode == 0o755:
        with pytest.raises(StoreLocked, match="nor shares it"):
            manager.save(1, {"w": 1})
    else:
        manager.save(1, {"w": 1})


@pytest.mark.root
def test_lease_that_root_takes_belongs_to_the_owner_of_the_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, STRANGER, STRANGER)
    with Store(tmp_path).lease("net"):
        figures = lease_path(tmp_path, "net").stat()
    assert (figures.st_uid, figures.st_gid) == (STRANGER, STRANGER)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(StoreLocked, match="cannot lock files") as caught:
            manager.save(1, {"w": 1})
    assert caught.value.path == str(tmp_path)
    assert os.strerror(number) in caught.value.message
    assert "NFS" in str(caught.value.hint)
    assert manager.checkpoints() == []


def test_lock_that_fails_otherwise_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)), Store(tmp_path).lease("net"):
            pass


def test_run_that_ends_leaves_no_lease_file(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1})
        assert lease_of(tmp_path).exists()
    assert not lease_of(tmp_path).exists()


def test_lease_file_of_a_killed_command_is_removed_by_the_next_save_of_any_file(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        save_checkpoint({"w": np.ones(3)}, tmp_path / "x.ckpt")
        assert lease_path(tmp_path, "net").exists()
        with (
            pytest.raises(StoreLocked, match=f"process {holder.pid} on "),
            Store(tmp_path).lease("net"),
        ):
            pass
        holder.kill()
        holder.wait()
    save_checkpoint({"w": np.ones(3)}, tmp_path / "x.ckpt")
    assert not lease_path(tmp_path, "net").exists()


def test_lease_file_that_names_a_process_of_another_host_stays(tmp_path: Path) -> None:
    path = lease_path(tmp_path, "net")
    path.write_text("process 7 on elsewhere\n0badcafe-0badcafe-7-7 0123456789abcdef\n")
    save_checkpoint({"w": np.ones(3)}, tmp_path / "x.ckpt")
    assert path.exists()
    with Store(tmp_path).lease("net"):  # the lock is free
        pass
    assert not path.exists()


def test_text_of_a_lease_names_its_process_and_is_another_one_each_time() -> None:
    one, other = new_owner_text(), new_owner_text()
    assert one != other
    holder, helper = holders_in(one)
    assert (holder.description, holder.token, helper) == (
        f"process {os.getpid()} on {socket.gethostname()}",
        ProcProcesses().token(),
        None,
    )


def test_text_of_a_lease_says_nothing_to_a_terminal(tmp_path: Path) -> None:
    path = lease_path(tmp_path, "net")
    path.write_text("\x1b[2Jfake\x00\n")
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(StoreLocked, match=r"written by \[2Jfake\n") as caught,
            Store(tmp_path).lease("net"),
        ):
            pass
    assert caught.value.message.isprintable()


def test_lease_is_had_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(descriptor: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lease_path(tmp_path, "net").write_text("process 7 on elsewhere\n")
    store = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        with store.lease("net"):
            assert lease_path(tmp_path, "net").read_bytes() == b""
            store.leases.check("net")
            with (
                pytest.raises(StoreLocked, match="by another process"),
                Store(tmp_path).lease("net"),
            ):
                pass
    assert not lease_path(tmp_path, "net").exists()


def test_lease_in_a_directory_that_is_gone_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError),
        OsFileSystem().lock(tmp_path / "gone" / ".net.lease", owner="x"),
    ):
        pass
