# SPDX-License-Identifier: Apache-2.0
"""Commit strategies of a series: who must agree before a checkpoint exists, and where it goes.

`SeriesWriter` asks a `Commit` for what many processes do together, and a `Destination` for what another
place than the directory needs. `Alone` and `Here` are those of a plain run; `parallel.rank_commit`
has that of many ranks, `remote.upload` the upload. To add one:

1. Write a class with the methods of `Commit` or `Destination`; take `Alone` or `Here` for a start.
2. `begin` returns a `BegunSave`: between its `commit` and `end` the checkpoint must be durable.
3. Hand it to `SeriesWriter(commit=...)` or `(destination=...)` in `training/parts.py` `RunParts.writer`.
4. Add its crash points to `tests/faults` or `tests/remote`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ckptmgr.core.errors import StoreFull
from ckptmgr.core.model import Checkpoint
from ckptmgr.files.save.job import SaveJob, SaveOrder
from ckptmgr.io.space_errors import is_helped_by_removal
from ckptmgr.series.candidates import Candidates, Skipped, first_that_loads
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    from ckptmgr.series.writer import SeriesWriter

_Loaded = TypeVar("_Loaded")


class BegunSave:
    """A save with a name and a position in its series; it is committed or abandoned once."""

    def __init__(self, writer: SeriesWriter, job: SaveJob, order: SaveOrder) -> None:
        self._writer = writer
        self._job = job
        self.order = order

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Record the published file; return its checkpoint."""
        return self._writer.publish(manifest)

    def make_room(self, error: StoreFull) -> bool:
        """Remove the checkpoints that the policy of the job drops; return whether the write may be tried again."""
        retention = self._job.retention
        if retention is None or not is_helped_by_removal(error):
            return False
        return self._writer.make_room(retention, error)

    def abandon(self, error: Exception) -> None:
        """Record that the save failed; it left no file."""
        self._writer.destination.note_failed(error)

    def end(self) -> None:
        """Apply the retention policy of the job; call it only after the checkpoint is durable."""
        if self._job.retention is not None:
            self._writer.retain(self._job.retention)


class Commit(Protocol):
    """Steps that the processes of a run do together; all of them make the same calls in the same order."""

    @property
    def is_first(self) -> bool:
        """Whether this process removes, pins and counts starts: only one of a run may."""
        ...

    def take_series(self, choose: Callable[[], str]) -> str:
        """Return the unused series that `choose` returns, before the first save."""
        ...

    def prepare(self) -> None:
        """Prepare for a save or a resumption."""
        ...

    def first_that_loads(
        self, candidates: Candidates[_Loaded]
    ) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
        """Return the first candidate that every process loads; see `candidates.first_that_loads`."""
        ...

    def all_prepared(self, *, is_changing: bool = False) -> AbstractContextManager[None]:
        """Leave the `with` block once every process of the run has run its own without an error.

        One that changes the states says so, for the message of the other processes.

        Raises:
            Exception: From the block, here or in another process.
        """
        ...

    def held_by_all(self, target: int, steps: Sequence[int]) -> list[int]:
        """Return the steps up to `target` that every process of the run has a copy of in memory.

        `steps` are those of this process.
        """
        ...

    def begin(self, job: SaveJob) -> BegunSave:
        """Choose the name and the position of a save.

        Raises:
            StoreLocked: Another live process writes this series, or its mirror.
        """
        ...

    def recover(self) -> list[str]:
        """Remove the leftovers of dead writers under the lease; return one sentence per action."""
        ...

    def collect(self) -> list[str]:
        """Remove uncommitted files after a retention; return one sentence per action."""
        ...


class OfWriter:
    """A strategy of one writer, which owns it: no circle, so that a dropped run ends at once."""

    def __init__(self, writer: SeriesWriter) -> None:
        self._reference = weakref.ref(writer)

    @property
    def _writer(self) -> SeriesWriter:
        writer = self._reference()
        if writer is None:
            raise ReferenceError("the run of this strategy has ended")
        return writer


class Alone(OfWriter):
    """One process, which decides by itself."""

    is_first = True

    def take_series(self, choose: Callable[[], str]) -> str:
        """Return the series that `choose` returns."""
        return choose()

    def prepare(self) -> None:
        """Take the lease."""
        self._writer.open()

    def first_that_loads(
        self, candidates: Candidates[_Loaded]
    ) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
        """Return the first candidate that loads."""
        return first_that_loads(candidates, self._writer.listing.fs)

    def all_prepared(self, *, is_changing: bool = False) -> AbstractContextManager[None]:
        """Return a block without an effect."""
        del is_changing
        return contextlib.nullcontext()

    def held_by_all(self, target: int, steps: Sequence[int]) -> list[int]:
        """Return the steps up to `target`."""
        return [step for step in steps if step <= target]

    def begin(self, job: SaveJob) -> BegunSave:
        """Take the lease, and choose the name and the position of a save."""
        writer = self._writer
        writer.open()
        if writer.rival is not None:
            raise writer.rival
        options = job.options or writer.options
        present = writer.present_at(job.facts.step)
        name, attempt = job.naming.free_name(job.facts.step, present, format=options.extension)
        facts = replace(job.facts, attempt=attempt)
        place = writer.next_place(facts, present)
        order = SaveOrder(
            name=name,
            items=job.items,
            options=options,
            series=writer.series,
            draft=writer.draft(name, options, facts, place=place, retention=job.retention),
            metadata=job.metadata,
        )
        return BegunSave(writer, job, order)

    def recover(self) -> list[str]:
        """Remove the leftovers of dead writers."""
        return self._writer.store.recover(self._writer.series)

    def collect(self) -> list[str]:
        """Do nothing: a save that failed has left no file."""
        return []


class Destination(Protocol):
    """Where the written files of a run go."""

    @property
    def place(self) -> Store:
        """The place that is listed and read."""
        ...

    def open(self, take: Callable[[], None]) -> None:
        """Have the lease taken by `take`, or checked."""
        ...

    def clean_up(self) -> None:
        """Remove what killed runs left here besides their files; the lease is held."""
        ...

    def close(self, release: Callable[[], None]) -> None:
        """Have the lease released by `release`."""
        ...

    def begin_at(self) -> None:
        """Take the present checkpoints as saved before this run."""
        ...

    def present_at(self, step: int, last: Checkpoint | None) -> Sequence[Checkpoint]:
        """Return the checkpoints that decide name, number and predecessor of a save.

        Raises:
            StoreLocked: Another run has saved since this one began.
        """
        ...

    def keep_at(self) -> str | None:
        """Return the mark of the place at which the recorded policy is applied; None for the directory."""
        ...

    def publish(self, manifest: Manifest) -> None:
        """Bring a written file to its place; it is durable there afterwards."""
        ...

    def note_failed(self, error: Exception) -> None:
        """Add a note to the error of a file that could not be written, where that helps."""
        ...

    def retained(self) -> None:
        """Clean up at the place after a retention; a failure is logged."""
        ...

    def check_can_change(self) -> None:
        """Raise UnsupportedCheckpoint where no manifest can be changed after its save."""
        ...


class Here(OfWriter):
    """The directory in which the files are written."""

    def __init__(self, writer: SeriesWriter) -> None:
        super().__init__(writer)
        self.place = writer.store

    def open(self, take: Callable[[], None]) -> None:
        """Have the lease taken."""
        take()

    def clean_up(self) -> None:
        """Do nothing."""

    def close(self, release: Callable[[], None]) -> None:
        """Have the lease released."""
        release()

    def begin_at(self) -> None:
        """Do nothing: the lease keeps other runs away."""

    def present_at(self, step: int, last: Checkpoint | None) -> Sequence[Checkpoint]:
        """Return those near the step and the last save, from the listing in memory if there is one."""
        return self.place.scan() if last is None else self.place.scan_near(step, last.sequence)

    def keep_at(self) -> str | None:
        """Return None."""
        return None

    def publish(self, manifest: Manifest) -> None:
        """Do nothing: the file is at its place."""

    def note_failed(self, error: Exception) -> None:
        """Do nothing: the error names the file."""

    def retained(self) -> None:
        """Do nothing."""

    def check_can_change(self) -> None:
        """Allow it."""
