# SPDX-License-Identifier: Apache-2.0
"""Progress line on a terminal: bytes, rate, time left; shown after half a second, removed at the end.

```
with ProgressLine("resuming", checkpoint.size_bytes):
    manager.resume(state)
```

It counts the bytes that this process reads from files (with `direction="write"`, writes). Work that
reads a file again starts the bar again, with the number of the pass. Without a terminal there is
one plain line every 10 seconds; an error in the line, or no `rich`, only ends the line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self, TextIO

from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.io.byte_counters import Direction, counting

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 0.5
_REDRAW_S = 0.1
_PLAIN_S = 10.0
_WIDE, _BAR = 60, 16
_WIDE_ROOM, _NARROW_ROOM = _BAR + 40, 26
"""Columns that bar, bytes, rate and time take; without bar and rate on a narrow terminal."""
_LEAST_LABEL = 8


class ProgressLine:
    """Shows progress within a `with` block, on standard error by default.

    `direction` selects the reads or the writes to count. NO_COLOR overrides `has_color`.
    """

    def __init__(
        self,
        label: str,
        total_bytes: int,
        *,
        direction: Direction = "read",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        has_color: bool = True,
    ) -> None:
        self._label = label
        self._total_bytes = max(1, total_bytes)
        self._direction = direction
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._has_color = has_color
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._shown: tuple[Progress, TaskID] | None = None
        self._next_s = 0.0
        self._started_s = 0.0
        self._is_plain = False
        self._room = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._is_plain = not self._stream.isatty() or os.environ.get("TERM") == "dumb"
        self._started_s = self._clock()
        self._next_s = self._started_s + (_PLAIN_S if self._is_plain else _PATIENCE_S)
        self._stack.enter_context(counting(self._count))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        with self._lock:
            shown, self._shown = self._shown, None
            self._next_s = float("inf")  # a thread may still be counting
        if shown is not None:
            _ignoring_errors(shown[0].stop)

    def _count(self, direction: Direction, count: int) -> None:
        if direction != self._direction:
            return
        with self._lock:
            self._done_bytes += count
            now = self._clock()
            if now < self._next_s:
                return
            self._next_s = now + (_PLAIN_S if self._is_plain else _REDRAW_S)
            draw = partial(self._write_line, now) if self._is_plain else self._draw
            if not _ignoring_errors(draw):
                self._next_s = float("inf")

    def _write_line(self, now: float) -> None:
        rounds, done_bytes = divmod(self._done_bytes, self._total_bytes)
        label = f"{self._label} (pass {rounds + 1})" if rounds else self._label
        done = f"{size_text(done_bytes)} of {size_text(self._total_bytes)}"
        rate = self._done_bytes / max(now - self._started_s, _REDRAW_S)
        self._stream.write(f"{label}: {done}, {rate_text(rate)}\n")
        self._stream.flush()

    def _draw(self) -> None:
        if self._shown is None:
            self._shown = self._start()
        progress, task = self._shown
        rounds, done_bytes = divmod(self._done_bytes, self._total_bytes)
        label = f"{self._label} (pass {rounds + 1})" if rounds else self._label
        label = _elided(label, progress.console.width - self._room)
        progress.update(task, completed=done_bytes, description=label, refresh=True)

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(file=self._stream, no_color=None if self._has_color else True)
        is_wide = console.width >= _WIDE
        self._room = _WIDE_ROOM if is_wide else _NARROW_ROOM
        progress = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(_BAR)] if is_wide else []),
            DownloadColumn(binary_units=True),
            *([TransferSpeedColumn()] if is_wide else []),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task = progress.add_task(self._label, total=self._total_bytes)
        progress.start()
        return progress, task


def _elided(label: str, columns: int) -> str:
    """Return a label of at most `columns` columns; its end distinguishes checkpoints."""
    columns = max(columns, _LEAST_LABEL)
    return label if len(label) <= columns else f"...{label[3 - columns :]}"


def _ignoring_errors(work: Callable[[], object]) -> bool:
    """Run a step that only concerns the line; return whether it succeeded."""
    try:
        work()
    except Exception:  # a closed terminal, no rich: the work the line is about goes on
        return False
    return True
