# SPDX-License-Identifier: Apache-2.0
"""Checks, reports and alarms of a watch, for listings and times that are given to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import Checkpoint
from ckptmgr.core.model import Link
from ckptmgr.maintenance.watch.decisions import WatchDecisions
from ckptmgr.maintenance.watch.model import AlarmKey, Limits, Listing, Report, Seen, SeriesHolder
from ckptmgr.store.publish import SPACE_MARGIN_BYTES
from tests.support import api

HERE = Path("/runs")
LIVE = {"net": SeriesHolder("live", "process 7 on host")}
DEAD = {"net": SeriesHolder("dead", "process 7 on host")}
ELSEWHERE = {"net": SeriesHolder("unknown", "process 7 on other")}
T0 = 1_000_000.0
TEMP = ".net-3.ckpt.a-b-1-2.0000.1-1.tmp"


def saved(
    step: int,
    *,
    at: float | None = None,
    size_bytes: int = 100,
    run: str | None = "r",
    state: api.State = api.State.OK,
    series: str = "net",
    duration_s: float | None = None,
    changed_at: float = 0.0,
    content: str = "a",
) -> Seen:
    """Return an entry of a listing; by default of a checkpoint saved `step` minutes after T0."""
    moment = T0 + 60 * step if at is None else at
    checkpoint = Checkpoint(
        path=HERE / f"{series}-{step}.ckpt",
        series=series,
        step=step,
        sequence=step,
        run_id=run,
        saved_at=datetime.fromtimestamp(moment, UTC),
        size_bytes=size_bytes,
        state=state,
        id=f"{step}" if run else None,
        previous=Link(name="", sequence=0, run_id="", id=""),
    )
    return Seen(
        checkpoint=checkpoint, fingerprint=content, changed_at=changed_at, duration_s=duration_s
    )


def leftover(name: str = TEMP, state: api.State = api.State.LEFTOVER) -> Seen:
    one = saved(3).checkpoint
    return Seen(
        checkpoint=replace(one, path=HERE / name, state=state), fingerprint="", changed_at=0
    )


def watch_of(*seen: Seen, limits: Limits | None = None, **more: object) -> WatchDecisions:
    """Return a watch that has listed these entries at T0."""
    watch = WatchDecisions(HERE, started_at=T0, limits=limits or Limits())
    listed(watch, T0, *seen, **more)
    return watch


def listed(watch: WatchDecisions, at: float, *seen: Seen, **more: object) -> list[Report]:
    return watch.listed(Listing(at=at, seen=seen, **more))  # type: ignore[arg-type]


def check(
    watch: WatchDecisions, at: float, seen: Seen, status: api.Status = api.Status.OK, *problems: str
) -> list[Report]:
    answer = api.Verification(
        checkpoint=seen.checkpoint, level=api.Level.FULL, status=status, problems=problems
    )
    return watch.verified(at, seen, answer, seconds=0.5)


def events(reports: Sequence[Report]) -> list[tuple[str, str]]:
    return [(one.event, one.message) for one in reports]


def test_first_listing_is_one_report_and_says_what_is_there() -> None:
    watch = WatchDecisions(HERE, started_at=T0, limits=Limits())
    assert events(listed(watch, T0, saved(1), saved(2))) == [
        ("watching", "2 checkpoints, the newest net-2.ckpt of 1970-01-12 13:48:40Z")
    ]
    empty = WatchDecisions(HERE, started_at=T0, limits=Limits())
    assert events(listed(empty, T0)) == [("watching", "no checkpoints yet")]


def test_later_listings_report_what_appeared_oldest_first_and_what_went() -> None:
    watch = watch_of(saved(1))
    reports = listed(watch, T0 + 1, saved(3), saved(2))
    assert events(reports) == [
        ("saved", "net-2.ckpt 100 B"),
        ("saved", "net-3.ckpt 100 B"),
        ("removed", "net-1.ckpt"),
    ]


def test_overwritten_name_is_a_new_checkpoint_and_a_changed_manifest_is_not() -> None:
    first = saved(1)
    watch = watch_of(first)
    again = replace(first, checkpoint=replace(first.checkpoint, id="other"), fingerprint="b")
    assert events(listed(watch, T0, replace(first, fingerprint="c"))) == []
    assert events(listed(watch, T0, again)) == [("saved", "net-1.ckpt 100 B")]


def test_newest_is_verified_first_and_each_once() -> None:
    one, two = saved(1), saved(2)
    watch = watch_of(one, two)
    assert watch.due(T0) == two
    assert events(check(watch, T0, two)) == [("verified", "net-2.ckpt ok")]
    assert watch.due(T0) == one
    check(watch, T0, one)
    assert watch.due(T0 + 9e9) is None
    assert watch.passed == {"net-1.ckpt": "a", "net-2.ckpt": "a"}


def test_changed_file_is_verified_again() -> None:
    watch = watch_of(saved(1))
    check(watch, T0, saved(1))
    changed = saved(1, content="b")
    listed(watch, T0 + 1, changed)
    assert watch.due(T0 + 1) == changed
    assert events(check(watch, T0 + 1, changed)) == [("verified", "net-1.ckpt ok")]


def test_what_passed_before_a_restart_is_not_verified_again_unless_it_changed() -> None:
    for content, is_due in (("a", False), ("b", True)):
        watch = WatchDecisions(
            HERE, started_at=T0, limits=Limits(), remembered={"net-1.ckpt": "a", "gone.ckpt": "a"}
        )
        listed(watch, T0, saved(1, content=content))
        assert (watch.due(T0) is not None) is is_due
        assert "gone.ckpt" not in watch.passed


def test_unfinished_files_are_neither_verified_nor_reported() -> None:
    watch = watch_of()
    assert listed(watch, T0, leftover(state=api.State.WRITING)) == []
    assert watch.due(T0) is None


def test_file_without_manifest_is_verified_when_it_stopped_changing() -> None:
    bare = saved(1, run=None, state=api.State.UNVERIFIED, changed_at=T0 - 2)
    watch = watch_of(bare, limits=Limits(settle_s=10))
    assert watch.due(T0) is None
    assert watch.next_at(T0) == T0 + 8
    assert watch.due(T0 + 8) == bare


def test_wrong_clock_of_the_disk_does_not_delay_a_check_for_ever() -> None:
    bare = saved(1, run=None, state=api.State.UNVERIFIED, changed_at=T0 + 1e6)
    assert watch_of(bare, limits=Limits(settle_s=10)).due(T0 + 10) == bare


def test_damage_of_an_old_file_is_an_alarm_until_it_is_gone() -> None:
    bad = saved(1)
    watch = watch_of(bad)
    reports = check(watch, T0, bad, api.Status.DAMAGED, "CRC mismatch")
    assert events(reports) == [
        ("verified", "net-1.ckpt damaged: CRC mismatch"),
        ("alarm", "net-1.ckpt: CRC mismatch"),
    ]
    assert reports[1].alarm == "damaged"
    assert reports[1].checkpoint == bad.checkpoint
    assert reports[1].series == "net"
    assert "net-1.ckpt" not in watch.passed
    assert events(listed(watch, T0 + 1)) == [
        ("removed", "net-1.ckpt"),
        ("cleared", "net-1.ckpt: CRC mismatch"),
    ]


def test_damage_of_a_file_that_changed_just_now_counts_when_it_is_found_again() -> None:
    bad = saved(1, changed_at=T0 - 1)
    watch = watch_of(bad, limits=Limits(settle_s=10))
    assert check(watch, T0, bad, api.Status.DAMAGED, "half") == []
    assert watch.due(T0 + 9) is None
    assert watch.due(T0 + 10) == bad
    assert [name for name, _ in events(check(watch, T0 + 10, bad, api.Status.DAMAGED, "half"))] == [
        "verified",
        "alarm",
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (api.Status.MISSING, "damaged"),
        (api.Status.WRONG_KEY, "unproven"),
        (api.Status.UNPROVEN, "unproven"),
        (api.Status.UNSEALED, "unproven"),
        (api.Status.UNREADABLE, "unreadable"),
    ],
)
def test_each_bad_status_has_an_alarm(status: api.Status, kind: str) -> None:
    watch = watch_of(saved(1))
    assert [one.alarm for one in check(watch, T0, saved(1), status)] == [None, kind]


@pytest.mark.parametrize("status", [api.Status.UNVERIFIED, api.Status.PARTIAL])
def test_what_nothing_vouches_for_is_no_alarm(status: api.Status) -> None:
    watch = watch_of(saved(1))
    check(watch, T0, saved(1), status)
    assert watch.standing == {}


def test_what_cannot_be_read_is_tried_again_and_reported_when_that_changes() -> None:
    watch = watch_of(saved(1), limits=Limits(retry_s=30))
    check(watch, T0, saved(1), api.Status.UNREADABLE, "Permission denied")
    assert watch.next_at(T0) == T0 + 30
    assert check(watch, T0 + 30, saved(1), api.Status.UNREADABLE, "Permission denied") == []
    assert events(check(watch, T0 + 60, saved(1))) == [
        ("verified", "net-1.ckpt ok"),
        ("cleared", "net-1.ckpt: Permission denied"),
    ]


def test_checkpoint_that_was_removed_before_its_check_is_no_alarm() -> None:
    watch = watch_of(saved(1))
    watch.gone(T0, saved(1))
    assert watch.due(T0) is None
    assert watch.ticked(T0) == []
    assert watch.passed == {}


def test_vanished_directory_is_an_alarm_that_keeps_the_others() -> None:
    watch = watch_of(saved(1))
    check(watch, T0, saved(1), api.Status.DAMAGED, "bad")
    assert events(watch.failed(T0, "gone")) == [("alarm", "gone")]
    assert watch.due(T0) is None
    assert watch.to_prune(T0, is_poll=True) == ([], [])
    assert {key.kind for key in watch.standing} == {"damaged", "directory"}
    assert events(listed(watch, T0 + 1, saved(1))) == [("cleared", "gone")]


def test_expected_saves_that_do_not_come_are_an_alarm_until_the_next() -> None:
    watch = watch_of(saved(1, at=T0 - 50), limits=Limits(expect_every_s=60))
    assert watch.next_at(T0) == T0 + 10
    assert watch.ticked(T0 + 9) == []
    assert events(watch.ticked(T0 + 10)) == [
        (
            "alarm",
            "no checkpoint since 1970-01-12 13:45:50Z (net-1.ckpt); one is expected every 60 s",
        )
    ]
    reports = listed(watch, T0 + 20, saved(1, at=T0 - 50), saved(2, at=T0 + 19))
    assert [name for name, _ in events(reports)] == ["saved", "cleared"]


def test_saves_that_are_expected_and_never_come_count_from_the_beginning() -> None:
    watch = watch_of(limits=Limits(expect_every_s=60))
    assert events(watch.ticked(T0 + 60)) == [
        ("alarm", "no checkpoint since the watch began; one is expected every 60 s")
    ]


@pytest.mark.parametrize(("holders", "is_alarm"), [(LIVE, True), (ELSEWHERE, True), ({}, False)])
def test_live_run_that_stops_saving_is_an_alarm_after_three_intervals(
    holders: dict[str, SeriesHolder], is_alarm: bool
) -> None:
    seen = [saved(step) for step in (1, 2, 4)]
    watch = watch_of(*seen, holders=holders)
    assert watch.ticked(T0 + 240 + 359) == []
    assert events(watch.ticked(T0 + 240 + 360)) == (
        [("alarm", "net saved nothing since 1970-01-12 13:50:40Z; it used to every 90 s")]
        if is_alarm
        else []
    )


def test_pause_between_two_runs_is_no_interval() -> None:
    runs = [saved(1, run="a"), saved(2, run="a"), saved(3, run="b", at=T0 + 9e5)]
    (row,) = watch_of(*runs, holders=LIVE).rows()
    assert row.every_s is None


def test_run_that_died_is_an_alarm_until_another_goes_on() -> None:
    watch = watch_of(saved(1), holders=LIVE)
    assert events(listed(watch, T0, saved(1), holders=DEAD)) == [
        ("alarm", "net: process 7 on host ended without closing its run")
    ]
    assert listed(watch, T0, saved(1)) == []  # retention took the lease, and removed its file
    assert events(listed(watch, T0, saved(1), holders=LIVE))[0][0] == "cleared"


def test_save_that_was_given_up_is_an_alarm_until_the_next_save() -> None:
    watch = watch_of(saved(1), holders=LIVE)
    reports = listed(watch, T0, saved(1), holders=LIVE, given_up=("net-2.ckpt",))
    assert events(reports) == [("alarm", "net: the save of net-2.ckpt was given up")]
    assert listed(watch, T0, saved(1), holders=LIVE) == []
    assert [name for name, _ in events(listed(watch, T0, saved(1), saved(2), holders=LIVE))] == [
        "saved",
        "cleared",
    ]


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("net-2_3.ckpt", "net"),
        ("net-2.0-of-2.67d2f1a41f0c9a2e.ckpt", "net"),
        ("weights.safetensors", "weights"),
    ],
)
def test_given_up_save_belongs_to_the_series_that_its_name_says(name: str, series: str) -> None:
    watch = watch_of()
    listed(watch, T0, given_up=(name,))
    assert list(watch.standing) == [AlarmKey("failed", series)]


def test_interrupted_save_is_an_alarm_while_its_file_is_there() -> None:
    watch = watch_of(saved(1))
    assert events(
        listed(watch, T0, saved(1), leftover(), leftover(TEMP.replace("-1-", "-9-")))
    ) == [("alarm", "net: an interrupted save left a temporary file")]
    assert [name for name, _ in events(listed(watch, T0, saved(1)))] == ["cleared"]


def test_manifest_without_data_is_no_interrupted_save() -> None:
    watch = watch_of(saved(1))
    assert listed(watch, T0, saved(1), leftover("net-3.ckpt")) == []


def test_slow_save_is_an_alarm_until_a_usual_one() -> None:
    usual = [saved(step, size_bytes=10**9, duration_s=2.0) for step in (1, 2, 3)]
    slow = saved(4, size_bytes=10**9, duration_s=8.0)
    watch = watch_of(*usual)
    reports = listed(watch, T0, *usual, slow)
    assert events(reports)[1:] == [
        ("alarm", "the last save of net wrote 125.0 MB/s, usually 500.0 MB/s")
    ]
    last = saved(5, size_bytes=10**9, duration_s=2.0)
    assert "cleared" in [name for name, _ in events(listed(watch, T0, *usual, slow, last))]


def test_short_save_is_never_slow() -> None:
    usual = [saved(step, duration_s=0.001) for step in (1, 2, 3)]
    assert watch_of(*usual, saved(4, duration_s=0.9)).standing == {}


def test_next_save_that_does_not_fit_is_an_alarm_while_a_run_is_there() -> None:
    needed = 100 + SPACE_MARGIN_BYTES
    watch = watch_of(saved(1), holders=LIVE, free_bytes=needed - 1)
    assert list(watch.standing.values()) == [
        "the next save of net does not fit the disk: 1.0 MiB are needed, 1.0 MiB are free"
    ]
    assert watch_of(saved(1), free_bytes=needed - 1).standing == {}
    assert watch_of(saved(1), holders=LIVE, free_bytes=needed).standing == {}


def test_disk_that_fills_is_an_alarm_before_it_is_full() -> None:
    watch = watch_of(free_bytes=10**9, limits=Limits(full_within_s=3600))
    for minute in range(1, 10):
        listed(watch, T0 + 60 * minute, free_bytes=10**9 - minute * 10**8)
    assert list(watch.standing) == [AlarmKey("disk", "")]
    (row,) = watch.rows()
    assert row.full_in_s is not None
    assert row.full_in_s < 600
    assert row.alarms == ("disk",)


def test_saves_that_retention_makes_room_for_do_not_fill_the_disk() -> None:
    watch = watch_of(free_bytes=10**9)
    for minute in range(1, 30):
        taken = 8 * 10**8 if minute % 3 else 0
        listed(watch, T0 + 60 * minute, free_bytes=10**9 - taken)
    assert watch.rows()[0].full_in_s is None


def test_retention_is_left_to_a_live_run_and_that_is_said_once() -> None:
    watch = watch_of(saved(1), holders=LIVE)
    names, reports = watch.to_prune(T0, is_poll=False)
    assert names == []
    assert events(reports) == [
        (
            "note",
            "process 7 on host writes net and applies its own retention: it is only verified here",
        )
    ]
    assert watch.to_prune(T0, is_poll=True) == ([], [])


def test_retention_is_applied_after_the_run_and_again_when_something_changed() -> None:
    watch = watch_of(saved(1), holders=LIVE)
    watch.to_prune(T0, is_poll=False)
    listed(watch, T0, saved(1))
    assert watch.to_prune(T0, is_poll=False) == (["net"], [])
    assert watch.to_prune(T0, is_poll=False) == ([], [])
    assert watch.to_prune(T0, is_poll=True) == (["net"], [])
    listed(watch, T0, saved(1), saved(2))
    assert watch.to_prune(T0, is_poll=False) == (["net"], [])


def test_series_whose_lease_a_process_elsewhere_holds_is_tried_once() -> None:
    watch = watch_of(saved(1), holders=ELSEWHERE)
    assert watch.to_prune(T0, is_poll=True) == (["net"], [])
    assert len(watch.held(T0, "net", "process 7 on other")) == 1
    assert watch.to_prune(T0, is_poll=True) == ([], [])
    listed(watch, T0, saved(1))
    assert watch.to_prune(T0, is_poll=True) == (["net"], [])


def test_retention_that_fails_is_an_alarm_until_it_succeeds() -> None:
    watch = watch_of(saved(1))
    assert events(watch.retained(T0, "net", "Permission denied")) == [
        ("alarm", "retention of net failed: Permission denied")
    ]
    assert watch.retained(T0, "net", "Permission denied") == []
    assert [name for name, _ in events(watch.retained(T0, "net", None))] == ["cleared"]


def test_damaged_checkpoint_is_moved_once_where_no_live_run_writes() -> None:
    watch = watch_of(saved(1), saved(2))
    check(watch, T0, saved(1), api.Status.DAMAGED, "bad")
    check(watch, T0, saved(2), api.Status.UNREADABLE, "Permission denied")
    assert watch.to_quarantine(T0) == ([saved(1)], [])
    assert watch.to_quarantine(T0) == ([], [])


def test_damaged_checkpoint_of_a_live_run_is_moved_after_its_end() -> None:
    watch = watch_of(saved(1), holders=LIVE)
    check(watch, T0, saved(1), api.Status.DAMAGED, "bad")
    chosen, reports = watch.to_quarantine(T0)
    assert (chosen, [one.event for one in reports]) == ([], ["note"])
    listed(watch, T0, saved(1))
    assert watch.to_quarantine(T0) == ([saved(1)], [])


def test_damage_that_is_not_believed_yet_and_files_of_ranks_are_not_moved() -> None:
    fresh = saved(1, changed_at=T0)
    one = saved(2)
    ranks = replace(one, checkpoint=replace(one.checkpoint, shards=("a", "b")))
    watch = watch_of(fresh, ranks)
    check(watch, T0, fresh, api.Status.DAMAGED, "half")
    check(watch, T0, ranks, api.Status.DAMAGED, "bad")
    assert watch.to_quarantine(T0) == ([], [])


def test_rows_are_of_series_with_what_they_wait_for() -> None:
    watch = watch_of(saved(1), saved(2, series="other"), holders=LIVE, free_bytes=10**9)
    check(watch, T0, saved(1), api.Status.DAMAGED, "bad")
    net, other = watch.rows()
    assert (net.series, net.unverified, net.alarms) == ("net", 0, ("damaged",))
    assert (other.series, other.unverified, other.alarms) == ("other", 1, ())
    assert (net.holder, other.holder) == (LIVE["net"], None)
    (row,) = watch_of().rows()
    assert (row.series, row.newest) == (None, None)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("list"), st.sets(st.integers(1, 5))),
        st.tuples(st.just("verify"), st.sampled_from([api.Status.OK, api.Status.DAMAGED])),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("tick"), st.integers(1, 200)),
    ),
    max_size=30,
)


@given(CHANGES)
def test_every_alarm_begins_once_and_ends_once_whatever_happens(
    changes: list[tuple[str, object]],
) -> None:
    watch = WatchDecisions(HERE, started_at=T0, limits=Limits(expect_every_s=100, settle_s=10))
    at, reports = T0, list[Report]()
    for kind, value in changes:
        if kind == "list":
            assert isinstance(value, set)
            reports += listed(watch, at, *(saved(step, changed_at=at - 3) for step in value))
        elif kind == "fail":
            reports += watch.failed(at, "gone")
        elif kind == "tick":
            assert isinstance(value, int)
            at += value
            reports += watch.ticked(at)
        elif (due := watch.due(at)) is not None:
            assert isinstance(value, api.Status)
            reports += check(watch, at, due, value, "bad")
    standing: set[tuple[str | None, str]] = set()
    for one in reports:
        key = (one.alarm, one.message)
        if one.event == "alarm":
            assert key not in standing
            standing.add(key)
        elif one.event == "cleared":
            standing.remove(key)
    assert standing == {(key.kind, text) for key, text in watch.standing.items()}


@given(CHANGES)
def test_everything_listed_is_verified_in_the_end(changes: list[tuple[str, object]]) -> None:
    watch = WatchDecisions(HERE, started_at=T0, limits=Limits())
    present: dict[int, Seen] = {}
    for _, value in changes:
        if isinstance(value, set):
            present = {step: saved(step) for step in value}
            listed(watch, T0, *present.values())
    while (due := watch.due(T0 + 1000)) is not None:
        check(watch, T0 + 1000, due)
    assert set(watch.passed) == {one.checkpoint.name for one in present.values()}
