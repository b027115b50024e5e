# SPDX-License-Identifier: Apache-2.0
"""Uploads of a watch, and its alarms about them, for uploads and times that are given to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptmgr.maintenance.watch.decisions import WatchDecisions
from ckptmgr.maintenance.watch.mirroring import UploadAttempt
from ckptmgr.maintenance.watch.model import AlarmKey, Limits, Report, Seen
from tests.maintenance.test_watch_decisions import HERE, T0, check, listed, saved, watch_of
from tests.support import api

URL = "s3://bucket/run"
WHOLE = AlarmKey("mirror", "")
PATIENT = Limits(mirror_within_s=600.0)


def wanted(watch: WatchDecisions, at: float = T0) -> list[str]:
    """Return the names that a watch wants to be uploaded."""
    return [one.name for one in watch.mirror.want(watch.whole, at)]


def ended(watch: WatchDecisions, at: float, seen: Seen | None, **more: Any) -> list[Report]:
    """Have the upload of a checkpoint end."""
    one = None if seen is None else seen.checkpoint
    return watch.mirrored(at, UploadAttempt(directory=HERE, address=URL, checkpoint=one, **more))


def verified(*steps: int, limits: Limits | None = None) -> tuple[WatchDecisions, list[Seen]]:
    """Return a watch that has verified these steps, and wants them."""
    seen = [saved(step) for step in steps]
    watch = watch_of(*seen, limits=limits)
    for one in seen:
        check(watch, T0, one)
    wanted(watch)
    return watch, seen


def test_only_what_passed_its_check_as_it_is_now_is_wanted() -> None:
    good, bad, unchecked = saved(1), saved(2), saved(3)
    watch = watch_of(good, bad, unchecked)
    check(watch, T0, good)
    check(watch, T0, bad, api.Status.DAMAGED, "digest")
    assert wanted(watch) == ["net-1.ckpt"]
    listed(watch, T0 + 1, replace(good, fingerprint="b"), bad, unchecked)
    assert wanted(watch) == []


def test_encrypted_checkpoint_that_was_checked_without_its_key_is_wanted() -> None:
    seen = saved(1)
    watch = watch_of(seen)
    check(watch, T0, seen, api.Status.PARTIAL)
    assert wanted(watch) == ["net-1.ckpt"]


def test_upload_is_reported_once_and_no_longer_wanted() -> None:
    watch, (one,) = verified(1)
    (report,) = ended(watch, T0, one, outcome="uploaded", seconds=2.0)
    assert (report.event, report.message) == ("mirrored", f"net-1.ckpt to {URL}")
    assert report.figures == {"seconds": 2.0}
    assert wanted(watch) == []


def test_what_was_there_or_is_left_out_by_the_policy_is_neither_reported_nor_wanted() -> None:
    watch, (first, last) = verified(1, 2)
    assert ended(watch, T0, first, outcome="present") == []
    assert ended(watch, T0, last, outcome="left out") == []
    assert wanted(watch) == []


def test_checkpoint_that_is_saved_again_under_its_name_is_wanted_again() -> None:
    watch, (one,) = verified(1)
    ended(watch, T0, one, outcome="uploaded")
    again = replace(one, checkpoint=replace(one.checkpoint, id="other"), fingerprint="b")
    listed(watch, T0 + 1, again)
    check(watch, T0 + 1, again)
    assert wanted(watch) == ["net-1.ckpt"]


def test_store_that_fails_is_an_alarm_until_it_answers() -> None:
    watch, (one,) = verified(1)
    (alarm,) = ended(watch, T0, one, outcome="failed", problem="no route")
    assert (alarm.event, alarm.alarm, alarm.checkpoint) == ("alarm", "mirror", None)
    assert alarm.message == "the mirror fails, and is tried again: no route"
    assert ended(watch, T0, one, outcome="failed", problem="no route") == []
    assert wanted(watch) == ["net-1.ckpt"]
    (cleared,) = ended(watch, T0, None, outcome="listed")
    assert cleared.event == "cleared"


def test_refused_checkpoint_is_an_alarm_of_its_own_and_not_tried_again() -> None:
    watch, (first, last) = verified(1, 2)
    (alarm,) = ended(watch, T0, first, outcome="refused", problem="another one is there")
    assert alarm.message == "net-1.ckpt is not mirrored: another one is there"
    assert alarm.checkpoint == first.checkpoint
    assert wanted(watch) == ["net-2.ckpt"]
    (row,) = watch.rows()
    assert row.alarms == ("mirror",)
    listed(watch, T0 + 1, last)
    wanted(watch)
    assert [one.event for one in watch.ticked(T0 + 1)] == ["cleared"]


def test_retention_that_fails_at_the_mirror_is_an_alarm_though_the_upload_is_done() -> None:
    watch, (one,) = verified(1)
    reports = ended(watch, T0, one, outcome="uploaded", problem="retention at s3: locked")
    assert [report.event for report in reports] == ["mirrored", "alarm"]
    assert wanted(watch) == []


def test_what_the_policy_of_the_mirror_removed_there_is_reported() -> None:
    watch, (one,) = verified(1)
    reports = ended(watch, T0, one, outcome="uploaded", removed=(saved(0).checkpoint,))
    assert [report.event for report in reports] == ["mirrored", "pruned"]
    assert reports[1].message == "/runs/net-0.ckpt for good"


def test_checkpoint_that_waits_too_long_is_an_alarm_of_its_series_until_all_are_there() -> None:
    watch, (first, last) = verified(1, 2, limits=PATIENT)
    assert watch.next_at(T0) == T0 + 600
    assert watch.ticked(T0 + 599) == []
    (alarm,) = watch.ticked(T0 + 600)
    assert (alarm.alarm, alarm.series) == ("mirror", "net")
    assert alarm.message.startswith(
        "waiting for the upload: 2 checkpoints of net, net-1.ckpt since "
    )
    assert [one.event for one in ended(watch, T0 + 601, last, outcome="uploaded")] == ["mirrored"]
    reports = ended(watch, T0 + 601, first, outcome="uploaded")
    assert [one.event for one in reports] == ["mirrored", "cleared"]
    assert watch.standing == {}


def test_retention_here_spares_what_was_not_mirrored() -> None:
    watch, (first, last) = verified(1, 2)
    ended(watch, T0, first, outcome="refused", problem="another one is there")
    assert watch.mirror.stays(first.checkpoint) is None
    assert watch.mirror.stays(last.checkpoint) == "not mirrored yet"
    ended(watch, T0, last, outcome="uploaded")
    assert watch.mirror.stays(last.checkpoint) is None
    assert WHOLE not in watch.standing
