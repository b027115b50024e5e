# SPDX-License-Identifier: Apache-2.0
"""The features of the grid with Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
)
from torch.utils.data import DataLoader

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.lightning import LightningCheckpoints
from ckptmgr.testing.cell import EPOCHS, Moments
from tests.kit.lightning_feature_programs import (
    SIZE,
    Adversarial,
    Averaged,
    Found,
    Net,
    Scheduled,
    UnequalCycle,
    rows,
)
from tests.kit.torch_grid_programs import HalfMoments, Stream


class Ending(Callback):  # type: ignore[misc]
    """Ends a fit at the place of a cell."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments

    def on_train_batch_start(self, *_: Any) -> None:
        """Is where a batch begins."""
        self.moments.batch()

    def on_validation_batch_start(self, *_: Any) -> None:
        """Is inside a validation."""
        self.moments.validation()


class Changing(Callback):  # type: ignore[misc]
    """Changes weights and rate at the end of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Change them."""
        with torch.no_grad():
            pl_module.head[1].weight.mul_(0.9).add_(torch.rand(()))
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


class Rounded(Net):
    """Has moments in bfloat16."""

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return HalfMoments(self.parameters())


class Streamed(Net):
    """Has data without a length."""

    def train_dataloader(self) -> Any:
        """Return a stream."""
        return DataLoader(Stream(), SIZE)


class Persistent(Net):
    """Has persistent workers."""

    def train_dataloader(self) -> Any:
        """Return a loader with workers."""
        return DataLoader(rows(), SIZE, shuffle=True, num_workers=2, persistent_workers=True)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "frozen and unfrozen layers": lambda: {
        "model": Net,
        "callbacks": [BackboneFinetuning(1, backbone_initial_lr=1e-3)],
    },
    "two optimizers": lambda: {"model": Adversarial},
    "moments of another type": lambda: {"model": Rounded},
    "averages of the epoch": lambda: {"model": Averaged},
    "state changed at the end of an epoch": lambda: {"model": Net, "callbacks": [Changing()]},
    "finder": lambda: {"model": Found, "callbacks": [LearningRateFinder(num_training_steps=20)]},
    "data without a length": lambda: {"model": Streamed},
    "loaders of unequal length": lambda: {"model": UnequalCycle},
    "persistent workers": lambda: {"model": Persistent},
    "EMA": lambda: {"model": Scheduled, "callbacks": [EMAWeightAveraging(decay=0.8)]},
    "accumulation that does not divide": lambda: {"model": Averaged, "accumulate_grad_batches": 2},
    "torch.compile": lambda: {"model": Net},
}


def measured(kind: type[Net]) -> Net:
    """Return a module of a kind that is validated."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", Net.loss(self, batch))
        torch.rand(1)

    def val_dataloader(self: Any) -> Any:
        return DataLoader(rows(3), SIZE)

    added = {"validation_step": validation_step, "val_dataloader": val_dataloader}
    made: Net = type(kind.__name__, (kind,), added)()
    return made


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    lightning.seed_everything(0, verbose=False)
    given = PARTS[feature]()
    model = measured(given.pop("model"))
    if isinstance(model, Found):
        model.batch_size = SIZE
    fitted = torch.compile(model, backend="eager") if feature == "torch.compile" else model
    checkpoints = LightningCheckpoints(directory, CheckpointConfig(**moments.options))
    given["callbacks"] = [*given.get("callbacks", []), Ending(moments), checkpoints]
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=EPOCHS,
        **given,
    )
    trainer.fit(fitted, ckpt_path=checkpoints.latest())
    return {
        "weights": model.state_dict(),
        "frozen": [name for name, one in model.named_parameters() if not one.requires_grad],
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "ends": [trainer.global_step, trainer.current_epoch],
        "metrics": {name: float(one) for name, one in sorted(trainer.callback_metrics.items())},
    }
