# SPDX-License-Identifier: Apache-2.0
"""What a run has behind it: the last step it has seen, what of it is saved, copied into memory, and given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.model import Checkpoint
from ckptmgr.engine.recent_states import RecentStates
from ckptmgr.engine.staging import Ledger
from ckptmgr.policy.save import LastSave
from ckptmgr.training.progress import Progress


class UnsavedStep(NamedTuple):
    """A step that has ended, to be saved at the end; as values, because a function would keep its manager alive."""

    step: int
    state: object
    epoch: int | None
    metrics: Mapping[str, float] | None


class RunPast:
    """The past of a run, which changes when the run goes back.

    Args:
        clock: Seconds since the epoch.
        memory: Bounds the copies in memory.
        ledger: The account of its budget, which saves live on, too; a new one by default.
        snapshots: How many of them are kept.

    Attributes:
        progress: What is saved.
        recent: What is copied into memory.
        seen_step: The last step that was seen.
        unsaved: The last step that has ended, or None.
        given_up: Checkpoints that a rollback went back behind.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        memory: MemoryConfig | None,
        ledger: Ledger | None = None,
        snapshots: int,
    ) -> None:
        self._clock = clock
        self.progress = Progress(LastSave(step=0, at=clock()))
        self.recent = RecentStates(memory, time.monotonic, ledger=ledger, most=snapshots)
        self.seen_step = 0
        self.unsaved: UnsavedStep | None = None
        self.given_up: set[Path] = set()

    def saw(self, step: int) -> None:
        """Note a step."""
        self.seen_step = max(self.seen_step, step)

    def start_at(self, step: int, *, is_own: bool) -> None:
        """Forget what the steps before a resumption left behind.

        Args:
            step: Where the run starts; 0 for a fresh start.
            is_own: Whether it resumes what itself has saved. Only then snapshots stay that lie before: all others are of
                another past.
        """
        self.progress = Progress(LastSave(step=step, at=self._clock()))
        self.seen_step = step
        self.unsaved = None
        self.recent.drop_after(step if is_own else -1)

    def go_back(self, step: int, checkpoints: Sequence[Checkpoint]) -> None:
        """Note a rollback.

        Args:
            step: Where to.
            checkpoints: Those of the series; later ones are given up.
        """
        self.given_up |= {one.path for one in checkpoints if one.step > step}
        self.recent.drop_after(step)
        self.progress.go_back(step, self._clock())
        self.seen_step = step
        self.unsaved = None

    def resumed(self, path: Path) -> None:
        """Note that the run goes on from a checkpoint: if that was given up, its past is ours again."""
        if path in self.given_up:
            self.given_up.clear()
