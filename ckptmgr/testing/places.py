# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of places: does a store of checkpoints behave as retention and readers expect?

A place holds checkpoints: a directory, a prefix of an object store, files of many ranks, a directory
of another tool. An adapter shows it to the suite (`PlaceUnderTest`), and says in `can` which
operations it has. A behaviour that needs another one asserts that the place refuses it by an error
that names the place, and that nothing changed.

With pytest, for a place of your own:

```
class TestTarFiles(PlaceBehaviours):
    @pytest.fixture
    def place(self, tmp_path: Path) -> TarFiles:
        return TarFiles(tmp_path / "run")  # which does not exist yet
```

Assertions say more after `pytest.register_assert_rewrite("ckptmgr.testing.places")`.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ckptmgr.core.errors import (
    CheckpointNotFound,
    StoreLocked,
    UnsafePrune,
)
from ckptmgr.core.model import UNFINISHED, Checkpoint, Pin, State
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.testing.place_under_test import Capability, PlaceUnderTest

__all__ = ["Capability", "PlaceBehaviours", "PlaceUnderTest"]

_MOST_CHANGES = 100
NOW = datetime(2100, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
ODD_NAMES = ("notes.txt", "net.ckpt.bak", ".net-9.ckpt", "net-9.ckpt~", "modèle 1 [a].bin", "-")
"""Names of entries that no run publishes."""
UNPUBLISHED = ("net-99.ckpt", ".", "..", "../net-10.ckpt", "a/net-10.ckpt", "net-10.ckpt~")
"""Names that no checkpoint has."""


class PlaceBehaviours:
    """The behaviours; a subclass has a fixture `place`: an adapter of a place that does not exist yet."""

    def test_adapter_and_place_say_the_same_about_what_it_can_do(
        self, place: PlaceUnderTest
    ) -> None:
        can = place.place.can
        assert [one in place.can for one in ("locks", "trash", "changes")] == [
            can.locks,
            can.trash,
            can.changes,
        ]

    # Listing

    def test_place_that_does_not_exist_lists_nothing(self, place: PlaceUnderTest) -> None:
        assert list(place.listed()) == []
        assert place.look("net-10.ckpt") is None

    def test_looking_creates_nothing(self, place: PlaceUnderTest) -> None:
        place.listed()
        place.look("net-10.ckpt")
        assert dict(place.entries()) == {}

    def test_published_one_is_listed_as_it_was_returned(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10, metrics={"loss": 0.5})
        assert whole(place) == [saved]
        assert (saved.step, saved.problem, saved.size_bytes > 0) == (10, None, True)

    def test_listing_after_another_publish_shows_it(self, place: PlaceUnderTest) -> None:
        first = place.publish(10)
        assert whole(place) == [first]
        other = place.again().publish(20)
        assert whole(place) == [other, first]

    def test_listing_is_newest_first(self, place: PlaceUnderTest) -> None:
        steps = publish_all(place, 10, 30, 20)
        by_commit = "manifests" in place.can
        assert steps == ([20, 30, 10] if by_commit else [30, 20, 10])

    def test_another_process_lists_the_same(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        assert list(place.again().listed()) == list(place.listed())

    def test_look_finds_each_listed_one(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        for one in place.listed():
            assert place.look(one.name) == one

    def test_look_for_a_name_of_nothing_finds_nothing(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        for name in UNPUBLISHED:
            with suppress(OSError):  # an object store refuses some names
                assert place.look(name) is None, name

    def test_paths_begin_with_the_address(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        assert str(saved.path).startswith(place.names[0])
        assert saved.path.name == saved.name

    def test_half_written_one_is_not_whole(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        place.plant_half_written(20)
        assert whole(place) == [saved]
        assert place.content(saved)

    def test_half_written_one_alone_is_not_whole(self, place: PlaceUnderTest) -> None:
        place.plant_half_written(20)
        assert whole(place) == []

    def test_publish_beside_a_half_written_one_is_whole(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        place.plant_half_written(20)
        saved = place.again().publish(20)
        assert whole(place)[0] == saved
        assert place.content(saved)

    def test_unknown_entries_are_not_listed(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        for name in ODD_NAMES:
            place.plant(name)
        assert [one for one in place.listed() if one.state not in UNFINISHED] == [saved]

    def test_unknown_entries_are_left_alone(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        before = set(place.entries())
        for name in ODD_NAMES:
            place.plant(name)
        planted = set(place.entries()) - before
        assert carry_out(place, "last(1)") == []
        assert steps_of(place) == [30]
        assert planted <= set(place.entries())

    # Publishing

    def test_content_reads_back(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        newer, older = (place.again().content(one) for one in place.listed())
        assert newer != older
        assert (newer, older) == tuple(place.content(one) for one in place.listed())

    def test_damaged_content_is_noticed(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        place.damage(saved)
        assert errors_of(lambda: place.again().content(saved))

    def test_manifest_reads_back(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10, metrics={"loss": 0.5})
        found = place.again().manifest(saved.name)
        if "manifests" not in place.can:
            assert found is None
            return
        assert found is not None
        assert (found.step, found.series, dict(found.metrics)) == (10, "net", {"loss": 0.5})
        assert (found.name, found.id, found.sequence) == (saved.name, saved.id, saved.sequence)

    def test_each_one_names_the_one_before_it(self, place: PlaceUnderTest) -> None:
        first, second = place.publish(10), place.again().publish(20)
        if "manifests" not in place.can:
            assert (first.previous, second.previous) == (None, None)
            return
        assert second.previous is not None
        assert (second.previous.id, second.sequence) == (first.id, first.sequence + 1)

    def test_series_of_odd_characters_reads_back(self, place: PlaceUnderTest) -> None:
        if "manifests" not in place.can:  # its names are those of its tool
            return
        series = "modèle 1.5 [a] %20"
        saved = place.publish(10, series=series)
        assert place.again().look(saved.name) == saved == whole(place)[0]
        assert (saved.series, bool(place.content(saved))) == (series, True)

    def test_each_series_is_planned_by_itself(self, place: PlaceUnderTest) -> None:
        if "manifests" not in place.can:
            return
        for series, step in itertools.product(("a", "b"), (10, 20)):
            place.publish(step, series=series)
        assert carry_out(place, "last(1)") == []
        assert sorted((one.series, one.step) for one in whole(place)) == [("a", 20), ("b", 20)]

    def test_name_that_is_published_again_is_replaced_or_refused(
        self, place: PlaceUnderTest
    ) -> None:
        first = place.publish(10)
        if is_refused(place, "overwrites", lambda: place.again().publish(10)):
            assert whole(place) == [first]
            return
        second = place.again().publish(10)
        assert whole(place) == [second]
        assert "manifests" not in place.can or second.sequence > first.sequence
        assert place.content(second)

    def test_reader_sees_nothing_or_all_of_a_publish(self, place: PlaceUnderTest) -> None:
        older = place.publish(10)
        seen: list[list[int]] = []

        def look() -> None:
            found = whole(place)
            assert [bool(place.content(one)) for one in found] == [True] * len(found)
            assert older in found
            seen.append([one.step for one in found])

        place.watched(look).publish(20)
        steps = [step for step, _ in itertools.groupby([*seen, steps_of(place)])]
        assert steps in ([[20, 10]], [[10], [20, 10]])

    def test_reader_sees_the_old_or_the_new_one_of_an_overwrite(
        self, place: PlaceUnderTest
    ) -> None:
        first = place.publish(10)
        if not {"overwrites", "manifests"} <= place.can:
            return
        seen: list[str | None] = []

        def look() -> None:
            (one,) = whole(place)
            assert place.content(one)
            seen.append(one.id)

        second = place.watched(look).publish(10)
        assert [id for id, _ in itertools.groupby([*seen, second.id])] == [first.id, second.id]

    # Sizes

    def test_size_is_that_of_its_data(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        (listed,) = whole(place.again())
        assert 0 < listed.size_bytes == saved.size_bytes <= sum(place.entries().values())

    def test_free_space_is_known_or_not(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        free = place.free_space()
        assert (free is not None and free > 0) == ("space" in place.can)

    # Locks

    def test_second_lock_is_refused(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        if is_refused(place, "locks", lambda: hold_and_leave(place)):
            return
        with place.lock():
            (error,) = errors_of(lambda: hold_and_leave(place.again()))
            assert isinstance(error, StoreLocked)
            assert names_it(place, error)
        hold_and_leave(place.again())

    def test_lock_ends_with_its_block_and_leaves_nothing(self, place: PlaceUnderTest) -> None:
        if "locks" not in place.can:
            return
        place.publish(10)
        before = dict(place.entries())
        with suppress(KeyError), place.lock():
            raise KeyError
        hold_and_leave(place.again())
        assert dict(place.entries()) == before

    def test_lock_dies_with_its_holder(self, place: PlaceUnderTest) -> None:
        if "locks" not in place.can:
            return
        place.publish(10)
        with held_by_a_killed_process(place):
            (error,) = errors_of(lambda: hold_and_leave(place))
            assert isinstance(error, StoreLocked)
        hold_and_leave(place)

    def test_plan_is_not_carried_out_while_another_holds_the_lock(
        self, place: PlaceUnderTest
    ) -> None:
        if "locks" not in place.can:
            return
        publish_all(place, 10, 20)
        with place.lock():
            (error,) = errors_of(place.again().plan("last(1)", NOW))
        assert isinstance(error, StoreLocked)
        assert steps_of(place) == [20, 10]

    def test_lost_lock_stops_a_removal(self, place: PlaceUnderTest) -> None:
        if "lost-locks" not in place.can:
            return
        publish_all(place, 10, 20)
        with place.lock():
            place.lose_lock()
            (error,) = errors_of(lambda: place.remove(place.listed()[1:]))
        assert isinstance(error, StoreLocked)
        assert steps_of(place) == [20, 10]

    # Removal

    def test_removed_one_is_gone_and_the_others_stay(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        newest, going, oldest = place.listed()
        if is_refused(place, "removes", lambda: place.remove([going])):
            return
        stored = sum(place.entries().values())
        assert removed(place, [going]) == []
        assert whole(place.again()) == [newest, oldest]
        assert place.look(going.name) is None
        assert stored - sum(place.entries().values()) >= going.size_bytes
        assert all(place.content(one) for one in (newest, oldest))

    def test_removing_again_changes_nothing(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "removes" not in place.can:
            return
        going = place.listed()[1:]
        removed(place, going)
        before = dict(place.entries())
        assert removed(place.again(), going) == []
        assert dict(place.entries()) == before

    def test_removing_what_was_never_there_changes_nothing(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        if "removes" not in place.can:
            return
        before = dict(place.entries())
        other = saved.path.with_name(saved.name.replace("10", "99"))
        assert removed(place, [replace(saved, path=other, id="0" * 64)]) == []
        assert dict(place.entries()) == before

    def test_last_good_one_is_not_removed(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "removes" not in place.can:
            return
        (error,) = removed(place, place.listed())
        assert isinstance(error, UnsafePrune)
        assert names_it(place, error)
        assert steps_of(place) == [20, 10]

    def test_one_that_was_saved_again_since_the_listing_stays(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "removes" not in place.can:
            return
        old = place.listed()[1]
        if "overwrites" not in place.can:
            removed(place.again(), [old])
        new = place.again().publish(10)
        (error,) = removed(place, [old])
        assert isinstance(error, UnsafePrune)
        assert new in whole(place)

    def test_removed_one_is_whole_until_it_is_gone(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "removes" not in place.can:
            return
        going = place.listed()[1]
        with disappearing(place, going) as look:
            assert removed(place.watched(look), [going]) == []

    # Plans

    def test_plan_alone_changes_nothing(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        before = dict(place.entries())
        place.plan("last(1)", NOW)
        assert dict(place.entries()) == before

    def test_plan_keeps_the_newest_and_drops_the_rest(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30, 40)
        kept = whole(place)[:2]
        assert carry_out(place, "last(2)") == []
        assert whole(place.again()) == kept
        assert all(place.content(one) for one in kept)

    def test_plan_that_is_carried_out_twice_changes_nothing_more(
        self, place: PlaceUnderTest
    ) -> None:
        publish_all(place, 10, 20, 30)
        carry_out(place, "last(2)")
        before = dict(place.entries())
        assert carry_out(place.again(), "last(2)") == []
        assert dict(place.entries()) == before

    def test_damaged_newest_uses_no_slot_and_stays_with_the_last_good_one(
        self, place: PlaceUnderTest
    ) -> None:
        publish_all(place, 10, 20, 30)
        place.damage(place.listed()[0])
        assert carry_out(place.again(), "last(1)") == []
        left = [one.step for one in place.again().listed()]
        assert sorted(left) == [20, 30]

    def test_half_written_one_uses_no_slot(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        place.plant_half_written(30)
        assert carry_out(place, "last(1)") == []
        assert steps_of(place) == [20]

    def test_dropped_one_is_whole_until_it_is_gone(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        with disappearing(place, place.listed()[1]) as look:
            assert list(place.watched(look).plan("last(1)", NOW)()) == []

    def test_one_that_a_cut_plan_drops_is_whole_or_its_name_is_free(
        self, place: PlaceUnderTest
    ) -> None:
        place.publish(1)
        for change in range(1, _MOST_CHANGES):
            place.publish(10 * change)
            going = place.listed()[1]
            if not is_cut(place, change, lambda cut: cut.plan("last(1)", NOW)()):
                return
            if not check_whole_or_gone(place.again(), going):
                again = place.again().publish(going.step)
                assert again in whole(place)
                assert place.content(again)
            assert carry_out(place.again(), "last(1)", now=NOW + 25 * HOUR) == []
        raise AssertionError(f"more than {_MOST_CHANGES} changes for one checkpoint")

    def test_plan_for_another_listing_is_refused(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        carry = place.plan("last(1)", NOW)
        place.again().publish(30)
        (error,) = errors_of(carry)
        assert isinstance(error, UnsafePrune)
        assert names_it(place, error)
        assert steps_of(place) == [30, 20, 10]

    def test_protected_one_stays(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        oldest = place.listed()[-1]
        if is_refused(place, "protects", lambda: place.protect(oldest)):
            return
        place.protect(oldest)
        assert carry_out(place.again(), "last(1)") == []
        assert steps_of(place) == [30, 10]

    # Trash

    def test_dropped_one_comes_back_as_it_was(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        before = [(one.name, place.content(one)) for one in whole(place)]
        if is_refused(place, "trash", place.restore):
            return
        assert carry_out(place, "last(1)") == []
        assert list(place.again().restore()) == []
        assert [(one.name, place.content(one)) for one in whole(place.again())] == before

    def test_restored_one_is_whole_from_the_moment_it_is_there(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "trash" not in place.can:
            return
        going = place.listed()[1]
        carry_out(place, "last(1)")

        def look() -> None:
            check_whole_or_gone(place, going)

        assert list(place.watched(look).restore()) == []
        assert check_whole_or_gone(place, going)

    def test_name_that_is_taken_is_not_restored(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "trash" not in place.can:
            return
        gone = place.listed()[1]
        carry_out(place, "last(1)")
        new = place.again().publish(10)
        if new.name != gone.name:
            return
        content = place.content(new)
        assert list(place.restore()) == [gone.name]
        assert place.content(new) == content
        assert new in whole(place)

    def test_empty_trash_restores_nothing(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "trash" not in place.can:
            return
        (error,) = errors_of(place.restore)
        assert isinstance(error, CheckpointNotFound)
        assert names_it(place, error)

    def test_trash_is_kept_for_its_grace_time(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "trash" not in place.can:
            return
        carry_out(place, "last(1)")
        assert carry_out(place, "last(1)", now=NOW + HOUR) == []
        assert list(place.restore()) == []
        assert steps_of(place) == [20, 10]

    def test_trash_is_emptied_after_its_grace_time(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "trash" not in place.can:
            return
        going = place.listed()[1]
        carry_out(place, "last(1)")
        stored = sum(place.entries().values())
        assert carry_out(place, "last(1)", now=NOW + 25 * HOUR) == []
        assert stored - sum(place.entries().values()) >= going.size_bytes
        assert [type(error) for error in errors_of(place.restore)] == [CheckpointNotFound]

    # Quarantine

    def test_quarantined_one_is_aside_and_nothing_removes_it(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        damaged = place.listed()[0]
        place.damage(damaged)
        stored = sum(place.entries().values())
        if is_refused(place, "quarantine", lambda: place.quarantine(damaged)):
            return
        place.quarantine(damaged)
        assert [one.step for one in place.again().listed()] == [10]
        assert carry_out(place, "last(1)", now=NOW + 25 * HOUR) == []
        assert errors_of(place.restore)
        assert sum(place.entries().values()) == stored

    def test_last_one_is_not_quarantined(self, place: PlaceUnderTest) -> None:
        saved = place.publish(10)
        if "quarantine" not in place.can:
            return
        (error,) = errors_of(lambda: place.quarantine(saved))
        assert isinstance(error, UnsafePrune)
        assert whole(place) == [saved]

    # Changes after the save

    def test_changed_manifest_is_read_by_others_and_the_checkpoint_is_the_same(
        self, place: PlaceUnderTest
    ) -> None:
        saved = place.publish(10)
        if is_refused(place, "changes", lambda: place.change(saved, with_pin("paper"))):
            return
        content = place.content(saved)
        place.change(saved, with_pin("paper"))
        found = place.again().manifest(saved.name)
        assert found is not None
        assert (found.pins, found.id, found.revision) == ((Pin(name="paper"),), saved.id, 1)
        assert place.content(whole(place)[0]) == content

    def test_change_of_a_stale_listing_keeps_what_others_changed(
        self, place: PlaceUnderTest
    ) -> None:
        saved = place.publish(10)
        if "changes" not in place.can:
            return
        place.again().change(saved, lambda one: replace(one, tags=("best",)))
        place.change(saved, with_pin("paper"))
        (now,) = whole(place)
        assert (now.tags, now.pins) == (("best",), (Pin(name="paper"),))

    def test_pins_and_tags_stay_when_others_go(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20, 30)
        if "changes" not in place.can:
            return
        place.change(place.listed()[-1], lambda one: replace(with_pin("p")(one), tags=("a b", "ü")))
        assert carry_out(place, "last(1)") == []
        pinned = whole(place.again())[-1]
        assert (pinned.step, pinned.pins, pinned.tags) == (10, (Pin(name="p"),), ("a b", "ü"))

    def test_removed_one_is_not_changed(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if not {"changes", "removes"} <= place.can:
            return
        gone = place.listed()[1]
        removed(place.again(), [gone])
        before = dict(place.entries())
        assert errors_of(lambda: place.change(gone, with_pin("paper")))
        assert dict(place.entries()) == before

    # Notes

    def test_note_is_replaced_whole(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        if is_refused(place, "notes", lambda: place.write_note(".run.note", b"first")):
            return
        assert place.read_note(".run.note") is None
        for text in (b"first, and longer", b"second"):
            place.write_note(".run.note", text)
            assert place.again().read_note(".run.note") == text

    def test_note_grows_by_what_is_appended(self, place: PlaceUnderTest) -> None:
        place.publish(10)
        if "notes" not in place.can:
            return
        for text in (b"one\n", b"two\n"):
            place.again().append_note(".run.note", text)
        assert place.read_note(".run.note") == b"one\ntwo\n"

    def test_note_is_no_checkpoint_and_stays_when_others_go(self, place: PlaceUnderTest) -> None:
        publish_all(place, 10, 20)
        if "notes" not in place.can:
            return
        place.write_note(".run.note", b"text")
        assert carry_out(place, "last(1)") == []
        assert [one.step for one in place.listed()] == [20]
        assert place.read_note(".run.note") == b"text"


def whole(place: PlaceUnderTest) -> list[Checkpoint]:
    """Return the checkpoints of a place that count, newest first."""
    return [one for one in place.listed() if one.is_countable]


def steps_of(place: PlaceUnderTest) -> list[int]:
    """Return the steps that another process finds, newest first."""
    return [one.step for one in whole(place.again())]


def publish_all(place: PlaceUnderTest, *steps: int) -> list[int]:
    """Publish steps; return those that are listed."""
    for step in steps:
        place.publish(step)
    return [one.step for one in whole(place)]


def carry_out(place: PlaceUnderTest, keep: str, *, now: datetime = NOW) -> list[Exception]:
    """Decide and carry out a policy; return the errors."""
    return errors_of(place.plan(keep, now))


def removed(place: PlaceUnderTest, going: Sequence[Checkpoint]) -> list[Exception]:
    """Remove checkpoints under the lock, if the place has one; return the errors."""

    def remove() -> Sequence[Exception]:
        with place.lock() if "locks" in place.can else nullcontext():
            return place.remove(going)

    return errors_of(remove)


def errors_of(call: Callable[[], object]) -> list[Exception]:
    """Return the errors that a call raises or returns."""
    try:
        found = call()
    except Exception as error:
        return [error]
    return [one for one in found if isinstance(one, Exception)] if isinstance(found, list) else []


def names_it(place: PlaceUnderTest, error: Exception) -> bool:
    """Return whether an error names the place."""
    return any(name in str(error) for name in place.names)


def is_refused(place: PlaceUnderTest, needed: Capability, call: Callable[[], object]) -> bool:
    """Return whether a place lacks a capability; a call that needs it must then be refused by name."""
    if needed in place.can:
        return False
    before = dict(place.entries())
    errors = errors_of(call)
    assert len(errors) == 1, f"{needed} is not refused: {errors}"
    assert names_it(place, errors[0]), f"the refusal of {needed} does not name the place: {errors}"
    assert dict(place.entries()) == before
    return True


def with_pin(name: str) -> Callable[[Manifest], Manifest]:
    """Return a change that adds a pin."""
    return lambda one: replace(one, pins=(*one.pins, Pin(name=name)))


def hold_and_leave(place: PlaceUnderTest) -> None:
    """Take the lock of a place, and release it."""
    with place.lock():
        pass


def check_whole_or_gone(place: PlaceUnderTest, one: Checkpoint) -> bool:
    """Return whether a checkpoint is listed; it must then be whole, and never be data that nothing vouches for."""
    found = [each for each in place.listed() if each.name == one.name and each.is_countable]
    for each in found:
        assert each.state is one.state in (State.OK, State.COMPLETE)
        assert place.content(each)
    return bool(found)


class Died(BaseException):
    """The process ended just before it changed something."""


def is_cut(
    place: PlaceUnderTest, change: int, call: Callable[[PlaceUnderTest], Sequence[Exception]]
) -> bool:
    """Call something in a process that dies before change number `change`, from 1; return whether it came to it."""
    seen: list[None] = []

    def look() -> None:
        seen.append(None)
        if len(seen) >= change:
            raise Died

    with suppress(Died):
        call(place.watched(look))
    return len(seen) >= change


@contextmanager
def disappearing(place: PlaceUnderTest, going: Checkpoint) -> Iterator[Callable[[], None]]:
    """Yield a look of a reader for the block, in which a checkpoint disappears once and for all."""
    seen: list[bool] = [check_whole_or_gone(place, going)]
    yield lambda: seen.append(check_whole_or_gone(place, going))
    seen.append(check_whole_or_gone(place, going))
    assert [is_there for is_there, _ in itertools.groupby(seen)] == [True, False]


@contextmanager
def held_by_a_killed_process(place: PlaceUnderTest) -> Iterator[None]:
    """Have another process hold the lock in the block, and kill it at its end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), place.again().lock():
            os.write(writing, b"held")
            os.close(writing)
            while True:
                signal.pause()
        os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 4) == b"held", "the other process could not take the lock"
        yield
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
