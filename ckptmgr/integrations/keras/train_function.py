# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Keras pyright takes this folder for it)
"""`TrainFunction`: the train function of a model, which can pass over batches.

Only `model.train_function` is replaced, which Keras reads for every batch. With torch it is given the
batches, with JAX the state and an iterator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from ckptmgr.state.global_random import global_draws
from ckptmgr.training.loaders import mark_of


class TrainFunction:
    """Stands for `model.train_function`: looks at the batches, or only fetches them."""

    def __init__(self, model: Any) -> None:
        self.mark: int | None = None
        self.is_drawn = False  # whether the last batch that was passed over drew numbers
        self._after: tuple[object, ...] | None = None
        self._model = model
        self._function: Callable[..., Any] = model.train_function
        self._metrics: Mapping[str, Any] | None = None
        self._takes_iterator = keras.backend.backend() != "torch"
        self._iterator: object = None
        self._is_first = True
        self._before: tuple[object, ...] | None = None
        self._has_warned = False
        self._epochs = 0
        model.train_function = self

    @property
    def is_skipping(self) -> bool:
        """Whether batches are passed over."""
        return self._metrics is not None

    def skip(self, metrics: Mapping[str, Any]) -> None:
        """Pass over the batches from now on; each returns these metrics."""
        self._metrics = metrics

    def train(self) -> None:
        """Train from now on."""
        self._metrics = None

    def begin_epoch(self) -> None:
        """Look at the next batch whether the data begin again."""
        self._epochs += 1
        self._is_first = True
        self._before = global_draws()

    def remove(self) -> None:
        """Give the model its own function back."""
        self._model.train_function = self._function

    def __call__(self, *given: Any) -> Any:
        """Train a step, or return the metrics without one."""
        if self._is_first:
            self._check_is_new_pass(given[-1])
        if not self._takes_iterator:
            self.mark = mark_of(given[0])
            if self._metrics is None:
                return self._function(*given)
            drawn = global_draws()
            self.is_drawn = self._after is not None and self._after != drawn
            self._after = drawn
            return self._metrics
        *state, iterator = given
        watched = self._watched(iterator)
        if self._metrics is None:
            return self._function(*state, watched)
        drawn = global_draws()
        next(watched)
        for _ in range(self._model.steps_per_execution - 1):
            next(watched, None)
        self.is_drawn = drawn != global_draws()
        return self._metrics, *state

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self.mark = mark_of(batch)
            yield batch

    def _check_is_new_pass(self, data: object) -> None:
        """Warn once of data that go on over epochs: a resumed run begins with their first batch."""
        self._is_first = False
        is_same = data is self._iterator if self._takes_iterator else self._before == global_draws()
        self._iterator = data if self._takes_iterator else None
        if self._epochs > 1 and is_same and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the data do not begin anew with the epoch, because of steps_per_epoch or of a generator of their own: a"
                " resumed run has other batches; give fit data of which each epoch is a whole pass",
                stacklevel=2,
            )
