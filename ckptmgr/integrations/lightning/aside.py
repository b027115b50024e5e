# SPDX-License-Identifier: Apache-2.0
"""The state of the last step, kept while batches go on without one: gradients accumulate, or a step fails.

Parameters and the states of optimizers change with a step alone, so they are not copied; buffers,
results and counters are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

_OPTIMIZERS = "optimizer_states"


class StateAside:
    """A checkpoint of Lightning, as it was when it was put aside."""

    def __init__(self, module: Any, checkpoint: Mapping[str, Any]) -> None:
        self._parameters = list(module.parameters())
        self._versions = self._present_versions()
        shared = frozenset(one.data_ptr() for one in self._parameters)
        self._checkpoint = {
            name: value if name == _OPTIMIZERS else copied(value, shared)
            for name, value in checkpoint.items()
        }

    def _present_versions(self) -> list[int]:
        return [one._version for one in self._parameters]

    def __call__(self) -> dict[str, Any]:
        """Return the checkpoint.

        Raises:
            RuntimeError: The parameters have changed since.
        """
        if self._present_versions() != self._versions:
            raise RuntimeError("the next step had begun to change the weights")
        return self._checkpoint


def copied(value: Any, shared: frozenset[int] = frozenset()) -> Any:
    """Return a copy of nested containers and tensors, but for tensors at the places of `shared`."""
    if isinstance(value, torch.Tensor):
        return value if value.data_ptr() in shared else value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copied(one, shared)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(copied(one, shared) for one in value)
    return value
