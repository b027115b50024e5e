# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Keras pyright takes this folder for it)
"""`Averages`: weights that `SwapEMAWeights` has replaced by their averages.

Between the end of an epoch and the next one the model has the averages, and the optimizer the
weights; after the last epoch the weights are gone. So the callback does not learn which epoch is
the last one before the state is saved. It is driven by its own events alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras


class Averages:
    """Gives the model its weights while the state is taken."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        kind = keras.callbacks.SwapEMAWeights
        self._all = [one for one in callbacks if isinstance(one, kind)]
        self._at_epochs = [(one, one.params) for one in self._all if one.swap_on_epoch]
        for one, params in self._at_epochs:
            one.set_params({**params, "epochs": math.inf})

    @contextmanager
    def left_out(self, epoch: int) -> Iterator[None]:
        """Have the weights in the model inside the block; `epoch` has ended."""
        for one, _ in reversed(self._at_epochs):
            one.on_epoch_begin(epoch)
        yield
        for one, params in self._at_epochs:
            changed = one.params
            one.set_params(params)
            one.on_epoch_end(epoch)
            one.set_params(changed)

    def leave(self) -> None:
        """Have the weights in the model for good, such as after a validation that failed."""
        for one in self._all:
            one.on_test_end()


def replaced_after_errors(optimizer: Any) -> bool:
    """Return whether Keras has replaced the weights by averages after a `fit` that failed."""
    one = getattr(optimizer, "inner_optimizer", optimizer)
    parts = getattr(one, "optimizers", [one])
    return keras.backend.backend() == "jax" and any(
        getattr(part, "use_ema", False) for part in parts
    )
