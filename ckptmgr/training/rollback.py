# SPDX-License-Identifier: Apache-2.0
"""Rollback to an earlier state, from memory or from disk, whichever is newer."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.engine.recent_states import RecentStates
from ckptmgr.files.load.state import plan_put_back
from ckptmgr.io.passing_errors import may_be_whole
from ckptmgr.parallel.coordinator import RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import ResumeFailed
from ckptmgr.series.candidates import RollbackCandidates, Skipped, doubt_of
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.resume import Resumption

_LOG = logging.getLogger(__name__)


def go_back(
    target: int,
    state: object,
    *,
    recent: RecentStates | None,
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
    steps = [] if recent is None else recent.steps
    common = writer.commit.held_by_all(target, steps)
    held = None if recent is None else recent.newest_of(common)
    candidates = RollbackCandidates(
        reader,
        state,
        target=target,
        held=None if held is None else held.step,
        given_up=given_up,
    )
    skipped: list[Skipped] = []
    try:
        checkpoint, loaded, skipped = writer.first_that_loads(candidates)
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
            with writer.commit.all_prepared():
                restore = loaded.plan_restore(state)
            with writer.commit.all_prepared(is_changing=True):
                restored = restore()
            return Resumption.at(
                checkpoint, restored, skipped=skipped, kept=loaded.kept, doubt=doubt_of(skipped)
            )
    if held is None:
        raise CheckpointNotFound(
            f"no state of step {target} or before: in memory are {steps}, on disk nothing that loads",
            path=reader.store.directory,
        )
    with writer.commit.all_prepared():
        restore = plan_put_back(state, held.skeleton, held.read)
    with writer.commit.all_prepared(is_changing=True):
        restored = restore()
    return Resumption(
        step=held.step,
        next_step=held.step + 1,
        epoch=held.epoch,
        state=restored,
        metrics=held.metrics,
        skipped=tuple(skipped),
        doubt=doubt_of(skipped),
    )
