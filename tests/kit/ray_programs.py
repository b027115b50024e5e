# SPDX-License-Identifier: Apache-2.0
"""Programs with Ray Train: one for the kit in Ray's local mode, and one that kills its workers.

As a program, `python ray_programs.py FOLDER` trains in a cluster of this machine, and writes what
happened as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.tune
import torch
from ray.train import CheckpointConfig as RayCheckpointConfig
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr import CheckpointManager, save_state
from ckptmgr.integrations.ray import CheckpointConfig, RayCheckpointManager, load_reported

STEPS, EPOCH, CUT = 14, 4, 10
MOST_STEPS = 100_000
KEY = bytes(range(32))


class Noisy(torch.utils.data.Dataset[Any]):
    """Rows with noise of the global generator, which a prepared loader draws one batch ahead."""

    def __len__(self) -> int:
        return EPOCH * 8

    def __getitem__(self, index: int) -> Any:
        row = torch.full((4,), index / 32) + 0.1 * torch.randn(4)
        return row, row.sum(0, keepdim=True)


def loop(config: dict[str, Any]) -> None:
    """Train; a worker kills itself once after the save of the step `cut`."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    inputs = torch.randn(EPOCH * 8, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
    if config.get("is_prepared"):
        loader = prepare_data_loader(DataLoader(Noisy(), 8, shuffle=True))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    saves = CheckpointConfig(save_checkpoint_steps=config["every"], keep="last(2)", enc_key=KEY)
    with RayCheckpointManager(config["directory"], saves, preemption_steps=1) as manager:
        begun = step = manager.resume(state).step
        loss = 0.0
        while step < config["steps"] and not manager.should_stop:
            for x, y in manager.batches(loader):
                value = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                value.backward()  # type: ignore[no-untyped-call, unused-ignore]
                for parameter in model.parameters():
                    _mean(parameter.grad)
                optimizer.step()
                step, loss = step + 1, value.item()
                manager.step_end(step, state, metrics={"loss": loss})
                if step == config.get("cut") and begun == 0 and rank == config["killed"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == config["steps"] or manager.should_stop:
                    break
        manager.report({"loss": loss, "begun": begun})
    if "refused" in config:
        noted = refusals(config["directory"])
        if rank == 0:
            Path(config["refused"]).write_text(json.dumps(noted))


def _mean(gradient: torch.Tensor | None) -> None:
    if gradient is not None and torch.distributed.is_initialized():
        torch.distributed.all_reduce(gradient)


def local(directory: str, steps: int, **options: Any) -> object:
    """Train in the program itself, as the kit does."""
    config = {"directory": directory, "steps": steps, "every": 1, **options}
    return load_reported(fit(config, f"{directory}/ray", 0).checkpoint, key=KEY)


def prepared(directory: str, steps: int) -> object:
    """Train with a loader of `prepare_data_loader`, whose `iter` begins it anew."""
    return local(directory, steps, is_prepared=True)


def fit(config: dict[str, Any], storage: str, workers: int, *, failures: int = 0) -> Any:
    """Train with a number of workers; 0 is the local mode."""
    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=storage,
            name="run",
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=RayCheckpointConfig(num_to_keep=1),
        ),
    ).fit()


def preempted(config: dict[str, Any]) -> None:
    """Train without saves until the node is going to be taken away, which this worker asks for."""
    state = {"weight": torch.zeros(3)}
    saves = CheckpointConfig(save_checkpoint_steps=10**9)
    with RayCheckpointManager(config["directory"], saves, preemption_steps=1) as manager:
        step = manager.resume(state).step
        _drain()
        while manager.latest() is None and step < MOST_STEPS:
            step += 1
            manager.step_end(step, state)
        manager.step_end(step + 1, state)
        manager.report({"stop": manager.should_stop})


def refusals(directory: str) -> dict[str, str]:
    """Return why a manager is refused in one of several workers that no group of torch joins."""
    torch.distributed.destroy_process_group()
    errors = {}
    for name, place in (("relative", "runs/ray"), ("many", directory)):
        try:
            RayCheckpointManager(place)
        except ValueError as error:
            errors[name] = str(error)
    return errors


def _drain() -> None:
    """Say that this node will be taken away in ten minutes, as a cloud does."""
    context = ray.get_runtime_context()
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", context.gcs_address, "--node-id", context.get_node_id()),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"),
            *("--deadline-remaining-seconds", "600"),
        ],
        check=True,
    )


def run(folder: Path, name: str, **cut: Any) -> dict[str, Any]:
    """Train with two workers; return what Ray and the directory then have."""
    place = folder / name
    config = {"directory": str(place), "steps": STEPS, "every": 3, **cut}
    result = fit(config, f"{place}-ray", 2, failures=1)
    save_state(load_reported(result.checkpoint, key=KEY), folder / f"{name}.safetensors")
    return {
        "metrics": result.metrics,
        "reference": result.checkpoint.get_metadata()["ckptmgr"],
        "references": [one.parent.name for one in Path(f"{place}-ray").rglob(".metadata.json")],
        "steps": [one.step for one in CheckpointManager(place).checkpoints()],
    }


def in_trial(folder: Path) -> dict[str, Any]:
    """Return why a manager is refused in a trial of Ray Tune, and what the way out saves there."""
    noted = folder / "noted"

    def trial(config: dict[str, Any]) -> None:
        problem = ""
        try:
            RayCheckpointManager(folder)
        except RuntimeError as error:
            problem = str(error)
        prefix = ray.tune.get_context().get_trial_id()
        with CheckpointManager(folder, prefix=prefix) as manager:
            manager.save(1, {"n": 1})
            name = manager.checkpoints()[0].name.replace(prefix, "TRIAL")
        noted.write_text(json.dumps({"problem": problem, "saved": name}))
        ray.tune.report({"loss": 1.0})

    folder.mkdir()
    storage = ray.tune.RunConfig(storage_path=f"{folder}-ray")
    ray.tune.Tuner(trial, run_config=storage).fit()
    found: dict[str, Any] = json.loads(noted.read_text())
    return found


def main(folder: Path) -> None:
    """Carry out all runs in one cluster, and note their results."""
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
    )
    try:
        found = {
            "uncut": run(folder, "uncut", refused=str(folder / "refused.json")),
            "cut": run(folder, "cut", cut=CUT, killed=0),
            "again": run(folder, "cut"),
            "refused": json.loads((folder / "refused.json").read_text()),
            "trial": in_trial(folder / "trial"),
        }
        place = folder / "preempted"
        result = TorchTrainer(
            preempted,
            train_loop_config={"directory": str(place)},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(storage_path=f"{place}-ray", name="run"),
        ).fit()
        saved = [(one.step, one.why) for one in CheckpointManager(place).checkpoints()]
        found["preempted"] = {"metrics": result.metrics, "saved": saved}
    finally:
        ray.shutdown()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
