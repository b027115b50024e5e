# SPDX-License-Identifier: Apache-2.0
"""Fits of Lightning go on bit for bit: `make kit FRAMEWORK=lightning`."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.testing.grid import Cell
from tests.kit.cuts import every_cut, every_pair

lightning = pytest.importorskip("lightning", reason="needs lightning: make kit FRAMEWORK=lightning")
torch = pytest.importorskip("torch")

from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402

from ckptmgr import CheckpointConfig, CheckpointManager, Resume  # noqa: E402
from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, UnsupportedCheckpoint  # noqa: E402
from ckptmgr.integrations import lightning as ours  # noqa: E402
from ckptmgr.integrations.lightning import LightningCheckpoints  # noqa: E402
from ckptmgr.state.paths import StateMismatch  # noqa: E402

pytestmark = pytest.mark.kit
ROOT = Path(__file__).parents[2]
COMMON = {"fork": True, "stops_at_once": True}
PROGRAMS = {
    "examples/lightning_fit.py:main": {"steps_per_epoch": 10, "keep": 2, **COMMON},
    **{
        f"tests/kit/lightning_programs.py:{name}": {"steps_per_epoch": 4, **COMMON}
        for name in ("steps", "epochs", "stateful", "reloaded", "workers")
    },
}


@pytest.mark.usefixtures("kit")
@every_cut(PROGRAMS)
def test_fit_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


@pytest.mark.usefixtures("quiet")
def test_schedule_of_accumulation_is_that_of_the_epoch_that_goes_on(tmp_path: Path) -> None:
    """Lightning sets it when an epoch starts, which a resumed one does not."""

    def run(name: str, steps: int) -> Any:
        lightning.seed_everything(0, verbose=False)
        every = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
        model = BoringModel()
        fit(tmp_path / name, steps, model=model, callbacks=[every], limit_train_batches=4)
        return model.layer.weight

    expected = run("uncut", 8)
    run("cut", 5)  # two of the four batches of the second epoch
    assert torch.equal(run("cut", 8), expected)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let Lightning advise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit(
    directory: Path, steps: int = 4, *, model: Any = None, ckpt_path: Any = "latest", **options: Any
) -> Any:
    """Train with the same data each time, by default from the newest checkpoint; return the trainer."""
    lightning.seed_everything(0, verbose=False)
    config = CheckpointConfig(**options.pop("config", {}))
    checkpoints = LightningCheckpoints(directory, config, **options.pop("callback", {}))
    trainer = lightning.Trainer(
        max_steps=steps,
        callbacks=[checkpoints, *options.pop("callbacks", [])],
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    path = checkpoints.latest() if ckpt_path == "latest" else ckpt_path
    trainer.fit(BoringModel() if model is None else model, ckpt_path=path)
    return trainer


def steps_in(directory: Path) -> list[int]:
    return [one.step for one in CheckpointManager(directory).checkpoints()]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("path", [None, "last"])
def test_fit_that_does_not_resume_beside_checkpoints_is_refused(
    path: str | None, tmp_path: Path
) -> None:
    fit(tmp_path)
    with pytest.raises(ValueError, match=r"step 4.*checkpoints.latest\(\).*start='new'"):
        fit(tmp_path, 8, ckpt_path=path)
    assert max(steps_in(tmp_path)) == 4


class Dies(lightning.Callback):  # type: ignore[name-defined,misc]
    """Raises before a step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 7:
            raise MemoryError


class Logging(BoringModel):  # type: ignore[misc]
    """Logs its loss at each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"])
        return found


@pytest.mark.usefixtures("quiet")
def test_steps_that_come_again_in_a_fit_are_compared(tmp_path: Path) -> None:
    events: list[Any] = []
    every = {"config": {"save_checkpoint_steps": 5}, "callback": {"observe": events.append}}
    for error, callbacks in ((MemoryError, [Dies()]), (None, [])):
        with pytest.raises(error) if error else nullcontext():
            fit(tmp_path, 9, model=Logging(), callbacks=callbacks, **every)
    (found,) = [one for one in events if one.operation == "witness"]
    assert (found.name, found.step) == ("witness.equal", 7)
    assert found.notes == ("continued; proven equal over 2 steps",)


@pytest.mark.usefixtures("quiet")
def test_start_new_trains_beside_checkpoints(tmp_path: Path) -> None:
    fit(tmp_path)
    trainer = fit(tmp_path, 2, ckpt_path=None, callback={"start": "new"})
    assert trainer.global_step == 2
    assert {2, 4} <= set(steps_in(tmp_path))


@pytest.mark.usefixtures("quiet")
def test_path_of_another_checkpoint_than_the_newest_is_refused_for_a_fit(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(ValueError, match="goes on from the newest checkpoint"):
        fit(tmp_path, 8, ckpt_path="ckptmgr:ckpt-2.ckpt")


@pytest.mark.usefixtures("quiet")
def test_missing_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="None for a first start"):
        fit(tmp_path, ckpt_path="ckptmgr:latest")


@pytest.mark.usefixtures("quiet")
def test_second_fit_of_a_trainer_goes_on(tmp_path: Path) -> None:
    trainer = fit(tmp_path)
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(trainer.lightning_module)
    assert max(steps_in(tmp_path)) == 6


@pytest.mark.usefixtures("quiet")
def test_best_checkpoint_is_loaded_by_test(tmp_path: Path) -> None:
    class Logging(BoringModel):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("worse", float(self.global_step))
            return super().training_step(batch, batch_idx)

    trainer = fit(tmp_path, model=Logging(), config={"keep": "last(4)"})
    (callback,) = trainer.checkpoint_callbacks
    best = callback.manager.load(1)["state_dict"]
    model = Logging()
    trainer.test(model, ckpt_path=callback.best("worse"), verbose=False)
    torch.testing.assert_close(dict(model.state_dict()), dict(best), rtol=0, atol=0)
    assert callback.best("other") is None


class Optimized(BoringModel):  # type: ignore[misc]
    """Trains with the optimizers that a function makes."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        """Return the optimizers."""
        return self.make(self.layer)


def adam(layer: Any) -> Any:
    return torch.optim.Adam(layer.parameters())


def adamw(layer: Any) -> Any:
    return torch.optim.AdamW(layer.parameters())


class Own(torch.optim.Adam):  # type: ignore[misc, name-defined]
    """An Adam of a program, whose state is torch's."""


OTHER_OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "AdamW": (
        adamw,
        r"state\['optimizer_states'\]\[0\] is a torch.optim.AdamW, stored is .*torch.optim.Adam\b",
    ),
    "a class of the program": (
        lambda layer: Own(layer.parameters()),
        "is a Own, stored is the state of a torch.optim.Adam",
    ),
    "more groups": (
        lambda layer: torch.optim.Adam([{"params": [layer.weight]}, {"params": [layer.bias]}]),
        r"\['param_groups'\] has 2 groups, stored are 1",
    ),
    "another order of the parameters": (
        lambda layer: torch.optim.Adam([layer.bias, layer.weight]),
        r"\['exp_avg'\] is stored with shape \[2, 32\], its parameter has \[2\]",
    ),
    "fewer optimizers": (lambda _: [], "are 1, and this fit has 0"),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_fit_with_another_optimizer_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, message = OTHER_OPTIMIZERS[kind]
    fit(tmp_path, model=Optimized(adam))
    with pytest.raises(StateMismatch, match=f"(?s){message}.*start='new'"):
        fit(tmp_path, 6, model=Optimized(make))
    assert max(steps_in(tmp_path)) == 4


OTHER_SCHEDULES: dict[str, tuple[Any, str]] = {
    "another class": (
        torch.optim.lr_scheduler.ConstantLR,
        r"\['lr_schedulers'\]\[0\]\['gamma'\] is only in .* another than this ConstantLR",
    ),
    "none": (None, r"\['lr_schedulers'\] are 1, and this fit has 0"),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", OTHER_SCHEDULES)
def test_fit_with_another_schedule_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    def scheduled(make: Any) -> Any:
        def made(layer: Any) -> Any:
            optimizer = adam(layer)
            return [optimizer], [] if make is None else [make(optimizer)]

        return Optimized(made)

    def step(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)

    make, message = OTHER_SCHEDULES[kind]
    fit(tmp_path, model=scheduled(step))
    with pytest.raises(StateMismatch, match=message):
        fit(tmp_path, 6, model=scheduled(make))
    assert fit(tmp_path, 6, model=scheduled(step)).global_step == 6


class Emptying(Optimized):
    """Takes a part of the state out of a checkpoint, as Lightning's hook allows."""

    def __init__(self, make: Callable[[Any], Any], name: str, count: int) -> None:
        super().__init__(make)
        self.name, self.count = name, count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave `count` of the states."""
        checkpoint[self.name] = checkpoint[self.name][: self.count]


def adam_by_steps(layer: Any) -> Any:
    optimizer = adam(layer)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


@pytest.mark.usefixtures("quiet")
def test_fit_whose_module_empties_the_stored_schedules_begins_one_anew(tmp_path: Path) -> None:
    def adam_at_a_constant(layer: Any) -> Any:
        optimizer = adam(layer)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    fit(tmp_path, model=Optimized(adam_by_steps))
    trainer = fit(tmp_path, 6, model=Emptying(adam_at_a_constant, "lr_schedulers", 0))
    assert trainer.global_step == 6


@pytest.mark.usefixtures("quiet")
def test_fit_with_a_schedule_where_there_was_none_begins_it(tmp_path: Path) -> None:
    fit(tmp_path, model=Optimized(adam))
    assert fit(tmp_path, 6, model=Optimized(adam_by_steps)).global_step == 6


class Manual(Emptying):
    """Steps each of its optimizers."""

    def __init__(self, make: Callable[[Any], Any], name: str, count: int) -> None:
        super().__init__(make, name, count)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step."""
        optimizers = self.optimizers()
        self.manual_backward(self(batch).sum())
        for one in optimizers if isinstance(optimizers, list) else [optimizers]:
            one.step()


@pytest.mark.usefixtures("quiet")
def test_fit_whose_module_takes_out_an_optimizer_is_compared_by_the_rest(tmp_path: Path) -> None:
    def one(layer: Any) -> Any:
        return torch.optim.Adam([layer.weight])

    def two(layer: Any) -> Any:
        return [one(layer), torch.optim.SGD([layer.bias])]

    def fitted(make: Any, count: int, epochs: int) -> Any:
        model = Manual(make, "optimizer_states", count)
        return fit(tmp_path, -1, model=model, max_epochs=epochs, limit_train_batches=2)

    fitted(two, 2, 1)
    with pytest.raises(StateMismatch, match="are 2, and this fit has 1"):
        fitted(one, 2, 2)
    with pytest.raises(StateMismatch, match="another than SGD"):
        fitted(lambda layer: torch.optim.SGD([layer.weight]), 1, 2)
    assert fitted(one, 1, 2).current_epoch == 2


@pytest.mark.usefixtures("quiet")
def test_fit_goes_on_after_weights_began_to_be_averaged(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    def averaged(epochs: int) -> Any:
        return fit(
            tmp_path,
            -1,
            model=Optimized(adam_by_steps),
            max_epochs=epochs,
            limit_train_batches=2,
            callbacks=[StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
        )

    averaged(3)
    assert averaged(5).global_step == 10


@pytest.mark.usefixtures("quiet")
def test_fit_from_a_file_of_the_trainer_is_refused_with_another_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "own.ckpt"
    fit(tmp_path / "runs", model=Optimized(adam)).save_checkpoint(file)
    with pytest.raises(StateMismatch, match=r"a torch.optim.AdamW, stored"):
        fit(tmp_path / "others", 6, model=Optimized(adamw), ckpt_path=file)
    assert fit(tmp_path / "same", 6, model=Optimized(adam), ckpt_path=file).global_step == 6


@pytest.mark.usefixtures("quiet")
def test_checkpoint_without_a_class_is_compared_by_its_hyperparameters(tmp_path: Path) -> None:
    class Older(Optimized):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["ckptmgr_optimizers"]  # as saved by ckptmgr before it was recorded

    fit(tmp_path, model=Older(adam))
    with pytest.raises(StateMismatch, match="Adam and AdamW differ in it"):
        fit(tmp_path, 6, model=Older(adamw))
    assert fit(tmp_path, 6, model=Older(lambda layer: Own(layer.parameters()))).global_step == 6


@pytest.mark.usefixtures("quiet")
def test_weights_alone_begin_a_run_with_another_optimizer(tmp_path: Path) -> None:
    saved = fit(tmp_path, model=Optimized(adam)).lightning_module.layer.weight
    model = Optimized(adamw)
    weights: Any = CheckpointManager(tmp_path).load("latest", only="state_dict")
    model.load_state_dict(weights["state_dict"])
    assert torch.equal(model.layer.weight, saved)
    assert fit(tmp_path, 2, model=model, ckpt_path=None, callback={"start": "new"}).global_step == 2


class Validated(BoringModel):  # type: ignore[misc]
    """Four batches an epoch; its validation after epoch n has the loss of the list."""

    LOSSES = (3.0, 1.0, 2.0, 5.0)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(4, 32))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.LOSSES[self.current_epoch])
        return super().validation_step(batch, batch_idx)


def validated(directory: Path, epochs: int, **options: Any) -> list[int]:
    """Train some epochs of four steps that are validated; return the steps that are there."""
    config = CheckpointConfig(**options)
    checkpoints = LightningCheckpoints(directory, config)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[checkpoints],
        limit_val_batches=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Validated())
    return steps_in(directory)


@pytest.mark.usefixtures("quiet")
def test_only_the_best_epochs_are_written(tmp_path: Path) -> None:
    best = {"keep": "best(1, val_loss, min)", "save_only_kept": True}
    # Step 12 was worse and is not written; step 16 is the end of the training.
    assert validated(tmp_path, 4, save_checkpoint_steps=4, **best) == [8, 16]


@pytest.mark.usefixtures("quiet")
def test_validated_steps_are_saved_where_the_metric_makes_them_due(tmp_path: Path) -> None:
    measured = {"save_checkpoint_steps": None, "save_when_measured": "val_loss", "keep": "all"}
    assert validated(tmp_path, 3, **measured) == [4, 8, 12]


@pytest.mark.usefixtures("quiet")
def test_interval_of_two_epochs_saves_their_last_steps(tmp_path: Path) -> None:
    assert validated(tmp_path, 4, save_checkpoint_steps=2 * 4, keep="all") == [8, 16]


@pytest.mark.usefixtures("quiet")
def test_encrypted_checkpoints_resume_with_their_key(tmp_path: Path) -> None:
    secret = {"enc_key": bytes(range(32)), "format": "safetensors", "async_save": "thread"}
    fit(tmp_path, config=secret)
    assert fit(tmp_path, 6, config=secret).global_step == 6
    with pytest.raises(CkptmgrError, match="encrypted"):
        fit(tmp_path, 8)


@pytest.mark.usefixtures("quiet")
def test_files_of_the_trainer_are_written_as_ever(tmp_path: Path) -> None:
    class Saving(BoringModel):  # type: ignore[misc]
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "own.ckpt")

    fit(tmp_path / "runs", model=Saving())
    own = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    own.fit(BoringModel(), ckpt_path=tmp_path / "own.ckpt")
    assert own.global_step == 6


class Failing(BoringModel):  # type: ignore[misc]
    """Fails in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of the first two steps."""
        if self.global_step == 2:
            raise ZeroDivisionError("of the user")
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("quiet")
def test_error_of_the_user_survives_a_save_that_fails(tmp_path: Path) -> None:
    class Unsaved(Failing):
        def on_exception(self, *_: object) -> None: ...

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = object()

    config = {"save_checkpoint_steps": 100, "exception_save": True}
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        fit(tmp_path, model=Unsaved(), config=config)
    assert any("odd" in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("quiet")
def test_exception_save_saves_the_last_step(tmp_path: Path) -> None:
    config = {"save_checkpoint_steps": 100, "exception_save": True}
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, model=Failing(), config=config)
    assert [path for path in tmp_path.iterdir() if "2" in path.name]
    assert (
        fit(tmp_path, 6, model=BoringModel()).global_step == 6
    )  # though no other checkpoint is there


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_strategy_that_saves_shards_is_refused_by_name(name: str, tmp_path: Path) -> None:
    made = getattr(lightning.pytorch.strategies, name)
    trainer = SimpleNamespace(strategy=object.__new__(made), world_size=1, fast_dev_run=False)
    with pytest.raises(ValueError, match=f"{name} saves shards"):
        LightningCheckpoints(tmp_path).setup(trainer, None, "fit")


def test_several_processes_are_refused(tmp_path: Path) -> None:
    trainer = SimpleNamespace(strategy=object(), world_size=2, fast_dev_run=False)
    with pytest.raises(ValueError, match=r"there are 2.*CkptmgrIO"):
        LightningCheckpoints(tmp_path).setup(trainer, None, "fit")


@pytest.mark.usefixtures("quiet")
def test_loader_without_a_length_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless(BoringModel):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return (torch.ones(1, 32) for _ in range(9))

    fit(tmp_path, model=Endless())
    assert "without a length" in caplog.text


class Asked(BoringModel):  # type: ignore[misc]
    """Gets SIGTERM in a batch."""

    def __init__(self, batch: int | None) -> None:
        super().__init__()
        self.batch = batch

    def train_dataloader(self) -> Any:
        """Return nine batches."""
        return torch.utils.data.DataLoader(torch.ones(9, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("quiet")
def test_sigterm_saves_the_step_that_no_policy_asks_for(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, 8, model=Asked(4), config={"save_checkpoint_steps": 100})
    (saved,) = CheckpointManager(tmp_path).checkpoints()
    assert (saved.step, saved.why) == (5, "preempted")


@pytest.mark.usefixtures("quiet")
def test_sigterm_while_gradients_are_accumulated_saves_the_step_before(tmp_path: Path) -> None:
    config = {"save_checkpoint_steps": 100}
    with pytest.raises(SystemExit):
        fit(tmp_path, 8, model=Asked(2), config=config, accumulate_grad_batches=2)
    assert steps_in(tmp_path) == [1]
    resumed = fit(tmp_path, 8, model=Asked(None), config=config, accumulate_grad_batches=2)
    assert resumed.global_step == 8


@pytest.mark.usefixtures("quiet")
def test_fast_dev_run_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quiet")
def test_resumed_run_with_more_steps_ends_as_one_run(tmp_path: Path) -> None:
    weights = []
    for ends in ([9], [5, 9]):
        model = BoringModel()
        for end in ends:
            lightning.seed_everything(1, verbose=False)  # the module draws its data
            model = BoringModel()
            config = {"save_checkpoint_steps": 100}
            fit(tmp_path / str(len(ends)), end, model=model, config=config)
        weights.append(dict(model.state_dict()))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_unknown_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'newest' or 'new'"):
        LightningCheckpoints(tmp_path, resume=Resume(start="old"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("quiet")
def test_page_runs_twice_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "lightning.md"
    if not page.exists():
        pytest.skip("needs the sources")
    block, weights_alone = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for end in (40, 60):
        names.clear()
        exec(block.replace("40", str(end)), names)  # noqa: S102 - our own page
        assert names["trainer"].global_step == end
    assert max(steps_in(tmp_path / "runs" / "boring")) == 60
    saved = names["trainer"].lightning_module.layer.weight.clone()
    exec(f"{weights_alone}\ntrained_from = weights", names)  # noqa: S102
    assert names["trainer"].global_step == 2
    assert torch.equal(names["trained_from"]["layer.weight"], saved)


def test_example_is_at_most_three_lines_longer_than_without_checkpoints() -> None:
    lines = (ROOT / "examples" / "lightning_fit.py").read_text().splitlines()
    own = [line for line in lines if re.search("ckptmgr|checkpoints = ", line)]
    assert len(own) == 3


class _Configured(BoringModel):  # type: ignore[misc]
    def __init__(self, conf: object) -> None:
        super().__init__()
        self.save_hyperparameters(conf)


@pytest.mark.usefixtures("quiet")
def test_configuration_with_interpolations_goes_on_where_the_program_has_the_same(
    tmp_path: Path,
) -> None:
    omegaconf = pytest.importorskip("omegaconf")

    def configured(text: str, steps: int) -> None:
        conf = omegaconf.OmegaConf.create({"width": 2, "double": text})
        fit(tmp_path, steps, model=_Configured(conf), config={"save_checkpoint_steps": 1})

    configured("${width}", 2)
    configured("${width}", 3)
    with pytest.raises(UnsupportedCheckpoint, match="double"):
        configured("${oc.env:HOME}", 4)


def test_earlier_name_is_the_same_class() -> None:
    assert ours.ManagerCheckpoint is LightningCheckpoints


@every_pair("tests/kit/lightning_grid_programs.py:train", "docs/lightning.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
