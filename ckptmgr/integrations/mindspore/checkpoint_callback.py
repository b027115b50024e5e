# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
# (without MindSpore pyright takes this file for it)
"""`MindSporeCheckpoints`: `Model.train` and `Model.fit` of MindSpore, resumed bit for bit.

Rules, each found by failing:

* `cur_step_num` restarts at 0 unless a callback sets it when the training begins.
* `initial_epoch` alone gives the first epochs of the data again, in their order: the data set has to
  begin at the step, too, from which MindSpore also derives the order of later epochs.
* The last step of an epoch is saved at the end of the epoch, after the evaluation of `Model.fit`,
  whose metrics belong to it; any other step where it ends, before such an evaluation.
* After a stop inside an epoch `Model` still runs the evaluation and the end of the epoch, whose
  callbacks change the rate and the weights: the step is saved before.
* So it is called after all other callbacks, wherever it is in the list.
* `Model` enters and leaves its callbacks around the training, and again around each evaluation.
* A run that has reached its last epoch cannot be trained for no epoch: it makes one more step, which
  is undone.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import mindspore
import numpy as np
from mindspore import dataset as data
from mindspore.train import Callback, EarlyStopping, LossMonitor, ReduceLROnPlateau, TimeMonitor

from ckptmgr.config.config import CheckpointConfig, check_config
from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.strict_json import parse_bounded
from ckptmgr.integrations.base import FrameworkManager, move_to_end
from ckptmgr.integrations.counting import Uncounted, are_same, counts_of, put_counts, without
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.paths import StateMismatch
from ckptmgr.training.callback_values import MetricsSource
from ckptmgr.training.resume import Resumption

_UNSEEDED = 5489  # std::mt19937::default_seed; the data then draw a seed of their own
_WITHOUT_COUNTS = (LossMonitor, TimeMonitor)
_OF_LOSS_SCALE = ("loss_scale", "cur_iter", "last_overflow_iter", "bad_step")
_NO_COUNTS: Mapping[str, Any] = {"counting": [], "own": []}
_CALL = "initial_epoch=checkpoints.resume(model, dataset, epochs)"


class MindSporeCheckpoints(Callback):  # type: ignore[misc, unused-ignore]
    """Saves, prunes and resumes the runs of a `Model`.

    ```
    checkpoints = MindSporeCheckpoints("runs/lenet", CheckpointConfig(save_checkpoint_steps=100))
    first = checkpoints.resume(model, dataset, 10)
    model.train(10, dataset, callbacks=[checkpoints], initial_epoch=first)
    ```

    Files are those of `CheckpointManager`; `ModelCheckpoint` writes files under MindSpore's names.

    Args:
        directory: Directory of the checkpoints.
        config: When and how to save, what to keep. `save_checkpoint_steps` counts from the last save,
            as in MindSpore. Metrics are the loss, as `loss`, and those of the
            evaluations of `Model.fit`, which the checkpoint of the last step of an epoch has.
        counting: Callbacks of your own whose counts are saved, too: numbers, texts, arrays,
            parameters, and lists and dicts of them, in their public attributes. Give them to the
            training as well. `EarlyStopping` and `ReduceLROnPlateau` need not be named.
        options: `resume=Resume(...)`, and as for `CheckpointManager`: `prefix`, `stop`, `trust` and
            others. There are no `ranks`, because only training in one process is supported.

    Attributes:
        manager: The `CheckpointManager`, to list, pin or load checkpoints.

    Raises:
        TypeError, ValueError: As `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        counting: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        if options.get("save_policy") is None:  # intervals are those of MindSpore's own callback
            options["save_policy"] = check_config(config).save_policy(since="save")
        self.manager = FrameworkManager(
            "MindSporeCheckpoints", directory, config, instead="use ModelCheckpoint", **options
        )
        self._counting = tuple(counting)
        self._others: list[Any] = []
        self._own: list[Any] = []  # callbacks of MindSpore that count
        self._uncounted = Uncounted([])
        self._counts: Any = None
        self._resumed: Checkpoint | None = None
        self._first = _First(self._note_step)
        self._model: Any = None
        self._first_epoch = 0
        self._last_epoch = 0
        self._step = 0
        self._ended: Checkpoint | None = None
        self._facts: dict[str, Any] = {}
        self._random: _StepRandom | None = None
        self._metrics = MetricsSource(None)
        self._steps_per_epoch = 0
        self._is_pending = False
        self._is_slow: bool | None = None
        self._depth = 0

    def resume(self, model: Any, dataset: Any, epochs: int) -> int:
        """Restore the newest checkpoint that loads; return the `initial_epoch` for `Model.train`.

        The network and the optimizer get their parameters; the data set, the random numbers and the
        number of the step follow when the training begins. At a first start nothing is changed.

        Args:
            model: Its `train_network` is restored, and saved by the training.
            dataset: The data set of the training, built as for the first start.
            epochs: As for `Model.train`.

        Raises:
            StateMismatch: The checkpoint is of another network, or of no `MindSporeCheckpoints`, and
                nothing was changed; or it is of another class of optimizer, or of data with another
                number of batches.
            CkptmgrError, OSError: As `CheckpointManager.resume`.
        """
        try:
            return self._begin(model, dataset, epochs)
        except BaseException:
            self.manager.close()  # another one may resume
            raise

    def _begin(self, model: Any, dataset: Any, epochs: int) -> int:
        self._model, self._random, self._ended = model, None, None
        self._counts = self._resumed = None
        self._first_epoch = self._step = 0
        self._facts, random = {}, _StepRandom()
        state = {
            "network": _parameters(model.train_network),
            "training": "",
            "random": random,
            "generator": random.generator,
        }
        start = self._resume(state)
        _warn_of_order(dataset, is_resumed=not start.is_fresh)
        if start.checkpoint is None:
            return 0
        facts = parse_bounded(start.state["training"], what="state of the training")  # type: ignore[index, unused-ignore]
        _check_optimizers(model.train_network, facts.get("optimizers"))
        if "requires_grad" not in self.manager.how.may_differ:
            _restore_frozen(model.train_network, facts.get("frozen"))
        self._step, self._facts, self._resumed = start.step, facts, start.checkpoint
        restored: Any = start.state
        self._counts = restored.get("counts", _NO_COUNTS)
        steps_per_epoch = int(facts["steps_per_epoch"])
        random.take()
        self._random = random
        _warn_of_dropout(model.train_network)
        if self._step >= epochs * steps_per_epoch:
            self._ended, self._first_epoch = start.checkpoint, epochs - 1
            return self._first_epoch
        if facts["batches"] != dataset.get_dataset_size():
            raise StateMismatch(
                f"the data set has {dataset.get_dataset_size()} batches, but the run was saved with {facts['batches']}",
                hint="resume with the same data and the same batch size",
            )
        data.config.set_seed(facts["data_seed"])
        self._is_slow = data.config.get_fast_recovery()
        data.config.set_fast_recovery(False)  # else random transforms draw other numbers
        dataset.set_init_step(self._step)
        self._first_epoch = self._step // steps_per_epoch
        return self._first_epoch

    def _resume(self, state: dict[str, Any]) -> Resumption:
        """Resume with the counts of callbacks, if the checkpoint has them."""
        try:
            return self.manager.resume({**state, "counts": None})
        except StateMismatch as error:
            if "counts" not in str(error):
                raise
            return self.manager.resume(state)

    def __enter__(self) -> Self:
        """Enter the training, or an evaluation inside it."""
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the training, as `CheckpointManager` does."""
        self._depth -= 1
        if self._depth == 0:
            self._model = None
            self.manager.__exit__(kind, error, traceback)

    def on_train_begin(self, run_context: Any) -> None:
        """Go on from the restored step; refuse what cannot be saved.

        Raises:
            RuntimeError: `resume` was not called for this training.
            ValueError: There are several ranks.
            StateMismatch: The epochs have another number of steps than those of the checkpoint.
        """
        others, is_last = move_to_end(self, ["_callbacks"], self._first.among)
        if not is_last:
            return
        self._others = [one for one in others if not type(one).__name__.startswith("_")]
        others = [
            one
            for one in without(self._others, self._counting)
            if not isinstance(one, _WITHOUT_COUNTS)
        ]
        self._own = [one for one in others if isinstance(one, EarlyStopping | ReduceLROnPlateau)]
        self._uncounted = Uncounted(without(others, self._own))
        params = run_context.original_args()
        if self._model is None or params.train_network is not self._model.train_network:
            raise RuntimeError(
                f"each training with MindSporeCheckpoints begins with resume, for its model: Model.train(..., {_CALL})"
            )
        if params.device_number > 1:
            raise ValueError(
                f"MindSporeCheckpoints saves the state of one process, and there are {params.device_number}: use"
                " ModelCheckpoint with a coordinator"
            )
        is_sink = bool(params.dataset_sink_mode)
        batches = params.train_dataset.get_dataset_size()
        self._steps_per_epoch = params.batch_num if is_sink else batches
        stored = self._facts.get("steps_per_epoch", self._steps_per_epoch)
        if self._ended is None and stored != self._steps_per_epoch:
            raise StateMismatch(
                f"an epoch has {self._steps_per_epoch} steps, but the run was saved with {stored}",
                hint="resume with the same sink_size",
            )
        for name, value in self._facts.get("loss_scale", {}).items():
            setattr(params.loss_scale_mananger, name, value)
        self._is_pending = False
        params.cur_step_num = self._step if self._ended is None else self._step - 1
        if self._step % self._steps_per_epoch == 0:
            self._put_back()
        if self.manager.should_stop:
            run_context.request_stop()

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Put back what other callbacks may have changed, if the run goes on inside the epoch.

        Raises:
            ValueError: `initial_epoch` is another one than `resume` said.
        """
        params = run_context.original_args()
        if self._first_epoch >= 0:
            first, self._first_epoch = self._first_epoch, -1
            if params.cur_epoch_num != first + 1:
                raise ValueError(
                    f"the run goes on with initial_epoch={first}, but the training began with"
                    f" initial_epoch={params.cur_epoch_num - 1}: Model.train(..., {_CALL})"
                )
            self._last_epoch = first + params.epoch_num
            self._put_back()
        self._uncounted.begin_epoch()

    def _put_back(self) -> None:
        """Put the state back as it was saved, once; other callbacks have begun the training."""
        if self._resumed is not None and self._others:
            self._load_network(self._resumed)
        if self._counts is not None:
            _put_counts(self._counting, self._counts["counting"])
            if are_same(self._own, self._counts["own"]):
                _put_counts(self._own, self._counts["own"])
        if self._random is not None:
            self._random.put_back()
        self._resumed = self._counts = self._random = None

    def _load_network(self, checkpoint: Checkpoint) -> None:
        network = {"network": _parameters(self._model.train_network)}
        self.manager.load(checkpoint, network, only="network")

    def on_train_step_begin(self, run_context: Any) -> None:
        """Let later passes over the data set begin at its first batch."""
        if self._is_slow is not None:
            run_context.original_args().train_dataset.set_init_step(0)
            data.config.set_fast_recovery(self._is_slow)
            self._is_slow = None

    def on_train_step_end(self, run_context: Any) -> None:
        """Save by the policy, unless the epoch ends with this step.

        Raises:
            UnsupportedState, OSError, CkptmgrError: As `CheckpointManager.step_end`.
        """
        params = run_context.original_args()
        if self._ended is not None:
            self._load_network(self._ended)
            run_context.request_stop()
            return
        self._is_pending = params.cur_step_num % self._steps_per_epoch == 0
        if not self._is_pending:
            self._step_end(run_context)

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Save the last step of the epoch; raises as `on_train_step_end`."""
        if self._ended is not None:
            self._load_network(self._ended)
        if self._is_pending:
            self._is_pending = False
            self._uncounted.end_epoch()
            self._step_end(run_context)

    def _step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        state = self._state_of(params)
        metrics, epoch = self._metrics.at(run_context), params.cur_epoch_num
        self.manager.step_end(params.cur_step_num, state, epoch=epoch, metrics=metrics)
        if self.manager.should_stop:
            run_context.request_stop()
        is_whole = params.cur_step_num % self._steps_per_epoch == 0
        is_last = is_whole and params.cur_epoch_num >= self._last_epoch
        if is_last or run_context.get_stop_requested():
            self.manager.__exit__(None, None, None)  # what ends the training changes the weights

    def _note_step(self, run_context: Any) -> None:
        """Have a step saved, if the program fails before `_step_end`."""
        params = run_context.original_args()
        if self._ended is None:
            metrics, epoch = self._metrics.at(run_context), params.cur_epoch_num
            state = self._state_of(params)
            self.manager.note_step(params.cur_step_num, state, epoch=epoch, metrics=metrics)

    def _state_of(self, params: Any) -> Callable[[], Mapping[str, object]]:
        """Return a function that returns the state of a step, before the next one begins."""
        network, scaler = self._model.train_network, params.loss_scale_mananger
        random = _StepRandom()
        random.take()
        facts = {
            "steps_per_epoch": self._steps_per_epoch,
            "batches": params.train_dataset.get_dataset_size(),
            "data_seed": data.config.get_seed(),
            "optimizers": _optimizers(network),
            "frozen": _frozen(network),
            "loss_scale": {
                name: getattr(scaler, name) for name in _OF_LOSS_SCALE if hasattr(scaler, name)
            },
        }
        kept = self._first.kept(params.cur_epoch_num)
        counts = {"counting": _counts(self._counting), "own": _counts(self._own)}

        def state() -> Mapping[str, object]:
            return {
                "network": kept or _parameters(network),
                "training": json.dumps(facts),
                "random": random,
                "generator": random.generator,
                # Earlier versions do not know counts.
                **({"counts": counts} if counts != _NO_COUNTS else {}),
            }

        return state


class _First(Callback):  # type: ignore[misc, unused-ignore]
    """Is called before the callbacks that may fail at the end of a step, or change its weights.

    An `EarlyStopping` that ends the training may replace the weights by the best ones: a copy of
    them is taken in each epoch that may be the last.
    """

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note
        self._early: list[Any] = []
        self._kept: dict[str, Any] = {}
        self._epoch = 0

    def among(self, callbacks: list[Any]) -> list[Any]:
        """Return callbacks with this one before the first that replaces weights."""
        self._early = [one for one in callbacks if _restores_best(one)]
        at = callbacks.index(self._early[0]) if self._early else 0
        return [*callbacks[:at], self, *callbacks[at:]]

    def on_train_step_end(self, run_context: Any) -> None:
        """Note the step."""
        self._note(run_context)

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Copy the weights, if an `EarlyStopping` may end the training with this epoch."""
        params = run_context.original_args()
        self._epoch = params.cur_epoch_num
        may_stop = any(one.wait + 1 >= one.patience for one in self._early)
        self._kept = copy.deepcopy(_parameters(params.train_network)) if may_stop else {}

    def kept(self, epoch: int) -> dict[str, Any]:
        """Return the weights that were replaced in an epoch; empty if none were."""
        is_stopped = any(one.stopped_epoch == epoch for one in self._early)
        return self._kept if is_stopped and self._epoch == epoch else {}


class _StepRandom(GlobalRandom):
    """The global generators as they were at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: np.ndarray = mindspore.get_rng_state().asnumpy()
        self._taken: dict[str, object] | None = None

    def take(self) -> None:
        """Remember the generators as they are now."""
        self._taken = super().state_dict()

    def state_dict(self) -> dict[str, object]:
        """Return the remembered states, or else the present ones."""
        return super().state_dict() if self._taken is None else self._taken

    def put_back(self) -> None:
        """Set the generators as they were."""
        self.load_state_dict(self.state_dict())
        mindspore.set_rng_state(mindspore.Tensor(self.generator))


def _parameters(cell: Any) -> dict[str, Any]:
    """Return the parameters of a network, and of the optimizer that trains it, by their names."""
    return {one.name: one for one in cell.get_parameters()}


def _restores_best(callback: Any) -> bool:
    return isinstance(callback, EarlyStopping) and bool(callback.restore_best_weights)


def _counts(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what callbacks count, and the parameters that they keep."""
    return [
        {"class": type(one).__name__, "counts": counted, "parameters": _kept_parameters(one)}
        for one, counted in zip(callbacks, counts_of(callbacks), strict=True)
    ]


def _kept_parameters(callback: Any) -> dict[str, dict[str, Any]]:
    return {
        name: dict(value)
        for name, value in vars(callback).items()
        if isinstance(value, dict)
        and value
        and all(isinstance(one, mindspore.Parameter) for one in value.values())
    }


def _put_counts(callbacks: Sequence[Any], stored: Sequence[Mapping[str, Any]]) -> None:
    """Give callbacks their counts back; raise StateMismatch if they are others."""
    put_counts(callbacks, [one["counts"] for one in stored], owner="MindSporeCheckpoints")
    for callback, one in zip(callbacks, stored, strict=True):
        for name, values in one["parameters"].items():
            if not isinstance(vars(callback).get(name, 0), dict | None) or name.startswith("_"):
                raise StateMismatch(
                    f"counting= {type(callback).__name__}.{name} holds no parameters"
                )
            setattr(callback, name, {key: _parameter(key, array) for key, array in values.items()})


def _parameter(name: str, array: Any) -> Any:
    return mindspore.Parameter(mindspore.Tensor(array), name=name)


def _optimizers(network: Any) -> list[str]:
    """Return the classes of the optimizers in a network that trains."""
    cells = [cell for _, cell in network.cells_and_names()]
    return [type(cell).__name__ for cell in cells if isinstance(cell, mindspore.nn.Optimizer)]


def _check_optimizers(network: Any, stored: list[str] | None) -> None:
    """Refuse another class whose parameters have the same names, such as LazyAdam for Adam."""
    given = _optimizers(network)
    if stored not in (None, given):
        names, others = ", ".join(given) or "none", ", ".join(stored or ()) or "none"
        raise StateMismatch(
            f"the optimizer is {names}, but the run was saved with {others}",
            hint="resume with the same class of optimizer, or begin a run with the network alone in another directory:"
            " load_param_into_net(network, manager.load('latest', only='network')['network'])",
        )


def _frozen(network: Any) -> list[str]:
    """Return the names of the parameters that do not train."""
    return [name for name, one in _parameters(network).items() if not one.requires_grad]


def _restore_frozen(network: Any, stored: list[str] | None) -> None:
    """Freeze and unfreeze parameters as in the saved step; warn where the program has them otherwise."""
    present = _parameters(network)
    others = [] if stored is None else sorted(({*_frozen(network)} ^ {*stored}) & present.keys())
    for name in others:
        present[name].requires_grad = name not in (stored or ())
    if others:
        warnings.warn(
            f"requires_grad of {', '.join(others)} was set otherwise than in the saved run, and is now as stored; to keep that"
            ' of the program: resume=Resume(may_differ=["requires_grad"])',
            stacklevel=4,
        )


def _warn_of_order(dataset: Any, *, is_resumed: bool) -> None:
    if not is_resumed and dataset.is_shuffled() and data.config.get_seed() == _UNSEEDED:
        warnings.warn(
            "the data are shuffled by a seed that MindSpore draws at each start: a run that resumes inside an epoch"
            " has another order; call mindspore.set_seed(...) first",
            stacklevel=3,
        )


def _warn_of_dropout(network: Any) -> None:
    names = [name for name, cell in network.cells_and_names() if "Dropout" in type(cell).__name__]
    if names:
        warnings.warn(
            f"{', '.join(names)}: MindSpore does not give the state of the generator of a dropout operator, so the resumed run"
            " drops other elements than the uncut one",
            stacklevel=3,
        )
