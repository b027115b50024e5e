# SPDX-License-Identifier: Apache-2.0
"""Rollback to an earlier state, from memory or from disk, whichever is newer."""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.engine.recent_states import RecentState, RecentStates
from ckptmgr.files.load.state import plan_restore
from ckptmgr.io.passing_errors import may_be_whole
from ckptmgr.parallel.coordinator import RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import ResumeFailed
from ckptmgr.series.candidates import Skipped, doubt_of, newest_first
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.resume import Resumption

_LOG = logging.getLogger(__name__)


def go_back(
    target: int,
    state: object,
    *,
    recent: RecentStates,
    reader: SeriesReader,
    writer: SeriesWriter,
    given_up: Collection[tuple[Path, int]] = (),
) -> Resumption:
    """Restore the newest state of step `target` or before; see `CheckpointManager.rollback`.

    `given_up` holds path and commit sequence of the checkpoints that an earlier rollback went back
    behind; they are ignored. The listed errors leave everything unchanged.

    Raises:
        CheckpointNotFound: Neither memory nor disk has a state that old.
        StateMismatch: The stored state does not fit `state`.
        ResumeFailed: Another rank failed to restore its state.
        RanksMissing, RanksOutOfStep: Other ranks did not arrive, or go back to another step.
    """
    held = recent.newest_of(writer.held_by_all(target, recent.steps))

    def scan() -> list[Checkpoint]:
        present = (c for c in reader.checkpoints() if c.step <= target)
        on_disk = [c for c in present if (c.path, c.sequence) not in given_up]
        return _worth_loading(newest_first(on_disk), held)

    skipped: list[Skipped] = []
    try:
        checkpoint, loaded, skipped = writer.first_that_loads(scan, lambda c: reader.read(c, state))
    except (CkptmgrError, OSError) as error:
        # Ranks without an agreement would go to different steps, and a newer checkpoint may be
        # intact.
        is_open = may_be_whole(error) or (isinstance(error, ResumeFailed) and error.may_be_whole)
        if held is None or is_open or isinstance(error, (RanksMissing, RanksOutOfStep)):
            raise
        _LOG.warning(
            "going back to step %d in memory, as no newer checkpoint loads: %s", held.step, error
        )
    else:
        if checkpoint is not None and loaded is not None:
            restored = writer.agreed(lambda: loaded.plan_restore(state))()
            return Resumption.at(
                checkpoint, restored, skipped=skipped, kept=loaded.kept, doubt=doubt_of(skipped)
            )
    if held is None:
        raise CheckpointNotFound(
            f"no state of step {target} or before: in memory are {recent.steps}, on disk nothing that loads",
            path=reader.directory,
        )
    restored = writer.agreed(lambda: plan_restore(state, held.skeleton, held.read))()
    return _from_memory(held, restored, skipped)


def _from_memory(held: RecentState, restored: object, skipped: list[Skipped]) -> Resumption:
    return Resumption(
        step=held.step,
        epoch=held.epoch,
        state=restored,
        metrics=held.metrics,
        skipped=tuple(skipped),
        doubt=doubt_of(skipped),
    )


def _worth_loading(candidates: list[Checkpoint], held: RecentState | None) -> list[Checkpoint]:
    """Return the candidates before the first one that is not newer than the state in memory."""
    if held is None:
        return candidates
    step = held.step
    # The order of damaged and unproven checkpoints proves nothing: newer ones may follow.
    passed = (State.CORRUPT, State.MISSING)
    return list(
        takewhile(lambda c: c.state in passed or c.is_unproven or c.step > step, candidates)
    )
