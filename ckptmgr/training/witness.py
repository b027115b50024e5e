# SPDX-License-Identifier: Apache-2.0
"""`Witness`: records each step, and compares those that come again after a resumption.

A run that dies at step 1,237 and resumes from 1,200 trains 37 steps a second time. If nothing has
changed, they give the same bits. `.<series>.witness` has the steps since the last checkpoints, at most
65,536 of them (`witness_record`).

The file tells and decides nothing: it is never synced, and a damaged one counts as absent. A metric
on a device is copied without a wait, and recorded with a later step. With a key there are no marks
of batches and generators: a CRC32 would say something about the data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.state.arrays import is_wrapper
from ckptmgr.state.paths import StateMismatch
from ckptmgr.training.companions import Companion
from ckptmgr.training.witness_record import (
    MOST_BYTES,
    MOST_METRICS,
    MOST_NAME_BYTES,
    NOT_GIVEN,
    Record,
    Witnessed,
    difference_of,
    head_of,
    packed,
    packed_metrics,
    parsed,
    place_of,
)

if TYPE_CHECKING:
    from ckptmgr.config.subjects import Resume
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.files.save.job import SaveFacts
    from ckptmgr.io.filesystem import OutputFile
    from ckptmgr.observe.observers import Observers
    from ckptmgr.series.writer import SeriesWriter
    from ckptmgr.training.data_state import DataState
    from ckptmgr.training.history import RunPast

_LOG = logging.getLogger(__name__)
_MOST_RUNS = 16
_MOST_WAITING = 16  # steps whose metrics a device still computes
_LEFT_OUT = -1


class _Waiting(NamedTuple):
    """A metric that a device computes: whether it is on the host by now, and how it is read."""

    is_ready: Callable[[], bool]
    read: Callable[[], float]


def _taken(value: Any) -> float | _Waiting:
    """Return a metric; of one on a device what becomes of it, without a wait."""
    found = _begun(value)
    if isinstance(found, _Waiting):
        return found
    try:
        return float(found)
    except (TypeError, ValueError, OverflowError):  # the save refuses it
        return NOT_GIVEN


def _begun(value: Any) -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if is_wrapper(value):  # reading a DTensor may wait for other ranks
            return NOT_GIVEN
        if value.is_cpu:
            return value.item()
        if not value.is_cuda:
            return NOT_GIVEN
        copied = value.detach().to("cpu", non_blocking=True)  # into pinned memory
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        return _Waiting(event.query, copied.item)
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return NOT_GIVEN
        value.copy_to_host_async()
        return _Waiting(value.is_ready, value.item)
    if isinstance(value, np.ndarray):
        return value.item()
    if isinstance(getattr(value, "shape", None), tuple) and not isinstance(value, np.generic):
        return NOT_GIVEN  # of another library: reading it may wait
    return value


def _is_ready(value: float | _Waiting) -> bool:
    try:
        return not isinstance(value, _Waiting) or value.is_ready()
    except Exception:  # an array that was given away
        return True


def _read(value: float | _Waiting) -> float:
    if not isinstance(value, _Waiting):
        return value
    try:
        return float(value.read()) if value.is_ready() else NOT_GIVEN
    except Exception:  # see above; or its computation failed
        return NOT_GIVEN


class Witness(Companion):
    """Records the steps of a run, and compares those that come again after a resumption.

    Args:
        writer: The writer of the series, whose directory holds the file.
        past: The past of the run, with the metrics of its last step.
        observers: Receive `witness.equal` and `witness.differs`.

    Attributes:
        data: Has the marks of batches and generators; None for none.
        result: Result of the comparison so far.
    """

    def __init__(self, writer: SeriesWriter, past: RunPast, observers: Observers) -> None:
        self._store, self._series = writer.store, writer.series
        self._runs: Callable[[], Sequence[str]] = lambda: (writer.run_id, *writer.parent_run_ids)
        self._past, self._observers = past, observers
        self.data: DataState | None = None
        self._file: OutputFile | None = None
        self._columns: dict[str, int] = {}  # of metrics, in the order of the head
        self._number = 0
        self._is_begun = writer.has_saved  # there is a checkpoint to resume from
        self._first: SaveHandle | None = None
        self._is_new = self._is_head_old = True  # the next record begins a file
        self._has_failed = self._is_waited_for = False
        self._waiting: deque[tuple[int, list[Any], tuple[int, int]]] = deque()
        self._earlier: dict[int, Record] = {}
        self._last = 0  # of the earlier steps
        self._raises = False
        self.result = Witnessed()

    def __del__(self) -> None:
        """Close the file of a manager that nothing has closed."""
        if hasattr(self, "_file"):
            self._close()

    def start_over(self) -> None:
        """Begin again with the next save: the records are of another past."""
        self._close()
        self._waiting.clear()
        self._earlier, self._columns, self.result = {}, {}, Witnessed()
        self._is_begun, self._first, self._is_new = False, None, True

    def rolled_back(self) -> None:
        """Begin again with the next step: a resumption before the next save must not find the old ones."""
        is_begun, first = self._is_begun, self._first
        self.start_over()
        self._is_begun, self._first = is_begun, first

    def resumed(self, checkpoint: Checkpoint, how: Resume, *, is_own: bool) -> int:
        """Compare the steps from now on with those recorded after a checkpoint; return their number.

        `is_own` says whether as many ranks saved it as are here.
        """
        self.start_over()
        self._is_begun = True
        data = self._store.read_note(name_of(self._series), most_bytes=MOST_BYTES + 1)
        found = parsed(data or b"", after=checkpoint.step)
        runs = (checkpoint.run_id, *checkpoint.parent_run_ids)
        if found is None or found.runs.isdisjoint(runs):
            return 0
        self._columns = {name: index for index, name in enumerate(found.names)}
        self._earlier, self._number = found.records, found.next_number
        # After a chosen step the recorded ones that do not come again are of another future.
        self._is_new, self._is_head_old = how.at is not None, True
        self._last, self._raises = max(found.records, default=0), how.on_difference == "raise"
        whys = {
            "it begins at a chosen step": how.at is not None,
            "batches are skipped": how.skip_batches > 0,
            "the data may differ": "data" in how.may_differ,
            "it has another number of ranks": not is_own,
        }
        within = {name: one for name, one in (how.tolerance or {}).items() if name in found.names}
        others = tuple(why for why, is_so in whys.items() if is_so)
        self.result = Witnessed(recorded=len(found.records), within=within, others=others)
        return len(found.records)

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """Record the steps once a save is durable: a resumption can begin there."""
        self._first = handle

    def step_ended(self, step: int) -> None:
        """Record and compare a step, or keep it until its metrics are on the host.

        Raises:
            StateMismatch: A step differs, and `on_difference="raise"`; its state is not saved.
        """
        if not self._has_begun() or (self._has_failed and not self._earlier):
            return
        last = self._past.unsaved
        values = self._in_columns((last and last.metrics) or {})
        marks = (0, 0) if self.data is None else self.data.marks(step)
        if not (self._waiting or self._is_waited_for):
            self._take(Record(step, packed_metrics(values), *marks))
            return
        self._waiting.append((step, values, marks))
        while self._waiting:
            first, values, marks = self._waiting[0]
            if not all(map(_is_ready, values)) and len(self._waiting) <= _MOST_WAITING:
                return
            self._waiting.popleft()
            self._take(Record(first, packed_metrics([*map(_read, values)]), *marks))

    def _has_begun(self) -> bool:
        first = None if self._is_begun else self._first
        if first is not None and first.durable.done():
            self._is_begun = first.durable.exception() is None
        return self._is_begun

    def _in_columns(self, metrics: Mapping[str, Any]) -> list[Any]:
        """Return the metrics in their columns; `_is_waited_for` says whether a device computes any."""
        values: list[Any] = [NOT_GIVEN] * MOST_METRICS
        self._is_waited_for = False
        for name, value in metrics.items():
            column = self._columns.get(name)
            if column is None:
                column = self._add(name)
            if type(value) is not float and column != _LEFT_OUT:
                value = _taken(value)
                self._is_waited_for = self._is_waited_for or type(value) is _Waiting
            if column != _LEFT_OUT:
                values[column] = value
        return values

    def _add(self, name: str) -> int:
        """Give a metric a column, or leave it out."""
        taken = [one for one, column in self._columns.items() if column != _LEFT_OUT]
        is_in = len(taken) < MOST_METRICS and len(json.dumps(name)) <= MOST_NAME_BYTES
        if not is_in and _LEFT_OUT not in self._columns.values():
            _LOG.info("of the metrics, where steps come again, %s are compared, not %s", ", ".join(taken), name)  # fmt: skip
        self._is_head_old = self._is_head_old or is_in
        self._columns[name] = len(taken) if is_in else _LEFT_OUT
        return self._columns[name]

    @property
    def _names(self) -> list[str]:
        return [name for name, column in self._columns.items() if column != _LEFT_OUT]

    def _take(self, record: Record) -> None:
        if self._earlier:
            self._compare(record)
        if self._has_failed:
            return
        try:
            self._write(record)
        except (OSError, CkptmgrError) as error:  # training goes on
            self._has_failed = True
            self._close()
            _LOG.warning(
                "steps are recorded no longer, so that a resumption could compare those that come again: %s", error
            )  # fmt: skip

    def _write(self, record: Record) -> None:
        file = self._file
        if file is None:
            file = self._file = self._opened()
        if self._is_head_old:
            file.write_at(0, self._head())
            self._is_head_old = False
        file.write_at(place_of(self._number), packed(record, self._number))
        self._number += 1

    def _opened(self) -> OutputFile:
        if self._is_new:
            path = self._store.directory / name_of(self._series)
            self._store.write_note(path, self._head(), series=self._series)
            self._number, self._is_new, self._is_head_old = 0, False, False
        return self._store.change_note(name_of(self._series))

    def _head(self) -> bytes:
        return head_of(self._names, tuple(self._runs())[:_MOST_RUNS])

    def _compare(self, record: Record) -> None:
        before = self._earlier.pop(record.step, None)
        if before is not None:
            difference = difference_of(before, record, self._names, self.result.within)
            if difference:
                self._differs(record.step, difference)
                return
            self.result = replace(self.result, equal=self.result.equal + (difference is None))
        if not self._earlier or record.step >= self._last:
            self._earlier, self.result = {}, replace(self.result, is_over=True)
            if self.result.equal:
                _LOG.info("%s", self.result)
                self._emit("witness.equal", record.step)

    def _differs(self, step: int, difference: str) -> None:
        text = f"step {step}: {difference}"
        self._earlier, self.result = {}, replace(self.result, difference=text, is_over=True)
        self._emit("witness.differs", step)
        if self._raises:
            self._past.unsaved = None  # no exit saves it
            raise StateMismatch(
                str(self.result),
                hint='to go on with a warning: Resume(on_difference="warn"); for kernels that are not deterministic:'
                " Resume(tolerance={METRIC: DIFFERENCE})",
            )
        _LOG.warning("%s", self.result)
        self._close()
        self._is_new = True  # the rest of the earlier steps is of another future

    def _emit(self, name: str, step: int) -> None:
        self._observers.emit(
            name,
            series=self._series,
            step=step,
            figures={"equal_steps": self.result.equal, "recorded_steps": self.result.recorded},
            notes=(str(self.result),),
        )

    def closing(self) -> None:
        """Record nothing until the next save, which takes the lease again."""
        self._close()
        self._is_begun, self._first, self._is_new = False, None, True

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def name_of(series: str) -> str:
    """Return the name of the file of a series."""
    return f".{series}.witness"
