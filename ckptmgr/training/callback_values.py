# SPDX-License-Identifier: Apache-2.0
"""Values that a training loop passes to a callback: parameters, items to save, metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.files.serialization import join_items
from ckptmgr.formats.safetensors_file import MINDSPORE_METADATA
from ckptmgr.formats.tensor import Item
from ckptmgr.state.arrays import is_mindspore, named_tensors

_LOG = logging.getLogger(__name__)


class RunContext(Protocol):
    """The argument of the callback methods."""

    def original_args(self) -> Any:
        """Return an object with `cur_step_num`, `cur_epoch_num`, `batch_num`, `train_network`."""
        ...


def items_of(params: Any, config: CheckpointConfig, *, step: int, epoch: int) -> list[Item]:
    """Return the items to save: those of the network, then those that the configuration appends.

    Raises:
        TypeError, UnsupportedState: A value cannot be stored.
    """
    items = named_tensors(_network_of(params, config))
    append = config.append_values(epoch, step=step)
    return join_items(items, named_tensors(append or {}))


def network_metadata(params: Any, config: CheckpointConfig) -> dict[str, str]:
    """Return the strings that a file of the network gets: those of MindSpore for its networks."""
    is_ms = config.format == "safetensors" and is_mindspore(_network_of(params, config))
    return dict(MINDSPORE_METADATA) if is_ms else {}


def _network_of(params: Any, config: CheckpointConfig) -> object:
    network = config.saved_network
    return params.train_network if network is None else network


def metrics_of(params: Any) -> dict[str, float]:
    """Return the metrics that are numbers; log a warning for each other one."""
    # MindSpore's parameters are a dictionary, whose missing attributes raise KeyError.
    found = (
        params.get("metrics") if isinstance(params, Mapping) else getattr(params, "metrics", None)
    )
    numbers: dict[str, float] = {}
    for name, value in found.items() if isinstance(found, Mapping) else ():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            # Loops keep arrays and tables among the metrics, which must not fail a save.
            _LOG.warning("the metric %r is no number and is not noted", name)
    return numbers
