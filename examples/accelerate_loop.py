"""Fit a small network with Accelerate. Kill it and start it again: it goes on, bit for bit."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr.integrations.accelerate import AcceleratorCheckpoints


def main(directory, steps):
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    inputs = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    with AcceleratorCheckpoints(accelerator, directory) as checkpoints:
        model, optimizer, loader, scheduler = checkpoints.prepare(
            model, optimizer, loader, scheduler
        )
        step = checkpoints.resume().step
        while step < steps and not checkpoints.should_stop:
            for x, y in checkpoints.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                checkpoints.step_end(step, metrics={"loss": loss.item()})
                if step == steps or checkpoints.should_stop:
                    break
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate", 25)["model"][-1].bias)
