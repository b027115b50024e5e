"""Fit a small network with Ray Train. A killed worker, or a second start, goes on, bit for bit."""

import sys
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr.integrations.ray import CheckpointConfig, RayCheckpointManager


def train(config):
    torch.manual_seed(0)
    inputs = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpointManager(config["directory"], CheckpointConfig(keep="last(2)")) as manager:
        step = manager.resume(state).step
        while step < config["steps"]:
            for x, y in manager.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                manager.step_end(step, state, metrics={"loss": loss.item()})
                if step == config["steps"]:
                    break
            manager.report({"loss": loss.item()})


def main(directory, steps, workers=1):
    place = str(Path(directory).absolute())
    run = RunConfig(storage_path=f"{place}/ray", failure_config=FailureConfig(max_failures=2))
    scaling = ScalingConfig(num_workers=workers)
    config = {"directory": place, "steps": steps}
    return TorchTrainer(
        train, train_loop_config=config, scaling_config=scaling, run_config=run
    ).fit()


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/ray", 25).metrics)
