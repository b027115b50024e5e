# SPDX-License-Identifier: Apache-2.0
"""The points of a training loop at which a callback is called, under both of MindSpore's names for them."""

from __future__ import annotations

from ckptmgr.training.callback_values import RunContext


class TrainingHooks:
    """Does nothing at any of them."""

    def begin(self, run_context: RunContext) -> None:
        """Training begins."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """An epoch begins."""

    def step_begin(self, run_context: RunContext) -> None:
        """A step begins."""

    def step_end(self, run_context: RunContext) -> None:
        """A step is done."""

    def epoch_end(self, run_context: RunContext) -> None:
        """An epoch is done."""

    def end(self, run_context: RunContext) -> None:
        """Training is done."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """See `begin`."""
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """See `epoch_begin`."""
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """See `step_begin`."""
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """See `step_end`."""
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """See `epoch_end`."""
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        """See `end`."""
        self.end(run_context)
