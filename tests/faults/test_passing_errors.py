# SPDX-License-Identifier: Apache-2.0
"""Errors of the disk that pass cost no progress: at every call of a resumption, for every errno, once and for good."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr import ResumeFailed, Resumption, StoreLocked, parse_policy
from ckptmgr.maintenance.prune_plan import RunPlanner, counted_together
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.resume import resume_values
from tests.faults.training import (
    KEYS,
    RUNS,
    ModelProcesses,
    Trainer,
    disk_with,
    name_of,
    saved,
    state_of,
    value_of,
)
from tests.parallel.ranks import Meeting, run_ranks
from tests.parallel.test_rank_manager import manager as rank_manager
from tests.parallel.test_rank_manager import state as rank_state
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.policies import NOW
from tests.support.pruning import propose

ONE, TWO = name_of(1), name_of(2)
PASSING = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
ERRORS = (*PASSING, errno.EIO)
with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])
for_each_error = pytest.mark.parametrize(
    "error", ERRORS, ids=lambda number: errno.errorcode[number]
)
for_each_passing = pytest.mark.parametrize(
    "error", PASSING, ids=lambda number: errno.errorcode[number]
)


class FailingFile(FailingDisk):
    """A disk on which all calls about some names fail from a call on, for good or once."""

    def __init__(
        self, disk: ModelDisk, error: int, *names: str, is_lasting: bool = True, times: int = 1
    ) -> None:
        super().__init__(disk)
        self.left = -1 if is_lasting else times
        self._number = error
        self._names = names

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation in ("open", "read_into") and path.name in self._names and self.left:
            self.left -= 1
            raise OSError(self._number, "injected", str(path))


class OutOfMemory(FailingDisk):
    """A disk that raises MemoryError at a call, as Python does where a buffer cannot be had."""

    def __init__(self, disk: ModelDisk, at: int) -> None:
        super().__init__(disk)
        self._at = at

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if len(self.calls) == self._at:
            raise MemoryError


def resume(disk: FailingDisk, model: ModelDisk, key: bytes | None = None) -> Resumption:
    with Trainer(model, fs=disk, key=key).manager() as manager:
        return manager.resume(state_of(0.0))


def calls_of(model: ModelDisk, run: Callable[[FailingDisk, ModelDisk], object]) -> int:
    copy = model.copy()
    counting = FailingDisk(copy)
    run(counting, copy)
    return len(counting.calls)


@with_and_without_key
@for_each_error
def test_one_error_at_any_call_of_a_resumption_never_leads_to_an_older_checkpoint(
    error: int, key: bytes | None
) -> None:
    model = disk_with(10.0, 20.0, key=key)
    calls = calls_of(model, lambda disk, copy: resume(disk, copy, key))
    assert calls > 10
    for call in range(1, calls + 1):
        copy = model.copy()
        found = resume(FailingDisk(copy, error=error, call=call), copy, key)
        assert (found.step, value_of(found.state)) == (2, 20.0), call
        assert (found.skipped, found.doubt) == ((), None), call


@with_and_without_key
def test_memory_that_is_short_once_never_leads_to_an_older_checkpoint(key: bytes | None) -> None:
    model = disk_with(10.0, 20.0, key=key)
    calls = calls_of(model, lambda disk, copy: resume(disk, copy, key))
    for call in range(1, calls + 1):
        copy = model.copy()
        try:
            found = resume(OutOfMemory(copy, call), copy, key)
        except MemoryError:
            continue  # where the disk would not have been asked for memory
        assert (found.step, value_of(found.state)) == (2, 20.0), call


@with_and_without_key
@for_each_error
def test_error_that_stays_is_raised_and_never_leads_to_an_older_checkpoint(
    error: int, key: bytes | None
) -> None:
    model = disk_with(10.0, 20.0, key=key)
    calls = calls_of(model, lambda disk, copy: resume(disk, copy, key))
    for call in range(1, calls + 1):
        copy = model.copy()
        failing = FailingDisk(copy, error=error, call=call, is_lasting=True)
        assert outcome_of(lambda: resume(failing, copy, key).step) in (2, error), call  # noqa: B023


def outcome_of(run: Callable[[], int]) -> int | None:
    """Return the result of a run, or the errno that it raised; a stale lease file is a lease that is lost."""
    try:
        return run()
    except OSError as raised:
        return raised.errno
    except StoreLocked as raised:
        return getattr(raised.__cause__, "errno", None)


@for_each_passing
@pytest.mark.parametrize("name", [TWO, api.manifest_name(TWO)], ids=["data", "manifest"])
def test_newest_that_the_disk_does_not_give_now_is_an_error_that_names_it(
    error: int, name: str
) -> None:
    model = disk_with(10.0, 20.0)
    failing = FailingFile(model, error, name)
    with pytest.raises(OSError, match="injected") as caught:
        resume(failing, model)
    assert caught.value.errno == error
    assert f"{RUNS / TWO} may be whole" in "".join(caught.value.__notes__)
    assert 0 < len(failing.pauses_s) < 10


def test_newest_that_may_not_be_read_is_an_error() -> None:
    model = disk_with(10.0, 20.0)
    with pytest.raises(PermissionError):
        resume(FailingFile(model, errno.EACCES, TWO), model)


@pytest.mark.parametrize("name", [TWO, api.manifest_name(TWO)], ids=["data", "manifest"])
def test_newest_that_the_disk_cannot_read_is_passed_over_told_and_kept(name: str) -> None:
    model = disk_with(10.0, 20.0)
    failing = FailingFile(model, errno.EIO, name)
    with Trainer(model, fs=failing, keep="last(1)").manager() as manager:
        found = manager.resume(state_of(0.0))
        assert (found.step, [one.checkpoint.name for one in found.skipped]) == (1, [TWO])
        assert found.doubt is not None
        assert TWO in found.doubt
        for step in (3, 4, 5):
            saved(manager, step, 10.0 * step)
    names = set(model.list(RUNS))
    assert {TWO, api.manifest_name(TWO), name_of(5)} <= names
    assert name_of(4) not in names


def test_damaged_checkpoint_that_was_passed_over_uses_up_no_slot() -> None:
    model = disk_with(10.0, 20.0)
    content = bytearray(model.read_bytes(RUNS / TWO))
    content[-1] ^= 1
    model.unlink(RUNS / TWO)
    file = model.create(RUNS / TWO, mode=0o400)
    file.write_at(0, bytes(content))
    file.close()
    with Trainer(model, keep="last(2)").manager() as manager:
        assert manager.resume(state_of(0.0)).step == 1
        saved(manager, 3, 30.0)
        manager.resume(state_of(0.0))  # so that the first one is no longer protected
        saved(manager, 4, 40.0)
    assert {TWO, name_of(3), name_of(4)} <= set(model.list(RUNS))


@for_each_error
def test_stale_handle_is_opened_anew(error: int) -> None:
    model = disk_with(10.0, 20.0)
    # More failures than one descriptor is asked for: only a second opening succeeds.
    failing = FailingFile(model, error, TWO, is_lasting=False, times=4)
    assert resume(failing, model).step == 2


@for_each_passing
def test_newest_is_not_named_while_a_manifest_cannot_be_read(error: int) -> None:
    model = disk_with(10.0, 20.0)
    failing = FailingFile(model, error, api.manifest_name(TWO))
    with Trainer(model, fs=failing).manager() as manager:
        with pytest.raises(OSError, match="injected"):
            manager.latest()
        with pytest.raises(OSError, match="injected"):
            manager.best("loss", "min")


@for_each_passing
def test_rollback_does_not_go_behind_a_checkpoint_that_may_be_whole(error: int) -> None:
    model = disk_with(10.0, 20.0, 30.0)
    failing = FailingFile(model, error, TWO, is_lasting=False, times=0)
    with Trainer(model, fs=failing).manager() as manager:
        assert manager.resume(state_of(0.0)).step == 3
        manager.snapshot(1, state_of(10.0))
        manager.snapshot(3, state_of(30.0))
        failing.left = -1
        with pytest.raises(OSError, match="injected"):
            manager.rollback(state_of(0.0), steps_back=1)
        failing.left = 1
        assert manager.rollback(state_of(0.0), steps_back=1).step == 2


def resume_by_name(disk: FailingDisk, model: ModelDisk) -> int:
    """Resume as `ModelCheckpoint` does, which works on the real disk only."""
    store = api.place(RUNS, fs=disk, processes=ModelProcesses(model))
    writer = SeriesWriter(store, "net_1", options=api.SaveOptions(), clock=lambda: 0.0)
    reader = SeriesReader(store, "net_1", options=api.reading())
    found = resume_values(writer, reader, prefix="net")
    writer.close()
    assert found.newest is not None
    return found.newest[0].step


@for_each_error
def test_one_error_at_any_call_never_leads_the_callback_to_an_older_checkpoint(error: int) -> None:
    model = disk_with(10.0, 20.0)
    for call in range(1, calls_of(model, resume_by_name) + 1):
        copy = model.copy()
        assert resume_by_name(FailingDisk(copy, error=error, call=call), copy) == 2, call


def ranked_disk() -> ModelDisk:
    disk, meeting = ModelDisk(), Meeting()

    def one(rank: int) -> bool:
        with rank_manager(disk, meeting, rank) as ours:
            for step in (1, 2):
                ours.save(step, rank_state(rank, step))
        return True

    for outcome in run_ranks(meeting, one):
        outcome.must()
    disk.settle()
    return disk


def ranks_resume(disk: ModelDisk, failing: FailingDisk, at: int) -> list[Resumption | Exception]:
    meeting = Meeting()

    def one(rank: int) -> Resumption:
        fs = failing if rank == at else None
        with rank_manager(disk, meeting, rank, fs=fs) as ours:
            return ours.resume(rank_state(rank, 0))

    outcomes = run_ranks(meeting, one)
    found: list[Resumption | Exception] = []
    for outcome in outcomes:
        raised = outcome.raised
        found.append(raised if isinstance(raised, Exception) else outcome.must())
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_one_error_on_one_rank_makes_no_rank_go_back(error: int, rank: int) -> None:
    model = ranked_disk()
    copy = model.copy()
    counting = FailingDisk(copy)
    ranks_resume(copy, counting, rank)
    for call in range(1, len(counting.calls) + 1):
        copy = model.copy()
        found = ranks_resume(copy, FailingDisk(copy, error=error, call=call), rank)
        steps = [one.step if isinstance(one, Resumption) else one for one in found]
        assert steps == [2] * len(found), call


def shard_of(model: ModelDisk, step: int, rank: int) -> str:
    (name,) = (one for one in model.list(RUNS) if one.startswith(f"net-{step}.{rank}-of-"))
    return name


@for_each_passing
def test_error_that_stays_on_one_rank_is_an_error_on_all(error: int) -> None:
    model = ranked_disk()
    failing = FailingFile(model, error, shard_of(model, 2, 1))
    for outcome in ranks_resume(model, failing, 1):
        assert isinstance(outcome, ResumeFailed)
        assert f"[{errno.errorcode[error]}]: " in str(outcome)


def test_file_that_the_disk_of_one_rank_cannot_read_is_told_to_all() -> None:
    model = ranked_disk()
    failing = FailingFile(model, errno.EIO, shard_of(model, 2, 1))
    for outcome in ranks_resume(model, failing, 1):
        assert isinstance(outcome, Resumption)
        assert (outcome.step, len(outcome.skipped)) == (1, 1)
        assert outcome.doubt is not None


@for_each_passing
def test_prune_is_refused_while_the_newest_cannot_be_read(error: int) -> None:
    model = disk_with(10.0, 20.0, 30.0)
    failing = FailingFile(model, error, name_of(3))
    store = api.place(RUNS, fs=failing, processes=ModelProcesses(model))
    with pytest.raises(OSError, match="injected"):
        propose(store, parse_policy("last(1)"), now=NOW)


@for_each_error
def test_prune_counts_what_could_not_be_read_once(error: int) -> None:
    model = disk_with(10.0, 20.0, 30.0)
    failing = FailingFile(model, error, name_of(3), is_lasting=False, times=4)
    store = api.place(RUNS, fs=failing, processes=ModelProcesses(model))
    plans = RunPlanner(store)
    (counted,) = counted_together(store.scan())
    decided = plans.plan(counted, parse_policy("last(1)"), NOW)
    assert ([c.step for c in decided.kept], plans.damaged) == ([3], {})
