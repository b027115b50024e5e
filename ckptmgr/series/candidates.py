# SPDX-License-Identifier: Apache-2.0
"""Find the newest checkpoint that really loads: from new to old, each verified, damaged ones skipped with a reason.

Leftovers and half-written files never make this fail; finding nothing is an answer, not an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from ckptmgr.core.error_translation import translated_errors, unproven_error
from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.model import UNFINISHED, Checkpoint, State
from ckptmgr.core.names import is_of_prefix, parse_name, parse_step_name
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.io.page_cache import bypass_page_cache_unless_shared
from ckptmgr.io.passing_errors import is_damage, may_be_whole, may_return
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.store.listing import lone_sets
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

_SHOWN_SERIES = 5
_LONE_SET = "the save was interrupted before its end, or the manifest was lost; if there is one, copy it here, too"
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over.

    Attributes:
        checkpoint: Which.
        reason: Why.
        is_damaged: Whether that is proven damage, and no question of keys or versions.
        may_return: Whether it may still be whole elsewhere, or later: a file is gone, or the disk cannot read it.
    """

    checkpoint: Checkpoint
    reason: str
    is_damaged: bool = False
    may_return: bool = False

    @classmethod
    def because(cls, checkpoint: Checkpoint, error: Exception) -> Self:
        """Return one that could not be loaded."""
        return cls(
            checkpoint=checkpoint,
            reason=error.message if isinstance(error, CkptmgrError) else str(error),
            is_damaged=is_damage(error),
            may_return=may_return(error),
        )


def doubt_of(skipped: Sequence[Skipped]) -> str | None:
    """Return which checkpoints that were passed over may still be whole elsewhere, or later; or None."""
    doubts = [f"{one.checkpoint.name}: {one.reason}" for one in skipped if one.may_return]
    return f"a newer checkpoint may come back: {'; '.join(doubts)}" if doubts else None


def notes_of(skipped: Sequence[Skipped]) -> tuple[str, ...]:
    """Return a sentence for each checkpoint that was passed over."""
    return tuple(f"skipped {one.checkpoint.name}: {one.reason}" for one in skipped)


@contextlib.contextmanager
def open_checkpoint(
    store: Store, checkpoint: Checkpoint, *, options: ReadOptions, is_read_once: bool = True
) -> Iterator[tuple[OpenCheckpoint, Manifest | None]]:
    """Open a checkpoint of a store with everything that is known about it, to be read with `read_values`.

    Args:
        store: Where it lies.
        checkpoint: Which.
        options: How to read it.
        is_read_once: Whether its contents are read only once.

    Raises:
        CkptmgrError: It is damaged, locked away by a key, or gone.
        OSError: From the disk.
    """
    path = checkpoint.path
    with translated_errors(str(path)):
        manifest = store.read_manifest(checkpoint.name)
        if manifest is not None and manifest.shards:
            manifest = manifest.of_shard(_rank_of(checkpoint, options))
            path = store.directory / manifest.name
        if manifest is None and options.trust.is_strict:
            # The seal proves who wrote the file, not which step of the run it is: an old one could have been renamed.
            raise unproven_error(checkpoint.path, options.trust)
        file = store.open_data(path)
        with contextlib.closing(
            bypass_page_cache_unless_shared(file) if is_read_once else file
        ) as raw:
            opened = open_source(
                raw,
                path=str(path),
                options=options,
                manifest=manifest,
                is_for_loading=True,
            )
            yield opened, manifest


def _rank_of(checkpoint: Checkpoint, options: ReadOptions) -> int:
    """Return whose file to read of a sharded checkpoint.

    Raises:
        UnsupportedCheckpoint: Other ranks read than have saved.
    """
    saved_by = len(checkpoint.shards)
    if options.rank is None or options.world != saved_by:
        readers = "no coordinator was given" if options.rank is None else f"{options.world} read"
        raise UnsupportedCheckpoint(
            f"was saved by {saved_by} ranks, but {readers}",
            path=checkpoint.path,
            hint="start as many ranks, or read the files one by one: each is an ordinary checkpoint",
        )
    return options.rank


def newest_first(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints worth trying, newest first; emergency saves last, as their state may be mid-step.

    Those whose manifest cannot be read come first: nobody knows how new they are, and whoever skips them must say so.
    """
    usable = [c for c in checkpoints if c.state not in UNFINISHED]
    return sorted(
        usable,
        key=lambda c: (c.is_unreadable, not c.is_emergency, *c.order, c.saved_at),
        reverse=True,
    )


def first_that_loads(
    candidates: Sequence[Checkpoint], load: Callable[[Checkpoint], _Loaded]
) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
    """Return the first candidate that loads, what it loaded to, and the ones skipped before it.

    Raises:
        OSError: One of them may be whole, but the disk does not give it now. Nothing older may take its place.
        KeyProblem, UnsupportedCheckpoint, OSError: Nothing loads, and not all of it is known to be damaged; some only needs
            the right key, version or disk. Starting over would silently lose the run.
    """
    skipped = []
    problems: list[tuple[Checkpoint, Exception]] = []
    for checkpoint in candidates:
        if checkpoint.state in (State.CORRUPT, State.MISSING):
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
            return checkpoint, load(checkpoint), skipped
        except (CkptmgrError, OSError) as error:
            _refuse_to_pass_over(checkpoint, error)
            problems.append((checkpoint, error))
            skipped.append(Skipped.because(checkpoint, error))
    # A stranger must not hide what is wrong with the caller's own checkpoints.
    for _, problem in sorted(problems, key=lambda one: one[0].is_unproven):
        if not isinstance(problem, (CorruptCheckpoint, FileNotFoundError)):
            raise problem
    return None, None, skipped


def _refuse_to_pass_over(checkpoint: Checkpoint, error: Exception) -> None:
    """Raise an error after which nothing older may be used, because the checkpoint may be whole."""
    if may_be_whole(error):
        error.add_note(
            f"ckptmgr: {checkpoint.path} may be whole, so nothing older is used in its place; mend what keeps it from "
            "being read, or move it away with its manifest to go on without it"
        )
        raise error


def without_manifest(
    present: Sequence[Checkpoint], prefix: str, chosen: Checkpoint | None
) -> list[Skipped]:
    """Return the files of a prefix whose manifests are gone, and which are not known to be older than the chosen one.

    They may be anybody's, so none is used in place of a checkpoint with a manifest; but whoever copied the data and forgot the
    manifests must hear of it.

    Args:
        present: What lies in the directory.
        prefix: Of the run, and of those before it.
        chosen: What the run goes on from, or None.
    """
    reason = "it has no manifest, so nothing says that it belongs to this series; copy the .manifest.json files, too"
    bare = [one for one in present if one.is_bare]
    found = []
    for one in bare:
        by_step, by_epoch = parse_step_name(one.name), parse_name(one.name)
        if by_step is not None and by_step.prefix == prefix != one.series:
            found.append(Skipped(checkpoint=one, reason=reason))
        elif by_epoch is not None and is_of_prefix(by_epoch.prefix, prefix):
            is_older = one.is_emergency or (chosen is not None and one.step <= chosen.step)
            if chosen is not None and chosen.run_id is not None and not is_older:
                found.append(Skipped(checkpoint=one, reason=reason))
    return [*found, *skipped_sets(present, prefix)]


def skipped_sets(present: Sequence[Checkpoint], prefix: str) -> list[Skipped]:
    """Return the checkpoints of many ranks of a prefix that lack only their manifest; see `lone_sets`."""
    return [
        Skipped(checkpoint=one, reason=f"{one.problem}: {_LONE_SET}")
        for one in lone_sets(present)
        if one.series == prefix or (one.epoch is not None and is_of_prefix(one.series, prefix))
    ]


def why_nothing(present: Sequence[Checkpoint], is_own: Callable[[Checkpoint], bool]) -> list[str]:
    """Return what may be wrong where nothing is found to go on from: another prefix is meant, or not all is here yet.

    Args:
        present: What lies in the directory.
        is_own: Which of that came into question.
    """
    hints = []
    last_steps: dict[str, int] = {}
    for one in present:
        is_of_run = bool(one.run_id) or one.epoch is not None  # others are single files, anybody's
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
    """Return whether a leftover is a manifest without data, not an unfinished file or that of a rank."""
    return parse_temp(leftover.name) is None and parse_shard_name(leftover.name) is None
