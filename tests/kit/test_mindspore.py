# SPDX-License-Identifier: Apache-2.0
"""`Model.train` and `Model.fit` go on bit for bit: `make kit FRAMEWORK=mindspore`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import AtSteps, CheckpointConfig, CheckpointManager, EverySteps, Ranks, StateMismatch
from ckptmgr.testing.child import find_program
from ckptmgr.testing.grid import Cell
from ckptmgr.testing.kit import differences
from tests.kit.cuts import every_cut, every_pair
from tests.parallel.ranks import Meeting, Seat
from tests.test_examples import MOST_LINES, lines_of

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make kit FRAMEWORK=mindspore")
nn = pytest.importorskip("mindspore.nn")
train = pytest.importorskip("mindspore.train")
data = pytest.importorskip("mindspore.dataset")
programs = pytest.importorskip("tests.kit.mindspore_programs")
ours = pytest.importorskip("ckptmgr.integrations.mindspore")

pytestmark = [
    pytest.mark.kit,
    pytest.mark.filterwarnings("ignore:getName:DeprecationWarning"),  # MindSpore's own
]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mindspore_train.py"
PROGRAMS: dict[str, dict[str, Any]] = {
    f"tests/kit/mindspore_programs.py:{name}": {"steps_per_epoch": 4, "fork": True}
    for name in ("fitted", "compiled")
} | {
    "tests/kit/mindspore_programs.py:generated": {"steps_per_epoch": 4, "fork": True, "keep": 2},
}
EPOCH = 4


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_training_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


# ---------------------------------------------------------------------- the example and the page


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    text = re.sub(r" +(checkpoints|first) = .*\n", "", text)
    text = text.replace(", callbacks=[checkpoints], initial_epoch=first", "")
    assert "checkpoints." not in text
    return text


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 2)
    found = find_program(f"{EXAMPLE}:main")(str(tmp_path / "runs"), 2)
    assert differences(expected, found) == []


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("*-30.ckpt"))


def test_page_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "mindspore-training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for _ in range(2):
        for block in blocks:
            exec(block, names)  # noqa: S102 - our own page
    assert names["first"] == 2  # of a run that had ended


# ---------------------------------------------------------------------- what a run sees


class Seen(train.Callback):  # type: ignore[misc, name-defined]
    """Notes the numbers of the steps, and acts at one of them."""

    def __init__(self, at: int | None = None, act: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.epochs: list[int] = []
        self._at = at
        self._act = act

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.steps.append(params.cur_step_num)
        self.epochs.append(params.cur_epoch_num)
        if params.cur_step_num == self._at and self._act is not None:
            self._act(run_context)


def run(
    directory: Path,
    epochs: int,
    *callbacks: Any,
    model: Any = None,
    rows: Any = None,
    **config: Any,
) -> Any:
    """Train; return the callback of the checkpoints, and the model."""
    model = programs.model() if model is None else model
    rows = programs.dataset() if rows is None else rows
    checkpoints = ours.MindSporeCheckpoints(directory, CheckpointConfig(**config))
    first = checkpoints.resume(model, rows, epochs)
    model.train(epochs, rows, callbacks=[checkpoints, *callbacks], initial_epoch=first)
    return checkpoints, model


def stop(run_context: Any) -> None:
    run_context.request_stop()


def saved_steps(checkpoints: Any) -> list[int]:
    return [one.step for one in checkpoints.manager.checkpoints()]


def test_numbers_of_steps_and_epochs_go_on_for_all_callbacks(tmp_path: Path) -> None:
    run(tmp_path, 2, Seen(3, stop))
    seen = Seen()
    run(tmp_path, 2, seen)
    assert seen.steps == [4, 5, 6, 7, 8]
    assert seen.epochs == [1, 2, 2, 2, 2]


class Inputs(Seen):
    """Notes what each step was given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []

    def on_train_step_end(self, run_context: Any) -> None:
        (inputs, _) = run_context.original_args().train_dataset_element
        self.rows.append(inputs.asnumpy().ravel().tolist())


def test_batches_go_on_in_the_order_of_the_uncut_run_where_initial_epoch_repeats_the_first(
    tmp_path: Path,
) -> None:
    uncut, alone, resumed = Inputs(), Inputs(), Inputs()
    programs.model().train(3, programs.dataset(), callbacks=[uncut])
    programs.model().train(3, programs.dataset(), callbacks=[alone], initial_epoch=2)
    assert alone.rows == uncut.rows[:EPOCH]
    run(tmp_path, 2)
    run(tmp_path, 3, resumed)
    assert resumed.rows == uncut.rows[2 * EPOCH :]


def test_evaluation_of_fit_is_in_the_checkpoint_of_the_last_step_of_the_epoch(
    tmp_path: Path,
) -> None:
    model, rows = programs.model(), programs.dataset()
    checkpoints = ours.MindSporeCheckpoints(tmp_path, CheckpointConfig(keep="all"))
    first = checkpoints.resume(model, rows, 2)
    valid = programs.dataset(is_shuffled=False)
    model.fit(2, rows, valid, callbacks=[checkpoints], initial_epoch=first)
    found = {one.step: set(one.metrics) for one in checkpoints.manager.checkpoints()}
    assert found == {
        step: {"loss", "mae"} if step % EPOCH == 0 else {"loss"} for step in range(1, 9)
    }


def test_epochs_that_are_evaluated_are_saved_where_the_metric_makes_them_due(
    tmp_path: Path,
) -> None:
    config = CheckpointConfig(None, save_when_measured="mae", keep="all")
    model, rows = programs.model(), programs.dataset()
    checkpoints = ours.MindSporeCheckpoints(tmp_path, config)
    first = checkpoints.resume(model, rows, 3)
    valid = programs.dataset(is_shuffled=False)
    model.fit(3, rows, valid, valid_frequency=2, callbacks=[checkpoints], initial_epoch=first)
    assert saved_steps(checkpoints) == [2 * EPOCH, 3 * EPOCH]


def test_steps_of_two_epochs_save_the_end_of_every_second_epoch(tmp_path: Path) -> None:
    every = 2 * programs.dataset().get_dataset_size()
    checkpoints, _ = run(tmp_path, 4, save_checkpoint_steps=every)
    found = {one.step: one.epoch for one in checkpoints.manager.checkpoints()}
    assert found == {2 * EPOCH: 2, 4 * EPOCH: 4}


EVERY = 2 * EPOCH
ENDS = [2 * EPOCH, 3 * EPOCH + 1, 4 * EPOCH, 6 * EPOCH]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"save_policy": AtSteps(*range(EVERY, 6 * EPOCH + 1, EVERY))}, ENDS),
        ({"save_policy": EverySteps(EVERY)}, ENDS),
        (
            {"config": CheckpointConfig(save_checkpoint_steps=EVERY)},
            [2 * EPOCH, 3 * EPOCH + 1, 5 * EPOCH + 1, 6 * EPOCH],
        ),
    ],
)
def test_saves_after_a_stop_inside_an_epoch_stay_at_the_ends_of_epochs_where_the_policy_names_them(
    options: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    def start(*callbacks: Any) -> Any:
        model, rows = programs.model(), programs.dataset()
        checkpoints = ours.MindSporeCheckpoints(tmp_path, **options)
        first = checkpoints.resume(model, rows, 6)
        model.train(6, rows, callbacks=[checkpoints, *callbacks], initial_epoch=first)
        return checkpoints

    start(Seen(3 * EPOCH + 1, stop))
    assert saved_steps(start()) == expected


def test_only_the_epochs_with_the_best_evaluation_are_saved(tmp_path: Path) -> None:
    saved: list[int] = []

    def note(event: Any) -> None:
        if event.name == "save.durable":
            saved.append(event.step)

    config = CheckpointConfig(keep="best(1, mae, max)", save_only_kept=True)
    checkpoints = ours.MindSporeCheckpoints(tmp_path, config, observe=note)
    model, rows = programs.model(), programs.dataset()
    first = checkpoints.resume(model, rows, 4)
    valid = programs.dataset(is_shuffled=False)
    model.fit(4, rows, valid, callbacks=[checkpoints], initial_epoch=first)
    assert saved == [EPOCH, 4 * EPOCH]  # the error shrinks; the end is saved in any case


def test_finished_run_that_is_started_again_returns_what_it_had(tmp_path: Path) -> None:
    _, model = run(tmp_path, 2)
    expected = programs.returned(model)
    checkpoints, again = run(tmp_path, 2)
    assert differences(expected, programs.returned(again)) == []
    assert max(saved_steps(checkpoints)) == 2 * EPOCH


def test_finished_run_goes_on_with_more_epochs(tmp_path: Path) -> None:
    run(tmp_path, 2)
    checkpoints, _ = run(tmp_path, 3)
    assert max(saved_steps(checkpoints)) == 3 * EPOCH


def test_run_that_saves_in_the_background_goes_on_bit_for_bit(tmp_path: Path) -> None:
    _, uncut = run(tmp_path / "uncut", 2)
    run(tmp_path / "cut", 2, Seen(6, stop), async_save="thread")
    _, resumed = run(tmp_path / "cut", 2, async_save="thread")
    assert differences(programs.returned(uncut), programs.returned(resumed)) == []


def test_optimizer_goes_on_with_its_slots_and_its_step(tmp_path: Path) -> None:
    run(tmp_path, 1)
    model = programs.model(seed=5)
    ours.MindSporeCheckpoints(tmp_path).resume(model, programs.dataset(), 2)
    found = programs.returned(model)
    assert found["global_step"].tolist() == [EPOCH]
    assert np.any(found["moment1.0.weight"])


# ---------------------------------------------------------------------- stops, and other callbacks


class Scores(train.Callback):  # type: ignore[misc, name-defined]
    """Keeps the evaluations of all epochs, over the starts of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.seen = [*self.seen, float(run_context.original_args().eval_results["mae"])]


def watched(
    directory: Path,
    epochs: int,
    *more: Any,
    place: str = "last",
    best: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit with callbacks that read the evaluation, a rate that is halved; return all of it."""
    mindspore.set_seed(0)
    network = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 1))
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    model = train.Model(network, nn.MSELoss(), optimizer, metrics={"mae"})
    scores, rows = Scores(), programs.dataset()
    plateau = train.ReduceLROnPlateau("mae", factor=0.5, patience=1, min_delta=9.0)
    early = train.EarlyStopping(
        "mae", patience=options.pop("patience", 9), min_delta=9.0, restore_best_weights=best
    )
    options.setdefault("counting", [scores])
    config = CheckpointConfig(save_checkpoint_steps=options.pop("every", 1000), keep="all")
    checkpoints = ours.MindSporeCheckpoints(directory, config, **options)
    first = checkpoints.resume(model, rows, epochs)
    callbacks = [*more, scores, plateau, early, checkpoints]
    if place == "first":
        callbacks = [checkpoints, scores, plateau, early, *more]
    valid = programs.dataset(is_shuffled=False)
    model.fit(epochs, rows, valid, callbacks=callbacks, initial_epoch=first)
    found = {"seen": scores.seen, "plateau": plateau.wait, "early": early.wait, "best": early.best}
    return {**found, **programs.returned(model)}


def terminate(run_context: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("act", [stop, terminate])
@pytest.mark.parametrize("step", [2, EPOCH + 2, 2 * EPOCH])
def test_stop_leaves_no_trace(tmp_path: Path, step: int, act: Any, place: str) -> None:
    expected = watched(tmp_path / "uncut", 4)
    watched(tmp_path / "cut", 4, Seen(step, act), place=place)
    assert saved_steps(ours.MindSporeCheckpoints(tmp_path / "cut")) == [step]
    assert differences(expected, watched(tmp_path / "cut", 4, place=place)) == []


def test_callbacks_that_count_go_on_counting(tmp_path: Path) -> None:
    expected = watched(tmp_path / "uncut", 9, patience=3, best=True)
    assert len(expected["seen"]) == 4
    watched(tmp_path / "cut", 2, patience=3, best=True)
    assert differences(expected, watched(tmp_path / "cut", 9, patience=3, best=True)) == []
    with pytest.raises(StateMismatch, match="counting= has 0 callbacks, and 1 were saved"):
        watched(tmp_path / "cut", 9, patience=3, counting=[])


def test_callbacks_that_count_and_are_not_named_are_warned_of(tmp_path: Path) -> None:
    class Steps(train.Callback):  # type: ignore[misc, name-defined]
        count = 0

        def on_train_step_end(self, run_context: Any) -> None:
            self.count += 1

    with pytest.warns(UserWarning, match=r"^Steps\.count: a resumed run begins anew"):
        watched(tmp_path, 2, Steps())


def test_other_callbacks_of_mindspore_that_count_are_warned_of(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.warns(UserWarning, match=r"had the callbacks \[\], and this one has \[EarlySt"):
        run(tmp_path, 2, train.EarlyStopping("loss", patience=9))


def test_weights_of_the_best_epoch_that_end_a_training_are_not_those_of_its_step(
    tmp_path: Path,
) -> None:
    watched(tmp_path / "uncut", 4, every=EPOCH)
    watched(tmp_path / "ended", 9, patience=3, best=True, every=EPOCH)
    uncut, ended = (
        CheckpointManager(tmp_path / name).load(4 * EPOCH, only="network")
        for name in ("uncut", "ended")
    )
    assert differences(uncut, ended) == []


def test_callback_that_changes_the_rate_when_an_epoch_begins_changes_it_once(
    tmp_path: Path,
) -> None:
    class Scaled(train.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_begin(self, run_context: Any) -> None:
            rate = run_context.original_args().optimizer.learning_rate
            mindspore.ops.assign(rate, mindspore.Tensor(rate * 0.5))

    expected = watched(tmp_path / "uncut", 3, Scaled())
    for step in (EPOCH, EPOCH + 2):
        watched(tmp_path / f"{step}", 3, Scaled(), Seen(step, stop))
        assert differences(expected, watched(tmp_path / f"{step}", 3, Scaled())) == []


# ---------------------------------------------------------------------- errors of the user's code


class _BrokenError(Exception):
    """An error of the user's code."""


def broken(run_context: Any) -> None:
    raise _BrokenError


def test_exception_reaches_the_user_and_its_last_step_is_saved_once(tmp_path: Path) -> None:
    with pytest.raises(_BrokenError) as caught:
        run(tmp_path, 2, Seen(6, broken), save_checkpoint_steps=4, exception_save=True)
    assert not hasattr(caught.value, "__notes__")
    latest = CheckpointManager(tmp_path).latest()
    assert latest is not None
    assert latest.step == 4  # the exception may have come in the middle of a step
    # Model would save one more file for its own ModelCheckpoint, in the clear.
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["ckpt-4.ckpt", "ckpt-6.ckpt"]


def test_exception_in_an_evaluation_inside_fit_closes_the_run_once(tmp_path: Path) -> None:
    class Broken(train.Callback):  # type: ignore[misc, name-defined]
        def on_eval_step_end(self, run_context: Any) -> None:
            raise _BrokenError

    model, rows = programs.model(), programs.dataset()
    checkpoints = ours.MindSporeCheckpoints(
        tmp_path, CheckpointConfig(save_checkpoint_steps=3, keep="all")
    )
    first = checkpoints.resume(model, rows, 2)
    with pytest.raises(_BrokenError):
        model.fit(2, rows, rows, callbacks=[checkpoints, Broken()], initial_epoch=first)
    assert saved_steps(checkpoints) == [3]


def test_callback_has_none_of_the_old_names_which_fit_refuses() -> None:
    old = {"begin", "end", "epoch_begin", "epoch_end", "step_begin", "step_end"}
    assert not old & vars(ours.MindSporeCheckpoints).keys()
    assert issubclass(ours.MindSporeCheckpoints, train.Callback)
    assert not issubclass(ours.MindSporeCheckpoints, train.ModelCheckpoint)


# ---------------------------------------------------------------------- what is refused, and warned of


def test_training_that_does_not_resume_is_refused(tmp_path: Path) -> None:
    checkpoints = ours.MindSporeCheckpoints(tmp_path)
    with pytest.raises(RuntimeError, match=r"checkpoints\.resume\(model, dataset, epochs\)"):
        programs.model().train(1, programs.dataset(), callbacks=[checkpoints])


def test_other_initial_epoch_than_that_of_resume_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    model, rows = programs.model(), programs.dataset()
    checkpoints = ours.MindSporeCheckpoints(tmp_path)
    assert checkpoints.resume(model, rows, 3) == 2
    with pytest.raises(ValueError, match=r"initial_epoch=2.* initial_epoch=0"):
        model.train(3, rows, callbacks=[checkpoints])


def test_other_batch_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    run(tmp_path, 1)
    rows = data.NumpySlicesDataset(np.zeros((9, 4), np.float32), ["x"], shuffle=False)
    with pytest.raises(StateMismatch, match=r"9 batches.* with 4"):
        ours.MindSporeCheckpoints(tmp_path).resume(programs.model(), rows, 2)


def test_other_network_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    run(tmp_path, 1)
    model = programs.model(seed=3, width=9)
    before = programs.returned(model)
    with pytest.raises(StateMismatch, match=r"0\.weight"):
        ours.MindSporeCheckpoints(tmp_path).resume(model, programs.dataset(), 2)
    assert differences(before, programs.returned(model)) == []


def linear(kind: Any) -> Any:
    """Return a model of one layer whose optimizer is of a class."""
    network = nn.Dense(4, 1)
    return train.Model(network, nn.MSELoss(), kind(network.trainable_params(), learning_rate=0.1))


def test_other_class_of_optimizer_with_the_same_names_is_refused(tmp_path: Path) -> None:
    class Own(nn.Adagrad):  # type: ignore[misc, name-defined]
        """An optimizer of a program, whose parameters have the names of MindSpore's."""

    run(tmp_path, 1, model=linear(nn.Adagrad))
    rows = programs.dataset()
    with pytest.raises(StateMismatch, match="optimizer is Own, but the run was saved with Adagrad"):
        ours.MindSporeCheckpoints(tmp_path).resume(linear(Own), rows, 2)
    assert ours.MindSporeCheckpoints(tmp_path).resume(linear(nn.Adagrad), rows, 2) == 1


def test_checkpoint_without_a_class_of_its_optimizer_resumes(tmp_path: Path) -> None:
    class Older(CheckpointManager):
        def step_end(self, step: int, state: Any, **facts: Any) -> Any:
            def without_class() -> Any:
                found = state()
                training = json.loads(found["training"])
                del training["optimizers"]
                return {**found, "training": json.dumps(training)}

            return super().step_end(step, without_class, **facts)

    model, rows = programs.model(), programs.dataset()
    checkpoints = ours.MindSporeCheckpoints(tmp_path)
    checkpoints.manager = Older(tmp_path)
    first = checkpoints.resume(model, rows, 1)
    model.train(1, rows, callbacks=[checkpoints], initial_epoch=first)
    assert ours.MindSporeCheckpoints(tmp_path).resume(programs.model(), rows, 2) == 1


def test_coordinator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"coordinator=.*ModelCheckpoint"):
        ours.MindSporeCheckpoints(tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))


def with_dropout() -> Any:
    mindspore.set_seed(0)
    network = nn.SequentialCell(nn.Dense(4, 8), nn.Dropout(p=0.5), nn.Dense(8, 1))
    return train.Model(network, nn.MSELoss(), nn.Adam(network.trainable_params()))


def test_dropout_whose_operator_has_a_state_of_its_own_is_warned_of_at_a_resume(
    tmp_path: Path,
) -> None:
    run(tmp_path, 1, model=with_dropout())
    with pytest.warns(UserWarning, match="1: MindSpore does not give the state"):
        ours.MindSporeCheckpoints(tmp_path).resume(with_dropout(), programs.dataset(), 2)


def test_layer_that_the_saved_run_had_unfrozen_is_unfrozen_at_a_resume(tmp_path: Path) -> None:
    run(tmp_path, 1)
    model = programs.model()
    weight = next(iter(model.train_network.get_parameters()))
    weight.requires_grad = False
    with pytest.warns(UserWarning, match="requires_grad of 0.weight was set otherwise"):
        ours.MindSporeCheckpoints(tmp_path).resume(model, programs.dataset(), 2)
    assert weight.requires_grad


@pytest.fixture
def unseeded() -> Iterator[None]:
    """The state of a program that never called `mindspore.set_seed`."""
    before = data.config.get_seed()
    data.config.set_seed(5489)
    yield
    data.config.set_seed(before)


@pytest.mark.usefixtures("unseeded")
def test_shuffled_data_without_a_seed_are_warned_of(tmp_path: Path) -> None:
    model = programs.model()
    data.config.set_seed(5489)
    with pytest.warns(UserWarning, match="mindspore.set_seed"):
        ours.MindSporeCheckpoints(tmp_path).resume(model, programs.dataset(), 2)


def test_data_set_begins_at_its_first_batch_after_a_resumed_run(tmp_path: Path) -> None:
    run(tmp_path, 2, Seen(3, stop))
    rows = programs.dataset()
    run(tmp_path, 2, rows=rows)
    assert sum(1 for _ in rows.create_tuple_iterator(num_epochs=1)) == EPOCH


class Counting(train.FixedLossScaleManager):  # type: ignore[misc, name-defined]
    """A loss scale with a number that changes, as DynamicLossScaleManager has on other devices."""

    def __init__(self) -> None:
        super().__init__(1024.0, drop_overflow_update=False)
        self.cur_iter = 1


def test_loss_scale_goes_on_with_its_numbers(tmp_path: Path) -> None:
    def count(run_context: Any) -> None:
        run_context.original_args().loss_scale_mananger.cur_iter = 77

    run(tmp_path, 1, Seen(2, count), model=programs.model(loss_scale_manager=Counting()))
    again = Counting()
    run(tmp_path, 2, model=programs.model(loss_scale_manager=again))
    assert again.cur_iter == 77


def test_earlier_name_is_the_same_class() -> None:
    assert ours.CheckpointCallback is ours.MindSporeCheckpoints


@every_pair("tests/kit/mindspore_grid_programs.py:train", "docs/mindspore-training.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
