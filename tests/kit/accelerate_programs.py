# SPDX-License-Identifier: Apache-2.0
"""Programs with Accelerate for the kit: accumulation, loss scale, orders, and data that draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.accelerate import AcceleratorCheckpoints

ROWS, SIZE = 64, 16  # 4 batches of an epoch


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows with noise of the global generator."""

    def __init__(self) -> None:
        self.inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.inputs[index]
        return row + 0.1 * torch.randn(8), row.sum(0, keepdim=True)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """The same rows, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        noisy = Noisy()
        return (noisy[index] for index in range(ROWS))


def accumulated(directory: str, steps: int) -> object:
    """Train with three batches for a step, saved after every batch; loss scale; registered EMA."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return _train(directory, steps, scaler=scaler, gradient_accumulation_steps=3)


def seeded(directory: str, steps: int) -> object:
    """Train in the order of a seed, with encrypted saves in a thread."""
    loaders = DataLoaderConfiguration(use_seedable_sampler=True)
    secret = {"enc_key": bytes(range(32)), "format": "safetensors", "async_save": "thread"}
    return _train(directory, steps, config=secret, dataloader_config=loaders)


def workers(directory: str, steps: int) -> object:
    """Train with two workers."""
    return _train(directory, steps, workers=2)


def streamed(directory: str, steps: int) -> object:
    """Train on an iterable dataset."""
    return _train(directory, steps, dataset=Streamed(), shuffle=False)


def _train(
    directory: str,
    steps: int,
    *,
    config: Any = None,
    scaler: Any = None,
    dataset: Any = None,
    workers: int = 0,
    shuffle: bool = True,
    **options: Any,
) -> object:
    set_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    accelerator.scaler = scaler
    given: Any = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    swa: Any = torch.optim.swa_utils
    average = swa.AveragedModel(given, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9), use_buffers=True)
    adam = torch.optim.AdamW(given.parameters(), 1e-2)
    kept = CheckpointConfig(keep="last(2) | best(1, loss, min)", **(config or {}))
    data: Any = torch.utils.data.DataLoader(
        dataset or Noisy(), SIZE, shuffle=shuffle, num_workers=workers
    )
    steps_lr = torch.optim.lr_scheduler.StepLR(adam, 5, 0.9)
    with AcceleratorCheckpoints(accelerator, directory, kept) as checkpoints:
        model, optimizer, loader, scheduler = checkpoints.prepare(given, adam, data, steps_lr)
        checkpoints.register_for_checkpointing(average)
        step = checkpoints.resume().step
        while step < steps and not checkpoints.should_stop:
            for x, y in checkpoints.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                average.update_parameters(given)
                step += 1
                checkpoints.step_end(step, metrics={"loss": loss.item()})
                if step == steps or checkpoints.should_stop:
                    break
    found = {"model": given, "optimizer": optimizer, "scheduler": scheduler, "average": average}
    found["epoch"] = getattr(loader, "iteration", None)
    return found if scaler is None else found | {"scaler": scaler}
