# SPDX-License-Identifier: Apache-2.0
"""Programs with MindSpore's Model for the kit: fit, graph mode, sink mode, workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import Callback, Model

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.mindspore import MindSporeCheckpoints

ROWS, SIZE = 32, 8  # 4 batches of an epoch


class StopAt(Callback):  # type: ignore[misc, unused-ignore]
    """Asks the training to stop after a step, inside an epoch."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_step_end(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num >= self._step:
            run_context.request_stop()


def fitted(directory: str, steps: int) -> object:
    """Train with an evaluation after every epoch."""
    return train(directory, steps, fits=True, config={"keep": "last(2) | best(1, mae, min)"})


def compiled(directory: str, steps: int) -> object:
    """Train in graph mode, with a data set that asks for sink mode, and encrypted saves.

    They are not in the background: Ctrl-C in another thread than the first comes as SIGTERM.
    """
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    config = {"enc_key": bytes(range(32)), "format": "safetensors"}
    return train(directory, steps, config=config, dataset_sink_mode=True)


def generated(directory: str, steps: int) -> object:
    """Train with rows of a generator, which two workers fetch."""
    return train(directory, steps, is_generated=True)


def dataset(*, is_generated: bool = False, is_shuffled: bool = True) -> Any:
    """Return 32 rows in 4 batches."""
    inputs = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    targets = inputs.sum(1, keepdims=True)
    columns = ["x", "y"]
    if is_generated:
        rows = list(zip(inputs, targets, strict=True))
        return GeneratorDataset(
            rows, columns, shuffle=True, num_parallel_workers=2, python_multiprocessing=False
        ).batch(SIZE)
    return NumpySlicesDataset((inputs, targets), columns, shuffle=is_shuffled).batch(SIZE)


def model(*, seed: int = 0, width: int = 8, **options: Any) -> Any:
    """Return a model with BatchNorm and a schedule, which needs the number of the step."""
    mindspore.set_seed(seed)
    network = nn.SequentialCell(
        nn.Dense(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dense(width, 1)
    )
    rates = nn.exponential_decay_lr(1e-2, 0.9, 100, 4, 1)
    optimizer = nn.Adam(network.trainable_params(), rates)
    return Model(network, nn.MSELoss(), optimizer, metrics={"mae"}, **options)


def returned(made: Any) -> dict[str, np.ndarray]:
    """Return the parameters of the network and of the optimizer."""
    return {one.name: one.asnumpy().copy() for one in made.train_network.get_parameters()}


def train(
    directory: str,
    steps: int,
    *,
    fits: bool = False,
    config: Any = None,
    is_generated: bool = False,
    dataset_sink_mode: bool = False,
) -> object:
    """Train to a step; return the parameters."""
    made, rows = model(), dataset(is_generated=is_generated)
    epochs = -(-steps // (ROWS // SIZE))
    checkpoints = MindSporeCheckpoints(
        directory, CheckpointConfig(**{"keep": "last(2)", **(config or {})})
    )
    first = checkpoints.resume(made, rows, epochs)
    call = partial(made.fit, valid_dataset=dataset(is_shuffled=False)) if fits else made.train
    call(
        epochs,
        train_dataset=rows,
        callbacks=[checkpoints, StopAt(steps)],
        initial_epoch=first,
        dataset_sink_mode=dataset_sink_mode,
    )
    return returned(made)
