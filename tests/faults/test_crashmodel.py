# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.writers import DATA, NEW, OLD, TARGET, TEMPORARY, Mistake, write
from tests.support.crashmodel import Crash, ModelDisk, Order, PowerCut, every_crash, every_kill

CRASH_MISTAKES = (
    Mistake.NO_FILE_SYNC,
    Mistake.NO_DIRECTORY_SYNC,
    Mistake.DELETE_BEFORE_PUBLISH,
    Mistake.RENAME_BEFORE_SYNC,
)
OTHER = DATA / "other"


def disk_with_old() -> ModelDisk:
    disk = ModelDisk()
    disk.make_directory(DATA, mode=0o755)
    write(disk, OLD)
    return disk


def save(disk: ModelDisk, mistake: Mistake = Mistake.NONE) -> None:
    write(disk, NEW, mistake)
    disk.acknowledge("new")


def is_sound(disk: ModelDisk) -> bool:
    if disk.status(TARGET) is None:
        return False
    allowed = (NEW,) if disk.acknowledged else (OLD, NEW)
    return disk.read_bytes(TARGET) in allowed


def put(disk: ModelDisk, path: Path, content: bytes = b"", *, is_synced: bool = True) -> None:
    file = disk.create(path, mode=0o600)
    file.write_at(0, content)
    if is_synced:
        file.sync()
    file.close()


def contents(disk: ModelDisk, order: Order, path: Path) -> set[bytes | None]:
    """Return the contents that a power cut may leave of one file; None when it is gone."""
    return {
        left.read_bytes(path) if left.status(path) else None for left in disk.crash_states(order)
    }


@pytest.mark.parametrize("order", Order)
def test_atomic_writer_survives_every_crash(order: Order) -> None:
    crashes = list(every_crash(disk_with_old(), save, order=order))
    assert len(crashes) > 10
    for crash in crashes:
        assert is_sound(crash.disk), crash


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("mistake", CRASH_MISTAKES)
def test_wrong_writer_is_caught(mistake: Mistake, order: Order) -> None:
    crashes = every_crash(disk_with_old(), lambda disk: save(disk, mistake), order=order)
    assert not all(is_sound(crash.disk) for crash in crashes)


def test_unsynced_file_may_be_empty_whole_zeros_or_torn() -> None:
    disk = disk_with_old()
    put(disk, OTHER, b"abcdef", is_synced=False)
    left = contents(disk, Order.JOURNALED, OTHER)
    assert left == {None, b"", b"abcdef", bytes(6), b"ab", b"abcd", b"abc\0\0\0", b"\0\0\0def"}


def test_synced_part_of_a_file_survives_when_the_rest_tears() -> None:
    disk = disk_with_old()
    file = disk.create(OTHER, mode=0o600)
    file.write_at(0, b"ab")
    file.sync()
    disk.sync_directory(DATA)
    file.write_at(2, b"cd")
    assert contents(disk, Order.WEAK, OTHER) == {
        b"ab",
        b"abcd",
        b"ab\0\0",
        b"abc",
        b"abc\0",
        b"ab\0d",
    }


def test_reserved_file_may_have_its_size_and_no_content() -> None:
    disk = disk_with_old()
    file = disk.create(OTHER, mode=0o600)
    file.reserve(4)
    file.write_at(0, b"ab")
    assert {b"", bytes(4), b"ab\0\0", b"a\0\0\0"} <= contents(disk, Order.JOURNALED, OTHER)


def test_unsynced_entries_survive_only_in_order_when_journaled() -> None:
    disk = disk_with_old()
    put(disk, DATA / "first")
    put(disk, DATA / "second")
    names = {frozenset(left.list(DATA)) for left in disk.crash_states(Order.JOURNALED)}
    kept = {"weights"}
    assert names == {frozenset(kept | new) for new in (set(), {"first"}, {"first", "second"})}


def test_unsynced_entries_survive_in_any_combination_when_weak() -> None:
    disk = disk_with_old()
    put(disk, DATA / "first")
    put(disk, DATA / "second")
    names = {frozenset(left.list(DATA)) for left in disk.crash_states(Order.WEAK)}
    assert frozenset({"weights", "second"}) in names
    assert len(names) == 4


def test_sync_of_another_directory_commits_older_changes_only_when_journaled() -> None:
    disk = disk_with_old()
    disk.make_directory(DATA / "trash", mode=0o755)
    put(disk, OTHER)
    put(disk, DATA / "trash" / "x")
    disk.sync_directory(DATA / "trash")
    assert None not in contents(disk, Order.JOURNALED, OTHER)
    assert None in contents(disk, Order.WEAK, OTHER)


def moved_across() -> tuple[ModelDisk, Path]:
    disk, target = disk_with_old(), DATA / "trash" / "weights"
    disk.make_directory(target.parent, mode=0o755)
    disk.replace(TARGET, target)
    return disk, target


def names_left(disk: ModelDisk, order: Order, *paths: Path) -> set[tuple[bool, ...]]:
    return {
        tuple(left.status(path) is not None for path in paths) for left in disk.crash_states(order)
    }


def test_rename_across_directories_may_leave_both_names_but_never_none_when_weak() -> None:
    disk, target = moved_across()
    assert names_left(disk, Order.WEAK, TARGET, target) == {
        (True, False),
        (True, True),
        (False, True),
    }
    assert names_left(disk, Order.JOURNALED, TARGET, target) == {(True, False), (False, True)}


def test_rename_across_directories_is_durable_when_the_old_directory_is_synced() -> None:
    disk, target = moved_across()
    disk.sync_directory(DATA)
    for order in Order:
        assert names_left(disk, order, TARGET, target) == {(False, True)}


def test_make_directory_is_durable_after_a_death_before_the_parent_was_synced() -> None:
    def make(disk: ModelDisk) -> None:
        disk.make_directory(DATA / "a" / "b", mode=0o755)

    for kill in every_kill(disk_with_old(), make):
        make(kill.disk)
        for order in Order:
            for left in kill.disk.crash_states(order):
                assert left.status(DATA / "a" / "b") is not None, kill


def test_many_unsynced_entries_give_a_bounded_repeatable_sample() -> None:
    disk = disk_with_old()
    for index in range(20):
        put(disk, DATA / f"{index}")
    states = [left.state() for left in disk.crash_states(Order.WEAK)]
    assert states == [left.state() for left in disk.crash_states(Order.WEAK)]
    assert 60 < len(states) < 130
    journaled = {left.state() for left in disk.crash_states(Order.JOURNALED)}
    assert journaled <= set(states)


def test_two_unsynced_files_tear_independently() -> None:
    disk = disk_with_old()
    for path in (DATA / "a", DATA / "b"):
        put(disk, path, b"xy", is_synced=False)
    disk.sync_directory(DATA)
    left = {
        (d.read_bytes(DATA / "a"), d.read_bytes(DATA / "b"))
        for d in disk.crash_states(Order.JOURNALED)
    }
    assert {(b"", b""), (b"xy", b""), (b"", b"xy"), (b"xy", b"xy"), (b"xy", b"\0y")} <= left


def test_power_cut_stops_cleanup_code() -> None:
    disk = disk_with_old()
    disk.cut_after(2)

    def save_and_clean_up() -> None:
        try:
            save(disk)
        finally:
            disk.unlink(TEMPORARY)

    with pytest.raises(PowerCut):
        save_and_clean_up()
    assert disk.is_cut
    assert any(left.status(TEMPORARY) for left in disk.crash_states(Order.WEAK))
    with pytest.raises(PowerCut):
        disk.list(DATA)


@pytest.mark.parametrize("order", Order)
def test_photographs_equal_power_cuts(order: Order) -> None:
    photographed = {c.disk.state() for c in every_crash(disk_with_old(), save, order=order)}
    cut = set()
    for count in range(len(disk_with_old().operations) + 1):
        disk = disk_with_old()
        disk.cut_after(count)
        with contextlib.suppress(PowerCut):
            save(disk)
        cut |= {left.state() for left in disk.crash_states(order)}
    assert photographed == cut


def test_crash_shows_where_and_what_is_left() -> None:
    crashes = list(every_crash(disk_with_old(), save, order=Order.JOURNALED))
    assert "after operation 0 (nothing)" in str(crashes[0])
    assert "/data/weights 400 bytes b'old old " in str(crashes[0])
    assert "(sync_directory /data) and the return" in str(crashes[-1])


def test_tree_marks_unsynced_content_and_zeros() -> None:
    disk = disk_with_old()
    disk.create(OTHER, mode=0o600).reserve(9)
    put(disk, DATA / "text", b"short")
    assert "/data/other 9 bytes* b'' then zeros" in disk.tree()
    assert "/data/text 5 bytes b'short'" in disk.tree().splitlines()
    assert "/data/" in disk.tree().splitlines()


def test_new_boot_frees_locks_and_counts() -> None:
    disk = disk_with_old()
    with disk.lock(DATA / "lock", owner="me") as holder:
        assert holder is None
        left = next(disk.copy().crash_states(Order.JOURNALED))
        restarted = disk.restart()
        with disk.copy().lock(DATA / "lock", owner="you") as other:
            assert other == "me"
    assert (left.boot, left.process) == (2, 2)
    assert (restarted.boot, restarted.process) == (1, 2)
    with restarted.lock(DATA / "lock", owner="you") as holder:
        assert holder is None


def test_restart_keeps_unsynced_content_that_a_later_power_cut_may_lose() -> None:
    disk = disk_with_old()
    put(disk, OTHER, b"abc", is_synced=False)
    restarted = disk.restart()
    assert restarted.read_bytes(OTHER) == b"abc"
    assert None in contents(restarted, Order.JOURNALED, OTHER)


def test_every_kill_leaves_the_temporary_file_of_the_dead() -> None:
    kills: list[Crash] = list(every_kill(disk_with_old(), save))
    assert kills[0].disk.state() == disk_with_old().state()
    assert any(kill.disk.status(TEMPORARY) for kill in kills)
    assert kills[-1].is_finished
    assert kills[-1].disk.read_bytes(TARGET) == NEW


names = st.sampled_from(["a", "b", "sub/a", "sub/b"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, st.booleans()),
        st.tuples(st.just("replace"), names, names),
        st.tuples(st.just("unlink"), names),
        st.tuples(st.just("sync_directory"), st.sampled_from([".", "sub"])),
    ),
    max_size=9,
)


def disk_after(done: list[tuple[object, ...]]) -> ModelDisk:
    disk = ModelDisk()
    disk.make_directory(DATA / "sub", mode=0o755)
    for kind, *arguments in done:
        paths = [DATA / item for item in arguments if isinstance(item, str)]
        try:
            if kind == "put":
                put(disk, paths[0], b"ab", is_synced=bool(arguments[1]))
            elif kind == "replace":
                disk.replace(*paths)
            elif kind == "unlink":
                disk.unlink(paths[0])
            else:
                disk.sync_directory(paths[0])
        except OSError:
            continue
    return disk


@given(steps)
@settings(max_examples=60, deadline=None)
def test_what_is_visible_may_survive_and_settled_disks_survive_unchanged(
    done: list[tuple[object, ...]],
) -> None:
    disk = disk_after(done)
    for order in Order:
        assert disk.state() in {left.state() for left in disk.crash_states(order)}
    disk.settle()
    for order in Order:
        assert [left.state() for left in disk.crash_states(order)] == [disk.state()]


@given(steps)
@settings(max_examples=60, deadline=None)
def test_weak_order_allows_all_that_journaled_order_allows(done: list[tuple[object, ...]]) -> None:
    disk = disk_after(done)
    weak = {left.state() for left in disk.crash_states(Order.WEAK)}
    assert {left.state() for left in disk.crash_states(Order.JOURNALED)} <= weak
