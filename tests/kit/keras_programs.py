# SPDX-License-Identifier: Apache-2.0
"""Programs with Keras for the kit: validation, schedules, averages, loss scale, odd data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.keras import KerasCheckpoints

ROWS, SIZE = 64, 16  # 4 batches of an epoch


class Noise(layers.Layer):  # type: ignore[misc]
    """Adds noise of the global seed generator, where the backend allows it."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return noisy inputs in training."""
        if not training or keras.backend.backend() == "jax":
            return inputs
        return inputs + keras.random.normal(keras.ops.shape(inputs), stddev=0.1)


class Stepped(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches whose noise is drawn where they are fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = _rows()

    def __len__(self) -> int:
        return ROWS // SIZE

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * SIZE, (index + 1) * SIZE)
        return self.x[rows] + np.random.normal(0, 0.1, (SIZE, 8)).astype("float32"), self.y[rows]


def arrays(directory: str, steps: int) -> object:
    """Train on shuffled arrays, with a validation, and a schedule that multiplies the last rate."""
    x, y = _rows()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    valid = (x[:8], y[:8])
    return _train(
        directory, steps, x, y, callbacks=[schedule], batch_size=SIZE, validation_data=valid
    )


def averaged(directory: str, steps: int) -> object:
    """Train on shuffled arrays, with weights that are replaced by their average at the end."""
    optimizer = keras.optimizers.AdamW(1e-2, use_ema=True, ema_overwrite_frequency=None)
    return _train(directory, steps, *_rows(), optimizer=optimizer, batch_size=SIZE)


class Losses(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the numbers of all epochs, over the starts of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the numbers of the epoch."""
        self.seen = [*self.seen, *(float(logs[name]) for name in ("loss", "mae", "val_loss"))]


def watched(directory: str, steps: int) -> object:
    """Train with callbacks that read the validation: a plateau halves the rate in every epoch.

    The averages of the weights are swapped in for the validation, and at the end of an epoch.
    """
    x, y = _rows()
    losses = Losses()
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_delta=9.0)
    early = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9)
    return _train(
        directory,
        steps,
        x,
        y,
        optimizer=optimizer,
        config={"keep": "last(2)"},
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True), losses, plateau, early],
        counting=[losses],
        batch_size=SIZE,
        validation_data=(x[:32], y[:32]),
        validation_batch_size=8,
    ) | {"seen": losses.seen, "wait": plateau.wait, "best": early.best}


def dataset(directory: str, steps: int) -> object:
    """Train on batches with noise, with encrypted saves in a thread."""
    secret = {"enc_key": bytes(range(32)), "format": "safetensors", "async_save": "thread"}
    return _train(directory, steps, Stepped(), config=secret)


def loader(directory: str, steps: int) -> object:
    """Train on a loader of torch without a length, in half precision with a loss scale."""
    import torch

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return zip(*_rows(), strict=True)

    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1e-2, momentum=0.9), initial_scale=2.0**10, dynamic_growth_steps=3
    )
    data = torch.utils.data.DataLoader(Rows(), SIZE)
    return _train(directory, steps, data, optimizer=optimizer)


def _rows() -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return x, x.sum(1, keepdims=True)


def _train(
    directory: str,
    steps: int,
    *data: Any,
    optimizer: Any = None,
    config: Any = None,
    callbacks: Any = (),
    counting: Any = (),
    **options: Any,
) -> dict[str, object]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            Noise(),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    kept = CheckpointConfig(**{"keep": "last(2) | best(1, loss, min)", **(config or {})})
    with KerasCheckpoints(directory, kept, counting=counting) as checkpoints:
        history = model.fit(
            *data,
            epochs=-(-steps // (ROWS // SIZE)),
            initial_epoch=checkpoints.initial_epoch,
            callbacks=[*callbacks, checkpoints],
            verbose=0,
            **options,
        )
    last = {name: values[-1:] for name, values in history.history.items()}
    return {"tree": model.get_state_tree(value_format="numpy_array"), "last": last}
