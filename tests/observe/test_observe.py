# SPDX-License-Identifier: Apache-2.0
"""What observers hear of saves, loads and prunes, and that they never harm one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    MemoryConfig,
    ModelCheckpoint,
    SaveFailed,
    SaveHandle,
    SaveSuperseded,
    StagingExhausted,
    StoreLocked,
    UnsupportedState,
    load_checkpoint,
    parse_policy,
    save_checkpoint,
    save_state,
)
from ckptmgr.core.handle import SaveStats
from ckptmgr.event_log import LogObserver, sentence
from ckptmgr.io.temp_names import temp_name
from ckptmgr.memory_config import MIB
from ckptmgr.observe import observers as observe
from ckptmgr.observe.observers import Event, Observers
from tests.faults.training import RUNS, SERIES, ModelProcesses, Trainer, disk_with, state_of
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.held import TIMEOUT_S, HeldDisk
from tests.support.pruning import carry_out, propose
from tests.support.runs import manager_on
from tests.support.saved import flip
from tests.support.surface import Loop

everywhere = pytest.mark.parametrize("mode", ["sync", "thread", "process"])
Heard = list[Event]


def names(heard: Heard) -> list[str]:
    return [event.name for event in heard]


def only(heard: Heard, name: str) -> Event:
    (found,) = (event for event in heard if event.name == name)
    return found


def config_of(mode: str, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(async_save=False if mode == "sync" else mode, **options)


@pytest.fixture
def everything() -> Iterator[Heard]:
    heard: Heard = []
    observe.register(heard.append)
    yield heard
    observe.unregister(heard.append)


@everywhere
def test_save_is_told_from_start_to_durable(tmp_path: Path, mode: str) -> None:
    heard: Heard = []
    with CheckpointManager(tmp_path, config_of(mode), observe=heard.append) as manager:
        handle = manager.save(7, state_of(1.0))
        assert handle is not None
        checkpoint = handle.wait(TIMEOUT_S)
    staged = [] if mode == "sync" else ["save.staged"]
    assert names(heard) == ["save.started", *staged, "save.durable"]
    assert {(event.series, event.step, event.is_ok) for event in heard} == {("ckpt", 7, True)}
    assert heard[0].notes == ("manual",)
    durable = heard[-1]
    assert (durable.path, durable.size_bytes) == (checkpoint.path, checkpoint.size_bytes)
    assert durable.seconds > 0
    assert durable.figures["write_s"] > 0
    assert durable.figures["gigabytes_per_s"] > 0
    assert durable.figures["blocked_s"] > 0


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_manifest_notes_what_staging_cost(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path, config_of(mode)) as manager:
        handle = manager.save(1, state_of(1.0))
        assert handle is not None
        handle.wait(TIMEOUT_S)
        manifest = api.place(tmp_path).read_manifest("ckpt-1.ckpt")
        assert manifest is not None
        noted = {"staged_bytes", "staging_bytes", "stage_s", "queue_s", "blocked_s", "buffer_bytes"}
        assert noted <= manifest.stats.keys()
        assert manifest.stats["staging_bytes"] >= manifest.stats["staged_bytes"] > 0
        assert handle.stats.peak_bytes == (
            manifest.stats["staging_bytes"] + manifest.stats["buffer_bytes"]
        )


def test_synchronous_save_needs_no_memory_but_the_buffers(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, config_of("sync")) as manager:
        handle = manager.save(1, {"w": np.zeros(MIB, np.uint8)})
    assert handle is not None
    assert handle.stats.staging_bytes == 0
    assert handle.stats.peak_bytes == handle.stats.buffer_bytes >= MIB


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_failed_save_is_told_once(tmp_path: Path, mode: str) -> None:
    heard: Heard = []
    disk = HeldDisk()
    disk.failure = OSError(5, "Input/output error")
    manager = manager_on(tmp_path, config_of(mode), fs=disk, observe=heard.append)
    with suppress(OSError):
        manager.save(1, state_of(1.0))
    with suppress(OSError):
        manager.close()
    failed = only(heard, "save.failed")
    assert names(heard)[-1] == "save.failed"
    assert (failed.step, failed.is_ok, failed.error_type) == (1, False, "OSError")
    assert "Input/output error" in (failed.error or "")


def test_state_that_cannot_be_stored_is_a_failed_save(tmp_path: Path) -> None:
    heard: Heard = []
    manager = CheckpointManager(tmp_path, observe=heard.append)
    with pytest.raises(UnsupportedState):
        manager.save(1, {"w": object()})
    assert names(heard) == ["save.started", "save.failed"]
    assert heard[1].error_type == "UnsupportedState"


def test_state_that_does_not_fit_is_a_failed_save(tmp_path: Path) -> None:
    heard: Heard = []
    config = config_of("thread", memory=MemoryConfig(host_budget_bytes=MIB))
    with (
        CheckpointManager(tmp_path, config, observe=heard.append) as manager,
        pytest.raises(StagingExhausted),
    ):
        manager.save(1, {"w": np.zeros(2 * MIB, np.uint8)})
    assert names(heard) == ["save.started", "forecast", "save.failed"]


@pytest.mark.parametrize(
    ("back_pressure", "ends"),
    [
        ("skip", ["durable", "skipped", "skipped"]),
        ("coalesce", ["durable", "superseded", "durable"]),
        ("wait", ["durable", "durable", "durable"]),
    ],
)
def test_every_save_that_started_ends_once(
    tmp_path: Path, back_pressure: str, ends: list[str]
) -> None:
    heard: Heard = []
    disk = HeldDisk()
    config = config_of("thread", back_pressure=back_pressure)
    with manager_on(tmp_path, config, fs=disk, observe=heard.append) as manager:
        if back_pressure != "wait":
            disk.gate.clear()
        for step in (1, 2, 3):
            manager.save(step, state_of(1.0))
            if step == 1:
                disk.arrive()
        disk.gate.set()
        manager.wait()
    end_of = {
        event.step: event.name.removeprefix("save.")
        for event in heard
        if event.name not in ("save.started", "save.staged")
    }
    assert [end_of[step] for step in (1, 2, 3)] == ends
    assert names(heard).count("save.started") == 3
    assert len([event for event in heard if event.name.startswith("save.")]) == 3 + 3 + (
        names(heard).count("save.staged")
    )


def test_checkpoint_is_durable_before_others_are_pruned(tmp_path: Path) -> None:
    heard: Heard = []
    config = CheckpointConfig(keep="last(1)")
    with CheckpointManager(tmp_path, config, observe=heard.append) as manager:
        manager.save(1, state_of(1.0))
        manager.save(2, state_of(1.0))
    assert names(heard)[-2:] == ["save.durable", "prune"]
    pruned = heard[-1]
    assert (pruned.figures["kept"], pruned.figures["dropped"]) == (1, 1)
    assert pruned.figures["freed_bytes"] > 0
    assert pruned.notes == ("dropped ckpt-1.ckpt",)


def test_resume_tells_what_it_skipped(tmp_path: Path) -> None:
    heard: Heard = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1.0))
        manager.save(2, state_of(1.0))
    flip(tmp_path / "ckpt-2.ckpt", 20)
    with CheckpointManager(tmp_path, observe=heard.append) as manager:
        assert manager.resume().step == 1
    told = only(heard, "resume")
    assert (told.step, told.path, told.is_ok) == (1, tmp_path / "ckpt-1.ckpt", True)
    assert told.figures == {"skipped": 1, "starts": 1}
    assert told.notes[0].startswith("skipped ckpt-2.ckpt: ")
    assert told.size_bytes > 0


def test_resume_of_nothing_is_told_without_a_step(tmp_path: Path) -> None:
    heard: Heard = []
    with CheckpointManager(tmp_path, observe=heard.append) as manager:
        manager.resume()
    assert (only(heard, "resume").step, only(heard, "resume").path) == (None, None)


def test_failed_load_is_told_with_its_error(tmp_path: Path) -> None:
    heard: Heard = []
    with CheckpointManager(tmp_path, observe=heard.append) as manager:
        manager.save(1, state_of(1.0))
        manager.load(1)
        flip(tmp_path / "ckpt-1.ckpt", 20)
        with pytest.raises(CorruptCheckpoint):
            manager.load(1)
    good, bad = (event for event in heard if event.name == "load")
    assert (good.is_ok, good.step) == (True, 1)
    assert (bad.is_ok, bad.error_type) == (False, "ChecksumMismatch")


def test_clean_up_after_a_dead_writer_is_told() -> None:
    disk = disk_with(10.0)
    name = temp_name("net-2.ckpt", token=ModelProcesses(disk).token(), series=SERIES)
    disk.create(RUNS / name, mode=0o600).close()
    disk.process += 1
    heard: Heard = []
    with Trainer(disk).manager(heard.append) as manager:
        manager.resume()
    taken = only(heard, "lease.taken_over")
    assert taken.series == SERIES
    assert "left by an interrupted save" in taken.notes[0]


def test_callback_tells_saves_resumes_and_prunes(tmp_path: Path) -> None:
    heard: Heard = []
    config = CheckpointConfig(keep_checkpoint_max=1)
    callback = ModelCheckpoint("net", str(tmp_path), config, observe=heard.append)
    Loop(callbacks=(callback,)).run(2)
    assert names(heard) == ["save.started", "save.durable"] * 2 + ["prune"]
    assert [event.step for event in heard[:4]] == [1, 1, 2, 2]
    heard.clear()
    second = ModelCheckpoint("net", str(tmp_path), config, observe=heard.append)
    second.resume()
    assert only(heard, "resume").figures == {"skipped": 0}
    assert only(heard, "resume").step == 2


def test_durable_event_has_epoch_and_metrics_of_the_checkpoint(
    tmp_path: Path, everything: Heard
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1.0), epoch=3, metrics={"loss": 0.5})
    save_state(state_of(1.0), tmp_path / "one.ckpt", epoch=4, metrics={"loss": 0.25})
    durable = [event for event in everything if event.name == "save.durable"]
    assert [(one.epoch, one.metrics) for one in durable] == [
        (3, {"loss": 0.5}),
        (4, {"loss": 0.25}),
    ]
    assert {one.epoch for one in everything if one.name != "save.durable"} == {None}


def test_callback_that_finds_nothing_tells_so(tmp_path: Path) -> None:
    heard: Heard = []
    assert ModelCheckpoint("net", str(tmp_path), observe=heard.append).resume() is None
    assert only(heard, "resume").step is None


def test_emergency_save_is_told(tmp_path: Path) -> None:
    heard: Heard = []
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    callback = ModelCheckpoint("net", str(tmp_path), config, observe=heard.append)
    loop = Loop(callbacks=(callback,))
    with suppress(ZeroDivisionError), callback:
        callback.begin(loop)
        raise ZeroDivisionError
    assert names(heard) == ["save.started", "save.durable"]
    assert heard[0].notes == ("exception:ZeroDivisionError",)
    assert heard[1].size_bytes > 0


def test_single_files_are_heard_by_the_registered(tmp_path: Path, everything: Heard) -> None:
    path = tmp_path / "w.ckpt"
    saved = save_checkpoint({"w": np.zeros(3)}, path)
    load_checkpoint(path)
    assert names(everything) == ["save.started", "save.durable", "load"]
    assert everything[1].size_bytes == everything[2].size_bytes == saved.size_bytes
    assert everything[1].figures["blocked_s"] >= everything[1].figures["write_s"] > 0
    with api.place(tmp_path).lease("w.ckpt"), pytest.raises(StoreLocked):
        save_checkpoint({"w": np.zeros(3)}, path)
    assert everything[-1].error_type == "StoreLocked"


def test_verify_tells_its_verdict(tmp_path: Path, everything: Heard) -> None:
    save_checkpoint({"w": np.zeros(3)}, tmp_path / "w.ckpt")
    store = api.place(tmp_path)
    (checkpoint,) = store.scan()
    api.verify(store, checkpoint)
    flip(checkpoint.path, 5)
    api.verify(store, checkpoint)
    good, bad = everything[-2:]
    assert (good.name, good.is_ok, good.path) == ("verify", True, checkpoint.path)
    assert (bad.name, bad.error_type) == ("verify", "damaged")
    assert "do not match the digest" in (bad.error or "")


def test_prune_by_hand_tells_what_went_and_what_failed(tmp_path: Path, everything: Heard) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all")) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(1.0))
    store = api.place(tmp_path)
    proposal = propose(store, parse_policy("last(1)"), now=datetime.now(UTC))
    with store.lease("ckpt"):
        carry_out(store, proposal)
    assert everything[-1].error_type == "StoreLocked"
    carry_out(store, proposal)
    pruned = everything[-1]
    assert (pruned.name, pruned.is_ok) == ("prune", True)
    assert (pruned.figures["kept"], pruned.figures["dropped"]) == (1, 2)


def test_retention_that_fails_is_told(tmp_path: Path) -> None:
    heard: Heard = []
    disk = FailingDisk(api.OsFileSystem(), operation="unlink", call=1, is_lasting=True)
    config = CheckpointConfig(keep="last(1)")
    with manager_on(tmp_path, config, fs=disk, observe=heard.append) as manager:
        manager.save(1, state_of(1.0))
        manager.save(2, state_of(1.0))
    assert "save.failed" not in names(heard)
    assert only(heard, "prune").error_type == "OSError"


def test_observer_that_fails_harms_no_save_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: Heard = []

    def broken(event: Event) -> None:
        raise SystemExit(event.name)

    manager = CheckpointManager(tmp_path, config_of("thread"), observe=[broken, heard.append])
    with manager:
        manager.save(1, state_of(1.0))
        manager.wait()
    assert names(heard) == ["save.started", "save.staged", "save.durable"]
    assert [c.step for c in manager.checkpoints()] == [1]
    assert len([record for record in caplog.records if "observer failed" in record.message]) == 1


def test_interrupt_in_an_observer_is_not_swallowed() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers(interrupted).emit("load")


@pytest.mark.parametrize("wrong", [[1], [None]])
def test_what_cannot_be_called_is_no_observer(wrong: Any) -> None:
    with pytest.raises(TypeError, match="functions of one Event"):
        Observers(wrong)


def test_unregister_of_a_stranger_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in list"):
        observe.unregister(print)


def test_event_is_stamped_by_the_clock_and_is_json() -> None:
    heard: Heard = []
    observers = Observers(heard.append, clock=lambda: 5.0)
    observers.emit("load", SaveFailed("no"), path=Path("a"), figures={"n": 1.0}, notes=("x",))
    assert json.loads(json.dumps(heard[0].to_json())) == {
        "event": "load",
        "at": 5.0,
        "seconds": 0.0,
        "size_bytes": 0,
        "path": "a",
        "series": None,
        "step": None,
        "epoch": None,
        "is_ok": False,
        "error": "no",
        "error_type": "SaveFailed",
        "figures": {"n": 1.0},
        "metrics": {},
        "notes": ["x"],
    }


def test_watch_tells_the_copy_before_the_end_whoever_is_first() -> None:
    heard: Heard = []
    handle = SaveHandle(stats=SaveStats(staged_bytes=3))
    with Observers(heard.append).watch(series="net", step=1, why="policy") as watch:
        watch.costs(handle.stats)
        watch.durable(Path("net-1.ckpt"))
        watch.follow(handle)
        handle.staged.set_result(None)
        handle.durable.set_exception(SaveFailed("the retention after it was interrupted"))
    assert names(heard) == ["save.started", "save.staged", "save.durable"]


@pytest.mark.parametrize(
    ("error", "name"),
    [(SaveFailed("x"), "save.failed"), (SaveSuperseded("x"), "save.superseded")],
)
def test_watch_follows_a_handle_to_its_end(error: Exception, name: str) -> None:
    heard: Heard = []
    handle = SaveHandle()
    Observers(heard.append).watch(series="net", step=1, why="policy").follow(handle)
    handle.staged.set_exception(error)
    handle.durable.set_exception(error)
    assert names(heard) == ["save.started", name]
    assert isinstance(handle.durable, Future)


def test_log_observer_logs_sentences_with_the_event_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LogObserver()
    with caplog.at_level(logging.INFO, "ckptmgr.events"):
        log(Event(name="load", at=0.0))
        log(Event(name="load", at=0.0, error="cut", error_type="TruncatedCheckpoint"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages == ["load", "load: TruncatedCheckpoint: cut"]
    assert vars(caplog.records[0])["ckptmgr"]["event"] == "load"


def test_log_observer_is_quiet_where_the_logger_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "ckptmgr.events"):
        LogObserver()(Event(name="load", at=0.0))
    assert caplog.records == []


def test_sentence_names_what_it_cost() -> None:
    event = Event(
        name="save.durable",
        at=0.0,
        series="net",
        step=7,
        size_bytes=1_500_000_000,
        seconds=1.25,
        figures={"blocked_s": 0.5},
        notes=("fine",),
    )
    assert sentence(event) == (
        "save.durable net step 7: 1.4 GiB in 1.25 s (training held up for 0.50 s); fine"
    )


def test_text_of_a_server_is_one_bounded_line_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    error = "no\r\n2026-01-01 ckptmgr INFO all is well\x1b[2J" + "y" * 100_000
    event = Event(name="mirror", at=0.0, error=error, error_type="OSError", notes=("a\nb",))
    with caplog.at_level(logging.WARNING, logger="ckptmgr.events"):
        LogObserver()(event)
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) <= 4000
