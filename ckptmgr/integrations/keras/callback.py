# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Keras pyright takes this folder for it)
"""`KerasCheckpoints`: the checkpoints of a `CheckpointManager` as a callback of Keras.

Only public names of Keras are used. Rules, each found by failing:

* The state is that of the end of a step. A step inside an epoch is saved after its batch, the last
  one at the end of the epoch: after the validation, whose metrics belong to it, and after what draws
  random numbers there. With torch that is a pass over the loader that Keras begins, and drops.
* After a stop inside an epoch Keras still runs the validation and the end of the epoch, whose
  callbacks change the rate and the weights: the step is saved before.
* A stop that comes in a validation saves the step as it was before, and the resumed run validates.
* So it is called after all other callbacks, wherever it is in the list.
* `fit` begins with whole epochs. So the batches of a resumed one that were used are fetched once
  more, in their order, and passed over. Then everything is put back as it was, because other
  callbacks may have changed it meanwhile.
* Keras calls nothing when `fit` raises: hence the `with` block.
* Weights may be replaced by their average when an epoch or `fit` ends: never in the state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.notes import add_note
from ckptmgr.integrations.base import FrameworkManager, TrainingBlock, move_to_end
from ckptmgr.integrations.counting import Uncounted, are_same, counts_of, put_counts, without
from ckptmgr.integrations.keras.averages import Averages, replaced_after_errors
from ckptmgr.integrations.keras.held import (
    OF_COMPILE,
    Optimizers,
    buffers_of,
    optimizers_of,
    pairs_of_buffers,
    settings_of,
    warn_of_settings,
)
from ckptmgr.integrations.keras.train_function import TrainFunction
from ckptmgr.integrations.keras.variables import (
    array_of,
    global_seed,
    model_variables,
    pairs_of,
    values_of,
)
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.paths import StateMismatch, mismatch

_BACKENDS = ("jax", "torch")
_WITH_COUNTS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)
_WITHOUT_COUNTS = (keras.callbacks.History, keras.callbacks.ProgbarLogger)
_PARTS = {
    "model",
    "optimizer",
    "metrics",
    "seed",
    "counts",
    "random",
    "epoch_random",
    "epoch",
    "batch",
}


@dataclass(slots=True)
class _Step:
    """A step that has ended, and is not saved yet."""

    number: int
    epoch: int
    batch: int  # batches of the epoch that were used; 0 between epochs
    mark: int | None
    random: Mapping[str, object]
    metrics: Mapping[str, float]
    averages: Mapping[str, Any] | None = None  # of the metrics, if a validation begins them anew


class _First(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Notes a step before other callbacks, which may fail, have seen its end.

    And the beginning of a validation, before they replace the weights by their average.
    """

    def __init__(self, note: Callable[[int, Any], None], validates: Callable[[], None]) -> None:
        super().__init__()
        self._note, self._validates = note, validates

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the step."""
        self._note(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Note the validation."""
        self._validates()


class KerasCheckpoints(TrainingBlock, keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Saves, prunes and resumes one `fit`; a context manager around it.

    Args:
        directory: Directory of the checkpoints.
        config: When and how to save, and what to keep. Metrics have the names of Keras: `loss`,
            `val_loss` and so on; those of a validation belong to the last step of the epoch.
        counting: Callbacks of your own whose counts are saved, too: numbers, texts, arrays, and
            lists and dicts of them, in their public attributes. Give them to `fit` as well. Those of
            Keras that count, such as `EarlyStopping`, need not be named.
        options: `resume=Resume(...)`, and as for `CheckpointManager`: `prefix`, `stop`, `trust` and
            others. There are no `ranks`, because only training in one process is supported.

    Attributes:
        manager: The `CheckpointManager`, to list, pin or load checkpoints.

    Raises:
        ValueError: Keras has another backend than torch or JAX.
        TypeError, NotADirectoryError: As `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        counting: Sequence[keras.callbacks.Callback] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        if keras.backend.backend() not in _BACKENDS:
            raise ValueError(
                f"KERAS_BACKEND={keras.backend.backend()} cannot be resumed bit for bit: choose {' or '.join(_BACKENDS)}"
            )
        self.manager = FrameworkManager("KerasCheckpoints", directory, config, **options)
        self._counting = tuple(counting)
        self._has_begun = self._is_stopping = self._is_counted = False
        self._saved: Mapping[str, Any] | None = None
        self._initial_epoch: int | None = None
        self._seed: Any = None
        self._step = self._epoch_start = 0
        self._epoch = 0
        self._epoch_random: Mapping[str, object] = {}
        self._pending: _Step | None = None
        self._ended: _Step | None = None  # of this epoch
        self._batches: TrainFunction | None = None
        self._fitted: Any = None  # `self.model` would fetch its variables from JAX
        self._averages, self._uncounted = Averages([]), Uncounted([])
        self._optimizers = Optimizers()
        self._own: list[Any] = []  # callbacks of Keras that count

    def _leave(self, error: BaseException | None) -> None:
        """Save the last step of an epoch whose validation fails; the resumed run repeats that."""
        self._remove_stand_in()
        if error is not None and self._fitted is not None:
            self._averages.leave()
            if replaced_after_errors(self._fitted.optimizer):
                self._training.pop_all()
                add_note(error, "ckptmgr: the last step is not saved: its weights are averages now")
                return
            try:
                self._end_step()
            except Exception as failure:
                add_note(error, f"ckptmgr: a save failed: {failure}")

    @property
    def initial_epoch(self) -> int:
        """The epoch in which `fit` goes on; 0 at the start.

        Raises:
            UnsupportedCheckpoint: The newest checkpoint is not that of a `fit`.
            CkptmgrError, OSError: As `CheckpointManager.resume`.
        """
        if self._initial_epoch is None:
            found = self.manager.resume()
            state: Any = found.state
            self.manager.check_parts(found, _PARTS, of="a fit")
            self._saved, self._step = state, found.step
            self._initial_epoch = 0 if state is None else int(state["epoch"])
        return self._initial_epoch

    def load_weights(self, model: Any, checkpoint: Checkpoint | int | str = "latest") -> None:
        """Load the weights of a checkpoint into a model, such as of `manager.best("val_loss")`.

        Raises:
            StateMismatch: The model is another than the saved one.
            CheckpointNotFound, CorruptCheckpoint, KeyProblem: As `CheckpointManager.load`.
        """
        found: Any = self.manager.load(checkpoint, only=["model"])
        for variable, value in pairs_of("model", model_variables(model), found["model"]):
            variable.assign(value)

    # ------------------------------------------------------------------ hooks of Keras

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model; begin to watch for signals.

        Raises:
            RuntimeError: Outside of a `with` block, or in a second `fit`.
            StateMismatch: The model, or the class of an optimizer, is another than the saved one.
            UnsupportedState: The model holds an optimizer that is none of Keras.
        """
        self._check_is_entered()
        others, is_last = move_to_end(
            self, ["callbacks"], lambda others: [_First(self._note_step, self._put_aside), *others]
        )
        if not is_last:
            return
        if self._has_begun:
            raise RuntimeError(
                "a KerasCheckpoints is for one fit: give each its own, with a prefix= or a directory"
            )
        self._has_begun = True
        _ = self.initial_epoch
        self._fitted, self._seed = self.model, global_seed()
        optimizers_of(self._fitted)
        self._averages = Averages(others)
        others = [
            one for one in without(others, self._counting) if not isinstance(one, _WITHOUT_COUNTS)
        ]
        self._own = [one for one in others if isinstance(one, _WITH_COUNTS)]
        self._uncounted = Uncounted(without(others, self._own))
        self._restore()
        if self._saved is not None:
            warn_of_settings(self._fitted, self._saved.get("settings", []))
            put_counts(self._counting, self._saved["counts"])
            self._is_counted = are_same(self._own, self._saved.get("own_counts", []))
            self._put_counts(self._saved)
            GlobalRandom().load_state_dict(self._saved["random"])
        self._training.enter_context(self.manager)
        self._batches = TrainFunction(self.model)
        _ = self.manager.should_stop  # which begins to watch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Put back the random numbers with which the epoch began, if the run goes on inside it.

        Raises:
            ValueError: `fit` does not go on where the run was saved.
            StateMismatch: The epoch has another number of batches than in the saved run.
        """
        assert self._batches is not None  # noqa: S101 - since `on_train_begin`
        self._epoch, self._epoch_start, self._ended = epoch, self._step, None
        saved = self._saved
        if saved is not None:
            if epoch != saved["epoch"]:
                raise ValueError(
                    f"fit begins with epoch {epoch}, and the run was saved in epoch {saved['epoch']}: pass"
                    " initial_epoch=checkpoints.initial_epoch to fit"
                )
            done, steps = saved["batch"], saved.get("steps")
            if done and steps and steps != self.params["steps"]:
                problem = f"has {self.params['steps']} batches now, and had {steps}"
                raise _other_batches(f"after batch {done}", f"the epoch {problem}")
            self._epoch_start = self._step - done
            if done:
                GlobalRandom().load_state_dict(saved["epoch_random"])
                self._restore()  # Keras has begun the metrics anew
                self._batches.skip(dict(self.model.get_metrics_result()))
            else:
                self._saved = None
        self._epoch_random = GlobalRandom().state_dict()
        self._batches.begin_epoch()
        self._uncounted.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Save the step before, if the epoch may have gone on after it."""
        self._end_step()
        if self._is_stopping:
            self._training.close()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save by the policy, or at the end of the epoch, if this may be the last batch.

        Raises:
            StateMismatch: The data are cut into other batches than in the saved run.
            UnsupportedState, OSError, CkptmgrError: As `CheckpointManager.step_end`.
        """
        assert self._batches is not None  # noqa: S101 - since `on_train_begin`
        if self._batches.is_skipping:
            self._end_skip(self._done(batch))
            return
        if self._is_stopping:
            return  # the step before was the last one
        steps, self._pending = self.params["steps"], self._step_of(batch, logs)
        is_stopped = self._fitted.stop_training
        if is_stopped or (steps is not None and self._pending.batch < steps):
            self._end_step()
        if is_stopped or self._is_stopping:  # Keras leaves the epoch, and does not draw its end
            self._training.close()

    def _put_aside(self) -> None:
        """Keep the metrics of the epoch, which a validation resets, and put the step aside."""
        step = self._pending or self._ended  # of data without a length the step has ended
        if step is not None:
            step.averages = values_of(self.model.metrics_variables)
            state = self._state_of(step)
            self.manager.put_aside(step.number, state, epoch=step.epoch, metrics=step.metrics)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the last step of the epoch; end the run, if `fit` does."""
        assert self._batches is not None  # noqa: S101 - since `on_train_begin`
        is_stopped = self._fitted.stop_training
        if self._batches.is_skipping and not is_stopped:
            assert self._saved is not None  # noqa: S101
            raise _other_batches(f"after batch {self._saved['batch']}", "the epoch is shorter")
        is_longer = is_stopped or self.params["steps"] is not None
        last = self._pending or (None if is_longer else self._ended)
        with self._averages.left_out(epoch):
            if last is not None:
                self._uncounted.end_epoch()
                last.epoch, last.batch = epoch + 1, 0
                last.random, last.metrics = GlobalRandom().state_dict(), _numbers(logs)
            if self._pending is None and last is not None:
                # With JAX a step that may be followed by another has ended: data without a length.
                state = self._state_of(last)
                self.manager.note_step(last.number, state, epoch=epoch + 1, metrics=last.metrics)
            self._end_step()
            if is_stopped or self._is_stopping or epoch + 1 >= self.params["epochs"]:
                self._training.close()  # before `fit` replaces the weights by their average
            self.manager.before_update()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Cut a validation short after a signal that asks the run to stop."""
        if self._is_stopping:
            self._fitted.stop_evaluating = True

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for saves in the background."""
        self._remove_stand_in()
        self._training.close()

    # ------------------------------------------------------------------ states

    def _done(self, batch: int) -> int:
        """Return how many batches of the epoch have ended with one."""
        steps = self.params["steps"]
        return batch + 1 if steps is None else min(batch + 1, int(steps))

    def _step_of(self, batch: int, logs: Any) -> _Step:
        """Return the step that has ended with a batch."""
        assert self._batches is not None  # noqa: S101 - since `on_train_begin`
        done = self._done(batch)
        return _Step(
            number=self._epoch_start + done,
            epoch=self._epoch,
            batch=done,
            mark=self._batches.mark,
            random=GlobalRandom().state_dict(),
            metrics=_numbers(logs),
        )

    def _note_step(self, batch: int, logs: Any) -> None:
        """Have a step saved, if the program fails before `on_train_batch_end`."""
        if self._batches is not None and not (self._batches.is_skipping or self._is_stopping):
            step = self._step_of(batch, logs)
            state = self._state_of(step)
            self.manager.note_step(step.number, state, epoch=step.epoch, metrics=step.metrics)

    def _end_step(self) -> None:
        """End a step for the manager, once."""
        if self._pending is None:
            return
        step = self._ended = self._pending
        self._pending = None
        self._step, state = step.number, self._state_of(step)
        if self.manager.end_step(step.number, state, epoch=step.epoch, metrics=step.metrics):
            self._is_stopping = self._fitted.stop_training = True

    def _state_of(self, step: _Step) -> Callable[[], dict[str, object]]:
        """Return a function that returns the state of a step, before the next one begins."""
        epoch_random, counts = self._epoch_random, counts_of(self._counting)
        own_counts = [
            {"class": type(one).__name__, "counts": counts_of([one])[0]} for one in self._own
        ]

        def state() -> dict[str, object]:
            model = self.model
            optimizers = self._optimizers.states(model)
            first = optimizers.pop(OF_COMPILE, {"class": None, "variables": {}})
            return {
                "model": values_of(model_variables(model)),
                "optimizer": first["variables"],
                "optimizer_class": first["class"],
                "optimizers": optimizers,
                "buffers": buffers_of(model),
                "settings": settings_of(model),
                "metrics": step.averages or values_of(model.metrics_variables),
                "seed": array_of(self._seed),
                "counts": counts,
                "own_counts": own_counts,
                "random": step.random,
                "epoch_random": epoch_random if step.batch else None,
                "epoch": step.epoch,
                "batch": step.batch,
                "mark": step.mark,
                "steps": self.params["steps"],
            }

        return state

    def _end_skip(self, done: int) -> None:
        """Go on after the last batch that the saved run has used."""
        assert self._saved is not None and self._batches is not None  # noqa: S101, PT018
        if done < self._saved["batch"]:
            return
        if done > self._saved["batch"]:
            raise _other_batches(f"after batch {self._saved['batch']}", f"they end with {done}")
        mark = self._batches.mark
        if mark != self._saved["mark"] and not self._batches.is_drawn:
            warnings.warn(
                f"batch {done} of the epoch is another than in the saved run, so the run does not go on bit for bit: the data"
                " are others, or their order is drawn from generators of their own, or when an epoch ends",
                stacklevel=2,
            )
        self._restore()
        self._put_counts(self._saved)
        GlobalRandom().load_state_dict(self._saved["random"])
        self._batches.train()
        self._saved = None

    def _put_counts(self, saved: Mapping[str, Any]) -> None:
        put_counts(self._counting, saved["counts"])
        if self._is_counted:
            put_counts(self._own, [one["counts"] for one in saved.get("own_counts", [])])

    def _restore(self) -> None:
        if self._saved is None:
            return
        model, saved = self.model, self._saved
        first = {"class": saved.get("optimizer_class"), "variables": saved["optimizer"]}
        optimizers = {OF_COMPILE: first} if saved["optimizer"] else {}
        optimizers |= saved.get("optimizers", {})
        parts = {"model": model_variables(model), "metrics": model.metrics_variables}
        pairs = [pair for name, part in parts.items() for pair in pairs_of(name, part, saved[name])]
        buffers = pairs_of_buffers(model, saved.get("buffers", {}))
        pairs += self._optimizers.restorers(model, optimizers)
        for variable, value in pairs:
            variable.assign(value)
        for buffer, value in buffers:
            buffer.copy_(value)
        self._seed.assign(saved["seed"])

    def _remove_stand_in(self) -> None:
        if self._batches is not None:
            self._batches.remove()
            self._batches = None


def _other_batches(saved: str, problem: str) -> StateMismatch:
    return mismatch(
        "this fit",
        [f"the run was saved {saved} of an epoch, and {problem}"],
        hint="resume with the same data, the same batch size and steps_per_execution",
    )


def _numbers(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}
