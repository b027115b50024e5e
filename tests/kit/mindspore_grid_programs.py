# SPDX-License-Identifier: Apache-2.0
"""The features of the grid with `Model.fit` of MindSpore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset, transforms
from mindspore.train import Callback, Model

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.mindspore import MindSporeCheckpoints
from ckptmgr.testing.cell import BATCHES, EPOCHS, Moments, NoSuchFeature

SIZE = 4
INPUTS = np.random.default_rng(0).normal(size=(BATCHES * SIZE, 8)).astype(np.float32)
ABSENT = {"finder": "MindSpore has no finder"}


class HalfMoments(nn.Optimizer):  # type: ignore[misc, unused-ignore]
    """Momentum in float16; bfloat16 has no operators on a CPU."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(1e-2, parameters)
        self.held = mindspore.ParameterTuple(
            mindspore.Parameter(ops.zeros(one.shape, mindspore.float16), name=f"half.{one.name}")
            for one in self.parameters
        )

    def construct(self, gradients: Any) -> Any:
        """Update."""
        rate = self.get_lr()
        for one, held, gradient in zip(self.parameters, self.held, gradients, strict=True):
            moment = held.astype(mindspore.float32) * 0.9 + gradient
            ops.assign(held, moment.astype(mindspore.float16))
            ops.assign_sub(one, rate * held.astype(mindspore.float32))
        return True


class Loss(nn.Cell):  # type: ignore[misc, unused-ignore]
    """The loss of a batch, and of one of a second data set beside it."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.of = network, nn.MSELoss()

    def construct(self, *batches: Any) -> Any:
        """Return the sum of the losses."""
        found = self.of(self.network(batches[0]), batches[1])
        if len(batches) > 2:
            found += self.of(self.network(batches[2]), batches[3])
        return found


class Step(nn.Cell):  # type: ignore[misc, unused-ignore]
    """One step of a training of its own: many optimizers, an average, gradients of many steps."""

    def __init__(self, loss: Any, optimizers: Any, *, every: int, averages: bool) -> None:
        super().__init__()
        self.loss, self.optimizers, self.every = loss, nn.CellList(optimizers), every
        self.weights = [tuple(one.parameters) for one in optimizers]
        every_weight = mindspore.ParameterTuple(one for some in self.weights for one in some)
        self.sums = every_weight.clone("sum", init="zeros") if every > 1 else ()
        self.count = mindspore.Parameter(mindspore.Tensor(0, mindspore.int32), name="count")
        self.average = every_weight.clone("average", init="same") if averages else ()
        self.found = mindspore.value_and_grad(loss, None, every_weight)

    def construct(self, *batches: Any) -> Any:
        """Train on a batch; return the loss."""
        loss, gradients = self.found(*batches)
        ops.assign_add(self.count, 1)
        if self.sums:
            for held, one in zip(self.sums, gradients, strict=True):
                ops.assign_add(held, one / self.every)
            gradients = self.sums
        if int(self.count) % self.every == 0:
            rest = list(gradients)
            for optimizer, weights in zip(self.optimizers, self.weights, strict=True):
                optimizer(tuple(rest[: len(weights)]))
                del rest[: len(weights)]
            for held in self.sums:
                ops.assign(held, ops.zeros_like(held))
        for held, one in zip(self.average, self.loss.network.trainable_params(), strict=False):
            ops.assign(held, held * 0.8 + one * 0.2)
        return loss


class Ends(Callback):  # type: ignore[misc, unused-ignore]
    """Ends a run at the place of a cell; draws in the validation."""

    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin a batch."""
        self._moments.batch()

    def on_eval_step_begin(self, run_context: Any) -> None:
        """Validate on a batch."""
        self._moments.validation()
        np.random.rand()


class Averages(Callback):  # type: ignore[misc, unused-ignore]
    """The mean of the losses of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = 0.0
        self.means: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Add a loss."""
        self.sum += float(run_context.original_args().net_outputs)

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Note the mean."""
        self.means.append(self.sum / BATCHES)
        self.sum = 0.0


class Changes(Callback):  # type: ignore[misc, unused-ignore]
    """Changes weights and rate at the end of an epoch, by numbers that it draws."""

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Change them."""
        params = run_context.original_args()
        weight = params.network.network[3].weight
        ops.assign(weight, weight * 0.9 + np.random.rand())
        ops.assign(params.optimizer.learning_rate, params.optimizer.learning_rate * 0.5)


class Unfreezes(Callback):  # type: ignore[misc, unused-ignore]
    """Unfreezes the first layer at the end of the first epoch."""

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Unfreeze it."""
        for one in run_context.original_args().network.network[0].get_parameters():
            one.requires_grad = True


def network_of() -> Any:
    """Return layers with batch norm."""
    return nn.SequentialCell(nn.Dense(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dense(8, 1))


def model_of(feature: str) -> Any:
    """Return the model of a feature, whose loss takes all columns of a batch."""
    network = network_of()
    weights = network.trainable_params()
    options: dict[str, Any] = {"metrics": {"loss"}}
    loss = Loss(network)
    options |= {"eval_network": nn.WithEvalCell(network, nn.MSELoss()), "eval_indexes": [0, 1, 2]}
    if feature == "moments of another type":
        return Model(loss, optimizer=HalfMoments(weights), **options)
    every = 2 if feature == "accumulation that does not divide" else 1
    if every == 1 and feature not in ("two optimizers", "EMA"):
        return Model(loss, optimizer=nn.Adam(weights, 1e-2), **options)
    parts = [weights[:2], weights[2:]] if feature == "two optimizers" else [weights]
    optimizers = [nn.Adam(one, 1e-2) for one in parts]
    step = Step(loss, optimizers, every=every, averages=feature == "EMA")
    return Model(step, **options)


def rows(batches: int = BATCHES) -> tuple[Any, Any]:
    """Return inputs and targets."""
    inputs = INPUTS[: batches * SIZE]
    return inputs, inputs.sum(1, keepdims=True)


def stream() -> Iterator[Any]:
    """Yield the rows, without a length."""
    yield from zip(*rows(), strict=True)


def data_of(feature: str) -> Any:
    """Return the data of a feature; the inputs have random zeros, by transforms of MindSpore."""
    columns = ["x", "y"]
    match feature:
        case "data without a length":
            found = GeneratorDataset(stream, columns)
        case "persistent workers":
            options: Any = {"num_parallel_workers": 2, "python_multiprocessing": True}
            pairs = list(zip(*rows(), strict=True))
            found = GeneratorDataset(pairs, columns, shuffle=True, **options)
        case _:
            found = NumpySlicesDataset(rows(), columns, shuffle=True)
    zeros = transforms.RandomApply([transforms.Fill(0.0)], prob=0.2)
    found = found.map(zeros, "x").batch(SIZE)
    if feature != "loaders of unequal length":
        return found
    short = NumpySlicesDataset(rows(2), ["x2", "y2"], shuffle=True).batch(SIZE).repeat(3)
    return found.zip(short)


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature in ABSENT:
        raise NoSuchFeature(ABSENT[feature])
    if feature == "torch.compile":
        mindspore.set_context(mode=mindspore.GRAPH_MODE)
    mindspore.set_seed(0)
    model, averages = model_of(feature), Averages()
    callbacks: list[Any] = [Ends(moments), averages]
    if feature == "state changed at the end of an epoch":
        callbacks.append(Changes())
    if feature == "frozen and unfrozen layers":
        for one in model.train_network.network.network[0].get_parameters():
            one.requires_grad = False
        callbacks.append(Unfreezes())
    checkpoints = MindSporeCheckpoints(
        directory, CheckpointConfig(**moments.options), counting=[averages]
    )
    data = data_of(feature)
    valid = NumpySlicesDataset(rows(2), ["x", "y"], shuffle=False).batch(SIZE)
    first = checkpoints.resume(model, data, EPOCHS)
    model.fit(EPOCHS, data, valid, callbacks=[*callbacks, checkpoints], initial_epoch=first)
    if moments.is_interrupted:
        raise KeyboardInterrupt  # in a validation MindSpore turns it into SIGTERM, which ends the training
    found = list(model.train_network.get_parameters())
    return {
        "parameters": [one.asnumpy().copy() for one in found],
        "trainable": [one.requires_grad for one in found],
        "means": averages.means,
    }
