# SPDX-License-Identifier: Apache-2.0
"""The features of the grid in a loop with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.accelerate import AcceleratorCheckpoints
from ckptmgr.testing.cell import BATCHES, EPOCHS, Moments, NoSuchFeature
from tests.kit.torch_grid_programs import (
    SIZE,
    Rows,
    averages,
    end_epoch,
    loader_of,
    loss_of,
    network,
    optimizers_of,
    side_by_side,
    validate,
)


class Sums:
    """The mean of the losses of an epoch, which the program registers."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"sum": 0.0, "means": []}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums."""
        return {"sum": self.found["sum"], "means": list(self.found["means"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the sums."""
        self.found.update(state)


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature == "finder":
        raise NoSuchFeature("a loop of its own has none; what it finds belongs into the state")
    set_seed(0)
    every = 2 if feature == "accumulation that does not divide" else 1
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    plain = network()
    average, sums = averages()(plain), Sums()
    if feature == "frozen and unfrozen layers":
        plain[0].requires_grad_(False)
    given: Any = torch.compile(plain, backend="eager") if feature == "torch.compile" else plain
    is_unequal = feature == "loaders of unequal length"
    shorter = [DataLoader(Rows(2), SIZE, shuffle=True)] if is_unequal else []
    with AcceleratorCheckpoints(
        accelerator, directory, CheckpointConfig(**moments.options)
    ) as checkpoints:
        model, loader, *others = checkpoints.prepare(
            given, loader_of(feature), *shorter, *optimizers_of(feature, plain)
        )
        short, optimizers = (others[0], others[1:]) if is_unequal else (None, others)
        checkpoints.register_for_checkpointing(average, sums)
        start = checkpoints.resume()
        step = start.step
        for epoch in range(start.next_epoch, EPOCHS):
            for batches in side_by_side(checkpoints, loader, short):
                moments.batch()
                with accelerator.accumulate(model):
                    loss = loss_of(model, batches)
                    accelerator.backward(loss)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                if feature == "EMA":
                    average.update_parameters(plain)
                sums.found["sum"] += loss.item()
                step += 1
                checkpoints.step_end(step, epoch=epoch, metrics={"loss": loss.item()})
                if checkpoints.should_stop:
                    return None
            validate(plain, moments)
            end_epoch(feature, epoch, plain, optimizers, sums.found)
            if checkpoints.should_stop:
                return None
    found = {"model": plain, "optimizers": optimizers, "average": average}
    return found | {"sums": sums.found, "steps": step // BATCHES}
