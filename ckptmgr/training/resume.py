# SPDX-License-Identifier: Apache-2.0
"""Resumption of a run: from the newest checkpoint that loads, the same on all ranks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from ckptmgr.config.subjects import NEWEST, Resume
from ckptmgr.core.errors import CorruptCheckpoint, UnprovenCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.model import UNUSABLE, Checkpoint, State
from ckptmgr.core.short_repr import short_repr
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.values import Value
from ckptmgr.io.gc_pause import gc_paused_if_short
from ckptmgr.policy.lines import about_others, lines_of
from ckptmgr.series.candidates import (
    ChosenCandidate,
    RunCandidates,
    Skipped,
    StateCandidates,
    ValueCandidates,
    doubt_of,
    newest_first,
    of_strangers,
    why_nothing,
    without_manifest,
)
from ckptmgr.series.reader import NamedValues, SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.growth import built
from ckptmgr.state.read_back import ReadBack
from ckptmgr.state.surroundings import Surroundings
from ckptmgr.state.tree import check_storable
from ckptmgr.store.manifest.lineage import Lineage, foreign_predecessor
from ckptmgr.training.data_state import DataState
from ckptmgr.training.history import RunPast
from ckptmgr.training.tries import Tries, said_of

if TYPE_CHECKING:
    from ckptmgr.remote.fallback import Fetched
    from ckptmgr.training.witness import Witness

_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 8
_Loaded = TypeVar("_Loaded")
Fetch = Callable[[Checkpoint | None, Sequence[Checkpoint], Set[str]], "Fetched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The start of a run: a restored checkpoint, or step 0.

    Attributes:
        step: The last completed step; 0 for a fresh start, too.
        next_step: The step to run next: 0 for a fresh start, else `step + 1`.
        epoch: Epoch of the checkpoint, or None.
        state: The restored state: the object given to `resume`, filled in place if possible.
        checkpoint: The loaded checkpoint; None for a fresh start, and for a state in memory.
        metrics: The metrics of the checkpoint.
        skipped: The newer checkpoints that were skipped, with the reasons.
        starts: How often runs have trained from this checkpoint without a newer save, this start
            included; those that ended as they wanted to, or were asked to stop, do not count.
        tries: The steps that the others reached, in their order.
        recorded: How many steps after it are recorded, and compared when they come again: `witness` of
            the manager says what came out.
        kept: Names that no rank saved for this one, such as its random numbers when there are more
            ranks than before; their values stay.
        notes: Sentences about the checkpoint, such as that its floats are not finite.
        fetched_from: Address of the checkpoint in the mirror, if it was downloaded because it is
            newer than all here; else None.
        is_inside_epoch: Whether a pass over `batches` had not ended when the checkpoint was saved.
        doubt: Why the genuine checkpoint is probably an older file under its name, or of another
            run; which newer checkpoint may return, because its data is missing or the disk cannot
            read it; or which other run in the series saved later or reaches a later step; or that
            the mirror did not answer; or None.
    """

    step: int
    next_step: int
    state: object
    epoch: int | None = None
    checkpoint: Checkpoint | None = None
    metrics: Mapping[str, float]
    skipped: tuple[Skipped, ...] = ()
    starts: int = 1
    tries: tuple[int, ...] = ()
    recorded: int = 0
    kept: tuple[str, ...] = ()
    is_inside_epoch: bool = False
    doubt: str | None = None
    notes: tuple[str, ...] = ()
    fetched_from: str | None = None

    @classmethod
    def fresh(
        cls, state: object, *, skipped: Sequence[Skipped] = (), doubt: str | None = None
    ) -> Self:
        """Return the start of a run without a checkpoint."""
        return cls(
            step=0, next_step=0, state=state, metrics={}, skipped=tuple(skipped), doubt=doubt
        )

    @classmethod
    def at(
        cls,
        checkpoint: Checkpoint,
        state: object,
        *,
        skipped: Sequence[Skipped],
        tries: Sequence[int] = (),
        recorded: int = 0,
        doubt: str | None = None,
        kept: Sequence[str] = (),
        is_inside_epoch: bool = False,
        notes: Sequence[str] = (),
        fetched_from: str | None = None,
    ) -> Self:
        """Return the resumption from a checkpoint."""
        return cls(
            step=checkpoint.step,
            next_step=checkpoint.step + 1,
            epoch=checkpoint.epoch,
            state=state,
            checkpoint=checkpoint,
            metrics=checkpoint.metrics,
            skipped=tuple(skipped),
            starts=len(tries) + 1,
            tries=tuple(tries),
            recorded=recorded,
            doubt=doubt,
            kept=tuple(kept),
            is_inside_epoch=is_inside_epoch,
            notes=tuple(notes),
            fetched_from=fetched_from,
        )

    def __repr__(self) -> str:
        """Return where the run starts, without the state."""
        name = None if self.checkpoint is None else self.checkpoint.name
        return short_repr(
            self,
            step=self.step,
            next_step=self.next_step,
            checkpoint=name,
            metrics=self.metrics,
            skipped=[one.checkpoint.name for one in self.skipped],
            starts=self.starts,
            recorded=self.recorded,
            kept=self.kept,
            doubt=self.doubt,
            notes=self.notes,
            fetched_from=self.fetched_from,
        )

    @property
    def next_epoch(self) -> int:
        """The epoch to go on with, counted from 0: `for epoch in range(start.next_epoch, epochs)`.

        It is that of the checkpoint where a pass over `batches` had not ended, whose rest is to come;
        else the one after it; 0 for a fresh start.

        Raises:
            ValueError: The checkpoint names no epoch.
        """
        if self.is_fresh:
            return 0
        if self.epoch is None:
            name = f"step {self.step}" if self.checkpoint is None else self.checkpoint.path
            raise ValueError(
                f"{name} names no epoch: pass epoch= to step_end, and count epochs from 0"
            )
        return self.epoch if self.is_inside_epoch else self.epoch + 1

    @property
    def is_fresh(self) -> bool:
        """Whether the run starts without a checkpoint, or a state in memory."""
        return self.next_step == 0


def read_back_of(how: Resume) -> ReadBack:
    """Return how a state is compared after its restore."""
    return ReadBack(is_on=how.read_back, may_differ=tuple(how.may_differ), is_strict=how.strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The result of `ModelCheckpoint.resume`.

    Attributes:
        checkpoint: The newest checkpoint that loads.
        values: Its values, name to array or string.
        skipped: The newer checkpoints that were skipped, with the reasons.
        kept: Names that no rank saved for this one when there are more ranks than before; `values`
            lacks them.
        doubt: Why a newer checkpoint probably exists or existed, as in `Resumption`, and whether the
            floats of this one are not finite; or None.
    """

    checkpoint: Checkpoint
    values: dict[str, Value]
    skipped: tuple[Skipped, ...]
    kept: tuple[str, ...] = ()
    doubt: str | None = None

    def __repr__(self) -> str:
        """Return where the run starts; of the values their number."""
        return short_repr(
            self,
            checkpoint=self.checkpoint.name,
            step=self.checkpoint.step,
            epoch=self.checkpoint.epoch,
            values=len(self.values),
            skipped=[one.checkpoint.name for one in self.skipped],
            kept=self.kept,
            doubt=self.doubt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[_Loaded]):
    """The newest checkpoint with its loaded content, and the newer ones that were skipped."""

    newest: tuple[Checkpoint, _Loaded] | None
    skipped: tuple[Skipped, ...]
    doubt: str | None = None


def find_newest(writer: SeriesWriter, candidates: RunCandidates[_Loaded]) -> Found[_Loaded]:
    """Return the newest checkpoint that loads; log skipped ones, doubts and hints.

    Raises:
        KeyProblem, UnsupportedCheckpoint, OSError: No checkpoint loads, and not because all are
            damaged.
        UnprovenCheckpoint: No checkpoint loads, and there are files without a manifest that only a
            run of this prefix can have written, or, with keys, that may be of it.
        ResumeFailed, RanksMissing: The ranks cannot resume together.
    """
    checkpoint, loaded, skipped = writer.first_that_loads(candidates)
    prefix, present = candidates.prefix, candidates.present
    tried = [one.checkpoint.path for one in skipped]
    tried += [] if checkpoint is None else [checkpoint.path]
    own = [one for one in present if candidates.is_own(one)]
    skipped = [
        *skipped,
        *of_strangers(own, checkpoint),
        *without_manifest(present, prefix, checkpoint, tried=tried),
    ]
    for one in skipped:
        _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
    if checkpoint is None or loaded is None:
        _refuse_to_start_beside(skipped, writer.store.trust)
        for hint in why_nothing(present, candidates.is_own):
            _LOG.warning("%s: nothing to resume as %r: %s", writer.listing.directory, prefix, hint)
        return Found(newest=None, skipped=tuple(skipped), doubt=doubt_of(skipped))
    others = about_others(checkpoint, lines_of(own))
    if others is not None:
        _LOG.warning("%s: resuming one of several runs: %s", writer.listing.directory, others)
    doubts = (_doubt(checkpoint, present), doubt_of(skipped), others)
    return Found(
        newest=(checkpoint, loaded),
        skipped=tuple(skipped),
        doubt="; ".join(one for one in doubts if one is not None) or None,
    )


def _find_chosen(writer: SeriesWriter, candidates: RunCandidates[_Loaded]) -> Found[_Loaded]:
    """Return the chosen checkpoint; nothing stands in for it.

    Raises:
        CheckpointNotFound, ValueError, ResumeFailed, OSError: As `SeriesReader.find`.
        UnprovenCheckpoint: It has no manifest.
        CorruptCheckpoint: It is damaged.
        KeyProblem, UnsupportedCheckpoint, RanksMissing: As `find_newest`.
    """
    checkpoint, loaded, skipped = writer.first_that_loads(candidates)
    if checkpoint is None or loaded is None:
        (one,) = skipped
        raise CorruptCheckpoint(
            one.reason, path=one.checkpoint.path, hint="choose another one: nothing was changed"
        )
    if checkpoint.is_bare:
        raise UnprovenCheckpoint(
            "no manifest says which step it is",
            path=checkpoint.path,
            hint="bring back its .manifest.json",
        )
    return Found(
        newest=(checkpoint, loaded), skipped=(), doubt=_doubt(checkpoint, candidates.present)
    )


def _around(
    checkpoint: Checkpoint, present: Sequence[Checkpoint]
) -> tuple[Sequence[Checkpoint], Sequence[Checkpoint]]:
    """Return the checkpoints of its line up to one, and those after it."""
    line = next((one for one in lines_of(present) if checkpoint.run_id in one.runs), None)
    known = () if line is None else line.checkpoints
    after = [one for one in known if one.order > checkpoint.order]
    return [one for one in known if one.order <= checkpoint.order], after


def _refuse_to_start_beside(skipped: Sequence[Skipped], trust: Trust) -> None:
    """Raise UnprovenCheckpoint if files of the series have no manifests and were not asked for.

    An attacker, or a copy of the data alone, must not make the run start over. Without keys the
    name must have an epoch: `net-2023.ckpt` may come from another program.
    """
    unplaced = newest_first(
        [
            one.checkpoint
            for one in skipped
            if one.checkpoint.is_bare
            and one.checkpoint.state is not State.OTHER_OWNER
            and not one.is_damaged
            and (trust.is_strict or one.checkpoint.epoch is not None)
        ]
    )
    if unplaced:
        more = f" (and {len(unplaced) - 1} more)" if len(unplaced) > 1 else ""
        raise UnprovenCheckpoint(
            f"belongs to this series by its name{more}, but no manifest proves which step it is, and nothing else is here "
            "to resume from",
            path=unplaced[0].path,
            hint="bring back the .manifest.json files, take it as it is with Resume(allow_bare=True), move the files "
            'away, or start anew beside them: a manager with Resume(start="new"), a callback without resume',
        )


def _doubt(checkpoint: Checkpoint, present: Sequence[Checkpoint]) -> str | None:
    if checkpoint.state is State.OTHER_OWNER:
        _LOG.warning("%s %s", checkpoint.path, checkpoint.problem)
        return f"{checkpoint.name} {checkpoint.problem}, but none of a trusted owner is here"
    replaced = Lineage(present).why_replaced(checkpoint)
    if replaced is not None:
        _LOG.warning("%s may be an older file under this name: %s", checkpoint.path, replaced)
        return replaced
    misplaced = foreign_predecessor(checkpoint, present)
    if misplaced is not None:
        _LOG.warning("%s may be of another run: %s", checkpoint.path, misplaced)
    return misplaced


def resume_values(
    writer: SeriesWriter, reader: SeriesReader, *, prefix: str, allow_bare: bool = False
) -> Found[NamedValues]:
    """Return the newest checkpoint of a prefix and its values; see `ModelCheckpoint.resume`.

    `writer` then continues the run of that checkpoint.
    """
    found = find_newest(writer, ValueCandidates(reader, prefix, allow_bare=allow_bare))
    if found.newest is None:
        return Found(newest=None, skipped=found.skipped, doubt=found.doubt)
    checkpoint, (values, manifest) = found.newest
    writer.continue_from(checkpoint, manifest)
    health = None if checkpoint.health is None else f"{checkpoint.name} is {checkpoint.health}"
    if health is not None:
        _LOG.warning("%s", health)
    doubt = "; ".join(one for one in (found.doubt, health) if one is not None) or None
    return Found(newest=(checkpoint, values), skipped=found.skipped, doubt=doubt)


def resume_state(
    state: object,
    *,
    writer: SeriesWriter,
    reader: SeriesReader,
    past: RunPast,
    data: DataState,
    tries: Tries,
    witness: Witness | None,
    how: Resume = NEWEST,
    needs_same_division: bool = False,
    fetch: Fetch | None = None,
) -> Resumption:
    """Restore a checkpoint of a series, by default the newest that loads; see `CheckpointManager.resume`.

    `past` is reset to its step, and `data` to where the loaders stood. `fetch` downloads what the
    mirror has newer than the newest usable checkpoint here, given that, all usable ones, and the
    ids of damaged ones; None for none here. With `needs_same_division` another number of processes
    is refused before anything is restored.
    """
    with gc_paused_if_short() as end_pause_if_long:  # a call, so that most objects die within
        return _resume_state(
            state,
            writer,
            reader,
            past,
            data,
            tries,
            witness,
            how=how,
            needs_same_division=needs_same_division,
            fetch=fetch,
            end_pause_if_long=end_pause_if_long,
        )


def _resume_state(
    state: object,
    writer: SeriesWriter,
    reader: SeriesReader,
    past: RunPast,
    data: DataState,
    tries: Tries,
    witness: Witness | None,
    *,
    how: Resume,
    needs_same_division: bool,
    fetch: Fetch | None,
    end_pause_if_long: Callable[[int], None],
) -> Resumption:
    started = time.perf_counter()
    writer.prepare()
    objects = _storable_objects(state, writer)
    given = built(state)
    if how.at is None:
        candidates = StateCandidates(
            reader,
            state,
            allow_bare=how.allow_bare,
            only_healthy=how.only == "healthy",
            renames=how.renamed,
            before_load=end_pause_if_long,
        )
        found, fetched_from = _find_with_mirror(writer, candidates, fetch, end_pause_if_long)
    else:
        candidates = ChosenCandidate(
            reader, state, how.at, renames=how.renamed, before_load=end_pause_if_long
        )
        found, fetched_from = _find_chosen(writer, candidates), None
    skipped = found.skipped
    if found.newest is None:
        writer.start_anew()
        past.start_fresh()
        past.began(given)
        data.forget()
        if witness is not None:
            witness.start_over()
        return Resumption.fresh(state, skipped=skipped, doubt=found.doubt)
    checkpoint, loaded = found.newest
    with writer.commit.all_prepared():
        is_own = reader.is_divided_alike(loaded.manifest)
        if needs_same_division and not is_own:
            saved = 1 if loaded.manifest is None else loaded.manifest.world_size
            raise UnsupportedCheckpoint(
                f"was saved by {saved} processes, which divided the data otherwise than this job",
                path=checkpoint.path,
                hint="start as many processes; or go on in a loop of your own, with CheckpointManager and its batches, which "
                "begins the pass anew",
            )
        restore_data = data.plan_restore(
            loaded.data, is_own=is_own, may_differ=how.may_differ, skip=how.skip_batches
        )
        seen = Surroundings.from_text(loaded.seen)
        comparison = read_back_of(how)
        restore = loaded.plan_restore(state, comparison)
        if seen is not None:  # after what explains more
            seen.check_groups(objects, path=checkpoint.path)
    random = None if is_own or writer.is_first or checkpoint.shards else GlobalRandom().state_dict()
    with writer.commit.all_prepared(is_changing=True):
        restored = restore()
    _compare_surroundings(seen, objects, comparison, checkpoint)
    restore_data()
    if random is not None:  # of a file of one process, only rank 0 takes the random numbers
        GlobalRandom().load_state_dict(random)
    if loaded.data is not None and not is_own:
        _LOG.warning(
            "%s was saved by another number of ranks, which divided the data otherwise: the loaders begin their pass anew",
            checkpoint.path,
        )
    before, after = _around(checkpoint, candidates.present)
    if how.at is None or not after:
        writer.continue_from(checkpoint, loaded.manifest)
    else:
        writer.branch_from(checkpoint)
    is_of_run = checkpoint.run_id == writer.run_id
    past.start_at(checkpoint.step, is_own=is_of_run)
    stride = None if seen is None else seen.stride
    past.restored_at(checkpoint.step, stride=stride, what="the resumption")
    past.began(given, () if seen is None else seen.empty or ())
    past.resumed(checkpoint, is_own=is_of_run, load_s=time.perf_counter() - started)
    if how.at is not None:
        past.went_back(checkpoint.step, [one for one in candidates.present if one not in before])
    begun = tries.begin(writer.store, writer.series, checkpoint) if writer.is_first else ()
    said = said_of(begun, checkpoint)
    if said is not None:
        _LOG.warning("%s", said)
    recorded = 0 if witness is None else witness.resumed(checkpoint, how, is_own=is_own)
    if checkpoint.is_emergency:
        _LOG.warning(
            "%s was saved by an exception, which may have come inside the next step or a validation: the run may not go on"
            " bit for bit. Resume(at=STEP) takes an earlier one",
            checkpoint.path,
        )
    return Resumption.at(
        checkpoint,
        restored,
        recorded=recorded,
        skipped=skipped,
        tries=begun,
        doubt=found.doubt,
        kept=loaded.kept,
        is_inside_epoch=data.is_inside_pass,
        notes=_notes(checkpoint, before, seen),
        fetched_from=fetched_from,
    )


def _notes(
    checkpoint: Checkpoint, before: Sequence[Checkpoint], seen: Surroundings | None
) -> list[str]:
    """Return sentences about the checkpoint, given those of its line up to it."""
    notes = []
    if checkpoint.health is not None:
        finite = [one for one in before if one.is_countable and one.health is None]
        way_out = (
            f'the newest finite one is {finite[-1].name}: Resume(only="healthy") takes it'
            if finite
            else "no earlier one of its line is finite"
        )
        notes.append(f"{checkpoint.name} is {checkpoint.health}; {way_out}")
    for note in notes:
        _LOG.warning("%s", note)
    if seen is not None and seen.left_out:
        some = _some(seen.left_out)
        notes.append(f"objects of the state hold what no checkpoint has: {some}")
    return notes


def _compare_surroundings(
    seen: Surroundings | None,
    objects: Sequence[tuple[str, object]],
    how: ReadBack,
    checkpoint: Checkpoint,
) -> None:
    """Set the flags of the modules, and warn of what the program or the process has otherwise."""
    if seen is None:
        _LOG.info(
            "%s: flags, options and steps are not compared: none are recorded", checkpoint.path
        )
        return
    flags = seen.set_flags(objects, lambda name, flag: how.accepts(f"{name}/{flag}"))
    if flags:
        _LOG.warning(
            "flags were set otherwise than in the saved run, and are now as stored: %s. To keep those of the"
            ' program: Resume(may_differ=["requires_grad", "training"])',
            _some(flags),
        )
    options = seen.other_options()
    if options:
        _LOG.warning("the run goes on otherwise than it was saved: %s", _some(options))


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return "; ".join(texts[:_MOST_SHOWN]) + more


def _find_with_mirror(
    writer: SeriesWriter,
    candidates: RunCandidates[_Loaded],
    fetch: Fetch | None,
    end_pause_if_long: Callable[[int], None],
) -> tuple[Found[_Loaded], str | None]:
    """Return as `find_newest`, after a download of a newer one from the mirror, and its address.

    The mirror is asked before a checkpoint is loaded, and again where that shows damage.
    """
    if fetch is None:
        return find_newest(writer, candidates), None
    listed = [one for one in candidates.listed() if not (one.is_bare or one.is_unproven)]
    usable = [one for one in listed if one.state not in UNUSABLE]
    damaged = {one.id for one in listed if one.state in UNUSABLE and one.id is not None}
    asked: list[Fetched] = []
    if usable:
        end_pause_if_long(sys.maxsize)  # a download
        asked.append(fetch(usable[0], usable, damaged))
    found = find_newest(writer, candidates)
    lost = {one.checkpoint.path for one in found.skipped if one.is_damaged or one.may_return}
    if found.newest is None or not lost.isdisjoint(one.path for one in usable):
        end_pause_if_long(sys.maxsize)
        here = None if found.newest is None else found.newest[0]
        damaged |= {one.id for one in listed if one.path in lost and one.id is not None}
        asked.append(fetch(here, [one for one in usable if one.path not in lost], damaged))
        if asked[-1].url is not None:
            skipped, found = found.skipped, Found(newest=None, skipped=())  # the loaded values go
            found = find_newest(writer, candidates)
            found = replace(found, skipped=(*skipped, *found.skipped))
    there = tuple(one for each in asked for one in each.skipped)
    doubts = dict.fromkeys((found.doubt, *(one.doubt for one in asked)))
    fetched = next((one.url for one in reversed(asked) if one.url is not None), None)
    doubt = "; ".join(one for one in doubts if one is not None) or None
    return replace(found, skipped=(*found.skipped, *there), doubt=doubt), fetched


def _storable_objects(state: object, writer: SeriesWriter) -> Sequence[tuple[str, object]]:
    """Return the objects in a state, each with its name.

    Raises:
        UnsupportedState: On all ranks, what would fail the first save.
    """
    with writer.commit.all_prepared():
        return check_storable(state)


def start_fresh(state: object, *, writer: SeriesWriter, past: RunPast) -> Resumption:
    """Start at step 0 beside the present checkpoints; see `CheckpointManager.resume`."""
    writer.prepare()
    _storable_objects(state, writer)
    writer.start_anew()
    past.start_fresh()
    past.began(built(state))
    return Resumption.fresh(state)
