# SPDX-License-Identifier: Apache-2.0
"""The metrics that were measured at a step, among those that Lightning keeps.

`trainer.callback_metrics` holds each metric until it is measured again: that of a validation also
while the weights change. A value that was measured is a new tensor, so the tensors are compared.
"""

from __future__ import annotations

from typing import Any

import torch


class Measured:
    """Tells the metrics of a step from earlier ones."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def forget(self, trainer: Any) -> None:
        """Count what there is as measured before."""
        self._seen = dict(trainer.callback_metrics)

    def since(self, trainer: Any) -> dict[str, float]:
        """Return what was measured since `forget`."""
        present = trainer.callback_metrics
        return {
            name: float(value)
            for name, value in present.items()
            if name not in self._seen or _place(value) != _place(self._seen[name])
        }


def _place(value: Any) -> tuple[object, object]:
    """Return where a value is in memory: of a tensor Lightning hands out a new view each time."""
    if not isinstance(value, torch.Tensor):  # a program has put it there
        return id(value), 0
    return value.untyped_storage().data_ptr(), value.storage_offset()
