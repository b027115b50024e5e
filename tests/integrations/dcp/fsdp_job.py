# SPDX-License-Identifier: Apache-2.0
"""What each rank does with FSDP2: train, save and print the state; or resume, print it and train on.

`fsdp_job.py DIRECTORY FORMAT WORLD...` saves with as many ranks as the first number says and loads with each of the
others; every rank prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from tests.support.torch_ranks import run_ranks


def build() -> tuple[Any, Any]:
    """Return a sharded model, whose rows do not divide evenly, and its optimizer."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 3)
    )
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, number: int) -> None:
    """Train on the same batch on every rank, so that any number of ranks computes the same."""
    import torch

    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()


def digest(state: object) -> str:
    """Return the digest of all tensors of a state, whole."""
    import torch

    found = hashlib.sha256()
    stack = [("", state)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{name}/{key}", value[key]) for key in sorted(value, key=str)]
        elif isinstance(value, list):
            stack += [(f"{name}/{index}", one) for index, one in enumerate(value)]
        elif isinstance(value, torch.Tensor):
            whole: Any = value
            if hasattr(value, "full_tensor"):
                whole = whole.full_tensor()
            found.update(name.encode() + whole.detach().numpy().tobytes())
        else:
            found.update(f"{name}={value!r}".encode())
    return found.hexdigest()


def main(directory: Path, action: str, format: str) -> None:
    import torch.distributed as dist

    from ckptmgr.integrations.torch_store import torchrun_coordinator

    dist.init_process_group("gloo")
    coordinator = torchrun_coordinator()
    model, optimizer = build()
    config = CheckpointConfig(format=format, remove_redundancy=True)
    state = {"model": model, "optimizer": optimizer, "rank": coordinator.rank}
    with CheckpointManager(
        directory, config, ranks=Ranks(coordinator, timeout_s=60), prefix="fsdp"
    ) as manager:
        step(model, optimizer, 1)  # the optimizer makes its tensors in its first step
        if action == "save":
            step(model, optimizer, 2)
            manager.save(2, state)
            kept = 0
        else:
            found = manager.resume(state)
            kept = len(found.kept)
    told = {
        "world": dist.get_world_size(),
        "rank": dist.get_rank(),
        "saved_by": state["rank"],
        "kept": kept,
    }
    told["digest"] = digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer, 3)
    told["next"] = digest({"model": model.state_dict()})
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # an interpreter that ends with threads of gloo sometimes aborts


if __name__ == "__main__":
    for number, ranks_now in enumerate(map(int, sys.argv[3:])):
        action = "load" if number else "save"
        run_ranks(ranks_now, lambda: main(Path(sys.argv[1]), action, sys.argv[2]))  # noqa: B023
