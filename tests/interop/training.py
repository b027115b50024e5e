# SPDX-License-Identifier: Apache-2.0
"""A small MindSpore training run, the same one every time. Import it only where MindSpore is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import mindspore.dataset
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model

STEPS_PER_EPOCH = 5


class At(Callback):  # type: ignore[misc] # MindSpore is untyped
    """Call `action(run_context)` at one point of the training.

    Args:
        point: `step_begin`, `step_end`, `epoch_begin`, `epoch_end` or `end`.
        number: Of the step or epoch; ignored for `end`.
        action: What to do.
    """

    def __init__(self, point: str, number: int, action: Callable[[Any], None]) -> None:
        super().__init__()
        self._point = point
        self._number = number
        self._action = action

    def on_train_step_begin(self, run_context: Any) -> None:
        self._act(run_context, "step_begin", run_context.original_args().cur_step_num)

    def on_train_step_end(self, run_context: Any) -> None:
        self._act(run_context, "step_end", run_context.original_args().cur_step_num)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self._act(run_context, "epoch_begin", run_context.original_args().cur_epoch_num)

    def on_train_epoch_end(self, run_context: Any) -> None:
        self._act(run_context, "epoch_end", run_context.original_args().cur_epoch_num)

    def on_train_end(self, run_context: Any) -> None:
        self._act(run_context, "end", self._number)

    def _act(self, run_context: Any, point: str, number: int) -> None:
        if (point, number) == (self._point, self._number):
            self._action(run_context)


def new_network(seed: int = 0) -> Any:
    """Return a network of two layers whose weights depend on the seed only."""
    network = nn.SequentialCell(nn.Dense(3, 4), nn.ReLU(), nn.Dense(4, 2))
    rng = np.random.default_rng(seed)
    for parameter in network.get_parameters():
        values = rng.normal(size=parameter.shape).astype(np.float32)
        parameter.set_data(mindspore.Tensor(values))
    return network


def dataset(size_steps: int = STEPS_PER_EPOCH) -> Any:
    """Return the same batches every time."""
    rng = np.random.default_rng(1)
    columns = [rng.normal(size=(size_steps * 4, width)).astype(np.float32) for width in (3, 2)]
    rows = mindspore.dataset.NumpySlicesDataset(tuple(columns), ["x", "y"], shuffle=False)
    return rows.batch(4)


def new_model(network: Any) -> Any:
    """Return a model that trains with Adam, which has two slots for each parameter."""
    optimizer = nn.Adam(network.trainable_params(), learning_rate=0.01)
    return Model(network, nn.MSELoss(), optimizer, metrics={"mae"})


def train(callbacks: Any, *, epochs: int = 3, network: Any = None, initial_epoch: int = 0) -> Any:
    """Train and return the model's training network (weights and optimizer slots)."""
    model = new_model(new_network() if network is None else network)
    model.train(epochs, dataset(), callbacks=callbacks, initial_epoch=initial_epoch)
    return model.train_network


def listing(directory: Path) -> list[str]:
    """Return all names in a directory but those of our manifests and lease files."""
    ours = (".manifest.json", ".lease")
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(ours))


def numbers_of(cell: Any) -> dict[str, np.ndarray]:
    """Return the parameters of a Cell as arrays."""
    return {name: parameter.asnumpy().copy() for name, parameter in cell.parameters_dict().items()}
