# SPDX-License-Identifier: Apache-2.0
"""The features of the grid in a plain loop of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.testing.cell import BATCHES, EPOCHS, Moments, NoSuchFeature

SIZE = 4
INPUTS = torch.randn(BATCHES * SIZE, 8, generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    """Rows; with noise of the global generator, if nothing fetches them elsewhere."""

    def __init__(self, batches: int = BATCHES, *, noise: float = 0.1) -> None:
        self.inputs, self.noise = INPUTS[: batches * SIZE], noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        row = self.inputs[index]
        return (row + self.noise * torch.randn(8) if self.noise else row), row.sum(0, keepdim=True)


class Stream(IterableDataset[Any]):
    """The same rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


class HalfMoments(torch.optim.Optimizer):
    """Momentum in bfloat16, beside parameters of float32; loads of torch would convert it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    def step(self, closure: Any = None) -> Any:
        """Update."""
        loss = None if closure is None else closure()  # Lightning has one
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        held = self.state[one]
                        if not held:
                            held["moment"] = torch.zeros_like(one, dtype=torch.bfloat16)
                        held["moment"].mul_(0.9).add_(one.grad.bfloat16())
                        one.sub_(group["lr"] * held["moment"].float())
        return loss


def loader_of(feature: str) -> Any:
    """Return the loader of a feature."""
    match feature:
        case "data without a length":
            return DataLoader(Stream(), SIZE)
        case "persistent workers":
            return DataLoader(
                Rows(noise=0.0), SIZE, shuffle=True, num_workers=2, persistent_workers=True
            )
        case _:
            return DataLoader(Rows(), SIZE, shuffle=True)


def network() -> Any:
    """Return layers with batch norm and dropout."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
    )


def optimizers_of(feature: str, model: Any) -> list[Any]:
    """Return the optimizers of a feature."""
    if feature == "two optimizers":
        return [torch.optim.Adam(one.parameters(), 1e-2) for one in (model[0], model[4])]
    if feature == "moments of another type":
        return [HalfMoments(model.parameters())]
    return [torch.optim.Adam(model.parameters(), 1e-2)]


def averages() -> Any:
    """Return the constructor of an EMA of a model and its buffers."""
    swa: Any = torch.optim.swa_utils
    return partial(swa.AveragedModel, multi_avg_fn=swa.get_ema_multi_avg_fn(0.8), use_buffers=True)


def loss_of(model: Any, batches: Sequence[Any]) -> Any:
    """Return the sum of the losses of loaders side by side."""
    losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
    return torch.stack(losses).sum()


def validate(model: Any, moments: Moments) -> None:
    """Measure, inside of which a run may end; it draws numbers, too."""
    model.eval()
    for x, y in DataLoader(Rows(2), SIZE):
        moments.validation()
        with torch.no_grad():
            loss_of(model, [(x, y)])
    model.train()


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature == "finder":
        raise NoSuchFeature("a loop of its own has none; what it finds belongs into the state")
    torch.manual_seed(0)
    np.random.seed(0)
    model, loader = network(), loader_of(feature)
    short = (
        DataLoader(Rows(2), SIZE, shuffle=True) if feature == "loaders of unequal length" else None
    )
    optimizers = optimizers_of(feature, model)
    state: dict[str, Any] = {
        "model": torch.compile(model, backend="eager") if feature == "torch.compile" else model,
        "optimizers": optimizers,
        "average": averages()(model) if feature == "EMA" else None,
        "sum": 0.0,
        "means": [],
        "gradients": None,
    }
    every = 2 if feature == "accumulation that does not divide" else 1
    if feature == "frozen and unfrozen layers":
        model[0].requires_grad_(False)

    with CheckpointManager(directory, CheckpointConfig(**moments.options)) as manager:
        start = manager.resume(state)
        step = start.step
        for one, gradient in zip(model.parameters(), state["gradients"] or (), strict=False):
            one.grad = gradient
        for epoch in range(start.next_epoch, EPOCHS):
            for batches in side_by_side(manager, loader, short):
                moments.batch()
                loss = loss_of(state["model"], batches) / every
                loss.backward()
                step += 1
                if step % every == 0:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                if state["average"] is not None:
                    state["average"].update_parameters(model)
                state["sum"] += loss.item()
                if every > 1:
                    state["gradients"] = [one.grad for one in model.parameters()]
                manager.step_end(step, state, epoch=epoch, metrics={"loss": loss.item()})
                if manager.should_stop:
                    return state
            validate(model, moments)
            end_epoch(feature, epoch, model, optimizers, state)
            if manager.should_stop:
                return state
    return state


def side_by_side(manager: Any, loader: Any, short: Any) -> Iterator[Sequence[Any]]:
    """Yield the batches of a loader, and of a short one that begins again."""
    if short is None:
        return ((batch,) for batch in manager.batches(loader))
    first = iter(manager.batches(short, name="short"))  # asked for before the other has ended
    others = (batch for _ in range(BATCHES) for batch in manager.batches(short, name="short"))
    again = itertools.chain(first, others)
    return zip(manager.batches(loader), again, strict=False)


def end_epoch(
    feature: str, epoch: int, model: Any, optimizers: Sequence[Any], state: dict[str, Any]
) -> None:
    """Change what a feature changes at the end of an epoch."""
    state["means"].append(state["sum"] / BATCHES)
    state["sum"] = 0.0
    if feature == "frozen and unfrozen layers" and epoch == 0:
        model[0].requires_grad_(True)
    if feature == "state changed at the end of an epoch":
        with torch.no_grad():
            model[4].weight.mul_(0.9).add_(torch.rand(()))
        optimizers[0].param_groups[0]["lr"] *= 0.5
