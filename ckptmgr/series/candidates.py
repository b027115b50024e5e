# SPDX-License-Identifier: Apache-2.0
"""Resume candidates: checkpoints in the order in which a run tries them, and those it skips.

A run tries the newest checkpoint first, verifies each, and skips a damaged one with a reason.
Leftovers and unfinished files raise nothing, and an empty result is no error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.model import UNFINISHED, UNUSABLE, Checkpoint, State
from ckptmgr.core.names import is_of_prefix, parse_name, parse_step_name
from ckptmgr.core.notes import add_note
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.passing_errors import (
    is_damage,
    is_gone,
    may_be_whole,
    may_return,
    pause_before_retry,
)
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.policy.lines import lines_of, meant_line
from ckptmgr.store.listing import lone_sets

if TYPE_CHECKING:
    from ckptmgr.files.load.in_place import InPlaceState
    from ckptmgr.files.load.state import StoredState
    from ckptmgr.series.reader import NamedValues, SeriesReader
    from ckptmgr.store.manifest.codec import Manifest

_SHOWN_SERIES = 5
_LONE_SET = "the save was interrupted before its end, or the manifest was lost; if there is one, copy it here, too"
_Loaded = TypeVar("_Loaded")
_LoadedCo = TypeVar("_LoadedCo", covariant=True)


class Candidates(Protocol[_LoadedCo]):
    """The checkpoints from which a run may go on, and how it loads one of them."""

    def listed(self) -> Sequence[Checkpoint]:
        """List the directory; return the candidates, in the order in which they are tried."""
        ...

    def load(self, checkpoint: Checkpoint) -> _LoadedCo:
        """Return the verified content of a candidate; nothing else changes yet."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was skipped.

    Attributes:
        checkpoint: The checkpoint.
        reason: Why it was skipped.
        is_damaged: Whether damage is proven, as opposed to a wrong key or an unknown version.
        may_return: Whether a later attempt may find it intact: its data is missing now, or the
            disk cannot read it.
    """

    checkpoint: Checkpoint
    reason: str
    is_damaged: bool = False
    may_return: bool = False

    @classmethod
    def because(cls, checkpoint: Checkpoint, error: Exception) -> Self:
        """Return a checkpoint that failed to load with `error`."""
        return cls(
            checkpoint=checkpoint,
            reason=error.message if isinstance(error, CkptmgrError) else str(error),
            is_damaged=is_damage(error),
            may_return=may_return(error),
        )


def doubt_of(skipped: Sequence[Skipped]) -> str | None:
    """Return a warning that names the skipped checkpoints that may return, or None."""
    doubts = [f"{one.checkpoint.name}: {one.reason}" for one in skipped if one.may_return]
    return f"a newer checkpoint may come back: {'; '.join(doubts)}" if doubts else None


def notes_of(skipped: Sequence[Skipped]) -> tuple[str, ...]:
    """Return one sentence for each skipped checkpoint."""
    return tuple(f"skipped {one.checkpoint.name}: {one.reason}" for one in skipped)


def newest_first(
    checkpoints: Sequence[Checkpoint], own_runs: Set[str] = frozenset()
) -> list[Checkpoint]:
    """Return the finished checkpoints, newest first, emergency saves last, and those of strangers.

    Those of the line of runs that is meant come before those of other lines; `own_runs` are the run
    that asks and its parents. The state of an emergency save may be from the middle of a step.
    Checkpoints with an unreadable manifest come first: their age is unknown, and the caller must
    report each one that it skips.
    """
    usable = [c for c in checkpoints if c.state not in UNFINISHED]
    meant = meant_line(lines_of(usable), own_runs)

    def is_of_other_line(c: Checkpoint) -> bool:
        if meant is None or c.is_unproven:
            return False
        return c.run_id not in meant.runs if c.run_id else c.sequence == 0

    return sorted(
        usable,
        key=lambda c: (
            c.state is not State.OTHER_OWNER,
            c.is_unreadable,
            not c.is_emergency,
            not is_of_other_line(c),
            *c.order,
            c.saved_at,
        ),
        reverse=True,
    )


def load_with_retry(
    candidates: Candidates[_Loaded], checkpoint: Checkpoint, disk: FileSystem
) -> _Loaded:
    """Load a candidate, again after a transient error, which opens the files again."""
    try:
        return candidates.load(checkpoint)
    except (OSError, MemoryError) as error:
        pause_before_retry(error, disk)
    return candidates.load(checkpoint)


def first_that_loads(
    candidates: Candidates[_Loaded], disk: FileSystem
) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
    """Return the first candidate that loads, its content, and the candidates skipped before it.

    Raises:
        OSError: The disk cannot read a candidate that may be intact; an older one must not replace
            it.
        KeyProblem, UnsupportedCheckpoint, OSError: No candidate loads, and one of them may need
            only the right key, version or disk: a fresh start would silently lose the run.
    """
    skipped = []
    problems: list[tuple[Checkpoint, Exception]] = []
    for checkpoint in candidates.listed():
        if checkpoint.state in UNUSABLE:
            if checkpoint.obstacle is not None:
                _refuse_to_pass_over(checkpoint, checkpoint.obstacle)
                problems.append((checkpoint, checkpoint.obstacle))
            reason = checkpoint.problem or "corrupt"
            skipped.append(
                Skipped(
                    checkpoint=checkpoint,
                    reason=reason,
                    is_damaged=checkpoint.obstacle is None or is_damage(checkpoint.obstacle),
                    may_return=may_return(checkpoint.obstacle),
                )
            )
            continue
        try:
            return checkpoint, load_with_retry(candidates, checkpoint, disk), skipped
        except (CkptmgrError, OSError) as error:
            _refuse_to_pass_over(checkpoint, error)
            problems.append((checkpoint, error))
            skipped.append(Skipped.because(checkpoint, error))
    # The error of an unproven file must not hide that of a checkpoint of this run.
    for _, problem in sorted(problems, key=lambda one: one[0].is_unproven):
        if not (isinstance(problem, CorruptCheckpoint) or is_gone(problem)):
            raise problem
    return None, None, skipped


def _refuse_to_pass_over(checkpoint: Checkpoint, error: Exception) -> None:
    """Raise `error` if the checkpoint may be intact: then an older one must not replace it."""
    if may_be_whole(error):
        add_note(
            error,
            f"ckptmgr: {checkpoint.path} may be whole, so nothing older is used in its place; mend what keeps it from "
            "being read, or move it away with its manifest to go on without it",
        )
        raise error


def of_strangers(present: Sequence[Checkpoint], chosen: Checkpoint | None) -> list[Skipped]:
    """Return the checkpoints that another user put beside the newest own one, if they seem newer."""
    if chosen is None or chosen.state is State.OTHER_OWNER:
        return []
    return [
        Skipped(checkpoint=one, reason=one.problem or "")
        for one in newest_first(present)
        if one.state is State.OTHER_OWNER and not one.is_bare and one.order > chosen.order
    ]


def without_manifest(
    present: Sequence[Checkpoint],
    prefix: str,
    chosen: Checkpoint | None,
    *,
    tried: Collection[Path] = (),
) -> list[Skipped]:
    """Return the files of a prefix without manifests that are not known to be older than `chosen`.

    Such a file may be of another run, so it never replaces a checkpoint with a manifest. The report
    warns a user who copied the data without the manifests. `chosen` is the checkpoint that the run
    resumes from, or None; `tried` are the paths of candidates, which are reported elsewhere.
    """
    reason = (
        "it has no manifest, so nothing says that it belongs to this series; copy the "
        ".manifest.json files, too, or take it as it is with Resume(allow_bare=True)"
    )
    bare = [one for one in present if one.is_bare and one.path not in tried]
    found = []
    for one in bare:
        by_step, by_epoch = parse_step_name(one.name), parse_name(one.name)
        if by_step is not None and by_step.prefix == prefix != one.series:
            # Only beside another bare file its step says that it is older.
            is_older = chosen is not None and chosen.is_bare and by_step.step <= chosen.step
        elif by_epoch is not None and is_of_prefix(by_epoch.prefix, prefix):
            is_older = chosen is not None and (one.is_emergency or one.step <= chosen.step)
        else:
            continue
        if not is_older:
            found.append(Skipped(checkpoint=one, reason=reason))
    return [*found, *skipped_sets(present, prefix)]


def skipped_sets(present: Sequence[Checkpoint], prefix: str) -> list[Skipped]:
    """Return the sharded checkpoints of a prefix that lack only their manifest; see `lone_sets`."""
    return [
        Skipped(checkpoint=one, reason=f"{one.problem}: {_LONE_SET}")
        for one in lone_sets(present)
        if one.series == prefix or (one.epoch is not None and is_of_prefix(one.series, prefix))
    ]


def why_nothing(present: Sequence[Checkpoint], is_own: Callable[[Checkpoint], bool]) -> list[str]:
    """Return hints why a directory has no checkpoint to resume from, such as a mistyped prefix.

    `is_own` selects the checkpoints of the run.
    """
    hints = []
    last_steps: dict[str, int] = {}
    for one in present:
        is_of_run = bool(one.run_id) or one.epoch is not None  # others belong to no run
        if is_of_run and one.is_countable and not is_own(one):
            last_steps[one.series] = max(one.step, last_steps.get(one.series, 0))
    if last_steps:
        names = [f"{name!r} (to step {last_steps[name]})" for name in sorted(last_steps)]
        more = f" and {len(names) - _SHOWN_SERIES} more" if len(names) > _SHOWN_SERIES else ""
        shown = ", ".join(names[:_SHOWN_SERIES]) + more
        hints.append(f"there are other series: {shown}; check the prefix")
    lone = (one for one in present if one.state in (State.LEFTOVER, State.MISSING))
    if any(is_manifest(one) and is_own(one) for one in lone):
        hints.append("there are manifests without data; if the rest is still being copied, wait")
    return hints


def is_manifest(leftover: Checkpoint) -> bool:
    """Return whether a leftover is a manifest without data."""
    return parse_temp(leftover.name) is None and parse_shard_name(leftover.name) is None


class RunCandidates(ABC, Generic[_Loaded]):
    """The checkpoints of a directory that belong to a run of `prefix`, newest first.

    With `allow_bare`, or with keys and leave to read unauthenticated files, also its files without
    manifests, after the checkpoints that have one.

    Attributes:
        present: All checkpoints of the directory, as listed last.
    """

    def __init__(self, reader: SeriesReader, prefix: str, *, allow_bare: bool = False) -> None:
        self.prefix = prefix
        trust = reader.store.trust
        self._allow_bare = allow_bare or (trust.keys is not None and trust.accepts_unsealed)
        self.present: Sequence[Checkpoint] = ()
        self._reader = reader

    def is_own(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint belongs to such a run."""
        return checkpoint.series == self.prefix

    def listed(self) -> Sequence[Checkpoint]:
        """List the directory; return the candidates; those of strangers where there are no others."""
        self.present = self._reader.store.scan()
        bare = map(self.as_own, (one for one in self.present if one.is_bare))
        found = newest_first(
            [
                *(one for one in self.present if self.is_own(one) and not one.is_bare),
                *(one for one in bare if one is not None and self._allow_bare),
            ]
        )
        trusted = [one for one in found if one.state is not State.OTHER_OWNER]
        return trusted if any(one.state not in UNUSABLE for one in trusted) else found

    def as_own(self, bare: Checkpoint) -> Checkpoint | None:
        """Return a file without manifest as the checkpoint that its name says it is, or None."""
        return bare if self.is_own(bare) else None

    @abstractmethod
    def load(self, checkpoint: Checkpoint) -> _Loaded:
        """Return the verified content of a candidate."""


class StateCandidates(RunCandidates["StoredState | InPlaceState"]):
    """The checkpoints of a series, to be restored into `state`.

    `before_load` is called with the size of each in bytes before it is read; `only_healthy` passes
    over those whose floats are not finite; `renames` are stored names and those of `state`.
    """

    def __init__(
        self,
        reader: SeriesReader,
        state: object,
        *,
        allow_bare: bool = False,
        only_healthy: bool = False,
        renames: Mapping[str, str] | None = None,
        before_load: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(reader, reader.series, allow_bare=allow_bare)
        self._state = state
        self._only_healthy = only_healthy
        self._renames = renames
        self._before_load = before_load

    def as_own(self, bare: Checkpoint) -> Checkpoint | None:
        """Return a file without manifest as the checkpoint that its name says it is, or None."""
        named = parse_step_name(bare.name)
        if named is None or named.prefix != self.prefix:
            return super().as_own(bare)
        return replace(bare, series=named.prefix, step=named.step, attempt=named.attempt)

    def load(self, checkpoint: Checkpoint) -> StoredState | InPlaceState:
        """Read a checkpoint; the state does not change yet."""
        if self._only_healthy and checkpoint.health is not None:
            raise UnsupportedCheckpoint(
                f"is {checkpoint.health}, and only healthy ones are asked for",
                path=checkpoint.path,
                hint='resume without Resume(only="healthy"), or from the start: Resume(start="new")',
            )
        self._before_load(checkpoint.size_bytes)
        return self._reader.read(checkpoint, self._state, renames=self._renames)


class ChosenCandidate(StateCandidates):
    """The one checkpoint of a series that `at` names, to be restored into `state`."""

    def __init__(
        self,
        reader: SeriesReader,
        state: object,
        at: int | str,
        *,
        renames: Mapping[str, str] | None = None,
        before_load: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(reader, state, renames=renames, before_load=before_load)
        self._at = at

    def listed(self) -> Sequence[Checkpoint]:
        """List the directory; return the checkpoint. Raises as `SeriesReader.find`."""
        self.present = self._reader.checkpoints()
        return [self._reader.find(self._at)]


class ValueCandidates(RunCandidates["tuple[NamedValues, Manifest | None]"]):
    """The checkpoints of all series of a prefix (`net`, `net_1`, ...), to be read as values."""

    def is_own(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint is of a series of the prefix."""
        return is_of_prefix(checkpoint.series, self.prefix)

    def load(self, checkpoint: Checkpoint) -> tuple[NamedValues, Manifest | None]:
        """Read the values of a checkpoint and its manifest."""
        return self._reader.values(checkpoint), self._reader.store.read_manifest(checkpoint.name)


class RollbackCandidates(StateCandidates):
    """The checkpoints of a series until step `target` that may be newer than step `held`.

    `held` is the step of a copy in memory, or None. `given_up` holds path and commit sequence of
    checkpoints that an earlier rollback went back behind.
    """

    def __init__(
        self,
        reader: SeriesReader,
        state: object,
        *,
        target: int,
        held: int | None,
        given_up: Collection[tuple[Path, int]],
    ) -> None:
        super().__init__(reader, state)
        self._target = target
        self._held = held
        self._given_up = given_up

    def listed(self) -> Sequence[Checkpoint]:
        """List the directory; return the candidates."""
        present = self._reader.checkpoints()
        past = [c for c in present if c.step <= self._target and not c.is_bare]
        past = [c for c in past if c.state is not State.OTHER_OWNER]
        own_runs = self._reader.own_runs()
        if any(c.run_id in own_runs for c in present):  # another run's past is not that of this one
            past = [c for c in past if not c.run_id or c.is_unproven or c.run_id in own_runs]
        known = [c for c in past if (c.path, c.sequence) not in self._given_up]
        found = newest_first(known, own_runs)
        return [*takewhile(self._may_be_newer, found)]

    def _may_be_newer(self, checkpoint: Checkpoint) -> bool:
        # The order of damaged and unproven checkpoints proves nothing: newer ones may follow.
        is_vague = checkpoint.state in UNUSABLE or checkpoint.is_unproven
        return is_vague or self._held is None or checkpoint.step > self._held
