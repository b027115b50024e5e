# SPDX-License-Identifier: Apache-2.0
"""Programs with Lightning for the kit: validation, early stopping, and other loaders."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.lightning import LightningCheckpoints
from tests.kit.torch_programs import ROWS, SIZE, Noisy


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A network with dropout and batch norm, whose hooks draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.drawn = nn.Buffer(torch.zeros(1))

    def on_fit_start(self) -> None:
        """Draw the number that an uncut run draws once."""
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        """Draw at the edges of an epoch."""
        self.drawn.add_(torch.rand(1))

    on_train_epoch_end = on_train_epoch_start

    def on_train_batch_end(self, *_: Any) -> None:
        """Change the state, as an average of the weights does; Lightning asks callbacks before."""
        self.drawn.mul_(0.9).add_(1)

    on_validation_end = on_train_batch_end

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss, and draw."""
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.drawn.add_(torch.rand(1))

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule of epochs."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def steps(directory: str, steps: int) -> object:
    """Train a number of steps, and validate inside epochs."""
    loader = DataLoader(Noisy(), SIZE, shuffle=True)
    return _fit(directory, loader, max_steps=steps, val_check_interval=2)


def epochs(directory: str, steps: int) -> object:
    """Train whole epochs of a limited length, and validate at their ends."""
    loader = DataLoader(Noisy(), SIZE // 2, shuffle=True)
    per_epoch = ROWS // SIZE
    return _fit(
        directory, loader, max_epochs=-(-steps // per_epoch), max_steps=steps, limit_train_batches=4
    )


def stateful(directory: str, steps: int) -> object:
    """Train with torchdata's StatefulDataLoader, saving in a thread."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Noisy(), SIZE, shuffle=True)
    return _fit(directory, loader, async_save="thread", max_steps=steps)


def reloaded(directory: str, steps: int) -> object:
    """Train with loaders that Lightning loads anew for each epoch, of a limited length."""
    loader = DataLoader(Noisy(), SIZE // 2, shuffle=True)
    options = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 4}
    return _fit(directory, loader, max_steps=steps, **options)


def workers(directory: str, steps: int) -> object:
    """Train with two workers."""
    own = torch.Generator().manual_seed(5)
    loader = DataLoader(Noisy(), SIZE, shuffle=True, num_workers=2, generator=own)
    return _fit(directory, loader, max_steps=steps, limit_val_batches=0)


def _fit(directory: str, loader: Any, async_save: Any = False, **options: Any) -> object:
    lightning.seed_everything(0, verbose=False)
    model = Model()
    config = CheckpointConfig(keep="last(2) | best(1, loss, min)", async_save=async_save)
    checkpoints = LightningCheckpoints(directory, config)
    trainer = lightning.Trainer(
        callbacks=[checkpoints],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    validation = DataLoader(Noisy(), SIZE)
    trainer.fit(model, loader, validation, ckpt_path=checkpoints.latest())
    return {"model": model, "optimizer": trainer.optimizers[0], "epoch": trainer.current_epoch}
