# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false
"""Programs that this version and that of commit 3b48e63e run, and resume from each other.

Each trains to a step in epochs of four batches, saves at steps 6 and 12, and returns numbers that are
exact in float32 on every processor: losses are linear, rates powers of two, noise and orders integers.

`python -m tests.kit.earlier_programs SOURCES PROGRAM...` writes `tests/golden/earlier/PROGRAM`: what a
run of the version in the directory SOURCES leaves that is killed after step 6, and what an uncut one
returns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager

ROWS, SIZE, STEPS, CUT = 16, 4, 12, 6
GOLDEN = Path(__file__).parents[1] / "golden" / "earlier"
X = np.arange(ROWS * 4, dtype="float32").reshape(ROWS, 4) % 7


def _config(**options: Any) -> Any:
    return CheckpointConfig(save_checkpoint_steps=CUT, keep="last(1)", **options)


class Batches:
    """Rows of NumPy in a new order for each epoch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __iter__(self) -> Any:
        order = self.rng.permutation(ROWS)
        return (X[order[at : at + SIZE]] for at in range(0, ROWS, SIZE))


def plain(directory: str, steps: int) -> object:
    """Train with NumPy, in the format `ckpt`."""
    rng = np.random.default_rng(2)
    weights, momentum = np.zeros(4, "float32"), np.zeros(4, "float32")
    state: dict[str, Any] = {"weights": weights, "momentum": momentum, "rng": rng, "seen": []}
    batches = Batches()
    with CheckpointManager(directory, _config()) as manager:
        step = manager.resume(state).step
        while step < steps:
            for x in manager.batches(batches):
                momentum[:] = momentum / 2 + x.sum(0) + rng.integers(0, 3, 4)
                weights -= momentum / 4
                state["seen"] += [float(x[0, 0])]
                step += 1
                manager.step_end(step, state, metrics={"loss": float(weights[0])})
    return {"weights": weights, "momentum": momentum, "seen": state["seen"]}


def _torch_parts() -> Any:
    import torch

    class Noisy(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(X[index]) + torch.randint(0, 3, (4,))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False))
    torch.nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.25, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    loader = torch.utils.data.DataLoader(Noisy(), SIZE, shuffle=True)
    return model, optimizer, schedule, loader


def torch_loader(directory: str, steps: int) -> object:
    """Train with a loader of torch that shuffles, in the format `safetensors`."""
    model, optimizer, schedule, loader = _torch_parts()
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with CheckpointManager(directory, _config(format="safetensors")) as manager:
        step = manager.resume(state).step
        while step < steps:
            for x in manager.batches(loader):
                model(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                manager.step_end(step, state)
    return state


def jax_keys(directory: str, steps: int) -> object:
    """Train with arrays and keys of JAX."""
    import jax

    state = {"weights": jax.numpy.zeros(4), "key": jax.random.key(0)}
    batches = Batches()
    with CheckpointManager(directory, _config()) as manager:
        step = manager.resume(state).step
        while step < steps:
            for x in manager.batches(batches):
                state["key"], own = jax.random.split(state["key"])
                state["weights"] -= (x.mean(0) + jax.random.randint(own, (4,), 0, 3)) / 4
                step += 1
                manager.step_end(step, state)
    return {"weights": np.asarray(state["weights"])}


def lightning(directory: str, steps: int) -> object:
    """Train with Lightning."""
    import lightning as pl

    from ckptmgr.integrations.lightning import ManagerCheckpoint

    class Net(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    net, optimizer, schedule, loader = _torch_parts()
    checkpoints = ManagerCheckpoint(directory, _config())
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[checkpoints],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net(net)
    trainer.fit(model, loader, ckpt_path=checkpoints.latest())
    return {"net": model.net, "optimizer": optimizer, "schedule": schedule}


def keras(directory: str, steps: int) -> object:
    """Train with Keras on arrays that it shuffles."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras as k

    from ckptmgr.integrations.keras import CheckpointCallback

    k.utils.set_random_seed(0)
    layer = k.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = k.Sequential([k.layers.Input((4,)), layer])
    model.compile(k.optimizers.SGD(0.25, momentum=0.5), lambda y, found: k.ops.mean(found * y))
    with CheckpointCallback(directory, _config()) as checkpoints:
        model.fit(
            X,
            X[:, :1] + 1,
            batch_size=SIZE,
            epochs=steps // 4,
            initial_epoch=checkpoints.initial_epoch,
            callbacks=[checkpoints],
            verbose=0,
        )
    return model.get_state_tree(value_format="numpy_array")


def transformers(directory: str, steps: int) -> object:
    """Train with the Trainer of Transformers."""
    import torch
    from transformers import Trainer, TrainingArguments

    from ckptmgr.integrations.transformers import CheckpointCallback

    class Net(torch.nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).mean()}

    net, optimizer, schedule, _ = _torch_parts()
    model = Net(net)
    args = TrainingArguments(
        f"{directory}/logs",
        max_steps=steps,
        per_device_train_batch_size=SIZE,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows: Any = [{"x": torch.tensor(row)} for row in X]
    with CheckpointCallback(directory, _config()) as checkpoints:
        trainer = Trainer(
            model,
            args,
            train_dataset=rows,
            callbacks=[checkpoints],
            optimizers=(optimizer, schedule),
        )
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def accelerate(directory: str, steps: int) -> object:
    """Train with an Accelerator, with gradients that are accumulated over four batches."""
    from accelerate import Accelerator

    from ckptmgr.integrations.accelerate import AcceleratorCheckpoints

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    parts = _torch_parts()
    with AcceleratorCheckpoints(accelerator, directory, _config()) as checkpoints:
        model, optimizer, schedule, loader = checkpoints.prepare(*parts)
        step = checkpoints.resume().step
        while step < steps:
            for x in checkpoints.batches(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).mean())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                step += 1
                checkpoints.step_end(step)
    return {"model": parts[0], "optimizer": parts[1], "schedule": parts[2]}


def _mindspore_parts(*, is_shuffled: bool) -> Any:
    import mindspore
    from mindspore import nn
    from mindspore.dataset import NumpySlicesDataset
    from mindspore.train import Model

    class Linear(nn.Cell):  # type: ignore[misc, unused-ignore]
        def construct(self, found: Any, y: Any) -> Any:
            return (found * y).mean()

    mindspore.set_seed(0)
    rows = NumpySlicesDataset((X, X[:, :1]), ["x", "y"], shuffle=is_shuffled).batch(SIZE)
    network = nn.Dense(4, 1, weight_init="zeros", has_bias=False)
    optimizer = nn.Momentum(network.trainable_params(), 0.25, 0.5)
    return Model(network, Linear(), optimizer), rows


def _mindspore_numbers(model: Any) -> object:
    return {one.name: one.asnumpy().copy() for one in model.train_network.get_parameters()}


def mindspore_callback(directory: str, steps: int) -> object:
    """Train with `Model.train` of MindSpore and the callback that resumes inside an epoch."""
    from ckptmgr.integrations.mindspore import CheckpointCallback

    model, rows = _mindspore_parts(is_shuffled=True)
    checkpoints = CheckpointCallback(directory, _config())
    first = checkpoints.resume(model, rows, steps // 4)
    model.train(steps // 4, rows, callbacks=[checkpoints], initial_epoch=first)
    return _mindspore_numbers(model)


def model_checkpoint(directory: str, steps: int) -> object:
    """Train with `Model.train` of MindSpore and `ModelCheckpoint`, which saves epochs."""
    from ckptmgr.integrations.mindspore import (
        CheckpointConfig,
        ModelCheckpoint,
        load_param_into_net,
    )

    model, rows = _mindspore_parts(is_shuffled=False)
    config = CheckpointConfig(save_checkpoint_steps=8, keep_checkpoint_max=1)
    callback = ModelCheckpoint("net", directory, config)
    found = callback.resume()
    if found is not None:
        assert load_param_into_net(model.train_network, found.values) == ([], [])
    first = 0 if found is None else found.checkpoint.epoch
    model.train(steps // 4, rows, callbacks=callback, initial_epoch=first)
    return _mindspore_numbers(model)


def run(sources: Path, program: str, directory: Path, *, cut: int = 0) -> tuple[int, Path]:
    """Run a program with the version in a directory; return its exit code and the file it returned.

    Args:
        sources: A checkout, of which the packages are taken.
        program: Its name.
        directory: The checkpoints; what it returns comes beside.
        cut: The step after whose save it is killed; 0 for none.
    """
    result = directory.parent / "returned.safetensors"
    given: dict[str, Any] = {"directory": str(directory), "steps": STEPS, "result": str(result)}
    given |= {"how": "kill", "step": cut} if cut else {}
    command = "import sys, json; from ckptmgr.testing.child import main; main(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", command, f"{__file__}:{program}", json.dumps(given)],
        env={**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"},
        cwd=directory.parent,
        check=False,
    )
    return done.returncode, result


def main(sources: str, *programs: str) -> None:
    """Write the golden files of programs, with the version in a directory."""
    for program in programs:
        place = GOLDEN / program
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        code, _ = run(Path(sources), program, place / "run", cut=CUT)
        assert code == -9, code
        for lease in place.rglob(".*.lease"):
            lease.unlink()  # names this machine
        with tempfile.TemporaryDirectory() as scratch:
            code, result = run(Path(sources), program, Path(scratch) / "run")
            assert code == 0, code
            shutil.copy(result, place)


if __name__ == "__main__":
    main(*sys.argv[1:])
