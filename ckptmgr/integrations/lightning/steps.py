# SPDX-License-Identifier: Apache-2.0
"""What counts as a step: Lightning's `global_step`, or a batch where it does not move.

With manual optimization Lightning counts the steps of its own wrappers. A module that steps torch's
optimizers, `self.optimizers(use_pl_optimizer=False)`, leaves `global_step` at 0; its steps are then
counted by batches, and the checkpoint says so, so that a resumed run counts alike.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch.optim.optimizer import register_optimizer_step_post_hook

_LOG = logging.getLogger(__name__)
Kind = Literal["steps", "batches"]


class StepCount:
    """Counts the steps of a fit; `kind` is None until a step says what to count."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self._stepped: list[Any] = []
        self._hook: Any = None

    def begin(self, trainer: Any) -> None:
        """Watch the optimizers of a fit that steps them itself."""
        if trainer.lightning_module.automatic_optimization:
            self.kind = "steps"
        else:
            self._hook = register_optimizer_step_post_hook(lambda one, *_: self._note(one))

    def end(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note(self, optimizer: Any) -> None:
        self._stepped.append(optimizer)

    def of(self, trainer: Any) -> int:
        """Return the number of the last step."""
        if self.kind == "batches":
            return int(trainer.fit_loop.epoch_loop.batch_progress.total.started)
        return int(trainer.global_step)

    def batch_ended(self, trainer: Any, *, since: int) -> None:
        """Decide what to count, after the first batch in which an optimizer stepped.

        The end of the first epoch decides where none does, such as in a fit without gradients.
        """
        stepped, self._stepped = self._stepped, []
        if self.kind is not None:
            return
        if trainer.global_step != since:
            self.kind = "steps"
        elif stepped or trainer.is_last_batch:
            self.kind = "batches"
            _LOG.info("global_step does not move, so the steps of checkpoints count batches")
            _warn_of_unsaved(trainer, stepped)


def _warn_of_unsaved(trainer: Any, stepped: list[Any]) -> None:
    """Warn where every optimizer that stepped is one that Lightning does not know of."""
    if stepped and not any(one is known for one in stepped for known in trainer.optimizers):
        _LOG.warning(
            "%s steps, but configure_optimizers does not return it, so Lightning does not save its state, and a resumed run"
            " begins with a new one: return it from configure_optimizers",
            type(stepped[0]).__name__,
        )
