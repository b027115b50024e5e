# SPDX-License-Identifier: Apache-2.0
"""Directory and file names of a callback: fixed, or from functions of the callback parameters.

A run that finds files of its prefix saves under `{prefix}_1`, `{prefix}_2`, ...; rank 0 chooses the
number for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import (
    check_directory,
    check_prefix,
    check_prefix_result,
    checkpoint_name,
    restart_prefix,
    step_in_epoch,
)
from ckptmgr.core.shard_names import SET_FORMAT
from ckptmgr.files.save.job import Naming
from ckptmgr.series.reader import free_name
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNames:
    """The checked arguments `prefix` and `directory` of a callback.

    With a function, the fixed value is empty or the working directory. `prefix_of` returns the
    whole name without its extension.
    """

    prefix: str
    prefix_of: Callable[[Any], object] | None
    directory: Path
    directory_of: Callable[[Any], object] | None

    @classmethod
    def checked(cls, prefix: object, directory: object) -> GivenNames:
        """Return the checked arguments.

        Raises:
            ValueError, TypeError, NotADirectoryError: One is unusable; messages as MindSpore's.
        """
        found = check_prefix(prefix)
        is_fixed = directory is not None and not callable(directory)
        return cls(
            prefix="" if callable(found) else found,
            prefix_of=found if callable(found) else None,
            directory=check_directory(directory) if is_fixed else Path.cwd(),
            directory_of=directory if callable(directory) else None,
        )

    def placed(self, place: Callable[[Path], Path]) -> GivenNames:
        """Return these names with the directory that `place` returns for the given one."""
        found = self.directory_of
        if found is None:
            return replace(self, directory=place(self.directory))
        return replace(self, directory_of=lambda params: place(check_directory(found(params))))

    @property
    def is_fixed(self) -> bool:
        """Whether neither is a function."""
        return self.prefix_of is None and self.directory_of is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackTarget:
    """Destination of a save.

    `is_numbered` says whether epoch and step follow the prefix. Without them the prefix is the
    whole name, saves may overwrite each other, and retention never removes any.
    """

    writer: SeriesWriter
    prefix: str
    is_numbered: bool

    def naming(self, params: Any) -> Naming:
        """Return the naming of a save of the present step."""
        if not self.is_numbered:
            return _GivenName(self.prefix)
        position = step_in_epoch(int(params.cur_step_num), int(params.batch_num))
        return _EpochAndStep(
            writer=self.writer,
            prefix=self.prefix,
            epoch=int(params.cur_epoch_num),
            step_in_epoch=position,
        )


@dataclass(frozen=True, slots=True)
class _GivenName:
    """The naming of a save whose whole name a function returned."""

    name: str

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int | None]:
        return f"{self.name}.{format}", None


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpochAndStep:
    """The naming of MindSpore, `{prefix}-{epoch}_{step}`; a sharded save overwrites no other."""

    writer: SeriesWriter
    prefix: str
    epoch: int
    step_in_epoch: int

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int | None]:
        def name_of(attempt: int) -> str:
            return checkpoint_name(
                self.prefix,
                self.epoch,
                step_in_epoch=self.step_in_epoch,
                format=format,
                attempt=attempt,
            )

        if format != SET_FORMAT:
            return name_of(0), None
        return free_name(self.writer.store, self.writer.series, step, present, name_of=name_of)


class CallbackSeries:
    """The series that a callback writes: one, or one for each directory.

    Raises:
        ValueError: The names are too long, or functions are given with many ranks, each of which
            would call its own.
        OSError: The directory cannot be created.
    """

    def __init__(self, given: GivenNames, run: Run) -> None:
        if run.team.is_many and not given.is_fixed:
            raise ValueError(
                "a function for the prefix or the directory with a coordinator: each rank would call its own; give strings, "
                "the files of the ranks have their numbers in their names"
            )
        self.given = given
        self.directory = given.directory
        self._run = run
        self._writers: dict[tuple[Path, str], SeriesWriter] = {}
        # Names from a function share one series of this object's own, and are never pruned.
        has_own = given.prefix_of is not None
        self._series = f"ModelCheckpoint-{id(self):x}" if has_own else given.prefix
        self._is_settled = not given.is_fixed
        if given.is_fixed:
            self._writer(self.directory, self._series)  # raises for names that are too long
        if not run.team.is_many:
            self.settle()

    @property
    def writer(self) -> SeriesWriter:
        """The writer of the series in the directory."""
        return self._writer(self.directory, self._series)

    def settle(self) -> None:
        """Choose the series of this run once, on rank 0 for all ranks.

        Raises:
            RankFailed, RanksMissing: The ranks failed to agree on one.
        """
        if not self._is_settled:
            self.writer.take_series(self._unused_prefix)
            self._is_settled = True

    def at(self, params: Any) -> CallbackTarget:
        """Return the target of a save now; functions are called at every step, as in MindSpore."""
        given, prefix = self.given, ""
        if given.prefix_of is not None:
            prefix = check_prefix_result(given.prefix_of(params))
        if given.directory_of is not None:
            self.directory = check_directory(given.directory_of(params))
            self.writer.store.make_directory()
        writer, is_numbered = self.writer, given.prefix_of is None
        return CallbackTarget(
            writer=writer,
            prefix=writer.series if is_numbered else prefix,
            is_numbered=is_numbered,
        )

    def for_breakpoint(self) -> tuple[SeriesWriter, str]:
        """Return the writer of a breakpoint file, and the prefix of its name.

        With many ranks each one has a prefix of its own: a rank fails alone, and the others neither
        wait for its file nor resume from it.
        """
        prefix, ranks = self.given.prefix or "breakpoint", self._run.team.coordinator
        if ranks is None:
            writer = self.writer
        else:
            prefix = f"{prefix}.rank_{ranks.rank}"
            alone = self._run.alone().writer(self.directory, prefix, has_epochs=True)
            writer = self._writers.setdefault((self.directory, prefix), alone)
            writer.belong_to(self.writer)
        names = self._names(writer)
        return writer, restart_prefix(prefix, names, is_breakpoint=True)

    def close(self) -> None:
        """Release the leases."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, directory: Path, series: str) -> SeriesWriter:
        writer = self._writers.get((directory, series))
        if writer is None:
            writer = self._run.writer(directory, series, has_epochs=True)
            writer.starts_anew = True  # MindSpore's restarts have a series of their own
            self._writers[directory, series] = writer
        return writer

    def _unused_prefix(self) -> str:
        writer = self.writer
        writer.store.make_directory()
        return restart_prefix(self.given.prefix, self._names(writer))

    def _names(self, writer: SeriesWriter) -> list[str]:
        fs = writer.store.fs
        return [] if fs.status(self.directory) is None else sorted(fs.list(self.directory))
