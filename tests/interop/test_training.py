# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr.ModelCheckpoint` in MindSpore's own training loops, side by side with MindSpore's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptmgr
from ckptmgr import Resume, load_checkpoint
from ckptmgr.store.store import Store

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
training = pytest.importorskip("tests.interop.training")
pytestmark = pytest.mark.interop

OURS, THEIRS = ckptmgr, mindspore.train


class _StoppedError(Exception):
    """An error of the user's code."""


def _stop(_: object) -> None:
    raise _StoppedError("out of patience")


def _callback(library: Any, directory: Path, **options: Any) -> Any:
    config = library.CheckpointConfig(**options)
    return library.ModelCheckpoint(prefix="net", directory=str(directory), config=config)


def _in_both(tmp_path: Path, **options: Any) -> list[tuple[Path, Any]]:
    return [
        (tmp_path / name, _callback(library, tmp_path / name, **options))
        for name, library in (("ours", OURS), ("theirs", THEIRS))
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"save_checkpoint_steps": 3},
        {"save_checkpoint_steps": 1, "keep_checkpoint_max": 2},
        {"save_checkpoint_steps": 4, "keep_checkpoint_per_n_minutes": 1, "keep_checkpoint_max": 0},
        {"save_checkpoint_steps": 5, "format": "safetensors"},
        {"save_checkpoint_steps": 5, "crc_check": True, "append_info": ["epoch_num", "step_num"]},
        {"save_checkpoint_steps": 6, "enc_key": bytes(16), "enc_mode": "SM4-CBC"},
        {"save_checkpoint_seconds": 1000, "save_checkpoint_steps": 0},
    ],
)
def test_training_leaves_the_files_mindspore_leaves(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    names = []
    for directory, callback in _in_both(tmp_path, **options):
        training.train([callback])
        names.append(training.listing(directory))
    assert names[0] == names[1]


def test_training_saves_the_parameters_mindspore_saves(tmp_path: Path) -> None:
    options = {"save_checkpoint_steps": 15, "append_info": ["epoch_num", "step_num", {"lr": 0.1}]}
    loaded = []
    for directory, callback in _in_both(tmp_path, **options):
        training.train([callback])
        loaded.append(mindspore.load_checkpoint(str(directory / "net-3_5.ckpt")))
    ours, theirs = loaded
    assert list(ours) == list(theirs)
    assert {"moment1.0.weight", "moment2.2.bias", "beta1_power", "global_step"} <= set(ours)
    assert [str(ours[n].dtype) for n in ours] == [str(theirs[n].dtype) for n in ours]
    for name in ours:
        assert np.array_equal(ours[name].asnumpy(), theirs[name].asnumpy()), name


def test_callback_alone_without_a_list_is_accepted(tmp_path: Path) -> None:
    training.train(_callback(OURS, tmp_path, save_checkpoint_steps=5))
    assert training.listing(tmp_path) == ["net-1_5.ckpt", "net-2_5.ckpt", "net-3_5.ckpt"]


def test_saved_network_is_saved_instead_of_the_training_network(tmp_path: Path) -> None:
    network = training.new_network()
    callback = _callback(OURS, tmp_path, save_checkpoint_steps=15, saved_network=network)
    training.train([callback], network=network)
    assert list(load_checkpoint(tmp_path / "net-3_5.ckpt")) == [
        parameter.name for parameter in network.get_parameters()
    ]


def test_fit_with_evaluation_leaves_the_files_mindspore_leaves(tmp_path: Path) -> None:
    names = []
    for directory, callback in _in_both(tmp_path, save_checkpoint_steps=2, keep_checkpoint_max=20):
        model = training.new_model(training.new_network())
        model.fit(3, training.dataset(), training.dataset(2), callbacks=[callback])
        names.append(training.listing(directory))
    assert names[0] == names[1]


def test_evaluation_saves_nothing(tmp_path: Path) -> None:
    callback = _callback(OURS, tmp_path, save_checkpoint_steps=1)
    model = training.new_model(training.new_network())
    model.eval(training.dataset(), callbacks=[callback])
    assert training.listing(tmp_path) == []


def test_subclass_of_our_callback_trains_and_fits(tmp_path: Path) -> None:
    class Loud(ckptmgr.ModelCheckpoint):
        saved = 0
        evaluated = 0

        def on_train_step_end(self, run_context: Any) -> None:
            super().on_train_step_end(run_context)
            self.saved += 1

        def on_eval_end(self, run_context: Any) -> None:
            self.evaluated += 1

    config = ckptmgr.CheckpointConfig(save_checkpoint_steps=5)
    callback = Loud("net", str(tmp_path), config)
    model = training.new_model(training.new_network())
    model.fit(2, training.dataset(), training.dataset(2), callbacks=[callback])
    assert training.listing(tmp_path) == ["net-1_5.ckpt", "net-2_5.ckpt"]
    assert (callback.saved, callback.evaluated) == (10, 2)


def test_stop_request_saves_the_last_step_as_mindspore_does(tmp_path: Path) -> None:
    names = []
    for directory, callback in _in_both(tmp_path, save_checkpoint_steps=3):
        stop = training.At("step_end", 7, lambda context: context.request_stop())
        training.train([callback, stop])
        names.append(training.listing(directory))
    assert names[0] == names[1]
    assert "net-2_2.ckpt" in names[0]


def test_second_run_renames_its_files_as_mindspore_does(tmp_path: Path) -> None:
    names = []
    for name, library in (("ours", OURS), ("theirs", THEIRS)):
        for _ in range(3):
            callback = _callback(library, tmp_path / name, save_checkpoint_steps=15)
            training.train([callback])
        names.append(training.listing(tmp_path / name))
    assert names[0] == names[1] == ["net-3_5.ckpt", "net_1-3_5.ckpt", "net_2-3_5.ckpt"]


def test_resumed_training_ends_where_an_uninterrupted_one_ends(tmp_path: Path) -> None:
    whole = training.numbers_of(training.train([], epochs=3))
    training.train([_callback(OURS, tmp_path, save_checkpoint_steps=5)], epochs=2)

    callback = _callback(OURS, tmp_path, save_checkpoint_steps=5)
    resumed = callback.resume()
    model = training.new_model(training.new_network(seed=9))
    load_checkpoint(resumed.checkpoint.path, net=model.train_network)
    model.train(3, training.dataset(), callbacks=[callback], initial_epoch=resumed.checkpoint.epoch)

    assert resumed.checkpoint.name == "net-2_5.ckpt"
    ended = training.numbers_of(model.train_network)
    assert all(np.array_equal(ended[name], whole[name]) for name in whole)
    assert "net_1-3_5.ckpt" in training.listing(tmp_path)


def test_resume_skips_a_damaged_file_and_continues_from_a_mindspore_one(tmp_path: Path) -> None:
    training.train([_callback(THEIRS, tmp_path, save_checkpoint_steps=5)])
    newest = tmp_path / "net-3_5.ckpt"
    newest.chmod(0o600)
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = _callback(OURS, tmp_path, save_checkpoint_steps=5).resume(Resume(allow_bare=True))
    assert resumed.checkpoint.name == "net-2_5.ckpt"
    assert [skipped.checkpoint.name for skipped in resumed.skipped] == ["net-3_5.ckpt"]


@pytest.mark.parametrize(
    ("point", "number"),
    [("step_begin", 7), ("step_end", 7), ("epoch_begin", 3), ("epoch_end", 2), ("end", 0)],
)
def test_exception_in_training_leaves_the_breakpoint_file_mindspore_leaves(
    tmp_path: Path, point: str, number: int
) -> None:
    names = []
    for directory, callback in _in_both(tmp_path, save_checkpoint_steps=3, exception_save=True):
        with pytest.raises(_StoppedError):
            training.train([callback, training.At(point, number, _stop)])
        names.append(training.listing(directory))
    assert names[0] == names[1]
    assert any("_breakpoint" in name for name in names[0])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_breakpoint_file_is_saved_whatever_stops_the_training(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def stop(_: object) -> None:
        raise kind

    callback = _callback(OURS, tmp_path, save_checkpoint_steps=50, exception_save=True)
    with pytest.raises(kind):
        training.train([callback, training.At("step_end", 4, stop)])
    assert training.listing(tmp_path) == ["net-1_4_breakpoint.ckpt"]


def test_exception_reaches_the_user_unchanged(tmp_path: Path) -> None:
    error = _StoppedError("out of patience")

    def stop(_: object) -> None:
        raise error

    callback = _callback(OURS, tmp_path, save_checkpoint_steps=50, exception_save=True)
    with pytest.raises(_StoppedError) as caught:
        training.train([callback, training.At("step_end", 4, stop)])
    assert caught.value is error
    assert (error.args, error.__context__, error.__cause__) == (("out of patience",), None, None)
    assert not hasattr(error, "__notes__")


def test_breakpoint_file_holds_the_state_and_the_global_step(tmp_path: Path) -> None:
    options = {"append_info": ["epoch_num", "step_num"], "exception_save": True}
    callback = _callback(OURS, tmp_path, save_checkpoint_steps=50, **options)
    with pytest.raises(_StoppedError):
        training.train([callback, training.At("step_end", 7, _stop)])
    values = load_checkpoint(tmp_path / "net-2_2_breakpoint.ckpt")
    counters = {
        name: np.asarray(values[name]).item() for name in ("epoch_num", "step_num", "global_step")
    }
    assert counters == {"epoch_num": 2, "step_num": 7, "global_step": 7}  # MindSpore: step_num 2


def test_without_exception_save_there_is_no_breakpoint_file(tmp_path: Path) -> None:
    callback = _callback(OURS, tmp_path, save_checkpoint_steps=3)
    with pytest.raises(_StoppedError):
        training.train([callback, training.At("step_end", 4, _stop)])
    assert training.listing(tmp_path) == ["net-1_3.ckpt"]


def test_breakpoint_save_that_fails_is_a_note_on_the_users_exception(tmp_path: Path) -> None:
    callback = _callback(
        OURS, tmp_path, save_checkpoint_steps=50, exception_save=True, saved_network=None
    )

    def spoil(context: Any) -> None:
        context.original_args().train_network = object()
        raise _StoppedError("out of patience")

    with pytest.raises(_StoppedError) as caught:
        training.train([callback, training.At("step_end", 4, spoil)])
    assert "breakpoint checkpoint could not be saved" in caught.value.__notes__[0]
    assert training.listing(tmp_path) == []


def test_save_that_fails_stops_the_training_with_its_error(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    callback = _callback(OURS, directory, save_checkpoint_steps=3)
    directory.rmdir()
    directory.write_text("in the way")
    with pytest.raises(OSError, match="run"):
        training.train([callback])


@pytest.mark.parametrize("is_sink", [False, True])
def test_dataset_sink_mode_makes_no_difference_on_a_cpu(tmp_path: Path, is_sink: bool) -> None:
    callback = _callback(OURS, tmp_path, save_checkpoint_steps=5)
    model = training.new_model(training.new_network())
    model.train(2, training.dataset(), callbacks=[callback], dataset_sink_mode=is_sink)
    assert training.listing(tmp_path) == ["net-1_5.ckpt", "net-2_5.ckpt"]


def test_callable_prefix_and_directory_give_the_names_mindspore_gives(tmp_path: Path) -> None:
    names = []
    for name, library in (("ours", OURS), ("theirs", THEIRS)):
        callback = library.ModelCheckpoint(
            prefix=lambda params: f"at{params.cur_step_num}",
            directory=lambda params, name=name: str(tmp_path / name / f"e{params.cur_epoch_num}"),
            config=library.CheckpointConfig(save_checkpoint_steps=4),
        )
        training.train([callback])
        found = (tmp_path / name).glob("*/*.ckpt")
        names.append(sorted(str(path.relative_to(tmp_path / name)) for path in found))
    assert names[0] == names[1]
    assert names[0] == ["e1/at4.ckpt", "e2/at8.ckpt", "e3/at12.ckpt", "e3/at15.ckpt"]


def test_graph_mode_leaves_the_files_and_the_graph_that_mindspore_leaves(tmp_path: Path) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        names, kinds = [], []
        for directory, callback in _in_both(tmp_path, save_checkpoint_steps=3):
            training.train([callback])
            names.append(training.listing(directory))
            graph = directory / "net-graph.meta"
            kinds.append((graph.stat().st_mode, graph.stat().st_size > 1000))
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert names[0] == names[1]
    assert kinds[0] == kinds[1]


def test_safetensors_of_a_training_have_the_bytes_of_mindspore(tmp_path: Path) -> None:
    options = {"save_checkpoint_steps": 15, "append_info": ["epoch_num", "step_num", {"lr": 0.1}]}
    parts = []
    for directory, callback in _in_both(tmp_path, format="safetensors", **options):
        training.train([callback])
        data = (directory / "net-3_5.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        # The order of the metadata strings differs between two saves of MindSpore, too.
        parts.append((header.pop("__metadata__"), list(header.items()), data[start:]))
    assert parts[0] == parts[1]


def test_step_that_goes_back_is_saved_where_mindspore_waits_for_the_old_number(
    tmp_path: Path,
) -> None:
    names = []
    for directory, callback in _in_both(tmp_path, save_checkpoint_steps=5):
        network = training.new_network()
        for step in (5, 1):
            state = {"cur_step_num": step, "cur_epoch_num": 1, "batch_num": 10}
            params = _Params(train_network=network, **state)
            callback.on_train_step_end(mindspore.train.RunContext(params))
        names.append(training.listing(directory))
    assert names == [["net-1_1.ckpt", "net-1_5.ckpt"], ["net-1_5.ckpt"]]


class _Params(dict[str, Any]):
    """Callback parameters as MindSpore's `Model` makes them: a dict with attributes."""

    __getattr__ = dict.__getitem__


def _losses_of(directory: Path) -> dict[int, float]:
    return {one.step: one.metrics["loss"] for one in Store(directory).scan()}


class _Losses(mindspore.train.Callback):  # type: ignore[misc, name-defined] # MindSpore is untyped
    """Notes the loss of every step, as MindSpore's monitors see it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.seen[params.cur_step_num] = float(params.net_outputs.asnumpy())


@pytest.mark.parametrize("is_sink", [False, True])
def test_train_records_the_loss_of_each_step(tmp_path: Path, is_sink: bool) -> None:
    losses = _Losses()
    ours = _callback(OURS, tmp_path, save_checkpoint_steps=5, keep="all")
    model = training.new_model(training.new_network())
    model.train(3, training.dataset(), callbacks=[losses, ours], dataset_sink_mode=is_sink)
    assert _losses_of(tmp_path) == {step: losses.seen[step] for step in (5, 10, 15)}


def test_best_of_train_keeps_the_lowest_loss(tmp_path: Path) -> None:
    losses = _Losses()
    ours = _callback(OURS, tmp_path, save_checkpoint_steps=1, keep="best(2, loss, min) | last(1)")
    training.new_model(training.new_network()).train(
        3, training.dataset(), callbacks=[losses, ours]
    )
    best = sorted(losses.seen, key=lambda step: losses.seen[step])[:2]
    assert {one.step for one in Store(tmp_path).scan()} == {*best, 15}


def test_fit_records_the_metrics_of_each_evaluation(tmp_path: Path) -> None:
    evaluated: list[float] = []

    def note(context: Any) -> None:
        evaluated.append(context.original_args().metrics["mae"])

    ours = _callback(OURS, tmp_path, save_checkpoint_steps=5, keep="all")
    notes = [training.At("epoch_end", epoch, note) for epoch in (1, 2, 3)]
    training.new_model(training.new_network()).fit(
        3, training.dataset(), training.dataset(), callbacks=[ours, *notes]
    )
    recorded = {one.step: one.metrics for one in Store(tmp_path).scan()}
    assert [recorded[step]["mae"] for step in (5, 10, 15)] == evaluated
    assert all("loss" in metrics for metrics in recorded.values())


def test_best_of_fit_keeps_the_best_evaluation(tmp_path: Path) -> None:
    ours = _callback(OURS, tmp_path, save_checkpoint_steps=5, keep="last(1) | best(1, mae, max)")
    training.new_model(training.new_network()).fit(
        4, training.dataset(), training.dataset(), callbacks=[ours]
    )
    assert len(training.listing(tmp_path)) <= 2
    assert all("mae" in one.metrics for one in Store(tmp_path).scan())
