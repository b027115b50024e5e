# SPDX-License-Identifier: Apache-2.0
"""What a run goes on from: the newest checkpoint that loads, on all ranks if there are many, and what was passed over.

Where a run starts, or starts again.

Count how often runs were started from the same checkpoint: a crash loop looks like progress to a scheduler.

The count lies in `.<series>.starts`, a small JSON file. It is a hint, not a promise: it is not synced, and a damaged one
counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from ckptmgr.core.errors import UnprovenCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import is_of_prefix
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.values import Value
from ckptmgr.formats.source import read_bytes
from ckptmgr.series.candidates import Skipped, doubt_of, newest_first, why_nothing, without_manifest
from ckptmgr.series.reader import NamedValues, SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.lineage import foreign_predecessor, replaced_by_older
from ckptmgr.store.store import Store
from ckptmgr.training.history import RunPast


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run starts.

    Attributes:
        step: The last step that is done; 0 for a fresh start.
        epoch: Epoch of the checkpoint, or None.
        state: The restored state: the object given to `resume`, filled in place where that is possible.
        checkpoint: What was loaded, or None for a fresh start.
        metrics: The metrics saved with it.
        skipped: Newer checkpoints that were passed over, and why.
        starts: How often a run has been started from this checkpoint without a newer one being saved, this one included.
        kept: What no rank has saved for this one, such as its random numbers when there are more ranks than before; it stays
            as it was.
        doubt: Why the checkpoint is genuine, but probably an older one than its name had here last, or of another run; or
            which newer one may come back, because its data is missing or the disk cannot read it; or None.
    """

    step: int
    state: object = field(repr=False)
    epoch: int | None = None
    checkpoint: Checkpoint | None = None
    metrics: Mapping[str, float]
    skipped: tuple[Skipped, ...] = ()
    starts: int = 1
    kept: tuple[str, ...] = ()
    doubt: str | None = None

    @classmethod
    def at(
        cls,
        checkpoint: Checkpoint,
        state: object,
        *,
        skipped: Sequence[Skipped],
        starts: int = 1,
        doubt: str | None = None,
        kept: Sequence[str] = (),
    ) -> Self:
        """Return where a run goes on whose state was restored from a checkpoint."""
        return cls(
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            state=state,
            checkpoint=checkpoint,
            metrics=checkpoint.metrics,
            skipped=tuple(skipped),
            starts=starts,
            doubt=doubt,
            kept=tuple(kept),
        )

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was found to continue from."""
        return self.checkpoint is None


_MAX_BYTES = 4096


def count_start(store: Store, series: str, checkpoint: Checkpoint) -> int:
    """Note one more start from `checkpoint` and return how many there were without a newer save."""
    identity = [checkpoint.name, checkpoint.sequence]
    path = store.directory / f".{series}.starts"
    starts = 1
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError
    ):
        with contextlib.closing(store.fs.open(path)) as file:
            noted = json.loads(read_bytes(file, 0, min(file.size, _MAX_BYTES)))
        if noted["checkpoint"] == identity:
            starts += int(noted["starts"])
    with contextlib.suppress(OSError):
        note = json.dumps({"checkpoint": identity, "starts": starts}).encode()
        store.write_note(path, note, series=series)
    return starts


_LOG = logging.getLogger(__name__)
_MANY_STARTS = 3
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `ModelCheckpoint.resume` found.

    Attributes:
        checkpoint: The newest checkpoint that loads.
        values: Its content, name to array or string.
        skipped: Newer ones that were passed over, and why.
        kept: What no rank has saved for this one, when there are more ranks than before; it is not in `values`.
        doubt: Why the checkpoint is genuine, but probably not the newest: see `Resumption`; or None.
    """

    checkpoint: Checkpoint
    values: dict[str, Value]
    skipped: tuple[Skipped, ...]
    kept: tuple[str, ...] = ()
    doubt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[_Loaded]):
    """What `find_newest` found.

    Attributes:
        newest: The checkpoint and what it loaded to, or None.
        skipped: Newer ones that were passed over, and why.
        doubt: Why it is genuine, but probably not what its name had here last; or which newer ones may come back; or None.
    """

    newest: tuple[Checkpoint, _Loaded] | None
    skipped: tuple[Skipped, ...]
    doubt: str | None = None


def find_newest(
    writer: SeriesWriter,
    is_own: Callable[[Checkpoint], bool],
    load: Callable[[Checkpoint], _Loaded],
    *,
    prefix: str,
) -> Found[_Loaded]:
    """Return the newest checkpoint that loads; what is skipped, doubtful, or may be why there is none, is logged.

    Args:
        writer: Of the run, which reads it with all its ranks.
        is_own: Which checkpoints of the directory come into question.
        load: Loads one; changes nothing yet.
        prefix: What the user calls the run.

    Raises:
        KeyProblem, UnsupportedCheckpoint, OSError: Nothing loads, and not because all is damaged.
        UnprovenCheckpoint: Keys were given, nothing loads, and there are files of the series without a manifest.
        ResumeFailed, RanksMissing: The ranks cannot go on together.
    """
    present: list[Checkpoint] = []

    def scan() -> list[Checkpoint]:
        present[:] = writer.store.scan()
        return newest_first([one for one in present if is_own(one)])

    checkpoint, loaded, skipped = writer.first_that_loads(scan, load)
    # All that is passed over, each with its reason, comes together here.
    skipped = [*skipped, *without_manifest(present, prefix, checkpoint)]
    for one in skipped:
        _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
    if checkpoint is None or loaded is None:
        _refuse_to_start_beside(skipped, writer.store.trust)
        for hint in why_nothing(present, is_own):
            _LOG.warning("%s: nothing to resume as %r: %s", writer.store.directory, prefix, hint)
        return Found(newest=None, skipped=tuple(skipped), doubt=doubt_of(skipped))
    doubts = [one for one in (_doubt(checkpoint, present), doubt_of(skipped)) if one is not None]
    return Found(
        newest=(checkpoint, loaded), skipped=tuple(skipped), doubt="; ".join(doubts) or None
    )


def _refuse_to_start_beside(skipped: Sequence[Skipped], trust: Trust) -> None:
    """Raise where keys were given and files of the series are here, but nothing says which steps they are.

    Their manifests may have been removed to make the run start over.
    """
    unplaced = [one.checkpoint for one in skipped if one.checkpoint.is_bare]
    if unplaced and trust.is_strict:
        more = f" (and {len(unplaced) - 1} more)" if len(unplaced) > 1 else ""
        raise UnprovenCheckpoint(
            f"belongs to this series by its name{more}, but no manifest proves which step it is, and nothing else is here "
            "to resume from",
            path=unplaced[0].path,
            hint="bring back the .manifest.json files, move the files away, or start anew beside them with "
            'resume(start="new")',
        )


def _doubt(checkpoint: Checkpoint, present: Sequence[Checkpoint]) -> str | None:
    replaced = replaced_by_older(checkpoint, present)
    if replaced is not None:
        _LOG.warning("%s may be an older file under this name: %s", checkpoint.path, replaced)
        return replaced
    misplaced = foreign_predecessor(checkpoint, present)
    if misplaced is not None:
        _LOG.warning("%s may be of another run: %s", checkpoint.path, misplaced)
    return misplaced


def resume_values(writer: SeriesWriter, reader: SeriesReader, *, prefix: str) -> Found[NamedValues]:
    """Return the newest checkpoint of a prefix, and what it holds by name; see `ModelCheckpoint.resume`.

    Args:
        writer: Of the run; from now on it continues that one.
        reader: Reads the checkpoints.
        prefix: Of this run, and of those before it.
    """

    def load(one: Checkpoint) -> tuple[NamedValues, Manifest | None]:
        return reader.values(one), writer.store.read_manifest(one.name)

    found = find_newest(writer, lambda one: is_of_prefix(one.series, prefix), load, prefix=prefix)
    if found.newest is None:
        return Found(newest=None, skipped=found.skipped, doubt=found.doubt)
    checkpoint, (values, manifest) = found.newest
    writer.continue_from(checkpoint, manifest)
    return Found(newest=(checkpoint, values), skipped=found.skipped, doubt=found.doubt)


def resume_state(
    state: object, *, writer: SeriesWriter, reader: SeriesReader, past: RunPast
) -> Resumption:
    """Restore the newest checkpoint of a series that loads; see `CheckpointManager.resume`.

    Args:
        state: The state to restore into, or None for new objects.
        writer: Of the series.
        reader: Reads its checkpoints.
        past: Of the run; it now ends there.
    """
    writer.prepare()
    found = find_newest(
        writer,
        lambda one: one.series == writer.series,
        lambda one: reader.read(one, state),
        prefix=writer.series,
    )
    if found.newest is None:
        past.start_at(0, is_own=False)
        return Resumption(step=0, state=state, metrics={}, skipped=found.skipped, doubt=found.doubt)
    checkpoint, loaded = found.newest
    restored = writer.agreed(lambda: loaded.plan_restore(state))()
    writer.continue_from(checkpoint, loaded.manifest)
    past.start_at(checkpoint.step, is_own=checkpoint.run_id == writer.run_id)
    past.resumed(checkpoint)
    starts = count_start(writer.store, writer.series, checkpoint) if writer.is_first else 0
    if starts > _MANY_STARTS:
        _LOG.warning(
            "this is start number %d from %s without a newer save: the run may be failing at the same place",
            starts,
            checkpoint.path,
        )
    return Resumption.at(
        checkpoint,
        restored,
        skipped=found.skipped,
        starts=starts,
        doubt=found.doubt,
        kept=loaded.kept,
    )


def start_anew(state: object, *, writer: SeriesWriter, past: RunPast) -> Resumption:
    """Start at step 0 beside the checkpoints that are there; see `CheckpointManager.resume`."""
    writer.prepare()
    writer.forget_parents()
    past.start_at(0, is_own=False)
    return Resumption(step=0, state=state, metrics={})
