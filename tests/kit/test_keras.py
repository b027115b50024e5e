# SPDX-License-Identifier: Apache-2.0
"""Fits of Keras go on bit for bit: `make kit FRAMEWORK=keras`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    Ranks,
    StateMismatch,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.integrations.base import FrameworkManager
from ckptmgr.testing.grid import Cell
from ckptmgr.testing.kit import differences
from tests.kit.cuts import KILLS_AT_EDGES, every_cut, every_pair
from tests.kit.stops import TOLD, saved_and_killed
from tests.parallel.ranks import Meeting, Seat
from tests.test_examples import MOST_LINES, lines_of

os.environ["KERAS_BACKEND"] = "torch"  # of this process and those that it starts
torch = pytest.importorskip("torch")
keras = pytest.importorskip("keras", reason="needs keras: make kit FRAMEWORK=keras")

from keras.callbacks import Callback  # noqa: E402
from keras.utils import PyDataset  # noqa: E402

from ckptmgr.integrations.counting import counts_of, put_counts  # noqa: E402
from ckptmgr.integrations.keras import CheckpointCallback, KerasCheckpoints  # noqa: E402

pytestmark = [
    pytest.mark.kit,
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # of torch, by Keras
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "keras_fit.py"
OWN = "tests/kit/keras_programs.py"
JAX = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
COMMON: dict[str, Any] = {"fork": True, "ends_with_epoch": True}
SMALL = {"steps_per_epoch": 4, **COMMON}
PROGRAMS = {
    "examples/keras_fit.py:main": {"steps_per_epoch": 10, "keep": 2, **COMMON},
    f"{OWN}:arrays": SMALL,
}
AT_EDGES = {
    f"{OWN}:dataset": SMALL,
    f"{OWN}:loader": SMALL,
    f"{OWN}:averaged": {**SMALL, "environment": JAX},
    f"{OWN}:watched": SMALL,
}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_fit_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


@every_cut(AT_EDGES, KILLS_AT_EDGES)
@pytest.mark.usefixtures("kit")
def test_fit_on_other_data_goes_on_at_the_edges_of_an_epoch(
    cut: str, check: Callable[[str], None]
) -> None:
    check(cut)


X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def model_of(*, units: int = 3, is_built: bool = True, seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    first = [keras.layers.Input((4,))] if is_built else []
    hidden = [keras.layers.Dense(units), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([*first, *hidden])
    model.compile("adam", "mse")
    return model


class Stop(Callback):  # type: ignore[misc]
    """Does something at a batch, such as raise."""

    def __init__(self, epoch: int, batch: int, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.epoch, self.batch, self.act = epoch, batch, act
        self.tests = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.present = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.present, batch) == (self.epoch, self.batch):
            self.act(self.model)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tests += 1


def fit(
    directory: Path,
    epochs: int,
    *,
    model: Any = None,
    data: Any = (X, Y),
    config: Any = None,
    callbacks: Any = (),
    **options: Any,
) -> Any:
    """Train on four batches an epoch; return the model."""
    model = model_of() if model is None else model
    with KerasCheckpoints(directory, config) as checkpoints:
        options.setdefault("initial_epoch", checkpoints.initial_epoch)
        if len(data) == 2:
            options.setdefault("batch_size", 8)
        model.fit(*data, epochs=epochs, callbacks=[*callbacks, checkpoints], verbose=0, **options)
    return model


def same(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(a, b) for a, b in zip(one.get_weights(), other.get_weights(), strict=True)
    )


def steps_in(directory: Path) -> list[int]:
    return [one.step for one in CheckpointManager(directory).checkpoints()]


def test_draw_between_the_last_batch_and_the_next_epoch_is_the_same(tmp_path: Path) -> None:
    expected = fit(tmp_path / "uncut", 3)
    fit(tmp_path / "cut", 1)
    assert same(fit(tmp_path / "cut", 3, model=model_of(seed=5)), expected)


def test_dropout_with_torch_draws_the_same_inside_an_epoch(tmp_path: Path) -> None:
    expected = fit(tmp_path / "uncut", 2)

    def fail(model: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", 2, callbacks=[Stop(1, 2, fail)])
    assert steps_in(tmp_path / "cut")[-1] == 6
    assert same(fit(tmp_path / "cut", 2, model=model_of(seed=5)), expected)


def test_callback_before_ours_sees_every_batch_of_the_resumed_epoch(tmp_path: Path) -> None:
    seen: list[tuple[int, list[str]]] = []

    def note(batch: int, logs: Any) -> None:
        seen.append((batch, sorted(logs)))

    stop = Stop(0, 1, lambda model: setattr(model, "stop_training", True))
    fit(tmp_path, 1, callbacks=[stop])
    fit(tmp_path, 1, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)])
    assert seen == [(batch, ["loss"]) for batch in range(4)]
    assert steps_in(tmp_path)[-1] == 4


def test_finished_run_gives_its_model_without_training(tmp_path: Path) -> None:
    expected = fit(tmp_path, 1)
    assert same(fit(tmp_path, 1, model=model_of(seed=3)), expected)


def test_model_that_is_built_by_the_fit_resumes(tmp_path: Path) -> None:
    expected = fit(tmp_path / "uncut", 2, model=model_of(is_built=False))
    fit(tmp_path / "cut", 1, model=model_of(is_built=False))
    assert same(fit(tmp_path / "cut", 2, model=model_of(is_built=False)), expected)


def test_names_that_count_the_layers_of_a_process_may_be_others(tmp_path: Path) -> None:
    expected = fit(tmp_path, 1)
    keras.layers.Dense(1)
    found = model_of(seed=4)
    assert found.layers[0].name != expected.layers[0].name
    assert same(fit(tmp_path, 1, model=found), expected)


def test_other_model_is_refused_with_its_variables_and_not_changed(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    with pytest.raises(StateMismatch, match=r"model: .*kernel has shape \(4, 5\), stored is"):
        fit(tmp_path, 2, model=model_of(units=5))
    other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, name="only")])
    other.compile("adam", "mse")
    with pytest.raises(StateMismatch, match="model: sequential/only/bias is not stored"):
        fit(tmp_path, 2, model=other)
    longer = model_of()
    longer.add(keras.layers.Dense(1))
    longer.compile("adam", "mse")
    with pytest.raises(StateMismatch, match=r"model: has 7 variables, stored are 5"):
        fit(tmp_path, 2, model=longer)


def with_optimizer(optimizer: Any) -> Any:
    model = model_of()
    model.compile(optimizer, "mse")
    return model


def test_other_class_of_optimizer_with_the_same_names_is_refused(tmp_path: Path) -> None:
    kinds = keras.optimizers
    fit(tmp_path, 1, model=with_optimizer(kinds.Adam(name="optimizer")))
    for other, name in (
        (kinds.AdamW(name="optimizer"), "AdamW"),
        (kinds.LossScaleOptimizer(kinds.Adam(name="optimizer")), "LossScaleOptimizer of Adam"),
    ):
        model = with_optimizer(other)
        before = model.get_weights()
        with pytest.raises(StateMismatch, match=f"is {name}, stored are the variables of Adam\\b"):
            fit(tmp_path, 2, model=model)
        assert all(map(np.array_equal, before, model.get_weights()))
    fit(tmp_path, 2, model=with_optimizer(kinds.Adam(name="optimizer")))
    assert steps_in(tmp_path)[-1] == 8


def test_checkpoint_without_a_class_of_its_optimizer_resumes(tmp_path: Path) -> None:
    class Older(FrameworkManager):
        def step_end(self, step: int, state: Any, **facts: Any) -> Any:
            def without_class() -> Any:
                return {name: one for name, one in state().items() if name != "optimizer_class"}

            return super().step_end(step, without_class, **facts)

    with KerasCheckpoints(tmp_path) as checkpoints:
        checkpoints.manager = Older("Older", tmp_path)
        model_of().fit(X, Y, batch_size=8, callbacks=[checkpoints], verbose=0)
    fit(tmp_path, 2)
    assert steps_in(tmp_path)[-1] == 8


class Adversarial(keras.Model):  # type: ignore[misc, name-defined]
    """Two networks that are trained in turn, by optimizers that are built when they are used."""

    has_turns = True

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        self.second = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        self.norm = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(4))
        self.error, self.built = keras.metrics.Mean(name="error"), True

    def compile(self, *optimizers: Any) -> None:
        super().compile()
        self.each = {"first": optimizers[0], "others": list(optimizers[1:])}

    @property
    def metrics(self) -> list[Any]:
        return [self.error]

    def train_step(self, data: Any) -> Any:
        is_turn = self.has_turns and int(self.each["first"].iterations) % 3 != 2
        pairs = [(self.first, self.each["first"])]
        pairs += [(self.second, one) for one in self.each["others"] if is_turn]
        loss: Any = None
        for network, optimizer in pairs:
            self.zero_grad()
            loss = keras.ops.mean((network(self.norm(data[0])) - data[1]) ** 2)
            loss.backward()
            weights = network.trainable_weights
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in weights], weights)
        self.error.update_state(loss)
        return {"error": self.error.result()}


def adversarial(*more: Any, kind: Any = None) -> Any:
    keras.utils.set_random_seed(0)
    model = Adversarial()
    model.compile(keras.optimizers.Adam(0.01), (kind or keras.optimizers.RMSprop)(0.02), *more)
    return model


def values_in(model: Any) -> list[Any]:
    kept = [model.each["first"], *model.each["others"]]
    found = [*model.weights, *(one for optimizer in kept for one in optimizer.variables)]
    arrays = [keras.ops.convert_to_numpy(one) for one in found]
    return [*arrays, *(one.numpy() for one in model.norm.module.buffers())]


@pytest.mark.parametrize("batch", [0, 2])
def test_every_optimizer_and_buffer_that_a_model_holds_goes_on(tmp_path: Path, batch: int) -> None:
    expected = values_in(fit(tmp_path / "uncut", 3, model=adversarial()))
    fit(tmp_path / "cut", 3, model=adversarial(), callbacks=[stop_at(1, batch)])
    found = values_in(fit(tmp_path / "cut", 3, model=adversarial()))
    assert differences(expected, found) == []


def test_optimizer_that_is_not_used_before_the_next_save_keeps_its_variables(
    tmp_path: Path,
) -> None:
    kept = CheckpointConfig(keep="all")
    fit(tmp_path, 1, model=adversarial(), config=kept)
    model = adversarial()
    model.has_turns = False
    fit(tmp_path, 2, model=model, config=kept)
    (unused,) = model.each["others"]
    assert not unused.built
    states: list[Any] = [CheckpointManager(tmp_path).load(step) for step in (4, 8)]
    before, after = (list(one["optimizers"].values())[1] for one in states)
    assert differences(before, after) == []
    assert len(after["variables"]) == 4
    assert int(fit(tmp_path, 3, model=adversarial()).each["others"][0].iterations) == 3 + 2


def test_other_optimizers_that_a_model_holds_are_refused_by_name(tmp_path: Path) -> None:
    fit(tmp_path, 1, model=adversarial())
    with pytest.raises(StateMismatch, match=r"others'\]\[1\]: is an optimizer that is not stored"):
        fit(tmp_path, 2, model=adversarial(keras.optimizers.SGD()))
    with pytest.raises(StateMismatch, match=r"is Adam, stored are the variables of RMSprop"):
        fit(tmp_path, 2, model=adversarial(kind=keras.optimizers.Adam))
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(UnsupportedState, match=r"holds a SGD of torch as each\['others'\]\[1\]"):
        fit(tmp_path / "new", 1, model=adversarial(foreign))


def test_layers_with_other_settings_than_those_saved_are_warned_of(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    model = model_of()
    model.layers[1].trainable = False
    with pytest.warns(UserWarning, match="dropout.*trainable is False, saved was True; if"):
        fit(tmp_path, 2, model=model)


def counted(directory: Path, epochs: int, **options: Any) -> Any:
    """Train with callbacks that wait two epochs; return their counts, and the rate."""
    from keras.callbacks import EarlyStopping, ReduceLROnPlateau

    plateau = ReduceLROnPlateau("loss", min_delta=100.0, patience=2)
    early = EarlyStopping("loss", min_delta=100.0, patience=4, restore_best_weights=True)
    model, counting = model_of(), options.pop("counting", [plateau, early])
    with KerasCheckpoints(directory, counting=counting) as checkpoints:
        model.fit(
            X,
            Y,
            batch_size=8,
            epochs=epochs,
            initial_epoch=checkpoints.initial_epoch,
            callbacks=[plateau, early, checkpoints],
            verbose=0,
        )
    return plateau.wait, early.wait, early.stopped_epoch, float(model.optimizer.learning_rate)


def test_callbacks_that_count_epochs_go_on_counting(tmp_path: Path) -> None:
    expected = counted(tmp_path / "uncut", 9)
    assert expected[2] == 4
    counted(tmp_path / "cut", 2)
    assert counted(tmp_path / "cut", 9) == expected
    with pytest.raises(StateMismatch, match="counting= has 0 callbacks, and 2 were saved"):
        counted(tmp_path / "cut", 9, counting=[])


def test_callbacks_that_count_and_are_not_named_are_warned_of(tmp_path: Path) -> None:
    class Batches(Callback):  # type: ignore[misc]
        count = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1

    with pytest.warns(UserWarning, match=r"^Batches\.count: a resumed run begins anew"):
        fit(tmp_path, 2, callbacks=[Batches(), keras.callbacks.EarlyStopping("loss", patience=9)])


def test_callbacks_of_keras_that_count_go_on_without_being_named(tmp_path: Path) -> None:
    expected = counted(tmp_path / "uncut", 9, counting=[])
    counted(tmp_path / "cut", 2, counting=[])
    assert counted(tmp_path / "cut", 9, counting=[]) == expected
    early = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.warns(UserWarning, match=r"\[ReduceLROnPlateau, EarlyStopping\], and this one has"):
        fit(tmp_path / "cut", 6, callbacks=[early])


def test_metrics_of_the_validation_belong_to_the_last_step_of_the_epoch(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="best(1, val_loss, min)")
    fit(tmp_path, 2, config=config, validation_data=(X, Y))
    with KerasCheckpoints(tmp_path, config) as checkpoints:
        best = checkpoints.manager.best("val_loss")
        assert best is not None
        assert (best.step, best.epoch) == (8, 2)
        model = model_of(seed=9)
        checkpoints.load_weights(model, best)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(best.metrics["val_loss"])


def test_only_the_best_epochs_are_written(tmp_path: Path) -> None:
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 10.0)
    config = CheckpointConfig(keep="best(1, val_loss, min)", save_only_kept=True)
    for epochs in (2, 4):
        with KerasCheckpoints(tmp_path, config) as checkpoints:
            places = {"initial_epoch": checkpoints.initial_epoch, "epochs": epochs}
            options = {"batch_size": 8, "validation_data": (X, Y), "verbose": 0, **places}
            model_of().fit(X, Y, callbacks=[rates, checkpoints], **options)
    # Step 12 was worse and is not written; step 16 is the end of the training.
    found = {one.step: one.why for one in CheckpointManager(tmp_path).checkpoints()}
    assert found == {8: "policy", 16: "end"}


def test_epochs_that_validate_are_saved_where_the_metric_makes_them_due(tmp_path: Path) -> None:
    config = CheckpointConfig(None, save_when_measured="val_loss", keep="all")
    with KerasCheckpoints(tmp_path, config) as checkpoints:
        options = {"validation_data": (X, Y), "validation_freq": 2, "verbose": 0, "epochs": 5}
        model_of().fit(X, Y, batch_size=8, callbacks=[checkpoints], **options)
    assert steps_in(tmp_path) == [8, 16, 20]


def test_interval_of_two_epochs_saves_their_last_steps(tmp_path: Path) -> None:
    batches = 4
    config = CheckpointConfig(save_checkpoint_steps=2 * batches, keep="all")
    fit(tmp_path, 5, config=config)
    assert steps_in(tmp_path) == [8, 16, 20]


def test_encrypted_checkpoints_resume_with_their_key(tmp_path: Path) -> None:
    secret = CheckpointConfig(
        enc_key=bytes(range(32)), format="safetensors", async_save="thread", keep="last(1)"
    )
    expected = fit(tmp_path, 1, config=secret)
    with pytest.raises(CkptmgrError, match="encrypted"):
        fit(tmp_path, 1)
    assert same(fit(tmp_path, 1, model=model_of(seed=2), config=secret), expected)


def test_sigterm_saves_the_step_and_cuts_the_validation_short(tmp_path: Path) -> None:
    stop = Stop(0, 1, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    config = CheckpointConfig(save_checkpoint_steps=100)
    fit(tmp_path, 9, config=config, callbacks=[stop], validation_data=(X, Y))
    (saved,) = CheckpointManager(tmp_path).checkpoints()
    assert (saved.step, saved.why) == (2, "preempted")
    assert stop.tests == 1
    assert same(fit(tmp_path, 2), fit(tmp_path / "uncut", 2))


WATCHED = """
import signal, sys, keras, numpy as np, torch
from ckptmgr import CheckpointConfig
from ckptmgr.integrations.keras import KerasCheckpoints

x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = np.sin(x).sum(1, keepdims=True)
callbacks = keras.callbacks

class Losses(callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        names = "loss", "mae", "val_loss", "val_mae"
        self.seen = self.seen + [float(logs[name]) for name in names]

class End(callbacks.Callback):
    def __init__(self, at, how):
        super().__init__()
        self.at, self.how = at, how

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.at:
            if self.how == "signal":
                signal.raise_signal(signal.SIGTERM)
            else:
                self.model.stop_training = True

def fit(name, at=None, how="", epochs=4):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9), "mse", metrics=["mae"])
    losses, plateau = Losses(), callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=2, min_delta=9.0)
    early = callbacks.EarlyStopping("val_loss", patience=3, min_delta=9.0, restore_best_weights=True)
    counting = [losses]
    end, swap = End(at, how), callbacks.SwapEMAWeights(swap_on_epoch=True)
    config = CheckpointConfig(save_checkpoint_steps=1000)
    with KerasCheckpoints(name, config, counting=counting) as ours:
        last = [swap, end, losses, plateau, early, ours]
        given = {"x": Loader()} if has_no_length else {"x": x, "y": y, "batch_size": 8}
        model.fit(**given, epochs=epochs, validation_data=(x[:16], y[:16]), validation_batch_size=4,
            verbose=0, initial_epoch=ours.initial_epoch,
            callbacks=last if is_last else [swap, plateau, ours, losses, early, end])
    return losses.seen, plateau.wait, early.wait, early.best, [w.tolist() for w in model.get_weights()], [
        np.array(keras.ops.convert_to_numpy(v.value)).tolist() for v in model.optimizer.variables]

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(x, y)

def Loader():
    return torch.utils.data.DataLoader(Rows(), 8)

is_last, has_no_length = sys.argv[1] != "between", sys.argv[1] == "stream"
expected = fit("uncut")
assert len(expected[0]) == 16
for step in map(int, sys.argv[2:]):
    for how in "signal", "flag":
        name = f"cut-{step}-{how}"
        fit(name, step, how)
        assert fit(name) == expected, name
"""


WAITS = """
class Wait(callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == waits_at and batch == 1:
            print("waits", flush=True)
            while True:
                select.select([], [], [], 60)
"""


@pytest.mark.parametrize("how", ["last", "between", "stream"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_kill_in_a_validation_after_a_stop_loses_no_step(
    tmp_path: Path, backend: str, how: str
) -> None:
    """The grace ends in the validation: the step is saved as it was before, and validated again."""
    program = WATCHED.replace("import signal", "import select, signal")
    head, *_ = program.partition("is_last, has")
    head = head.replace("last = [swap, end,", "last = [swap, end, *waiting,")
    head = head.replace("else [swap,", "else [swap, *waiting,")
    head = head.replace("counting=counting)", "counting=counting, observe=told)")
    tail = """
is_last, has_no_length = sys.argv[1] != "between", sys.argv[1] == "stream"
waits_at, waiting = int(sys.argv[2]), []
if waits_at:
    waiting = [Wait()]
fit("cut") if waits_at else print(fit("cut") == fit("uncut"))
"""
    program = head + TOLD + WAITS + tail
    assert saved_and_killed(started(program, tmp_path, how, "8", backend=backend)) == 8
    assert run_program(program, tmp_path, how, "0", backend=backend).split()[-1] == "True"


@pytest.mark.parametrize("how", ["last", "between", "stream"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_stop_leaves_no_trace(tmp_path: Path, backend: str, how: str) -> None:
    """The callback is the last one, or between others; or the data have no length."""
    run_program(WATCHED, tmp_path, how, "6", "8", backend=backend)


@pytest.mark.parametrize("act", ["batch", "validation"])
def test_state_that_is_saved_after_an_error_is_that_of_the_step(tmp_path: Path, act: str) -> None:
    class Fail(Callback):  # type: ignore[misc]
        has_failed = False

        def fail(self) -> None:
            if int(self.model.optimizer.iterations) == 8 and not Fail.has_failed:
                Fail.has_failed = True
                raise ZeroDivisionError

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if act == "batch":
                self.fail()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if act == "validation":
                self.fail()

    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    options: Any = {"validation_data": (X, Y), "validation_batch_size": 8, "config": config}
    expected = fit(tmp_path / "uncut", 3, **options)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", 3, callbacks=[Fail()], **options)
    assert steps_in(tmp_path / "cut") == [8]
    assert same(fit(tmp_path / "cut", 3, callbacks=[Fail()], **options), expected)


def test_exception_save_saves_the_last_step(tmp_path: Path) -> None:
    """Keras calls no `on_train_end` then."""

    def fail(model: Any) -> None:
        raise ZeroDivisionError

    model, config = model_of(), CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, 2, model=model, config=config, callbacks=[Stop(1, 1, fail)])
    assert [path for path in tmp_path.iterdir() if "-5" in path.name]
    assert not type(model.train_function).__module__.startswith("ckptmgr")


class Reshuffled(PyDataset):  # type: ignore[misc]
    """Shuffles its rows when an epoch ends, with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng, self.order = np.random.default_rng(0), np.arange(32)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * 8 : index * 8 + 8]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        """Shuffle."""
        self.rng.shuffle(self.order)


def stop_at(epoch: int, batch: int) -> Stop:
    return Stop(epoch, batch, lambda model: setattr(model, "stop_training", True))


def test_data_in_another_order_are_warned_of(tmp_path: Path) -> None:
    fit(tmp_path, 2, data=(Reshuffled(),), callbacks=[stop_at(1, 1)], shuffle=False)
    with pytest.warns(UserWarning, match="batch 2 of the epoch is another"):
        fit(tmp_path, 2, data=(Reshuffled(),), shuffle=False)


def test_data_that_go_on_from_epoch_to_epoch_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="do not begin anew with the epoch.*steps_per_epoch"):
        fit(tmp_path, 2, steps_per_epoch=2, shuffle=False)


def test_data_in_other_batches_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, 1, callbacks=[stop_at(0, 2)])
    with pytest.raises(
        StateMismatch, match=r"after batch 3.*the epoch has 2 batches now, and had 4"
    ):
        fit(tmp_path, 1, batch_size=16)
    with pytest.raises(StateMismatch, match="the epoch has 8 batches now"):
        fit(tmp_path, 1, batch_size=4)


def rows_of(count: int) -> Iterator[Any]:
    for first in range(0, 8 * count, 8):
        yield X[first : first + 8], Y[first : first + 8]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # the epoch is to be short
def test_data_without_a_length_that_end_before_the_saved_batch_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, 1, data=(rows_of(4),), callbacks=[stop_at(0, 2)])
    with pytest.raises(StateMismatch, match="after batch 3 of an epoch, and the epoch is shorter"):
        fit(tmp_path, 1, data=(rows_of(2),))


def test_other_batch_size_at_the_edge_of_an_epoch_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    fit(tmp_path, 2, batch_size=16)
    assert steps_in(tmp_path)[-1] == 6


GROUPED = """
import sys, keras, numpy as np
from ckptmgr import CheckpointManager, StateMismatch
from ckptmgr.integrations.keras import KerasCheckpoints
from ckptmgr.integrations.counting import counts_of, put_counts  # noqa: E402

x = np.ones((32, 4), "float32")

def fit(name, epochs, *more, group=3):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=group)
    with KerasCheckpoints(name) as checkpoints:
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, verbose=0,
            initial_epoch=checkpoints.initial_epoch, callbacks=[*more, checkpoints])
    return model.get_weights()

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True

fit("cut", 2, Stop())
print([one.step for one in CheckpointManager("cut").checkpoints()])
try:
    fit("cut", 2, group=2)
except StateMismatch as error:
    print(error)
for one, other in zip(fit("cut", 2), fit("uncut", 2)):
    print(np.array_equal(one, other))
print([one.step for one in CheckpointManager("uncut").checkpoints()])
"""


def started(text: str, directory: Path, *arguments: str, backend: str) -> subprocess.Popen[str]:
    """Start a program in a process of its own."""
    places = {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    command, environment = [sys.executable, "-c", text, *arguments], {**os.environ, **places}
    return subprocess.Popen(
        command, cwd=directory, env=environment, stdout=PIPE, stderr=PIPE, text=True
    )


def run_program(text: str, directory: Path, *arguments: str, backend: str) -> str:
    """Run a program in a process of its own; return what it printed, or fail with its error."""
    child = started(text, directory, *arguments, backend=backend)
    output, errors = child.communicate()
    assert child.returncode == 0, errors[-3000:]
    return output


def test_batches_of_one_execution_are_counted_and_passed_over_together(tmp_path: Path) -> None:
    """With JAX: with torch Keras has no `steps_per_execution`."""
    done = subprocess.run(
        [sys.executable, "-c", GROUPED],
        cwd=tmp_path,
        env={**os.environ, **JAX, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"^[\[TF].*", done.stdout, re.MULTILINE) == [
        "[3]",
        "True",
        "True",
        "[3, 4, 7, 8]",
    ]
    assert "after batch 3 of an epoch, and they end with 4" in done.stdout


def test_fit_that_begins_with_another_epoch_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    with pytest.raises(ValueError, match=r"epoch 0.*epoch 1.*initial_epoch=checkpoints\."):
        fit(tmp_path, 2, initial_epoch=0)


def test_second_fit_is_refused(tmp_path: Path) -> None:
    model = model_of()
    with KerasCheckpoints(tmp_path) as checkpoints:
        model.fit(X, Y, callbacks=[checkpoints], verbose=0)
        with pytest.raises(RuntimeError, match="for one fit"):
            model.fit(X, Y, callbacks=[checkpoints], verbose=0)


def test_fit_outside_of_the_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="train inside `with KerasCheckpoints"):
        model_of().fit(X, Y, callbacks=[KerasCheckpoints(tmp_path)], verbose=0)


def test_checkpoint_of_another_loop_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1})
    with pytest.raises(UnsupportedCheckpoint, match="no state of a fit"):
        _ = KerasCheckpoints(tmp_path).initial_epoch


def test_coordinator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="coordinator= has no effect"):
        KerasCheckpoints(tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))


def test_backend_that_cannot_be_resumed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(ValueError, match=r"KERAS_BACKEND=tensorflow.*jax or torch"):
        KerasCheckpoints(tmp_path)


def test_model_and_optimizer_inside_a_plain_state_are_refused(tmp_path: Path) -> None:
    model = model_of()
    for state, path in (({"net": model}, "net"), ({"o": model.optimizer}, "o")):
        said = rf"state\['{path}'\] is a keras.*\n?.*KerasCheckpoints"
        with pytest.raises(UnsupportedState, match=said):
            CheckpointManager(tmp_path).resume(state)
        with pytest.raises(UnsupportedState, match=said):
            CheckpointManager(tmp_path).save(1, state)
    tree = {"net": model.get_state_tree(value_format="numpy_array")}
    CheckpointManager(tmp_path).save(1, tree)


def test_loader_without_a_length_saves_its_steps_one_by_one(tmp_path: Path) -> None:
    def rows() -> Iterator[Any]:
        for start in range(0, 32, 8):
            yield X[start : start + 8], Y[start : start + 8]

    with pytest.warns(UserWarning, match="ran out of data"):
        fit(tmp_path, 1, data=(rows(),))
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    head, _, body = re.split(r"( +with KerasCheckpoints.*\n)", text)
    block, end, tail = body.partition("    return model")
    text = head + re.sub("^    ", "", block, flags=re.MULTILINE) + end + tail
    text = text.replace("initial_epoch=checkpoints.initial_epoch", "initial_epoch=0")
    text = text.replace("callbacks=[checkpoints]", "callbacks=[]")
    assert "checkpoints." not in text
    return text


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    results = []
    for program in (plain, text):
        keras.backend.clear_session()
        names: dict[str, Any] = {"__name__": "example"}
        exec(program, names)  # noqa: S102 - our own example
        results.append(names["main"](str(tmp_path / "runs"), 10))
    assert differences(*results) == []


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("*-30.ckpt"))


def test_page_runs_twice_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "keras.md"
    first, second, third = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for epochs in (3, 4):
        exec(first.replace("epochs=3", f"epochs={epochs}"), names)  # noqa: S102 - our own page
        assert max(steps_in(tmp_path / "runs" / "keras")) == 10 * epochs
    exec(second, names)  # noqa: S102
    for _ in range(2):
        exec(third, names)  # noqa: S102
    assert names["batches"].count == steps_in(tmp_path / "runs" / "early")[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("filepath", "elsewhere.keras"), ("wait", "a text"), ("__class__", 3)],
)
def test_count_that_a_checkpoint_names_is_set_only_if_it_is_one_of_the_callback(
    tmp_path: Path, name: str, value: object
) -> None:
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=9)
    saved = {**counts_of([early])[0], name: value}
    with pytest.raises(StateMismatch, match=rf"EarlyStopping\.{name} is"):
        put_counts([early], [saved])
    assert early.wait == 0
    kept = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    with pytest.raises(StateMismatch, match=r"ModelCheckpoint\.filepath is no count of it"):
        put_counts([kept], [{"filepath": str(tmp_path / "other.keras")}])
    assert kept.filepath == str(tmp_path / "model.keras")


def test_earlier_name_is_the_same_class() -> None:
    assert CheckpointCallback is KerasCheckpoints


@every_pair("tests/kit/keras_grid_programs.py:train", "docs/keras.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
