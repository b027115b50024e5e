# SPDX-License-Identifier: Apache-2.0
"""Programs with plain torch for the kit: the example, and workers, a scaler and an EMA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ckptmgr import CheckpointConfig, CheckpointManager

ROWS, SIZE = 64, 16  # 4 batches of an epoch


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with noise of torch and NumPy: augmentation, in the workers if there are some."""

    def __init__(self) -> None:
        self.inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.1 * torch.randn(8) + float(np.random.normal(0, 0.01))
        row = self.inputs[index]
        return (row + noise).float(), row.sum(0, keepdim=True)


def stock(directory: str, steps: int) -> object:
    """Train with torch's DataLoader, without workers."""
    return _train(directory, steps, DataLoader(Noisy(), SIZE, shuffle=True))


def workers(directory: str, steps: int) -> object:
    """Train with torch's DataLoader, two workers and a generator of its own."""
    own = torch.Generator().manual_seed(5)
    return _train(
        directory, steps, DataLoader(Noisy(), SIZE, shuffle=True, num_workers=2, generator=own)
    )


def stateful(directory: str, steps: int) -> object:
    """Train with torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _train(directory, steps, StatefulDataLoader(Noisy(), SIZE, shuffle=True))


def stateful_workers(directory: str, steps: int) -> object:
    """Train with torchdata's StatefulDataLoader and two workers, which draw nothing."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [Noisy()[index] for index in range(ROWS)]
    loader: Any = StatefulDataLoader(rows, SIZE, shuffle=True, num_workers=2)
    return _train(directory, steps, loader)


def nodes(directory: str, steps: int) -> object:
    """Train with a Loader of torchdata.nodes, whose sampler has a generator of its own."""
    from torch.utils.data import RandomSampler, default_collate
    from torchdata import nodes as tn

    rows = Noisy()
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(1))
    wrapped: Any = tn.SamplerWrapper(sampler)
    batches = tn.Batcher(tn.Mapper(wrapped, rows.__getitem__), SIZE)
    return _train(directory, steps, tn.Loader(tn.Mapper(batches, default_collate)))


def threads(directory: str, steps: int) -> object:
    """Train with saves in a thread."""
    return _train(directory, steps, DataLoader(Noisy(), SIZE, shuffle=True), async_save="thread")


def process(directory: str, steps: int) -> object:
    """Train with saves in a worker process."""
    return _train(directory, steps, DataLoader(Noisy(), SIZE, shuffle=True), async_save="process")


def best_after_loop(directory: str, steps: int) -> object:
    """Load the weights with the smallest loss after the loop, before the block ends, as for an evaluation."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss": 9.0, "best": None}
    loader = DataLoader(Noisy(), SIZE, shuffle=True)
    with CheckpointManager(directory, CheckpointConfig(save_checkpoint_steps=7)) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for x, y in manager.batches(loader):
                loss: Any = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if loss.item() < state["loss"]:
                    best = {name: one.clone() for name, one in model.state_dict().items()}
                    state |= {"loss": loss.item(), "best": best}
                step += 1
                manager.step_end(step, state)
                if step == steps or manager.should_stop:
                    break
        model.load_state_dict(state["best"])
    return state


def _train(directory: str, steps: int, loader: Any, **options: Any) -> object:
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    swa: Any = torch.optim.swa_utils
    average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    state = {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
    }
    config = CheckpointConfig(keep="last(2) | best(1, loss, min)", **options)
    with CheckpointManager(directory, config) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for x, y in manager.batches(loader):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                average.update_parameters(model)
                step += 1
                manager.step_end(step, state, metrics={"loss": loss.item()})
                if step == steps or manager.should_stop:
                    break
            else:
                scheduler.step()
    return state
