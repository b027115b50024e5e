# SPDX-License-Identifier: Apache-2.0
"""The methods that a training loop calls on a callback."""

from __future__ import annotations

from ckptmgr.training.callback_values import RunContext


class TrainingHooks:
    """The methods of a callback, under both of MindSpore's names; none does anything."""

    def begin(self, run_context: RunContext) -> None:
        """Training begins."""

    def epoch_begin(self, run_context: RunContext) -> None:
        """An epoch begins."""

    def step_begin(self, run_context: RunContext) -> None:
        """A step begins."""

    def step_end(self, run_context: RunContext) -> None:
        """A step has ended."""

    def epoch_end(self, run_context: RunContext) -> None:
        """An epoch has ended."""

    def end(self, run_context: RunContext) -> None:
        """Training has ended."""

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
