# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of Lightning holds, and of which moment: `make kit FRAMEWORK=lightning`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning", reason="needs lightning: make kit FRAMEWORK=lightning")
torch = pytest.importorskip("torch")

from lightning.pytorch.callbacks import Callback, EMAWeightAveraging  # noqa: E402

from ckptmgr import CheckpointConfig, CheckpointManager, Resume  # noqa: E402
from ckptmgr.integrations.lightning import LightningCheckpoints  # noqa: E402
from tests.kit.lightning_feature_programs import Net, OwnOptimizers, Validated  # noqa: E402

pytestmark = [pytest.mark.kit, pytest.mark.usefixtures("quiet")]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let Lightning advise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit(
    directory: Path, model: Any, *callbacks: Any, every: int = 1, epochs: int = 2, **options: Any
) -> Any:
    """Train epochs of five batches from the newest checkpoint; return the trainer."""
    lightning.seed_everything(0, verbose=False)
    config = CheckpointConfig(
        save_checkpoint_steps=every, keep="last(99)", exception_save=options.pop("saves", False)
    )
    how = options.pop("resume", None)
    checkpoints = LightningCheckpoints(directory / "runs", config, resume=how)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[*callbacks, checkpoints],
        accelerator="cpu",
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, ckpt_path=checkpoints.latest())
    return trainer


def made(kind: Any, *args: Any) -> Any:
    """Return a model with the same weights each time."""
    lightning.seed_everything(0, verbose=False)
    return kind(*args)


def saved(directory: Path) -> Any:
    """Return the manager of the checkpoints."""
    return CheckpointManager(directory / "runs")


def test_metric_is_that_of_the_step_at_which_it_was_measured(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Validated(), epochs=3)
    metrics = {one.step: one.metrics for one in saved(tmp_path).checkpoints()}
    assert [step for step, one in metrics.items() if "val_loss" in one] == [5, 10, 15]
    assert all("loss" in one for one in metrics.values())
    (callback,) = trainer.checkpoint_callbacks
    best = saved(tmp_path).best("val_loss")
    (measured,) = trainer.validate(Validated(), ckpt_path=callback.best("val_loss"), verbose=False)
    assert measured["val_loss"] == best.metrics["val_loss"]


def test_fit_that_steps_optimizers_of_torch_saves_by_batches(tmp_path: Path) -> None:
    assert fit(tmp_path, OwnOptimizers(), every=2).global_step == 0
    assert [one.step for one in saved(tmp_path).checkpoints()] == [2, 4, 6, 8, 10]
    fit(tmp_path, OwnOptimizers(), every=2, epochs=3)
    assert [one.step for one in saved(tmp_path).checkpoints()][-2:] == [14, 15]


def test_optimizer_that_is_not_configured_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.own = torch.optim.Adam(self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.own.step()

        def configure_optimizers(self) -> None: ...

    fit(tmp_path, Hidden(), epochs=1)
    assert "Adam steps, but configure_optimizers does not return it" in caplog.text


def test_flags_that_the_program_sets_otherwise_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Whole(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    frozen, thawed = Whole(), Whole()
    frozen.backbone.requires_grad_(False)
    fit(tmp_path, frozen, epochs=1)
    assert "the flags of the saved step" not in caplog.text
    fit(tmp_path, thawed)
    assert "backbone.0.weight.requires_grad = False" in caplog.text
    assert not thawed.backbone[0].weight.requires_grad


def test_flags_that_may_differ_stay_those_of_the_program(tmp_path: Path) -> None:
    class Whole(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    frozen, thawed = Whole(), Whole()
    frozen.backbone.requires_grad_(False)
    fit(tmp_path, frozen, epochs=1)
    fit(tmp_path, thawed, resume=Resume(may_differ=["requires_grad"]))
    assert thawed.backbone[0].weight.requires_grad


def test_moments_come_back_in_their_stored_type(tmp_path: Path) -> None:
    class Moments(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            for one in self.param_groups[0]["params"]:
                held = self.state[one].setdefault("moment", torch.zeros(1, dtype=torch.float64))
                held += 1 / 3
            return found

    class Own(Net):
        def configure_optimizers(self) -> Any:
            self.made = Moments(self.parameters(), 1e-3)
            return self.made

    first, second = Own(), Own()
    fit(tmp_path, first, epochs=1)
    fit(tmp_path, second)
    (held, *_) = (one["moment"] for one in second.made.state.values())
    assert held.dtype is torch.float64


def test_callback_that_loads_another_checkpoint_is_refused(tmp_path: Path) -> None:
    class Loading(Callback):  # type: ignore[misc]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            trainer._checkpoint_connector.restore(tmp_path / "own.ckpt")

    fit(tmp_path, Net(), epochs=1)
    with pytest.raises(RuntimeError, match="step 5 was resumed, but the training begins at step 0"):
        fit(tmp_path, Net(), Loading())


def test_last_step_holds_the_trained_weights_beside_the_averaged_ones(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Validated(), EMAWeightAveraging(decay=0.5), every=1000)
    averaged = trainer.lightning_module.state_dict()
    state: Any = saved(tmp_path).load("latest")
    name = "backbone.0.weight"
    assert torch.equal(state["state_dict"][name], averaged[name])
    assert not torch.equal(state["current_model_state"][name], averaged[name])


class Failing(Net):
    """Fails in its eighth batch, before or after the step of the optimizer."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def fail(self, hook: str) -> None:
        """Fail in one of the hooks."""
        if hook == self.hook and self.trainer.fit_loop.total_batch_idx == 7:
            raise ZeroDivisionError

    def on_after_backward(self) -> None:
        """Fail before the step; the forward has changed batch norm."""
        self.fail("before")

    def on_train_batch_end(self, *_: Any) -> None:
        """Fail after it."""
        self.fail("after")


def test_error_before_the_next_step_saves_the_last_one_as_it_was(tmp_path: Path) -> None:
    fit(tmp_path / "uncut", made(Failing, "never"))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, made(Failing, "before"), every=1000, saves=True)
    states: list[Any] = [saved(one).load(7) for one in (tmp_path / "uncut", tmp_path)]
    assert states[0]["loops"] == states[1]["loops"]
    torch.testing.assert_close(*[one["state_dict"] for one in states], rtol=0, atol=0)


def test_error_after_the_next_step_saves_nothing_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path, Failing("after"), every=1000, saves=True)
    assert "had begun to change the weights" in "".join(caught.value.__notes__)
    assert saved(tmp_path).checkpoints() == []


def test_checkpoint_without_the_state_beside_is_resumed(tmp_path: Path) -> None:
    fit(tmp_path / "first", Net(), epochs=1)
    state: Any = saved(tmp_path / "first").load("latest")
    del state["ckptmgr"]  # as saved by ckptmgr before it was recorded
    with CheckpointManager(tmp_path / "runs") as manager:
        manager.save(5, state)
    assert fit(tmp_path, Net()).global_step == 10
