# SPDX-License-Identifier: Apache-2.0
"""Every call of a save, of retention and of a resume fails once with every error it can meet."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import CheckpointManager, StoreFull
from tests.faults.scenarios import (
    FIRST_SAVE,
    NEXT_SAVE,
    OVERWRITE,
    RETENTION,
    Scenario,
    what_counts,
)
from tests.faults.training import (
    KEY,
    RUNS,
    SERIES,
    Content,
    Trainer,
    check_after_fault,
    disk_with,
    name_of,
    saved,
    state_of,
)
from tests.support import api
from tests.support.crashmodel import FailingDisk, Failure, ModelDisk, Order, every_failure

SAVES = {"first save": FIRST_SAVE, "next save": NEXT_SAVE, "overwrite": OVERWRITE}
all_saves = pytest.mark.parametrize("name", SAVES)
# Errors of these calls are errors of the save; others may be survived.
WRITES = ("create", "write_at", "reserve", "sync", "close", "replace")


def failures(scenario: Scenario, key: bytes | None = None, **how: bool) -> list[Failure]:
    """Return what each failure left; tests of a module share it, on a disk of their own."""
    name = (id(scenario), key, *how.items())
    if name not in _FAILURES:
        _FAILURES[name] = _new_failures(scenario, key, **how)
    return [replace(failure, disk=failure.disk.copy()) for failure in _FAILURES[name]]


_FAILURES: dict[tuple[object, ...], list[Failure]] = {}


def _new_failures(scenario: Scenario, key: bytes | None, **how: bool) -> list[Failure]:
    disk = scenario.start(key)

    def run(failing: FailingDisk) -> None:
        scenario.run(Trainer(disk.copy(), fs=failing, key=key, keep=scenario.keep))

    return list(every_failure(disk, run, **how))


def content_after(scenario: Scenario, failure: Failure) -> Content:
    """Return the content that must be there; a run that returned has made its promise."""
    return scenario.must(failure.raised is None)


def same_process(disk: ModelDisk) -> ModelDisk:
    """Return a copy on which the process that met the failure goes on."""
    return disk.copy()


@pytest.mark.slow
@all_saves
def test_failed_save_leaves_the_old_state_and_the_next_save_works(name: str) -> None:
    scenario = SAVES[name]
    for failure in failures(scenario):
        must = content_after(scenario, failure)
        try:
            check_after_fault(same_process(failure.disk), must=must, may=scenario.may)
        except Exception as error:
            raise AssertionError(str(failure)) from error


@pytest.mark.slow
@all_saves
def test_failed_save_survives_a_later_power_cut(name: str) -> None:
    scenario = SAVES[name]
    seen = set()
    for failure in failures(scenario):
        must = content_after(scenario, failure)
        for left in failure.disk.crash_states(Order.WEAK, tears=0):
            state = (what_counts(left), failure.raised is None)
            if state in seen:
                continue
            seen.add(state)
            shown = f"{failure}\nthen\n{left.tree()}"
            try:
                check_after_fault(left, must=must, may=scenario.may)
            except Exception as error:
                raise AssertionError(shown) from error


@all_saves
def test_failed_save_removes_its_temporary_files(name: str) -> None:
    for failure in failures(SAVES[name]):
        assert temporaries(failure.disk) == [], failure


def temporaries(disk: ModelDisk) -> list[str]:
    if disk.status(RUNS) is None:
        return []
    return [name for name in disk.list(RUNS) if name.endswith(".tmp")]


@all_saves
def test_failed_save_raises_the_error_of_the_disk_and_names_the_file(name: str) -> None:
    for failure in failures(SAVES[name]):
        if failure.raised is not None:
            assert isinstance(failure.raised, OSError), failure
            assert failure.raised.errno == failure.error, failure
            # The first make_directory is the lease's, when the need of a save is not yet known.
            is_full = failure.error == errno.ENOSPC
            if failure.operation != "make_directory":
                assert isinstance(failure.raised, StoreFull) == is_full, failure
            assert str(RUNS) in str(failure.raised), failure


def test_save_on_a_full_disk_says_how_much_is_missing() -> None:
    full = [f for f in failures(NEXT_SAVE) if isinstance(f.raised, StoreFull)]
    assert len(full) >= 4
    for failure in full:
        assert "bytes needed" in str(failure.raised), failure
        assert "previous checkpoints are intact" in str(failure.raised), failure


@pytest.mark.parametrize("operation", WRITES)
def test_error_of_a_write_is_never_swallowed(operation: str) -> None:
    disk = NEXT_SAVE.start(None)
    counting = FailingDisk(disk.copy())
    with Trainer(disk, fs=counting).manager() as manager:
        manager.save(3, state_of(30.0))
    assert counting.calls.count(operation) > 0
    for call in range(1, counting.calls.count(operation) + 1):
        failing = FailingDisk(disk.copy(), operation=operation, call=call)
        with Trainer(disk, fs=failing).manager() as manager, pytest.raises(OSError, match="Input"):
            manager.save(3, state_of(30.0))


def test_failed_sync_is_final() -> None:
    synced = [f for f in failures(NEXT_SAVE) if f.operation == "sync"]
    assert len(synced) >= 4
    for failure in synced:
        # The written bytes may be gone although a second sync would say that all is well.
        assert failure.raised is not None
        later = failure.disk.operations[failure.call :]
        assert not [op for op in later if op.kind in ("sync", "replace")], failure
        assert failure.disk.status(RUNS / name_of(3)) is None


def test_failed_sync_after_the_commit_is_reported_and_the_file_stays() -> None:
    committed = [
        failure
        for failure in failures(NEXT_SAVE)
        if failure.operation == "sync_directory" and failure.disk.status(RUNS / name_of(3))
    ]
    assert len(committed) == 2  # EIO and EMFILE
    for failure in committed:
        assert failure.raised is not None
        check_after_fault(failure.disk, must=NEXT_SAVE.must(True))


@pytest.mark.slow
@all_saves
def test_disk_that_stays_bad_loses_nothing(name: str) -> None:
    scenario = SAVES[name]
    for failure in failures(scenario, is_lasting=True):
        must = content_after(scenario, failure)
        # The next process finds a good disk, and the temporary files that could not be removed.
        check_after_fault(failure.disk.restart(), must=must, may=scenario.may)


@pytest.mark.slow
def test_failed_removal_does_not_fail_the_save_and_is_finished_later() -> None:
    found = failures(RETENTION)
    assert {"unlink"} <= {f.operation for f in found}
    for failure in found:
        if failure.operation == "unlink":
            assert failure.raised is None, failure
        # A run that could not read step 2 goes on from step 1, and then keeps the newest only.
        is_read = failure.operation in ("open", "read_into")
        must = NEXT_SAVE.must(False) if failure.raised else {name_of(3): [30.0]}
        check_after_fault(
            same_process(failure.disk),
            must=must if is_read else content_after(RETENTION, failure),
            may=RETENTION.may,
            keep="last(1)",
        )


def test_retention_removes_the_others_when_one_cannot_be_removed() -> None:
    disk = disk_with(10.0, 20.0, 30.0)
    with Trainer(disk, keep="last(1)").manager() as manager:
        manager.resume()
    failing = FailingDisk(disk, error=errno.EROFS, operation="unlink", call=1)
    store = Trainer(disk, fs=failing).store()
    whole = sorted(store.scan(), key=lambda c: c.order)
    (failure,) = store.remove(whole[:2])
    assert isinstance(failure, OSError)
    assert failure.errno == errno.EROFS
    assert sorted(c.step for c in store.scan()) == [1, 3]


def test_resume_that_cannot_read_one_file_once_reads_it_again() -> None:
    disk = disk_with(10.0, 20.0)

    def run(failing: FailingDisk) -> None:
        with Trainer(disk, fs=failing).manager() as manager:
            assert manager.resume().step == 2

    failures = list(every_failure(disk, run))
    assert {"open", "read_into"} <= {failure.operation for failure in failures}
    for failure in failures:
        assert failure.raised is None or failure.operation not in ("open", "read_into"), failure


class NearlyFullDisk(FailingDisk):
    """A disk with little space that does not say how much."""

    def free_bytes(self, path: Path) -> int | None:
        return None


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_full_disk_leaves_the_directory_as_it_was(key: bytes | None) -> None:
    disk = disk_with(10.0, 20.0, key=key)
    outcomes = set()
    for space_bytes in range(0, 4000, 250):
        model = disk.copy()
        with Trainer(
            disk, fs=NearlyFullDisk(model, space_bytes=space_bytes), key=key
        ).manager() as m:
            outcomes.add(outcome(m))
        assert temporaries(model) == []
        check_after_fault(model, must=NEXT_SAVE.must(False), may=NEXT_SAVE.may, key=key)
    assert outcomes == {"saved", "StoreFull"}


def outcome(manager: CheckpointManager) -> str:
    try:
        manager.save(3, state_of(30.0))
    except StoreFull as error:
        return type(error).__name__
    return "saved"


def test_save_without_enough_space_changes_nothing() -> None:
    disk = disk_with(10.0)
    disk.available_bytes = 1000
    before = set(disk.list(RUNS))
    with Trainer(disk).manager() as manager:
        with pytest.raises(StoreFull, match=r"\d+ bytes needed, 1000 free, \d+ missing"):
            manager.save(2, state_of(20.0))
        assert set(disk.list(RUNS)) - {f".{SERIES}.lease"} == before
        disk.available_bytes = 1 << 30
        assert saved(manager, 2, 20.0).state is api.State.OK
