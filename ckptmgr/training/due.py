# SPDX-License-Identifier: Apache-2.0
"""Which steps of a run are saved: those that the save policy asks for, or of these only the kept ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.core.arguments import checked_metrics
from ckptmgr.core.model import Checkpoint
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.observe.observers import Observers
from ckptmgr.parallel.team import policy_of_all
from ckptmgr.policy.only_kept import PassedOver, needs_history, passed_over
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.save import (
    EverySteps,
    LastSave,
    SavePolicy,
    decide_at_end,
    decide_at_step,
    is_saved,
)
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.training.history import Progress

if TYPE_CHECKING:
    from ckptmgr.parallel.coordinator import Coordinator

_LOG = logging.getLogger(__name__)
_Place = tuple[int, float]
"""Step and time of a save."""


class DueSaves:
    """Decides about saves at the ends of steps and of the training, the same on all ranks.

    With `only_kept` a due save is passed over unless one of its rules would keep it. A save passed
    over counts for the intervals of the save policy as if it had been made, unless a metric was
    missing: then each later step is due until one has it. The first save after a rollback that gave
    up saves is never passed over, nor are those at the end, on preemption and on exceptions.

    `measured` is a metric whose steps are due beside those of the policy.

    `progress` returns the saves so far.
    """

    def __init__(
        self,
        policy: SavePolicy,
        *,
        only_kept: RetentionPolicy | None,
        measured: str | None,
        progress: Callable[[], Progress],
        clock: Callable[[], float],
        observers: Observers,
        coordinator: Coordinator | None,
        timeout_s: float,
    ) -> None:
        beside = "" if measured is None else f", or when {measured} is measured"
        self._policy = policy_of_all(policy, coordinator, timeout_s=timeout_s, beside=beside)
        self._measured = measured
        is_each = isinstance(policy, EverySteps) and policy.interval_steps == 1
        if measured is not None and is_each:
            _LOG.warning(
                "save_when_measured=%r has no effect: save_checkpoint_steps=1, its default, saves every step;"
                " save_checkpoint_steps=None saves the measured steps alone",
                measured,
            )
        self._only_kept = only_kept
        self._progress = progress
        self._clock = clock
        self._observers = observers
        self._ask = None
        if only_kept is not None and coordinator is not None:
            from ckptmgr.parallel.rank_policy import RankZeroAnswer

            self._ask = RankZeroAnswer(coordinator, timeout_s=timeout_s)
        self._passed: tuple[_Place, LastSave] | None = None
        self._told: tuple[_Place, _Place] | None = None
        self._has_warned = False
        self.lacks_metric_at: int | None = None
        self.skipped: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether a step is ever due."""
        return self._policy.is_active or self._measured is not None

    def at_step(
        self,
        step: int,
        writer: SeriesWriter,
        *,
        epoch: int | None,
        metrics: Callable[[], Mapping[str, float] | None],
        at: float | None = None,
    ) -> bool:
        """Return whether a step that ended at a time, by default now, is to be saved.

        `metrics` is called only where they decide.
        """
        now, last = self._clock() if at is None else at, self._progress().last
        place = (last.step, last.at)
        since = last
        if self._passed is not None and self._passed[0] == place and not last.is_given_up:
            since = self._passed[1]
        self.lacks_metric_at = None
        is_due = decide_at_step(self._policy, step, now, last=since).is_due
        if not (is_due or self._is_measured(step, metrics, last)):
            return False
        found = None
        if self._only_kept is not None and not last.is_given_up:
            facts = SaveFacts(step=step, at=now, epoch=epoch)
            found = self._passed_over(self._only_kept, facts, metrics, writer)
        if found is None:
            self.skipped = None
            return True
        self.skipped = f"step {step}: {found.reason}"
        if found.lacks_metric:
            self.lacks_metric_at = step
        else:
            self._passed = (place, replace(last, step=step, at=now, is_start=False))
        told = (place, (since.step, since.at))
        if not (found.lacks_metric and told == self._told):
            watch = self._observers.watch(series=writer.series, step=step, why="policy")
            watch.passed_over(found.reason)
            self._told = told if found.lacks_metric else None
        if found.is_doubtful and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "save_only_kept: step %d is not saved: %s. The end of the training is saved all the same",
                step,
                found.reason,
            )
        return False

    def at_end(self, step: int, *, is_preempted: bool = False) -> bool:
        """Return whether the last step is to be saved; one that was passed over is."""
        last = self._progress().last
        is_due = decide_at_end(self._policy, step, last=last).is_due
        asks = is_preempted or self._measured is not None
        return is_due or (asks and not is_saved(step, last))

    def _is_measured(
        self, step: int, metrics: Callable[[], Mapping[str, float] | None], last: LastSave
    ) -> bool:
        """Return whether a step has the metric; any step is due where nothing counts as saved."""
        if self._measured is None or is_saved(step, last):
            return False
        return last.is_given_up or self._measured in (metrics() or {})

    def _passed_over(
        self,
        policy: RetentionPolicy,
        facts: SaveFacts,
        metrics: Callable[[], Mapping[str, float] | None],
        writer: SeriesWriter,
    ) -> PassedOver | None:
        def judged() -> PassedOver | None:
            new = _checkpoint(replace(facts, metrics=checked_metrics(metrics())), writer)
            history = self._history(writer) if needs_history(policy, new) else []
            return passed_over(policy, history, new, new.saved_at)

        if self._ask is None:
            return judged()
        answer = self._ask(judged)
        return None if answer is None else PassedOver(*answer)

    def _history(self, writer: SeriesWriter) -> list[Checkpoint]:
        """Return the checkpoints of the run and its saves in flight."""
        unfinished = [_checkpoint(one, writer) for one in self._progress().unfinished]
        listed = writer.own_history()
        # A save that ends now may be in both.
        seen = [(one.step, one.metrics) for one in listed]
        return [*listed, *(one for one in unfinished if (one.step, one.metrics) not in seen)]


def _checkpoint(facts: SaveFacts, writer: SeriesWriter) -> Checkpoint:
    """Return the checkpoint that a save will make, for rules about checkpoints."""
    return Checkpoint(
        path=Path(f"{writer.series}-{facts.step}"),
        series=writer.series,
        step=facts.step,
        epoch=facts.epoch,
        metrics=facts.metrics or {},
        saved_at=datetime.fromtimestamp(facts.at or 0.0, UTC),
        size_bytes=0,
        sequence=1 << 62,  # newer than all that are committed
    )
