# SPDX-License-Identifier: Apache-2.0
"""The bare disk: each request is really carried out, alone, with other work, and beside a training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench.figures import Figures
from tools.bench.peers.raw import Library
from tools.bench.raw_disk import RawDisk, Shape
from tools.bench.raw_writer import RawWriter
from tools.bench.sections import FLOORS, measure_files, measure_loops
from tools.bench.session import Pace, Session
from tools.bench.tables import report
from tools.bench.targets import verdicts
from tools.bench.team import Setup, Team
from tools.bench.workload import Workload

_SHAPE = Shape(threads=2, chunk_bytes=1 << 20)
_LARGE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def writer() -> Iterator[RawWriter]:
    found = RawWriter(_SHAPE)
    yield found
    found.close()


def _session(directory: Path, section: str) -> Session:
    return Session(
        section=section,
        workload=Workload(size_bytes=1 << 20),
        directory=directory,
        pace=Pace(rounds=1, peer_rounds=1, rest_s=0),
        figures=Figures(),
        failures={},
        report=lambda line: None,
    )


def _team(session: Session) -> Team:
    setup = Setup(libraries=["raw"], pythons={}, directory=session.directory, rest_s=0)
    return Team(setup, session.workload)


def test_raw_disk_tuned_writes_and_reads_what_was_asked(tmp_path: Path) -> None:
    disk = RawDisk()
    rests: list[int] = []
    disk.tune(tmp_path / "tune.raw", 1 << 20, lambda: rests.append(1))
    assert list(tmp_path.iterdir()) == []
    assert len(rests) == 18
    disk.write(tmp_path / "file.raw", 5 << 20)
    disk.read(tmp_path / "file.raw")
    assert (tmp_path / "file.raw").stat().st_size == 8 << 20


@pytest.mark.parametrize("what", ["load", *FLOORS])
def test_raw_library_does_everything_with_a_file_that_it_wrote(tmp_path: Path, what: str) -> None:
    (limit,) = Library({}, 5 << 20, directory=tmp_path, rest_s=0).contestants()
    limit.actions["save"](tmp_path / "file.raw")
    limit.actions[what](tmp_path / "file.raw")
    assert (tmp_path / "file.raw").stat().st_size == 8 << 20


@pytest.mark.parametrize("what", ["load", "load new", "load digested", "load busy"])
def test_raw_library_reading_a_cut_file_says_so(tmp_path: Path, what: str) -> None:
    (limit,) = Library({}, 8 << 20, directory=tmp_path, rest_s=0).contestants()
    path = tmp_path / "cut.raw"
    limit.actions["save"](path)
    os.truncate(path, 5 << 20)
    with pytest.raises(OSError, match="at 4194304 was short"):
        limit.actions[what](path)


def test_raw_disk_error_of_a_transfer_is_raised(tmp_path: Path) -> None:
    (tmp_path / "entry").touch()
    with pytest.raises(IsADirectoryError):
        RawDisk().read(tmp_path)


@pytest.mark.parametrize("what", ["load new", "touch"])
def test_raw_library_with_new_memory_has_the_whole_file_in_it(tmp_path: Path, what: str) -> None:
    (limit,) = Library({}, _LARGE_BYTES, directory=tmp_path, rest_s=0).contestants()
    limit.actions["save"](tmp_path / "file.raw")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory in use
    before = _peak_bytes()
    limit.actions[what](tmp_path / "file.raw")
    assert _peak_bytes() - before > _LARGE_BYTES * 0.9


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_raw_writer_writes_a_file_of_at_least_as_many_bytes(
    tmp_path: Path, writer: RawWriter
) -> None:
    writer.start(tmp_path / "file.raw", 5 << 20).wait()
    assert (tmp_path / "file.raw").stat().st_size == 8 << 20


def test_raw_writer_that_cannot_write_says_why_and_goes_on(
    tmp_path: Path, writer: RawWriter
) -> None:
    with pytest.raises(OSError, match="No such file"):
        writer.start(tmp_path / "absent" / "file.raw", 1).wait()
    writer.start(tmp_path / "file.raw", 1).wait()
    assert (tmp_path / "file.raw").stat().st_size == 4 << 20


def test_raw_writer_that_has_ended_is_an_error() -> None:
    writer = RawWriter(_SHAPE)
    with pytest.raises(OSError, match="has ended"):
        writer.start(Path("no\0path"), 1).wait()
    writer.close()


def test_raw_files_show_the_disk_with_the_work_of_others_in_the_table(tmp_path: Path) -> None:
    session = _session(tmp_path, "files")
    with _team(session) as team:
        measure_files(session, list(team.players("contestants")))
    assert list(tmp_path.glob("*.raw")) == []
    table = report(session.figures, [], [], {})
    assert "| limit | raw O_DIRECT, into new memory | " in table


@pytest.mark.slow
def test_raw_writes_beside_a_loop_that_peers_leave_out_are_in_the_table_and_stated(
    tmp_path: Path,
) -> None:
    session = _session(tmp_path, "loops")
    with _team(session) as team:
        measure_loops(session, list(team.players("backgrounds")), loops=("python",))
    assert [path.name for path in tmp_path.iterdir()] == ["raw.log"]
    assert "| raw O_DIRECT | limit | " in report(session.figures, [], [], {})
    stated = {one.what: one.is_met for one in verdicts(session.figures, [], {})}
    assert stated == {"steps lost by a python loop, raw writes": None}
