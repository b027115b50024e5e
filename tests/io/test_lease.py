# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr import StoreLocked
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import ProcProcesses, describe_owner, hold_lease, lease_path, series_tag
from tests.support.failingdisk import FailingDisk

SRC_STAT = "{pid} (a (b) c) S " + " ".join(["0"] * 18) + " {start} 0 0\n"
HOLD = """
import sys
from pathlib import Path
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import hold_lease
with hold_lease(OsFileSystem(), Path(sys.argv[1]), "net"):
    print("held", flush=True)
    sys.stdin.read()
"""


def fake_proc(tmp_path: Path, *, boot: str = "one", starts: dict[int, int] | None = None) -> Path:
    """Make a /proc with a boot id and processes, this one included."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(boot)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[1]")
    for pid, start in {os.getpid(): 100, **(starts or {})}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(SRC_STAT.format(pid=pid, start=start))
    return tmp_path


def token(proc: Path, *, pid: int, start: int) -> str:
    host, boot, _, _ = ProcProcesses(proc).token().split("-")
    return f"{host}-{boot}-{pid}-{start}"


def test_token_is_safe_in_file_names() -> None:
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{8}-\d+-\d+", ProcProcesses().token())


def test_own_token_is_alive() -> None:
    processes = ProcProcesses()
    assert processes.is_dead(processes.token()) is False


def test_token_of_a_process_that_ended_is_dead() -> None:
    code = "from ckptmgr.io.leases import ProcProcesses; print(ProcProcesses().token())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ProcProcesses().is_dead(done.stdout.strip()) is True


def test_process_that_nobody_waits_for_is_dead() -> None:
    code = "from ckptmgr.io.leases import ProcProcesses; print(ProcProcesses().token(), flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert ProcProcesses().is_dead(token) is True


def test_reused_pid_is_another_process(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, starts={77: 500})
    assert ProcProcesses(proc).is_dead(token(proc, pid=77, start=500)) is False
    assert ProcProcesses(proc).is_dead(token(proc, pid=77, start=400)) is True
    assert ProcProcesses(proc).is_dead(token(proc, pid=78, start=500)) is True


def test_token_of_an_earlier_boot_is_dead(tmp_path: Path) -> None:
    before = fake_proc(tmp_path / "before", boot="one", starts={77: 500})
    after = fake_proc(tmp_path / "after", boot="two", starts={77: 500})
    assert ProcProcesses(after).is_dead(token(before, pid=77, start=500)) is True


def test_token_of_another_container_is_unknown(tmp_path: Path) -> None:
    there, here = fake_proc(tmp_path / "there"), fake_proc(tmp_path / "here")
    (there / "self/ns/pid").unlink()
    (there / "self/ns/pid").symlink_to("pid:[2]")
    assert ProcProcesses(here).is_dead(token(there, pid=1, start=1)) is None


@pytest.mark.parametrize("text", ["", "a", "a-b-c", "a-b-1-2-3", "a-b-x-1", "a-b-1-x"])
def test_token_of_another_spelling_is_unknown(text: str) -> None:
    assert ProcProcesses().is_dead(text) is None


def test_nothing_is_dead_where_there_is_no_proc(tmp_path: Path) -> None:
    processes = ProcProcesses(tmp_path)
    assert processes.is_dead(processes.token()) is None


def test_second_lease_names_the_owner(tmp_path: Path) -> None:
    with hold_lease(OsFileSystem(), tmp_path, "net"):
        with pytest.raises(StoreLocked) as caught:
            take(tmp_path)
        assert f"series 'net' is being written by {describe_owner()}" in str(caught.value)
    assert str(os.getpid()) in str(caught.value)


def test_second_lease_in_one_process_says_what_to_close(tmp_path: Path) -> None:
    with (
        hold_lease(OsFileSystem(), tmp_path, "net"),
        pytest.raises(StoreLocked, match=r"this process: close\(\)"),
    ):
        take(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_directory_that_is_read_only_is_told_what_reads(tmp_path: Path, number: int) -> None:
    disk = FailingDisk(OsFileSystem(), operation="lock", call=1, error=number)
    with pytest.raises(OSError, match="lease") as caught, hold_lease(disk, tmp_path, "net"):
        pass
    assert "CheckpointManager.load()" in "".join(caught.value.__notes__)


def test_lease_that_the_disk_refuses_is_an_error_of_the_disk(tmp_path: Path) -> None:
    disk = FailingDisk(OsFileSystem(), operation="lock", call=1, error=errno.EIO)
    with pytest.raises(OSError, match="lease") as caught, hold_lease(disk, tmp_path, "net"):
        pass
    assert not hasattr(caught.value, "__notes__")


def test_lease_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with hold_lease(OsFileSystem(), tmp_path, "net"):
            assert lease_path(tmp_path, "net").exists()


def test_lease_of_another_series_is_free(tmp_path: Path) -> None:
    with (
        hold_lease(OsFileSystem(), tmp_path, "net"),
        hold_lease(OsFileSystem(), tmp_path, "other"),
    ):
        pass


def test_lease_of_a_live_process_is_refused_and_of_a_killed_one_taken_over(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid} on "):
            take(tmp_path)
        holder.kill()
        holder.wait()
    take(tmp_path)


def take(directory: Path) -> None:
    with hold_lease(OsFileSystem(), directory, "net"):
        pass


def test_tags_tell_series_apart() -> None:
    assert series_tag("net") == series_tag("net") != series_tag("net_1")
    assert series_tag("n\udcffet").isalnum()
