"""Fit a small network with plain PyTorch. Kill it and start it again: it goes on, bit for bit."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr import CheckpointConfig, CheckpointManager


def main(directory, steps):
    torch.manual_seed(0)
    inputs = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with CheckpointManager(directory, CheckpointConfig(keep="last(2)")) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for x, y in manager.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                manager.step_end(step, state, metrics={"loss": loss.item()})
                if step == steps or manager.should_stop:
                    break
            else:
                scheduler.step()
    return state


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/torch", 25)["model"][-1].bias)
