# SPDX-License-Identifier: Apache-2.0
"""Real savers and commands that meet errors at, or are killed by, every system call that changes the directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.conftest import MEMORY
from tests.faults.durability import broken_promise
from tests.faults.straced import Call, Straced, changes, is_among, python, straced
from tests.faults.works import (
    NEW_KEY,
    OLD_KEY,
    SAVERS,
    WORKS,
    check_directory,
    commit_of,
    each_saver,
    each_work,
    prepare_second,
    save_steps,
    temporaries,
    without_sync,
)

pytestmark = [pytest.mark.strace, pytest.mark.slow]

ERRORS = {
    "create": "EMFILE",
    "write": "ENOSPC",
    "reserve": "ENOSPC",
    "sync": "EIO",
    "close": "EIO",
    "rename": "EROFS",
    "remove": "EIO",
}
SHOWN = {
    "EMFILE": ("Too many open files",),
    "ENOSPC": ("bytes needed", "No space left on device"),
    "EIO": ("Input/output error",),
    "EROFS": ("Read-only file system",),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """A work, the disk that it starts from, and the calls that it makes.

    Attributes:
        name: Of the work.
        folder: For disks and logs.
        calls: That change the disk, without interference.
        mortal: The same with the numbers at which SIGKILL meets them alone.
    """

    name: str
    folder: Path
    calls: list[Call]
    mortal: list[Call]

    @property
    def disk(self) -> Path:
        """Where the work is done."""
        return self.folder / "disk"

    def run(self, *options: str, start: str = "before", is_offset: bool = True) -> Straced:
        """Do the work on a new copy of the disk, under strace with these options."""
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.copytree(self.folder / start, self.disk)
        command = WORKS[self.name].command(self.disk)
        return straced(command, self.folder / "log", *options, is_offset=is_offset)

    def inject(
        self, call: Call, fault: str, *, is_offset: bool = True, is_lasting: bool = False
    ) -> Straced:
        """Do the work with a fault in one call, or in it and all later ones of its name."""
        when = f"{call.number}+" if is_lasting else f"{call.number}"
        met: list[str] = []
        for _ in range(3):  # threads may do their shares in another order
            options = ("-e", f"inject={call.name}:{fault}:when={when}")
            done = self.run(*options, is_offset=is_offset)
            met = done.met(fault)
            if is_among(call, met):
                return done
        raise AssertionError(f"{fault} did not meet {call}, but {met}")

    def check(self, *, is_acknowledged: bool) -> None:
        """Check the content, and finish the work."""
        WORKS[self.name].check(self.disk, is_acknowledged)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@pytest.fixture
def bench(name: str) -> Bench:
    """Return the bench of a work; each test starts from a new copy of its disk."""
    return _bench(name)


@cache
def _bench(name: str) -> Bench:
    _FOLDERS.append(tempfile.TemporaryDirectory(dir=MEMORY))
    bench = Bench(name, Path(_FOLDERS[-1].name), [], [])
    (bench.folder / "before").mkdir()
    WORKS[name].prepare(bench.folder / "before")
    bench.run()  # fills the cache of byte code: the second run makes the calls of all later ones
    for calls, is_offset in ((bench.mortal, False), (bench.calls, True)):
        done = bench.run(is_offset=is_offset)
        assert done.returncode == 0, done.output
        found = changes(done.log, bench.disk)
        calls.extend(call for call in found if not call.is_shared)
        # Two threads of a worker process sync: one its save, the other one the removals of retention.
        assert not is_offset or {call.kind for call in found if call.is_shared} <= {"sync"}
    bench.check(is_acknowledged=True)
    return bench


def survivable(bench: Bench) -> Iterator[Call]:
    """Yield the calls of a saver that may fail: the count of starts, and what follows the commit and its sync."""
    if bench.name not in SAVERS:
        return
    commit = commit_of(bench.calls)
    for number, call in enumerate(bench.calls):
        if ".net.starts" in call.line or number > commit + 1:
            yield call


@each_work
def test_error_at_every_call_is_reported_and_loses_nothing(bench: Bench) -> None:
    may_fail = list(survivable(bench))
    met = set()
    for call in bench.calls:
        error = ERRORS[call.kind]
        done = bench.inject(call, f"error={error}")
        met.add(call.kind)
        assert not done.is_acknowledged or call in may_fail, call
        said = any(text in done.output for text in SHOWN[error])
        assert done.is_acknowledged or said, (call, done.output)
        assert done.is_acknowledged or str(bench.disk) in done.output, (call, done.output)
        assert "bug in ckptmgr" not in done.output
        assert done.returncode in (0, 1, 2, 3), (call, done.output)
        if call not in may_fail:
            assert temporaries(bench.disk) == [], call
        bench.check(is_acknowledged=done.is_acknowledged)
    assert met >= {"sync", "rename"} or bench.name == "prune --now"


@each_work
def test_death_at_every_call_loses_nothing_and_the_work_can_be_finished(bench: Bench) -> None:
    killed = 0
    for call in bench.mortal:
        if call.kind != "close":  # a killed process closes its files itself
            done = bench.inject(call, "signal=SIGKILL", is_offset=False)
            bench.check(is_acknowledged=done.is_acknowledged)
            killed += 1
    assert killed >= 7


@each_work
def test_interrupted_calls_are_made_again(bench: Bench) -> None:
    calls = "pwrite64,fsync,fdatasync,fallocate"
    done = bench.run("-e", f"inject={calls}:error=EINTR:when=1+2")
    assert len([line for line in done.injected() if str(bench.disk) in line]) >= 2
    assert done.is_acknowledged, done.output
    bench.check(is_acknowledged=True)


@each_work
def test_write_that_the_kernel_only_claims_is_refused_or_found(bench: Bench) -> None:
    found = 0
    for call in bench.calls:
        if call.kind == "write":
            done = bench.inject(call, f"retval={call.result}")
            if is_found_damaged(bench.disk):
                found += 1
            else:
                bench.check(is_acknowledged=done.is_acknowledged)
    # The header of a container has two copies; prune writes only leases.
    assert found or bench.name.startswith("prune")


def is_found_damaged(disk: Path) -> bool:
    """Return whether `verify` names damage in the files of a work, plain or encrypted."""
    places = [disk / name for name in ("out/hub", "out", "run")]
    directory = next(one for one in places if one.exists())
    keys = [key for name in (OLD_KEY, NEW_KEY) if (key := disk / name).exists()]
    options = [part for key in keys for part in ("--key", f"file:{key}")]
    return 1 in (run("verify", directory, *given).exit_code for given in ([], options))


@each_work
def test_names_and_contents_are_synced_before_the_work_is_acknowledged(bench: Bench) -> None:
    assert broken_promise(bench.run().log, bench.disk) is None


@each_saver
def test_saver_without_one_of_its_syncs_is_caught(bench: Bench) -> None:
    prepare_second(bench.folder / "second")
    for forgotten in ("data", "manifest", "commit"):
        done = bench.run(*without_sync(bench.calls, forgotten), start="second")
        assert done.is_injected
        assert done.is_acknowledged
        said = "not synced" if forgotten == "commit" else "published before"
        assert said in str(broken_promise(done.log, bench.disk))


@each_saver
def test_failed_sync_after_the_commit_is_reported_and_the_file_stays(bench: Bench) -> None:
    after = bench.calls[commit_of(bench.calls) + 1]
    assert after.kind == "sync"
    done = bench.inject(after, "error=EIO")
    assert not done.is_acknowledged
    assert (bench.disk / "run" / "net-3.ckpt").exists()
    check_directory(bench.disk / "run", must={2, 3}, may={1})


@each_saver
def test_error_of_a_full_disk_names_the_bytes(bench: Bench) -> None:
    (reserved,) = (call for call in bench.calls if call.kind == "reserve")
    done = bench.inject(reserved, "error=ENOSPC", is_lasting=True)
    assert "StoreFull" in done.output
    assert "bytes needed" in done.output


@each_saver
def test_save_on_a_disk_that_retention_makes_room_on_is_whole(bench: Bench) -> None:
    (reserved,) = (call for call in bench.calls if call.kind == "reserve")
    done = bench.inject(reserved, "error=EDQUOT")
    assert done.is_acknowledged
    assert "to make room, removed" in done.output
    check_directory(bench.disk / "run", must={2, 3}, may=set())


@pytest.mark.parametrize("mode", SAVERS)
def test_write_that_the_kernel_only_claims_fails_a_verified_save(
    fast_path: Path, mode: str
) -> None:
    directory, log = fast_path / "run", fast_path / "log"
    command = python("-m", "tests.faults.saver", directory, "2", mode, "verified")
    save_steps(directory, 1)
    written = [
        call for call in changes(straced(command, log).log, directory) if call.kind == "write"
    ]
    data = next(call for call in written if ".net-2.ckpt." in call.path)
    shutil.rmtree(directory)
    save_steps(directory, 1)
    done = straced(command, log, "-e", f"inject=pwrite64:retval={data.result}:when={data.number}")
    assert is_among(data, done.injected())
    assert not done.is_acknowledged
    assert "read back" in done.output
    check_directory(directory, must={1}, may=set())


@pytest.mark.parametrize("mode", SAVERS)
def test_save_without_descriptors_left_is_reported(fast_path: Path, mode: str) -> None:
    directory = fast_path / "run"
    save_steps(directory, 1)
    command = python("-m", "tests.faults.saver", directory, "2", mode, "starved")
    done = straced(command, fast_path / "log")
    assert "EMFILE" in done.log
    assert not done.is_acknowledged
    assert "Too many open files" in done.output
    check_directory(directory, must={1, 2}, may={3})
