# SPDX-License-Identifier: Apache-2.0
"""The way back to an earlier state: the newer one of what is in memory and what is on disk."""

from __future__ import annotations

from ckptmgr.errors import CheckpointNotFound
from ckptmgr.recent_states import RecentStates
from ckptmgr.resume import first_that_loads, newest_first
from ckptmgr.resumption import Resumption
from ckptmgr.series_reader import SeriesReader
from ckptmgr.stored_state import put_back


def go_back(
    target: int, state: object, *, recent: RecentStates, reader: SeriesReader
) -> Resumption:
    """Restore the newest state of step `target` or before.

    Args:
        target: The step.
        state: The state to restore into, or None for new objects.
        recent: What is in memory.
        reader: What is on disk.

    Raises:
        CheckpointNotFound: Neither has a state that old. Nothing was changed.
        StateMismatch: It does not fit `state`. Nothing was changed.
    """
    held = recent.newest_until(target)
    on_disk = [c for c in newest_first(reader.checkpoints()) if c.step <= target]
    if held is not None and not any(c.step > held.step for c in on_disk):
        return Resumption(
            step=held.step,
            epoch=held.epoch,
            state=put_back(state, held.skeleton, held.read),
            metrics=held.metrics,
        )
    checkpoint, loaded, skipped = first_that_loads(on_disk, lambda c: reader.read(c, state))
    if checkpoint is None or loaded is None:
        raise CheckpointNotFound(
            f"no state of step {target} or before: in memory are {recent.steps}, on disk nothing that loads",
            path=reader.directory,
        )
    return Resumption.at(checkpoint, loaded.put_back(state), skipped=skipped)
