# SPDX-License-Identifier: Apache-2.0
"""The features of the grid with `fit` of Keras, over torch."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from keras import layers

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.keras import KerasCheckpoints
from ckptmgr.testing.cell import EPOCHS, Moments, NoSuchFeature
from tests.kit.torch_grid_programs import INPUTS, SIZE, Rows, Stream

ABSENT = {
    "finder": "Keras has no finder",
    "loaders of unequal length": "`fit` takes one loader",
    "torch.compile": "`jit_compile=True` compiles for a minute in each start; four of its cells were run with a"
    " compiler that does nothing: three went on bit for bit, one lost a batch",
}


class HalfMoments(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Momentum in bfloat16."""

    def build(self, variables: Any) -> None:
        """Make the moments."""
        if not self.built:
            super().build(variables)
            self.held = [
                self.add_variable(one.shape, dtype="bfloat16", name=f"half_{number}")
                for number, one in enumerate(variables)
            ]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable."""
        held = self.held[self._get_variable_index(variable)]
        moment = held * 0.9 + keras.ops.cast(gradient, "bfloat16")
        self.assign(held, moment)
        self.assign_sub(variable, learning_rate * keras.ops.cast(moment, "float32"))


class Net(keras.Model):  # type: ignore[misc]
    """A network whose own steps end a run at the place of a cell; it has a second optimizer."""

    def __init__(self, moments: Moments, *, has_two: bool, is_frozen: bool) -> None:
        super().__init__()
        self.moments = moments
        self.first = layers.Dense(8, activation="relu", trainable=not is_frozen)
        self.norm, self.dropout = layers.BatchNormalization(), layers.Dropout(0.2)
        self.last = layers.Dense(1)
        self.second = keras.optimizers.SGD(1e-2, momentum=0.9) if has_two else None

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the prediction."""
        found = self.dropout(self.norm(self.first(inputs), training=training), training=training)
        return self.last(found)

    def train_step(self, data: Any) -> Any:
        """Train on a batch."""
        self.moments.batch()
        if self.second is None:
            return super().train_step(data)
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        loss.backward()
        parts = (self.first.trainable_weights, self.last.trainable_weights)
        with torch.no_grad():
            for optimizer, weights in zip((self.optimizer, self.second), parts, strict=True):
                optimizer.apply([one.value.grad for one in weights], weights)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, self(x))
        return self.get_metrics_result()

    def test_step(self, data: Any) -> Any:
        """Validate on a batch, which draws."""
        self.moments.validation()
        torch.rand(1)
        return super().test_step(data)


class Changes(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes weights and rate at the end of an epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Change them."""
        weights = self.model.last.kernel
        weights.assign(weights * 0.9 + keras.random.uniform(weights.shape))
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate * 0.5)


def optimizer_of(feature: str) -> Any:
    """Return the optimizer of a feature."""
    if feature == "moments of another type":
        return HalfMoments(1e-2)
    options: dict[str, Any] = {}
    if feature == "EMA":
        options = {"use_ema": True, "ema_momentum": 0.8}
    if feature == "accumulation that does not divide":
        options = {"gradient_accumulation_steps": 2}
    return keras.optimizers.Adam(1e-2, **options)


def data_of(feature: str) -> tuple[list[Any], dict[str, Any]]:
    """Return data of a feature, and options of `fit` for them."""
    if feature == "data without a length":
        return [torch.utils.data.DataLoader(Stream(), SIZE)], {}
    if feature == "persistent workers":
        rows = Rows(noise=0.0)
        options: Any = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
        return [torch.utils.data.DataLoader(rows, SIZE, **options)], {}
    x = INPUTS.numpy()
    return [x, x.sum(1, keepdims=True)], {"batch_size": SIZE}


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature in ABSENT:
        raise NoSuchFeature(ABSENT[feature])
    keras.utils.set_random_seed(0)
    is_frozen = feature == "frozen and unfrozen layers"
    model = Net(moments, has_two=feature == "two optimizers", is_frozen=is_frozen)
    model.compile(optimizer_of(feature), "mse", metrics=["mae"])
    model.build((None, 8))
    callbacks = [Changes()] if feature == "state changed at the end of an epoch" else []
    data, options = data_of(feature)
    x = INPUTS[: 2 * SIZE].numpy()
    with KerasCheckpoints(directory, CheckpointConfig(**moments.options)) as checkpoints:
        history = model.fit(
            *data,
            epochs=EPOCHS,
            initial_epoch=checkpoints.initial_epoch,
            callbacks=[*callbacks, checkpoints],
            validation_data=(x, x.sum(1, keepdims=True)),
            validation_batch_size=SIZE,
            verbose=0,
            **options,
        )
    tree = model.get_state_tree(value_format="numpy_array")
    if model.second is not None:
        tree["second"] = [one.numpy() for one in model.second.variables]
    last = {name: values[-1:] for name, values in history.history.items()}
    return {"tree": tree, "last": last, "trainable": model.first.trainable}
