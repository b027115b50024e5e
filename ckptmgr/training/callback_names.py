# SPDX-License-Identifier: Apache-2.0
"""Where a callback saves, and what its files are called: as given, or as functions of the callback parameters say.

A run that finds files of its prefix continues under `{prefix}_1`, `{prefix}_2`, ...; rank 0 finds that out for all ranks.
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
from ckptmgr.parallel.team import ALONE
from ckptmgr.series.reader import free_name
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.parts import RunParts


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNames:
    """What a callback was told about its files, checked.

    Attributes:
        prefix: Start of the names; empty when there is a function.
        prefix_of: Returns the whole name without ending, given the callback parameters; or None.
        directory: Where they lie; the working directory when there is a function.
        directory_of: Returns where, given the callback parameters; or None.
    """

    prefix: str
    prefix_of: Callable[[Any], object] | None
    directory: Path
    directory_of: Callable[[Any], object] | None

    @classmethod
    def checked(cls, prefix: object, directory: object) -> GivenNames:
        """Return them.

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

    @property
    def is_fixed(self) -> bool:
        """Whether there is no function."""
        return self.prefix_of is None and self.directory_of is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes.

    Attributes:
        writer: Of the series.
        prefix: Start of the name, or all of it.
        is_numbered: Whether epoch and step follow. Others may overwrite each other, and are never pruned.
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
    """The naming of a save whose whole name a function has given."""

    name: str

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int | None]:
        return f"{self.name}.{format}", None


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpochAndStep:
    """The naming of MindSpore, `{prefix}-{epoch}_{step}`; a save of many ranks overwrites none."""

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

    Args:
        given: What the callback was told.
        parts: Makes the writers.

    Raises:
        ValueError: There are functions, and many ranks, of which each would call its own; or the names would be too long.
        OSError: The directory cannot be made.
    """

    def __init__(self, given: GivenNames, parts: RunParts) -> None:
        if parts.team.is_many and not given.is_fixed:
            raise ValueError(
                "a function for the prefix or the directory with a coordinator: each rank would call its own; give strings, "
                "the files of the ranks have their numbers in their names"
            )
        self.given = given
        self.directory = given.directory
        self._parts = parts
        self._writers: dict[tuple[Path, str], SeriesWriter] = {}
        # Names that a function makes share one series that is this object's own: they are never pruned.
        has_own = given.prefix_of is not None
        self._series = f"ModelCheckpoint-{id(self):x}" if has_own else given.prefix
        self._is_settled = not given.is_fixed
        if given.is_fixed:
            self._writer(self.directory, self._series)  # which refuses names that are too long
        if not parts.team.is_many:
            self.settle()

    @property
    def writer(self) -> SeriesWriter:
        """The writer of the series in the directory."""
        return self._writer(self.directory, self._series)

    def settle(self) -> None:
        """Choose the series of this run, on rank 0 for all ranks; only the first time.

        Raises:
            RankFailed, RanksMissing: The ranks could not agree on one.
        """
        if not self._is_settled:
            self.writer.take_series(self._unused_prefix)
            self._is_settled = True

    def at(self, params: Any) -> Target:
        """Return where a save of the present step would go; functions are called at every step, as in MindSpore."""
        given, prefix = self.given, ""
        if given.prefix_of is not None:
            prefix = check_prefix_result(given.prefix_of(params))
        if given.directory_of is not None:
            self.directory = check_directory(given.directory_of(params))
            self.writer.store.fs.make_directory(self.directory, mode=0o700)
        writer, is_numbered = self.writer, given.prefix_of is None
        return Target(
            writer=writer,
            prefix=writer.series if is_numbered else prefix,
            is_numbered=is_numbered,
        )

    def for_breakpoint(self) -> tuple[SeriesWriter, str]:
        """Return the writer of a breakpoint file, and the prefix of its name.

        A rank fails alone, and what it holds is its own: the others neither wait for it nor resume from it.
        """
        prefix, ranks = self.given.prefix or "breakpoint", self._parts.team.coordinator
        if ranks is None:
            writer = self.writer
        else:
            prefix = f"{prefix}.rank_{ranks.rank}"
            parts = replace(self._parts, team=ALONE)
            alone = parts.writer(self.directory, prefix, has_epochs=True)
            writer = self._writers.setdefault((self.directory, prefix), alone)
        names = self._names(writer)
        return writer, restart_prefix(prefix, names, is_breakpoint=True)

    def close(self) -> None:
        """Let other processes write the series."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, directory: Path, series: str) -> SeriesWriter:
        writer = self._writers.get((directory, series))
        if writer is None:
            writer = self._parts.writer(directory, series, has_epochs=True)
            self._writers[directory, series] = writer
        return writer

    def _unused_prefix(self) -> str:
        writer = self.writer
        writer.store.fs.make_directory(self.directory, mode=0o700)
        return restart_prefix(self.given.prefix, self._names(writer))

    def _names(self, writer: SeriesWriter) -> list[str]:
        fs = writer.store.fs
        return [] if fs.status(self.directory) is None else sorted(fs.list(self.directory))
