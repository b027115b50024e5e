"""Fit a small network with Lightning. Kill it and start it again: it goes on, bit for bit."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.lightning import LightningCheckpoints


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def main(directory, steps):
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True)
    model = Model()
    checkpoints = LightningCheckpoints(directory, CheckpointConfig(keep="last(2)"))
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[checkpoints], logger=False, accelerator="cpu"
    )
    trainer.fit(model, loader, ckpt_path=checkpoints.latest())
    return {"model": model, "optimizer": trainer.optimizers[0]}


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning", 25)["model"].net[-1].bias)
