# SPDX-License-Identifier: Apache-2.0
"""`JsonLinesObserver`, and the way back."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import pytest

from ckptmgr.event_log import JsonLinesObserver
from ckptmgr.observe.events import Event
from ckptmgr.observe.json_lines import read_events

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
