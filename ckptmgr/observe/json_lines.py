# SPDX-License-Identifier: Apache-2.0
"""JSON-lines observer: each event as one line of a file, and the way back; `ckptmgr report` reads such files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.urls import refuse_url
from ckptmgr.io.appending import opened_to_append
from ckptmgr.observe.events import FIRST_OF_A_SAVE, Event

EVENTS_NAME = "events.jsonl"
"""The file in a checkpoint directory that `ckptmgr report` reads unless another one is named."""


class JsonLinesObserver:
    """Append each event to a file as one line of JSON: the keys of `Event`, NaN as null.

    A line is written by one call, so that processes may share a file. The file is opened for each
    event: it may be rotated or removed at any time. A link, a pipe or a file of an untrusted user
    in its place is refused.

    Args:
        path: The file; a missing directory is made for this user alone, unless the run of the first
            event makes it. Others get the rights on the file that they have on the directory, less
            the umask and `w`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Check the path; raise ValueError for an address, or one that a shell should have expanded."""
        refuse_url(path)
        self._path = Path(path)
        self._ends_whole = False  # whether the last line is known to have an end
        self._waiting = b""

    def __call__(self, event: Event) -> None:
        """Append one event."""
        line = self._waiting + json.dumps(_finite(event.to_json())).encode() + b"\n"
        if event.name == FIRST_OF_A_SAVE and not self._path.parent.exists():
            self._waiting = line  # the save makes the directory, with the mode of its run
            return
        with opened_to_append(self._path) as descriptor:
            data = line if self._ends_whole else _missing_end(descriptor) + line
            self._ends_whole, self._waiting = False, b""
            self._ends_whole = os.write(descriptor, data) == len(data)


def _missing_end(descriptor: int) -> bytes:
    """Return the end of a last line that a crash or a full disk cut short, if it has none."""
    size = os.fstat(descriptor).st_size
    return b"" if not size or os.pread(descriptor, 1, size - 1) == b"\n" else b"\n"


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
