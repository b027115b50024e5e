# SPDX-License-Identifier: Apache-2.0
"""`JsonLinesObserver`, and the way back."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.event_log import JsonLinesObserver, read_events
from ckptmgr.events import Event

EVENT = Event(
    name="save.durable",
    at=12.5,
    seconds=0.25,
    size_bytes=100,
    path=Path("run/net-1.ckpt"),
    series="net",
    step=1,
    epoch=2,
    figures={"blocked_s": 0.125},
    metrics={"loss": 0.5},
    notes=("policy",),
)


def test_events_of_a_file_are_those_that_were_noted(tmp_path: Path) -> None:
    path = tmp_path / "made" / "events.jsonl"
    observer = JsonLinesObserver(path)
    failed = Event(name="save.failed", at=13.0, error="no\nspace", error_type="StoreFull")
    for event in (EVENT, failed):
        observer(event)
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") == 2
    assert read_events(text.splitlines()) == ([EVENT, failed], 0)


def test_figure_that_is_no_number_is_null_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLinesObserver(path)(Event(name="load", at=1.0, figures={"ratio": math.nan}))
    assert '"ratio": null' in path.read_text(encoding="utf-8")
    (event,) = read_events(path.read_text(encoding="utf-8").splitlines()).events
    assert event.figures == {}


def test_lines_that_are_no_event_are_counted_and_passed_over() -> None:
    lines = ["", "{", "[]", "3", '{"event": "load"}', '{"event":1,"at":true}', "[" * 100_000]
    assert read_events(lines) == ([], 6)


def test_event_of_no_calendar_is_no_event() -> None:
    line = json.dumps({**EVENT.to_json(), "at": 1e300})
    assert read_events([line]) == ([], 1)


def test_file_that_was_rotated_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    observer = JsonLinesObserver(path)
    observer(EVENT)
    os.replace(path, tmp_path / "old.jsonl")
    observer(EVENT)
    assert len(read_events(path.read_text(encoding="utf-8").splitlines()).events) == 1


def test_pipe_without_a_reader_does_not_hold_up_the_training(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match=r"events\.jsonl"):  # which the manager logs
        JsonLinesObserver(tmp_path / "events.jsonl")(EVENT)


def test_event_after_a_line_that_a_crash_cut_short_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "cut sh', encoding="utf-8")
    for _ in range(2):
        JsonLinesObserver(path)(EVENT)
    found = read_events(path.read_text(encoding="utf-8").splitlines())
    assert (found.events, found.unreadable_count) == ([EVENT, EVENT], 1)


def test_metric_that_is_no_number_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    JsonLinesObserver(path)(Event(name="save.durable", at=1.0, metrics={"loss": math.inf}))
    line = path.read_text(encoding="utf-8")
    assert json.loads(line)["metrics"] == {"loss": None}
    (event,) = read_events([line]).events
    assert math.isnan(event.metrics["loss"])


def test_line_of_an_earlier_version_is_an_event() -> None:
    fields = {k: v for k, v in EVENT.to_json().items() if k not in ("epoch", "metrics")}
    (event,) = read_events([json.dumps(fields)]).events
    assert (event.step, event.epoch, event.metrics) == (1, None, {})


def test_page_names_the_keys_of_a_line() -> None:
    page = Path(__file__).parents[2] / "docs/training.md"
    if not page.exists():
        pytest.skip("needs the sources")
    text = page.read_text(encoding="utf-8")
    named = text[text.index("The keys of a line") : text.index("(sentences)")]
    keys = [key for key in re.findall(r"`([a-z_]+)`", named)]
    assert list(dict.fromkeys(keys)) == list(EVENT.to_json())


@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name", "pipe", "directory"])
def test_entry_that_is_no_file_of_its_own_is_refused_and_not_written(
    tmp_path: Path, kind: str
) -> None:
    private = tmp_path / "private"
    private.write_text("export A=1\n", encoding="utf-8")
    path = tmp_path / "runs/events.jsonl"
    path.parent.mkdir()
    if kind == "second name":
        path.hardlink_to(private)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(private if kind == "link" else tmp_path / "absent")
    with pytest.raises(OSError, match=re.escape(str(path))):
        JsonLinesObserver(path)(EVENT)
    assert private.read_text(encoding="utf-8") == "export A=1\n"
    assert not (tmp_path / "absent").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_file_of_a_stranger_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("", encoding="utf-8")
    os.chown(path, 12399, -1)
    with pytest.raises(PermissionError, match="belongs to user 12399"):
        JsonLinesObserver(path)(EVENT)
    assert path.read_text(encoding="utf-8") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_file_that_root_makes_belongs_to_the_owner_of_the_directory(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 23456)
    JsonLinesObserver(tmp_path / "events.jsonl")(EVENT)
    status = (tmp_path / "events.jsonl").stat()
    assert (status.st_uid, status.st_gid) == (12345, 23456)


@pytest.mark.parametrize(
    ("umask", "directory", "expected"),
    [
        (0o000, None, (0o700, 0o600)),
        (0o022, None, (0o700, 0o600)),
        (0o000, 0o770, (0o770, 0o660)),
        (0o000, 0o777, (0o777, 0o664)),
        (0o077, 0o755, (0o755, 0o600)),
    ],
)
def test_events_are_for_those_who_may_use_the_directory(
    tmp_path: Path, umask: int, directory: int | None, expected: tuple[int, int]
) -> None:
    path = tmp_path / "runs/events.jsonl"
    if directory is not None:
        path.parent.mkdir()
        path.parent.chmod(directory)
    before = os.umask(umask)
    try:
        JsonLinesObserver(path)(EVENT)
    finally:
        os.umask(before)
    modes = (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777)
    assert modes == expected


@pytest.mark.parametrize("file_mode", [0o400, 0o440, 0o660])
def test_directory_of_a_run_with_events_has_the_mode_of_the_run(
    tmp_path: Path, file_mode: int
) -> None:
    state = {"w": np.zeros(3)}
    modes = []
    for name, observers in (("with", True), ("without", False)):
        runs = tmp_path / name
        observe = JsonLinesObserver(runs / "events.jsonl") if observers else None
        config = CheckpointConfig(file_mode=file_mode)
        with CheckpointManager(runs, config, prefix="net", observe=observe) as manager:
            manager.save(1, state)
        modes.append(oct(runs.stat().st_mode))
    assert modes[0] == modes[1]
    lines = (tmp_path / "with/events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [event.name for event in read_events(lines).events] == ["save.started", "save.durable"]
