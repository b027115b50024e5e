# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, StoreLocked
from ckptmgr.io.files import FileHead
from ckptmgr.io.leases import LEASE_SUFFIX
from ckptmgr.policy.rules import Last, RetentionPolicy
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.numbering import next_attempt
from tests.faults.training import RUNS, SERIES, Trainer, disk_with, name_of, saved
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import manifest_of, put, truncate
from tests.support.strategies import named_tensor

KEEP_ONE = RetentionPolicy((Last(1),))


def writer(disk: ModelDisk, series: str = SERIES, *, run_id: str = "run") -> SeriesWriter:
    store = Trainer(disk).store()
    return SeriesWriter(
        store, series, options=api.SaveOptions(), clock=lambda: 1_700_000_000.0, run_id=run_id
    )


def save(series: SeriesWriter, step: int) -> Checkpoint:
    name = f"{series.series}-{step}.ckpt"
    return series.save(name, [named_tensor("w")], api.SaveFacts(step=step))


def test_commits_are_numbered_across_the_series_of_a_directory() -> None:
    disk = ModelDisk()
    assert save(writer(disk), 5).sequence == 1
    assert save(writer(disk, "other"), 1).sequence == 2


class FailingReads(FailingDisk):
    """A disk that fails where checkpoints are read, and not where a run looks at its own lease."""

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        if path.name.endswith(LEASE_SUFFIX):
            return self._disk.open(path, is_uncached=is_uncached)
        return super().open(path, is_uncached=is_uncached)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        if name.endswith(LEASE_SUFFIX):
            return self._disk.read_head(directory, name, most_bytes=most_bytes)
        return super().read_head(directory, name, most_bytes=most_bytes)


def saved_after_failed_open(disk: ModelDisk, call: int, *, is_lasting: bool = False) -> Checkpoint:
    """Resume, and save step 4 on a disk on which one `open` after the resume fails."""
    counting = FailingReads(disk)
    with Trainer(disk, fs=counting).manager() as manager:
        manager.resume()
    before = counting.calls.count("open")
    failing = FailingReads(
        disk, error=errno.EMFILE, operation="open", call=before + call, is_lasting=is_lasting
    )
    with Trainer(disk, fs=failing, keep="last(1)").manager() as manager:
        assert manager.resume().step == 3
        checkpoint = saved(manager, 4, 40.0)
    assert failing.has_failed
    return checkpoint


@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize("call", range(1, 8))
def test_save_stays_and_is_the_newest_when_older_ones_cannot_be_read(
    call: int, is_lasting: bool
) -> None:
    disk = disk_with(10.0, 20.0, 30.0)
    disk.has_change_times = False  # else the manifests would not be opened again
    checkpoint = saved_after_failed_open(disk, call, is_lasting=is_lasting)
    assert disk.status(checkpoint.path) is not None
    assert Trainer(disk).manager().latest() == checkpoint


def test_save_whose_lease_cannot_be_read_changes_nothing() -> None:
    disk = disk_with(10.0)
    failing = FailingDisk(disk, error=errno.EACCES, operation="open", call=None)
    with Trainer(disk, fs=failing).manager() as manager:
        manager.resume()
        before = disk.state()
        failing._call = failing.calls.count("open") + 1
        with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
            saved(manager, 2, 20.0)
        assert disk.state() == before
        saved(manager, 2, 20.0)


def test_retention_of_another_series_needs_its_lease() -> None:
    disk = ModelDisk()
    before = writer(disk, "net")
    save(before, 1)
    manifest = before.store.read_manifest("net-1.ckpt")
    before.close()
    assert manifest is not None
    after = writer(disk, "net_1", run_id="second")
    after.continue_from(manifest.to_checkpoint(RUNS), manifest)
    after.resumed_from = None
    save(after, 2)
    with writer(disk, "net").store.lease("net"):
        after.retain(KEEP_ONE)
        assert disk.status(RUNS / "net-1.ckpt") is not None
    after.retain(KEEP_ONE)
    assert disk.status(RUNS / "net-1.ckpt") is None


def test_refused_retention_is_logged_and_removes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = disk_with(10.0)
    assert writer(disk).retain(RetentionPolicy(())) is None
    assert "retention: the retention policy is empty" in caplog.text


def test_failed_removal_is_logged_and_the_others_go(caplog: pytest.LogCaptureFixture) -> None:
    disk = ModelDisk()
    failing = FailingDisk(disk, error=errno.EROFS, operation="unlink", call=1)
    store = Trainer(disk, fs=failing).store()
    series = SeriesWriter(store, SERIES, options=api.SaveOptions(), clock=lambda: 0.0)
    for step in (1, 2, 3):
        save(series, step)
    assert series.retain(KEEP_ONE) is not None
    assert "retention: [Errno 30]" in caplog.text
    assert len([c for c in store.scan() if c.state is api.State.OK]) == 2


def test_lease_is_taken_once_and_given_back() -> None:
    disk = ModelDisk()
    first, second = writer(disk), writer(disk)
    first.open()
    first.open()
    with pytest.raises(StoreLocked):
        second.open()
    first.close()
    second.open()
    second.close()


def test_first_saves_from_several_threads_share_the_lease() -> None:
    gate = threading.Barrier(4)

    def open_at_once(one: SeriesWriter) -> None:
        gate.wait(20)
        one.open()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            one = writer(ModelDisk())
            for opened in [pool.submit(open_at_once, one) for _ in range(4)]:
                opened.result(20)
            one.close()


def test_next_attempt_counts_damaged_ones_but_no_foreign_files() -> None:
    disk = disk_with(10.0, 20.0)
    truncate(disk, manifest_of(name_of(1)), 3)
    truncate(disk, name_of(2), 3)
    history = Trainer(disk).store().scan()
    assert [next_attempt(history, step, trust=api.Trust()) for step in (0, 1, 2)] == [0, 1, 1]
    disk.unlink(RUNS / manifest_of(name_of(1)))
    disk.replace(RUNS / name_of(1), RUNS / "net-1_1.ckpt")
    assert next_attempt(Trainer(disk).store().scan(), 1, trust=api.Trust()) == 0


def test_number_of_the_last_save_is_not_used_again_when_its_manifest_is_unreadable() -> None:
    disk = ModelDisk()
    series = writer(disk)
    save(series, 1)
    save(series, 2)
    put(disk, RUNS / manifest_of("net-2.ckpt"), b"{}")
    assert save(series, 3).sequence == 3
