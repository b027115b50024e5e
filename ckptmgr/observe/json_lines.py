# SPDX-License-Identifier: Apache-2.0
"""JSON-lines observer: each event as one line of a file, and the way back; `ckptmgr report` reads such files."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ckptmgr.observe.events import Event

EVENTS_NAME = "events.jsonl"
"""The file in a checkpoint directory that `ckptmgr report` reads unless another one is named."""


class JsonLinesObserver:
    """Append each event to a file as one line of JSON: the keys of `Event`, NaN as null.

    A line is written by one call, so that processes may share a file. The file is opened for each
    event: it may be rotated or removed at any time.

    Args:
        path: The file; its directory is made with the first event.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._ends_whole = False  # whether the last line is known to have an end

    def __call__(self, event: Event) -> None:
        """Append one event."""
        line = json.dumps(_finite(event.to_json())) + "\n"
        # A pipe without a reader must not hold up the training.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path, flags, 0o666)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o666)
        try:
            data = line.encode() if self._ends_whole else self._missing_end() + line.encode()
            self._ends_whole = False
            self._ends_whole = os.write(descriptor, data) == len(data)
        finally:
            os.close(descriptor)

    def _missing_end(self) -> bytes:
        """Return the end of a last line that a crash or a full disk cut short, if it has none."""
        # It is empty, may not be read, was just rotated, or is a pipe, which cannot seek.
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return b"" if file.read(1) == b"\n" else b"\n"
        return b""


class EventLines(NamedTuple):
    """The events of a file, and how many of its lines are none."""

    events: list[Event]
    unreadable_count: int


def read_events(lines: Iterable[str]) -> EventLines:
    """Return the events of lines, in their order; a line cut short by a crash is only counted."""
    events, unreadable_count = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            events.append(_event(json.loads(line)))
        except (KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError):
            unreadable_count += 1
    return EventLines(events, unreadable_count)


def _event(fields: Mapping[str, object]) -> Event:
    path, step, figures, notes = (fields[name] for name in ("path", "step", "figures", "notes"))
    metrics = fields.get("metrics", {})  # which other writers of such lines may leave out
    if not (isinstance(figures, dict) and isinstance(metrics, dict) and isinstance(notes, list)):
        raise TypeError("figures, metrics or notes of an event")
    at = _number(fields["at"])
    datetime.fromtimestamp(at, UTC)  # those that no calendar has are refused
    return Event(
        name=str(fields["event"]),
        at=at,
        seconds=_number(fields["seconds"]),
        size_bytes=int(_number(fields["size_bytes"])),
        path=None if path is None else Path(str(path)),
        series=_text(fields["series"]),
        step=_whole(step),
        epoch=_whole(fields.get("epoch")),  # see above
        error=_text(fields["error"]),
        error_type=_text(fields["error_type"]),
        figures={str(name): _number(value) for name, value in figures.items() if value is not None},
        metrics={str(name): _metric(value) for name, value in metrics.items()},
        notes=tuple(map(str, notes)),
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number of an event")
    return float(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _metric(value: object) -> float:
    return math.nan if value is None else _number(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value
