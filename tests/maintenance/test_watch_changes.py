# SPDX-License-Identifier: Apache-2.0
"""Events of the real kernel, through the installed watchdog: received and lost ones."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.maintenance.watch import changes as module
from ckptmgr.maintenance.watch.changes import Changes, ReportedChanges
from tests.support.saved import save_run

TEMP = ".net-1.ckpt.a-b-1-2.0000.1-1.tmp"
LONG_S = 20.0


@pytest.fixture
def changes() -> Iterator[Changes]:
    with Changes(kind_of=lambda _: "ext4") as one:
        yield one


def heard(changes: Changes) -> ReportedChanges:
    """Return the next batch; it is on its way."""
    return changes.wait(LONG_S)


def test_renames_of_a_save_are_one_batch(tmp_path: Path, changes: Changes) -> None:
    assert changes.follow(tmp_path) is None
    save_run(tmp_path, [10])
    batch = heard(changes)
    assert (batch.changed, batch.has_losses) == ({tmp_path}, False)


@pytest.mark.parametrize("name", ["net-1.ckpt", "net-1.ckpt.manifest.json", ".net.lease"])
def test_file_that_is_written_in_place_or_removed_is_heard_of(
    tmp_path: Path, changes: Changes, name: str
) -> None:
    changes.follow(tmp_path)
    (tmp_path / name).write_bytes(b"1")
    assert heard(changes).changed == {tmp_path}
    (tmp_path / name).unlink()
    assert heard(changes).changed == {tmp_path}


def test_file_that_is_moved_in_or_out_is_heard_of(tmp_path: Path, changes: Changes) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "net-1.ckpt"
    runs.mkdir()
    outside.touch()
    changes.follow(runs)
    outside.rename(runs / outside.name)
    assert heard(changes).changed == {runs}
    (runs / outside.name).rename(outside)
    assert heard(changes).changed == {runs}


def test_other_names_are_not_heard_of(
    tmp_path: Path, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard_of = []

    class Queue(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            heard_of.append(item)
            super().put(item)

    monkeypatch.setattr(changes, "_queue", Queue())
    (tmp_path / "last.ckpt").touch()
    changes.follow(tmp_path)
    for name in ("graph.json", TEMP, ".hidden", "log.txt"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "log.txt").rename(tmp_path / "log.1")
    (tmp_path / "last.ckpt").unlink()  # events come in order: with this one all have come
    heard(changes)
    assert heard_of == [(tmp_path, "last.ckpt", True)]


def test_temporary_file_of_data_that_is_removed_is_named(tmp_path: Path, changes: Changes) -> None:
    (tmp_path / TEMP).touch()
    changes.follow(tmp_path)
    (tmp_path / TEMP).unlink()
    assert heard(changes).removed_temps == {tmp_path: [TEMP]}


def test_removed_directory_is_heard_of(tmp_path: Path, changes: Changes) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    changes.follow(runs)
    runs.rmdir()
    batch = heard(changes)
    assert (batch.changed, batch.vanished) == ({runs}, {runs})
    runs.mkdir()
    assert changes.follow(runs) is None
    (runs / "net-1.ckpt").touch()
    assert heard(changes).changed == {runs}


def test_removed_folder_in_a_directory_is_not_heard_of(tmp_path: Path, changes: Changes) -> None:
    (tmp_path / "folder").mkdir()
    changes.follow(tmp_path)
    (tmp_path / "folder").rmdir()
    (tmp_path / "last.ckpt").touch()
    assert heard(changes).vanished == set()


def test_link_to_a_directory_is_followed(tmp_path: Path, changes: Changes) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    changes.follow(link)
    (tmp_path / "real/net-1.ckpt").touch()
    assert heard(changes).changed == {link}


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "lustre"])
def test_shared_file_system_is_not_relied_on(tmp_path: Path, kind: str) -> None:
    with Changes(kind_of=lambda _: kind) as changes:
        assert changes.follow(tmp_path) == f"{kind} does not report what other hosts change"
        assert changes.wait(0.0) == ReportedChanges()


def test_user_may_ask_for_polling(tmp_path: Path) -> None:
    with Changes(is_polling=True) as changes:
        assert changes.follow(tmp_path) == "as --poll-only asks"


def test_limit_of_the_kernel_leads_to_polling(tmp_path: Path, changes: Changes) -> None:
    why = changes.follow(tmp_path / "vanished")
    assert why is not None
    assert why.startswith("inotify: ")


def test_loss_that_watchdog_reports_is_a_loss(changes: Changes) -> None:
    logging.getLogger("watchdog.observers.inotify_c").warning("Inotify queue overflowed")
    assert heard(changes).has_losses


def test_as_many_events_as_the_kernel_keeps_count_as_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "max_queued_events"
    limit.write_text("40\n")
    monkeypatch.setattr(module, "_QUEUE_LIMIT", limit)
    runs = tmp_path / "runs"
    runs.mkdir()
    with Changes(kind_of=lambda _: "ext4") as changes:
        changes.follow(runs)
        for number in range(12):
            (runs / f"log-{number}").touch()
        assert heard(changes).has_losses


def test_unknown_limit_is_the_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUEUE_LIMIT", tmp_path / "none")
    assert module._queue_limit() == 16384


def test_wait_of_a_day_blocks_for_a_second_at_a_time(
    changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Queue:
        def get(self, timeout: float) -> None:
            waited.append(timeout)
            if len(waited) == 3:  # as the handler of a signal does
                raise KeyboardInterrupt
            raise queue.Empty

    monkeypatch.setattr(changes, "_queue", Queue())
    with pytest.raises(KeyboardInterrupt):
        changes.wait(86400.0)
    assert waited == [1.0] * 3
