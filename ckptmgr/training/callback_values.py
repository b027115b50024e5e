# SPDX-License-Identifier: Apache-2.0
"""Values that a training loop passes to a callback: parameters, items to save, metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.arguments import checked_metrics
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
    if not is_ms:
        return {}
    return {**MINDSPORE_METADATA, "remove_redundancy": str(config.remove_redundancy)}


def _network_of(params: Any, config: CheckpointConfig) -> object:
    network = config.saved_network
    return params.train_network if network is None else network


GivenMetrics = Mapping[str, float] | Callable[[RunContext], Mapping[str, float] | None]


class MetricsSource:
    """The metrics of the saves of a callback: the loss, those of the parameters, and given ones.

    Later ones replace earlier ones of the same name. `given` is a mapping, which is read at each
    save, or a function of the run context.

    Raises:
        TypeError: It is neither.
    """

    def __init__(self, given: GivenMetrics | None) -> None:
        if given is not None and not (isinstance(given, Mapping) or callable(given)):
            raise TypeError(
                "metrics is a mapping of names to numbers or a function of the run context, but got "
                f"{type(given).__name__}"
            )
        self._given = given
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def at(self, run_context: RunContext) -> dict[str, float]:
        """Return the metrics of a save now.

        Raises:
            TypeError: A given metric is no number.
            Exception: From the given function.
        """
        params, given = run_context.original_args(), self._given
        step, evaluated = self._evaluated
        found = _loss_of(params) | _metrics_of(params)
        if step == int(params.cur_step_num):
            found |= evaluated
        if given is not None:
            found |= checked_metrics(given if isinstance(given, Mapping) else given(run_context))
        return found

    def evaluated(self, params: Any) -> dict[str, float]:
        """Return the metrics of an evaluation that has just ended; a later save of the step has them.

        `Model.fit` has them only at the end of an epoch, after the callbacks of its last step.
        """
        found = _metrics_of(params)
        self._evaluated = (int(params.cur_step_num), found)
        return found


def _loss_of(params: Any) -> dict[str, float]:
    """Return the loss that MindSpore's `LossMonitor` prints, if the network returned one."""
    outputs = _parameter(params, "net_outputs")
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    try:
        as_numpy = getattr(first, "asnumpy", None)
        return {"loss": float(first if as_numpy is None else np.mean(as_numpy()))}  # type: ignore[arg-type] # else raises
    except (TypeError, ValueError, RuntimeError):
        return {}  # outputs of another kind are no loss


def _metrics_of(params: Any) -> dict[str, float]:
    """Return the metrics that are numbers; log a warning for each other one."""
    found = _parameter(params, "metrics")
    numbers: dict[str, float] = {}
    for name, value in found.items() if isinstance(found, Mapping) else ():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            # Loops keep arrays and tables among the metrics, which must not fail a save.
            _LOG.warning("the metric %r is no number and is not noted", name)
    return numbers


def _parameter(params: Any, name: str) -> object:
    # MindSpore's parameters are a dictionary, whose missing attributes raise KeyError.
    return params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
