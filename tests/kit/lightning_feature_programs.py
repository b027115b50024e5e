# SPDX-License-Identifier: Apache-2.0
"""Fits of Lightning with one of its features each, and what they leave behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.lightning import LightningCheckpoints

BATCHES, SIZE = 5, 4  # of an epoch


class Cut(BaseException):
    """Ends a fit as a kill would: nothing is saved."""


def rows(batches: int = BATCHES) -> Any:
    """Return rows to train with."""
    inputs = torch.randn(batches * SIZE, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


class Net(lightning.LightningModule):  # type: ignore[misc]
    """A backbone with batch norm and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses: dict[int, float] = {}

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch."""
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and note it."""
        loss = self.loss(batch)
        self.losses[self.trainer.fit_loop.total_batch_idx] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """Return Adam for what trains."""
        return torch.optim.Adam([one for one in self.parameters() if one.requires_grad], 1e-2)

    def train_dataloader(self) -> Any:
        """Return five batches in another order each epoch."""
        return DataLoader(rows(), SIZE, shuffle=True)


class Validated(Net):
    """Is validated; logs what it measures."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and log it."""
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch))

    def val_dataloader(self) -> Any:
        """Return three batches."""
        return DataLoader(rows(3), SIZE)


class Gradual(BaseFinetuning):  # type: ignore[misc]
    """Unfreezes the layers of the backbone one by one, and leaves its batch norm."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze all of it."""
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """Unfreeze a layer."""
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[2 - epoch], optimizer, 1e-3)


class OwnUnfreezing(Callback):  # type: ignore[misc]
    """Freezes and unfreezes without the class of Lightning."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Freeze the backbone."""
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Unfreeze it in the second epoch; its layers stay as in an evaluation."""
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True).eval()
            group = {"params": list(pl_module.backbone.parameters()), "lr": 1e-3}
            trainer.optimizers[0].add_param_group(group)


class Returning(Net):
    """Leaves the rest of each epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Leave it."""
        return -1 if batch_idx == BATCHES - 1 else None


class OwnOptimizers(Validated):
    """Steps torch's optimizers, past Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class OwnAccumulation(OwnOptimizers):
    """Steps an optimizer of Lightning every second batch; gradients go over the end of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step."""
        optimizer = self.optimizers()
        self.manual_backward(Validated.training_step(self, batch, batch_idx))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Adversarial(OwnOptimizers):
    """Steps two optimizers of Lightning in each batch, which counts two steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Step both."""
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = Validated.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """Return one for each part."""
        return [torch.optim.Adam(one.parameters(), 1e-2) for one in (self.backbone, self.head)]


class Averaged(Validated):
    """Logs results of the epoch in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.squares, self.total = MeanSquaredError(), SumMetric()
        self.group = MetricCollection(  # the first two have equal states, of which one is updated
            {
                "mse": MeanSquaredError(),
                "rmse": MeanSquaredError(squared=False),
                "mae": MeanAbsoluteError(),
            }
        )
        self.quiet = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log, some values in some batches only."""
        loss = super().training_step(batch, batch_idx)
        for reduction in ("mean", "sum", "max", "min"):
            self.log(f"epoch_{reduction}", loss, on_epoch=True, on_step=False, reduce_fx=reduction)
        self.log("forked", loss, on_epoch=True, on_step=True)
        if batch_idx in (0, 3):
            self.log("rare", loss, on_epoch=True, on_step=False)
            self.log("rare_step", loss)
        predicted = self.head(self.backbone(batch[0]))
        self.squares(predicted, batch[1])
        self.log("squares", self.squares, on_epoch=True, on_step=True)
        self.total(loss)
        self.log("total", self.total, on_epoch=True, on_step=False)
        self.group(predicted, batch[1])
        self.log_dict(self.group, on_epoch=True, on_step=False)
        self.quiet.update(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the metric that Lightning does not know of."""
        self.log("quiet", self.quiet.compute())
        self.quiet.reset()


class Plateau(Validated):
    """Lowers its rate when the validation gets no better."""

    interval = "epoch"

    def configure_optimizers(self) -> Any:
        """Return SGD and the plateau."""
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.5
        )
        monitor = "val_loss" if self.interval == "epoch" else "loss"
        given = {"scheduler": plateau, "monitor": monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": given}


class PlateauOfSteps(Plateau):
    """Lowers its rate when the loss of a batch gets no better."""

    interval = "step"


class Scheduled(Validated):
    """Has a schedule of epochs, which averaging replaces."""

    def configure_optimizers(self) -> Any:
        """Return SGD and the schedule."""
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Unnormed(Scheduled):
    """Has no batch norm, for which averaging would train one more epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


class Found(Net):
    """Has a rate and a batch size that are searched."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def configure_optimizers(self) -> Any:
        """Return Adam with the rate."""
        return torch.optim.Adam(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        """Return batches of that size."""
        return DataLoader(rows(), self.batch_size, shuffle=True)


class LaterFinder(LearningRateFinder):  # type: ignore[misc]
    """Searches when the second epoch starts."""

    def on_fit_start(self, *_: Any) -> None:
        """Search later."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Search."""
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class Unequal(Net):
    """Has loaders of unequal length side by side."""

    mode = "max_size"

    def train_dataloader(self) -> Any:
        """Return a short and a long loader."""
        short = DataLoader(rows(2), SIZE, shuffle=True)
        return CombinedLoader({"short": short, "long": super().train_dataloader()}, self.mode)

    def loss(self, batch: Any) -> Any:
        """Return the loss of both."""
        return sum(super(Unequal, self).loss(one) for one in batch.values() if one is not None)


class UnequalCycle(Unequal):
    """The short loader begins again."""

    mode = "max_size_cycle"


FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"model": Net()},
    "validation in the epoch": lambda: {"model": Validated(), "val_check_interval": 2},
    "validation over epochs": lambda: {
        "model": Validated(),
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    },
    "BackboneFinetuning": lambda: {
        "model": Net(),
        "callbacks": [BackboneFinetuning(1, backbone_initial_lr=1e-3)],
    },
    "finetuning of layers": lambda: {"model": Net(), "callbacks": [Gradual()]},
    "own unfreezing": lambda: {"model": Net(), "callbacks": [OwnUnfreezing()]},
    "own optimizers": lambda: {"model": OwnOptimizers()},
    "own accumulation": lambda: {"model": OwnAccumulation()},
    "two optimizers": lambda: {"model": Adversarial()},
    "results of the epoch": lambda: {"model": Averaged(), "val_check_interval": 2},
    "early stopping in the epoch": lambda: {
        "model": Validated(),
        "val_check_interval": 2,
        "callbacks": [EarlyStopping("val_loss", patience=2, min_delta=0.05)],
    },
    "early stopping on a result": lambda: {
        "model": Averaged(),
        "callbacks": [EarlyStopping("epoch_mean", min_delta=0.1, check_on_train_epoch_end=True)],
    },
    "plateau": lambda: {"model": Plateau()},
    "plateau of steps": lambda: {"model": PlateauOfSteps()},
    "plateau up to a step": lambda: {"model": PlateauOfSteps(), "max_steps": 17, "max_epochs": -1},
    "EMAWeightAveraging": lambda: {
        "model": Validated(),
        "val_check_interval": 2,
        "callbacks": [EMAWeightAveraging(decay=0.8)],
    },
    "StochasticWeightAveraging": lambda: {
        "model": Unnormed(),
        "callbacks": [StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2)],
    },
    "LearningRateFinder": lambda: {
        "model": Found(),
        "callbacks": [LearningRateFinder(num_training_steps=20)],
    },
    "finder at an epoch": lambda: {
        "model": Found(),
        "callbacks": [LaterFinder(num_training_steps=10)],
    },
    "BatchSizeFinder": lambda: {
        "model": Found(),
        "callbacks": [BatchSizeFinder(max_trials=2, steps_per_trial=1)],
    },
    "rest of the epoch left out": lambda: {"model": Returning()},
    "max_size": lambda: {"model": Unequal()},
    "max_size_cycle": lambda: {"model": UnequalCycle()},
    "accumulation": lambda: {
        "model": Averaged(),
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
    },
}


class Stop(Callback):  # type: ignore[misc]
    """Ends the fit when the batch of a number has ended."""

    def __init__(self, batch: int | None, how: str) -> None:
        self.batch, self.how = batch, how

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """End it in a way that lets it finish the step."""
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            if self.how == "SIGTERM":
                signal.raise_signal(signal.SIGTERM)
            elif self.how == "should_stop":
                trainer.should_stop = True

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """End it as a kill would, before the next batch."""
        if self.how == "killed" and trainer.fit_loop.total_batch_idx == self.batch:
            raise Cut

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        """Ask it to end inside a validation."""
        is_there = trainer.fit_loop.total_batch_idx + 1 == self.batch
        if is_there and self.how == "SIGTERM in a validation":
            signal.raise_signal(signal.SIGTERM)


def run(
    directory: Path, feature: str, *, stop: Stop | None = None, every: int = 1, epochs: int = 4
) -> dict[str, Any]:
    """Train from the newest checkpoint to the end, or to a stop; return what is left."""
    lightning.seed_everything(0, verbose=False)
    options = FEATURES[feature]()
    model = options.pop("model")
    config = CheckpointConfig(save_checkpoint_steps=every, keep="last(99)")
    checkpoints = LightningCheckpoints(directory / "runs", config)
    given = {"max_epochs": epochs, **options}
    given["callbacks"] = [*given.get("callbacks", []), stop or Stop(None, ""), checkpoints]
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    try:
        trainer.fit(model, ckpt_path=checkpoints.latest())
    except (Cut, SystemExit):
        return {}
    return {
        "weights": {name: one.clone() for name, one in model.state_dict().items()},
        "frozen": [name for name, one in model.named_parameters() if not one.requires_grad],
        "evaluated": [name for name, one in model.named_modules() if not one.training],
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "ends": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx),
        "metrics": {name: float(one) for name, one in trainer.callback_metrics.items()},
        "losses": model.losses,
        "saved": {
            one.step: (one.epoch, dict(one.metrics)) for one in checkpoints.manager.checkpoints()
        },
    }
