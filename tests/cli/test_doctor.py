# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr doctor`."""

from __future__ import annotations

import contextlib
import math
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import StoreLocked
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.mounts import Mount
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance import doctor_disk
from ckptmgr.maintenance.doctor import Diagnosis, check_space, check_versions
from ckptmgr.maintenance.doctor_disk import check_disk
from ckptmgr.store.trash import DirectoryTrash
from tests.cli.running import key_file, run
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.saved import KEY, START_S, flip, save_run

CHECKS = ["writable", "fsync", "clock", "locks", "space", "leftovers", "keys", "versions", "resume"]


def grades(directory: Path, *arguments: str | Path, code: int = 0) -> dict[str, tuple[str, str]]:
    """Return grade and message of each check, of the one that is worst where there are several."""
    document = run_with_schema("doctor", directory, *arguments, code=code)
    order = ["skip", "ok", "warn", "fail"]
    items = sorted(document["items"], key=lambda item: order.index(item["status"]))
    return {item["check"]: (item["status"], item["message"]) for item in items}


def names_in(directory: Path) -> list[tuple[str, int, int]]:
    return sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in directory.iterdir()
    )


@pytest.fixture
def busy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no fsync count as slow: other programs use the disk of the tests, too."""
    monkeypatch.setattr(doctor_disk, "_SLOW_SYNC_S", math.inf)


@pytest.mark.usefixtures("busy_disk")
def test_sound_directory_passes_every_check_and_keeps_its_files(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    before = names_in(tmp_path)
    answer = run("doctor", tmp_path, now_s=time.time())
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert [line.split()[:2] for line in answer.stdout.splitlines()[:-1]] == [
        ["ok", check] for check in CHECKS
    ]
    assert answer.stdout.splitlines()[-1] == "9 checks: 9 ok"
    assert "not checked: whether the drive and its controller obey" in answer.stdout
    assert "net-2_10.ckpt (step 20) loads: sizes, header and manifest fit" in answer.stdout
    assert names_in(tmp_path) == before
    assert run("doctor", tmp_path, "-q", now_s=time.time()).stdout == ""


def test_empty_directory_has_nothing_to_resume(tmp_path: Path) -> None:
    assert grades(tmp_path)["resume"] == ("ok", "nothing to resume: no checkpoint yet")
    assert list(tmp_path.iterdir()) == []


def test_directory_that_takes_no_file_fails_by_name() -> None:
    answer = run("doctor", "/proc/self/fdinfo", now_s=time.time())
    assert answer.exit_code == 1
    assert "fail  writable   no file can be saved: " in answer.stdout
    assert "hint: saves need a directory that this user can write to" in answer.stdout
    assert run("doctor", "/proc/self/fdinfo", "-q").stdout == "writable\nspace\n"


def test_missing_directory_is_not_found(tmp_path: Path) -> None:
    answer = run("doctor", tmp_path / "no")
    assert (answer.exit_code, "no such directory" in answer.stderr) == (10, True)


def test_checkpoint_whose_manifest_cannot_be_read_is_named(tmp_path: Path) -> None:
    (_, path) = save_run(tmp_path, [10, 20])
    described = path.with_name(f"{path.name}.manifest.json")
    described.chmod(0o600)
    described.write_bytes(b"{")
    answer = run("doctor", tmp_path, now_s=time.time())
    assert answer.exit_code == 0
    assert "ok    resume     net-1_10.ckpt (step 10) loads" in answer.stdout
    assert f"warn  resume     {path.name}: not valid JSON" in answer.stdout
    assert "a resume passes over it" in answer.stdout


def test_damaged_newest_checkpoint_leads_to_an_older_one(tmp_path: Path) -> None:
    (_, path) = save_run(tmp_path, [10, 20])
    flip(path, 40)
    assert grades(tmp_path, "--deep")["resume"][0] == "warn"
    assert (
        "a resume would go back to net-1_10.ckpt (step 10)"
        in run("doctor", tmp_path, "--deep").stdout
    )
    flip(tmp_path / "net-1_10.ckpt", 40)
    grade, message = grades(tmp_path, "--deep", code=1)["resume"]
    assert (grade, message.startswith("no checkpoint loads: net-2_10.ckpt: ")) == ("fail", True)


def test_each_run_of_a_directory_is_resumed(tmp_path: Path) -> None:
    save_run(tmp_path, [10], series="a")
    save_run(tmp_path, [10, 20], series="b")
    assert run("doctor", tmp_path).stdout.count("  resume  ") == 2
    assert run("doctor", tmp_path, "--series", "a").stdout.count("  resume  ") == 1


def test_key_is_described_by_its_id_and_the_mode_of_its_file(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    source = key_file(tmp_path)
    assert grades(tmp_path / "runs")["keys"][0] == "warn"
    without = run("doctor", tmp_path / "runs").stdout
    assert "no key is given, and 1 of 1 checkpoints are encrypted" in without
    grade, message = grades(tmp_path / "runs", "--key", source)["keys"]
    assert (grade, message) == ("ok", f"key {KEY.key_id}; from '{tmp_path}/run.key' (mode 0600)")
    (tmp_path / "run.key").chmod(0o644)
    grade, message = grades(tmp_path / "runs", "--key", source, code=1)["keys"]
    assert (grade, "can be used by others (mode 0644)" in message) == ("fail", True)


def test_wrong_key_fails_the_resume(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    wrong = key_file(tmp_path, hex_digits="ab" * 32)
    assert grades(tmp_path / "runs", "--key", wrong, code=1)["resume"][0] == "fail"


def test_leftovers_and_trash_are_counted(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    run("prune", tmp_path, "--keep", "last(1)", "--yes")
    (tmp_path / ".net-1_1.ckpt.0a-0b-1-2.0a1b2c3d.7f-0.tmp").write_bytes(b"x" * 5000)
    grade, message = grades(tmp_path)["leftovers"]
    assert grade == "warn"
    assert message.startswith("1 of interrupted saves, 4.9 KiB; ")
    assert message.endswith(" B in the trash")


def test_what_cannot_be_read_is_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectoryTrash, "batches", fail)
    failed = grades(tmp_path, code=1)
    assert failed["leftovers"] == ("fail", "the trash cannot be read: Input/output error")
    monkeypatch.setattr(api.Place, "scan_for", fail)
    assert grades(tmp_path, code=1)["listing"][0] == "fail"


def test_save_in_progress_is_no_leftover(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    own = temp_name("net-1_1.ckpt", token=ProcProcesses().token(), series="net")
    with api.place(tmp_path).lease("net"):
        (tmp_path / own).write_bytes(b"x")
        assert grades(tmp_path)["leftovers"] == ("ok", "none; 1 being written now")


def test_key_of_a_variable_is_described_by_its_kind(tmp_path: Path) -> None:
    answer = run("doctor", tmp_path, env={"CKPTMGR_KEY": KEY.raw.hex()})
    assert f"key {KEY.key_id}; from env:" in answer.stdout


def test_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_disk, "mount_of", lambda path: Mount("ext4", frozenset()))
    monkeypatch.setattr(doctor_disk, "_SLOW_SYNC_S", 0.0)
    (found,) = (
        one for one in check_disk(api.OsFileSystem(), tmp_path, now_s=0) if one.check == "fsync"
    )
    assert (found.grade, "that is slow" in found.message) == ("warn", True)


def test_clock_that_agrees_is_said_to_do_so_within_a_tenth_of_a_second_or_more(
    tmp_path: Path,
) -> None:
    save_run(tmp_path, [10])
    told = run("doctor", tmp_path, now_s=time.time()).stdout
    assert re.search(r"a new file has the time of this machine, within \d\.\d s\n", told)
    assert "within 0.0 s" not in told


def test_clock_that_differs_is_a_warning(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    for now_s, word in ((time.time() + 100, "behind"), (time.time() - 100, "ahead of")):
        answer = run("doctor", tmp_path, now_s=now_s)
        assert answer.exit_code == 0
        assert f"s {word} that of this machine" in answer.stdout
    early = run("doctor", tmp_path, now_s=START_S - 9999)
    assert "1 checkpoint was saved in the future, such as net-1_10.ckpt" in early.stdout


def test_clock_is_not_ahead_where_a_file_is_created_slowly(tmp_path: Path) -> None:
    class SlowDisk(api.OsFileSystem):
        """A disk whose files have the time at which they are looked at."""

        def create(self, path: Path, **more: Any) -> Any:
            self.created = time.perf_counter()
            return super().create(path, **more)

        def status(self, path: Path) -> Any:
            found = super().status(path)
            assert found is not None
            return found._replace(modified_at=START_S + time.perf_counter() - self.created)

    found = {one.check: one for one in check_disk(SlowDisk(), tmp_path, now_s=START_S)}
    assert (found["clock"].grade, found["clock"].figures) == ("ok", {"ahead_s": 0.0})


class Disk(api.OsFileSystem):
    """A disk with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        if self.fault == "no locks":
            raise StoreLocked("its file system cannot lock files", path=path)
        if self.fault == "idle locks":
            return contextlib.nullcontext()
        return super().lock(path, owner=owner)

    def open(self, path: Path, *, is_uncached: bool = False) -> Any:
        if self.fault == "other bytes":
            path.chmod(0o600)
            path.write_bytes(b"x" * 99)
        return super().open(path, is_uncached=is_uncached)

    def status(self, path: Path) -> Any:
        return None if self.fault == "vanishing" else super().status(path)


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("no locks", "locks", "files cannot be locked: its file system cannot lock files"),
        ("idle locks", "locks", "flock has no effect"),
        ("other bytes", "writable", "does not have the bytes that were written"),
        ("vanishing", "clock", "a file vanished"),
    ],
)
def test_faulty_disk_is_found_and_left_empty(
    tmp_path: Path, fault: str, check: str, message: str
) -> None:
    failed = [
        one for one in check_disk(Disk(fault), tmp_path, now_s=time.time()) if one.grade == "fail"
    ]
    assert [(one.check, message in one.message, one.hint is None) for one in failed] == [
        (check, True, fault == "vanishing")
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mount", "preload", "grade", "message"),
    [
        (Mount("tmpfs", frozenset()), "", "warn", "nothing survives a restart"),
        (Mount("ext4", frozenset({"rw", "nobarrier"})), "", "warn", "write barriers are off"),
        (Mount("ext4", frozenset({"rw"})), "/usr/lib/libeatmydata.so", "warn", "libeatmydata"),
        (Mount("nfs4", frozenset({"rw"})), "", "ok", "and what the server does"),
        (None, "", "ok", "on an unknown file system"),
    ],
)
@pytest.mark.usefixtures("busy_disk")
def test_durability_says_what_the_file_system_promises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mount: Mount | None,
    preload: str,
    grade: str,
    message: str,
) -> None:
    monkeypatch.setattr(doctor_disk, "mount_of", lambda path: mount)
    monkeypatch.setenv("LD_PRELOAD", preload)
    (found,) = (
        one for one in check_disk(api.OsFileSystem(), tmp_path, now_s=0) if one.check == "fsync"
    )
    assert (found.grade, message in found.message) == (grade, True)


class FullDisk(api.OsFileSystem):
    def __init__(self, free: int | None, inodes: int | None) -> None:
        super().__init__()
        self.figures = (free, inodes)

    def free_bytes(self, path: Path) -> int | None:
        return self.figures[0]

    def free_inodes(self, path: Path) -> int | None:
        return self.figures[1]


@pytest.mark.parametrize(
    ("free", "inodes", "grade"),
    [
        (None, None, "skip"),
        (0, 99, "fail"),
        (100, 99, "fail"),
        (300, 99, "warn"),
        (1 << 40, 3, "fail"),
        (1 << 40, None, "ok"),
    ],
)
def test_space_is_compared_with_the_largest_checkpoint(
    tmp_path: Path, free: int | None, inodes: int | None, grade: str
) -> None:
    save_run(tmp_path, [10])
    store = api.place(tmp_path, fs=FullDisk(free, inodes))
    assert check_space(store, store.scan()).grade == grade


def installed(**versions: str) -> Diagnosis:
    def version_of(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    required = ["click>=8.1", "ml_dtypes<0.6,>=0.5", 'torch>=2.7; extra == "torch"', "odd"]
    return check_versions(required, version_of)


def test_versions_are_compared_with_what_the_package_asks_for() -> None:
    right = installed(click="8.1", ml_dtypes="0.5.1")
    assert (right.grade, right.message.endswith(", click 8.1, ml_dtypes 0.5.1")) == ("ok", True)
    wrong = installed(click="8.0.9", torch="2.6.0+cpu")
    assert wrong.grade == "fail"
    assert wrong.message == (
        "click 8.0.9 is older than 8.1; ml_dtypes is not installed; torch 2.6.0+cpu is older than 2.7"
    )


def test_versions_of_a_copy_that_is_not_installed_are_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert check_versions().grade == "skip"
