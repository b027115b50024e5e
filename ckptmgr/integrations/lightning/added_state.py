# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of `LightningCheckpoints` holds beside what Lightning saves, under one key.

| part | given back |
|---|---|
| `count`: what counts as a step | before the fit is compared with the checkpoint |
| `found`: what finders of a rate or a batch size have set | in place of their search |
| `groups`: groups that were added to optimizers | before the optimizers load their states |
| `flags`: what is frozen, and in which mode each layer is | when the training starts, after all set-up |
| `metrics`, `results`: what was logged | when the training starts |
| `ended`: loaders that have ended beside longer ones | at the first batch |
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckptmgr.integrations.lightning.aside import copied
from ckptmgr.integrations.lightning.finders import found_values, skip_finders
from ckptmgr.integrations.lightning.flags import OptimizerGroups, flags_of, restore_flags
from ckptmgr.integrations.lightning.loaders import TrainingLoaders
from ckptmgr.integrations.lightning.results import restore_results, running_results
from ckptmgr.integrations.lightning.stand_ins import StandIns
from ckptmgr.integrations.lightning.steps import StepCount

KEY = "ckptmgr"


class AddedState:
    """The parts of one fit; `begin` and the methods after it are called in the order of a fit."""

    def __init__(self, loaders: TrainingLoaders) -> None:
        self.count = StepCount()
        self._groups = OptimizerGroups()
        self._loaders = loaders
        self._stored: dict[str, Any] = {}

    def to_state(self, trainer: Any, *, is_between_epochs: bool) -> dict[str, Any]:
        """Return all parts, as values that later batches do not change."""
        return {
            "count": self.count.kind,
            "found": found_values(trainer),
            "groups": self._groups.to_state(trainer),
            "flags": flags_of(trainer.lightning_module),
            "metrics": copied(dict(trainer.callback_metrics)),
            "results": running_results(trainer),
            "ended": [] if is_between_epochs else self._loaders.ended(),
            "is_inside_epoch": not is_between_epochs,
        }

    def begin(self, trainer: Any) -> None:
        """Begin a fit, which resumes nothing yet."""
        self._stored = {}
        self.count.begin(trainer)

    def take(self, trainer: Any, checkpoint: dict[str, Any], stand_ins: StandIns) -> None:
        """Take the parts out of a checkpoint that the fit resumes; there are none in an early one."""
        self._stored = checkpoint.pop(KEY, {})
        self.count.kind = self._stored.get("count", "steps")
        self._loaders.resume(self._stored.get("ended", []))
        skip_finders(trainer, self._stored.get("found", {}), stand_ins)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the resumed step is one inside an epoch, and has ended wholly."""
        return bool(self._stored.get("is_inside_epoch"))

    def fit_started(self, trainer: Any) -> None:
        """Complete the optimizers, before they load their states."""
        if "groups" in self._stored:
            self._groups.add_again(trainer, self._stored["groups"])
        else:
            self._groups.begin(trainer)

    def training_started(self, trainer: Any, may_differ: Collection[str] = ()) -> None:
        """Give back what Lightning has set up otherwise by now, but flags that may differ."""
        if "flags" not in self._stored:
            return
        restore_flags(trainer, self._stored["flags"], may_differ)
        trainer.callback_metrics.update(self._stored["metrics"])
        restore_results(trainer, self._stored["results"])
        if self.is_inside_epoch:  # or else the first `self.log` would reset the results
            trainer._logger_connector._first_loop_iter = False
        self._stored = {}
