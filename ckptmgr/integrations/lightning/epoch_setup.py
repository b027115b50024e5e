# SPDX-License-Identifier: Apache-2.0
"""What callbacks set up when an epoch starts, for a run that resumes inside one: Lightning does not call them."""

from __future__ import annotations

from typing import Any

_ACCUMULATION = "GradientAccumulationScheduler"
_AVERAGING = "StochasticWeightAveraging"


def begin_epoch_again(callback: Any, trainer: Any, *, is_inside: bool) -> None:
    """Have a callback set up the epoch that goes on; weights and rates stay those of the checkpoint.

    The number of batches for a step is also set at the start of a run, before the first epoch.
    """
    kinds = {one.__name__ for one in type(callback).__mro__}
    module = trainer.lightning_module
    if _ACCUMULATION in kinds:
        callback.on_train_epoch_start(trainer, module)
    elif _AVERAGING in kinds and is_inside:
        weights = {name: one.clone() for name, one in module.state_dict().items()}
        groups = [[dict(group) for group in one.param_groups] for one in trainer.optimizers]
        callback.on_train_epoch_start(trainer, module)
        module.load_state_dict(weights)
        for optimizer, stored in zip(trainer.optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, stored, strict=True):
                group.update(values)
