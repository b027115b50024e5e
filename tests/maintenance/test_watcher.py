# SPDX-License-Identifier: Apache-2.0
"""The loop of a watch, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, parse_policy
from ckptmgr.io.leases import ProcProcesses, lease_path
from ckptmgr.maintenance.watch.directory import WatchedDirectory, problem_of
from ckptmgr.maintenance.watch.model import Limits, Report
from ckptmgr.maintenance.watch.watcher import Settings, Watcher
from tests.support import api
from tests.support.saved import save_run

NOW_S = 2e9
QUIET = Settings(is_polling=True, poll_s=100.0, limits=Limits(settle_s=0.0))


class Clock:
    def __init__(self) -> None:
        self.at = NOW_S

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


def until_idle(reports: Iterator[Report | None]) -> list[Report]:
    """Return the reports up to the second pause in a row: after the first, a check may follow."""
    found: list[Report] = []
    pauses = 0
    while pauses < 2:
        one = next(reports)
        pauses = pauses + 1 if one is None else 0
        found += [] if one is None else [one]
    return found


def events(reports: list[Report]) -> list[str]:
    return [one.event for one in reports]


def test_directory_without_events_is_listed_at_the_next_poll_and_this_is_said(
    tmp_path: Path, clock: Clock
) -> None:
    with Watcher([tmp_path], QUIET, clock=clock) as watcher:
        reports = watcher.run(tick_s=0.0)
        first = until_idle(reports)
        assert events(first) == ["note", "watching"]
        assert first[0].message == "listed every 100 s, without events: as --poll-only asks"
        save_run(tmp_path, [10])
        clock.at += 99
        assert until_idle(reports) == []
        clock.at += 1
        assert events(until_idle(reports))[:2] == ["saved", "verified"]


def test_clock_that_is_set_back_leads_to_a_listing_and_not_to_a_long_wait(
    tmp_path: Path, clock: Clock
) -> None:
    with Watcher([tmp_path], QUIET, clock=clock) as watcher:
        reports = watcher.run(tick_s=0.0)
        until_idle(reports)
        save_run(tmp_path, [10])
        clock.at -= 1e6
        assert "saved" in events(until_idle(reports))


def test_policy_that_cannot_be_carried_out_is_an_alarm(tmp_path: Path, clock: Clock) -> None:
    save_run(tmp_path, [10, 20])
    (tmp_path / ".ckptmgr-trash").touch()
    settings = replace(QUIET, policy_of=lambda _: parse_policy("last(1)"))
    with Watcher([tmp_path], settings, clock=clock) as watcher:
        found = until_idle(watcher.run(tick_s=0.0))
    (alarm,) = [one for one in found if one.event == "alarm"]
    assert alarm.alarm == "retention"
    assert "is not a directory" in alarm.message


def test_series_whose_lock_is_held_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    save_run(tmp_path, [10, 20])
    settings = replace(QUIET, policy_of=lambda _: parse_policy("last(1)"))
    path = lease_path(tmp_path, "net")
    with api.place(tmp_path).lease("net"), Watcher([tmp_path], settings, clock=clock) as watcher:
        path.write_text("process 7 on other\n0-0-7-7 1\n")  # of another host: nothing is known
        found = until_idle(watcher.run(tick_s=0.0))
        assert len(list(tmp_path.glob("*.ckpt"))) == 2
    notes = [one.message for one in found if one.event == "note"]
    assert any("it is only verified here" in text for text in notes)


def holder_of(directory: Path, text: str | None) -> object:
    if text is not None:
        lease_path(directory, "net").write_text(text)
    return WatchedDirectory(directory, trust=QUIET.trust).look(at=NOW_S).holders.get("net")


def test_holder_is_the_process_that_the_lease_file_names(tmp_path: Path) -> None:
    own = api.place(tmp_path).processes.token()
    host, boot, pid, start = own.split("-")
    dead = f"{host}-{boot}-{pid}-{int(start) + 1}"
    assert holder_of(tmp_path, None) is None
    assert holder_of(tmp_path, f"process 1 on h\n{own} 1\n") == ("live", "process 1 on h")
    assert holder_of(tmp_path, f"process 1 on h\n{dead} 1\n") == ("dead", "process 1 on h")
    assert holder_of(tmp_path, "") == ("unknown", "another process")
    worker = f"process 1 on h\n{dead} 1\nprocess 2 on h\n{own} 1\n"
    assert holder_of(tmp_path, worker) == ("live", "process 1 on h")


@pytest.mark.parametrize("is_followed", [False, True])
def test_run_that_closes_while_its_lease_is_read_has_not_died(
    tmp_path: Path, is_followed: bool
) -> None:
    lease = lease_path(tmp_path, "net")

    class EndingProcesses(ProcProcesses):
        """The first process that is asked about closes its run and ends; another may follow."""

        def is_dead(self, token: str) -> bool | None:
            if token == self.token():
                return False
            lease.unlink()
            if is_followed:
                lease.write_text(f"process 2 on h\n{self.token()} 1\n")
            return True

    place = WatchedDirectory(tmp_path, trust=QUIET.trust)
    place.store.processes = EndingProcesses()
    lease.write_text("process 1 on h\n0-0-1-1 1\n")
    holder = place.look(at=NOW_S).holders.get("net")
    assert holder == (("live", "process 2 on h") if is_followed else None)


def test_lease_file_that_is_no_file_has_an_unknown_holder(tmp_path: Path) -> None:
    lease_path(tmp_path, "net").mkdir()
    assert holder_of(tmp_path, None) == ("unknown", "another process")


def test_leases_of_files_and_of_the_trash_are_no_runs(tmp_path: Path) -> None:
    for name in ("net-1.ckpt", ".ckptmgr-trash"):
        lease_path(tmp_path, name).touch()
    assert WatchedDirectory(tmp_path, trust=QUIET.trust).look(at=NOW_S).holders == {}


def test_temporary_file_of_a_dead_process_or_of_this_one_was_not_given_up(tmp_path: Path) -> None:
    place = WatchedDirectory(tmp_path, trust=QUIET.trust)
    own = place.store.processes.token()
    dead = f"{own.rpartition('-')[0]}-1"
    temps = [f".net-1.ckpt.{token}.0000.1-1.tmp" for token in (own, dead, "odd")]
    assert place.look(at=NOW_S, removed_temps=temps).given_up == ()


def test_file_in_place_of_a_directory_is_named(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "file"
    path.touch()
    with Watcher([path], QUIET, clock=clock) as watcher:
        (alarm,) = until_idle(watcher.run(tick_s=0.0))
    assert (alarm.alarm, alarm.message) == ("directory", f"{path}: is no directory")


def test_duration_of_a_save_comes_from_its_manifest_and_damage_hides_it(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    place = WatchedDirectory(tmp_path, trust=QUIET.trust)
    assert all(one.duration_s for one in place.look(at=NOW_S).seen)
    manifest = tmp_path / api.manifest_name(first.name)
    manifest.chmod(0o600)
    manifest.write_text("{")
    found = {one.checkpoint.name: one.duration_s for one in place.look(at=NOW_S).seen}
    assert found[first.name] is None


def test_error_of_the_disk_is_one_sentence_with_its_path() -> None:
    assert problem_of(OSError(13, "Permission denied", "/runs")) == "/runs: Permission denied"
    assert problem_of(OSError(5, "Input/output error")) == "Input/output error"
    assert problem_of(OSError("odd")) == "odd"


def test_missing_data_is_verified_as_missing(tmp_path: Path, clock: Clock) -> None:
    _, last = save_run(tmp_path, [10, 20])
    last.unlink()
    with Watcher([tmp_path], QUIET, clock=clock) as watcher:
        found = until_idle(watcher.run(tick_s=0.0))
    about: list[Checkpoint | None] = [one.checkpoint for one in found if one.alarm == "damaged"]
    assert [one.name for one in about if one is not None] == [last.name]
