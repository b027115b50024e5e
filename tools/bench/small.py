# SPDX-License-Identifier: Apache-2.0
"""CPU time of a manager for each small tensor: `python -m tools.bench.small [TENSORS] [--beside CHECKOUT]`.

The state is that of a model and of Adam: of each parameter of 64 values the values, two moments and
a step counter, as torch tensors and as NumPy arrays. Measured are `step_end` that saves, `resume`
without a state and `resume` into the state. Shown is the least of some rounds, in microseconds of
CPU time of the process for each tensor.

With another checkout of this repository the two take turns, each time in a new process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager

TENSORS = 10_000
_TENSORS_OF_PARAMETER = 4
_VALUES = 64
_ROUNDS = 7
_TURNS = 3
_ACTIONS = ("step_end", "resume", "resume into")


def new_state(tensors: int, new: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """Return a state of about so many tensors; `new` makes one of an array."""
    parameters = range(tensors // _TENSORS_OF_PARAMETER)

    def values(value: float) -> object:
        return new(np.full(_VALUES, value, np.float32))

    def moments() -> dict[str, object]:
        step = new(np.full((), 3, np.float32))
        return {"step": step, "exp_avg": values(1), "exp_avg_sq": values(2)}

    return {
        "model": {f"blocks.{number}.weight": values(number) for number in parameters},
        "optimizer": {
            "state": {number: moments() for number in parameters},
            "param_groups": [{"lr": 1e-3, "params": list(parameters)}],
        },
        "step": 3,
    }


def cpu_us(tensors: int, kind: str, directory: Path) -> dict[str, float]:
    """Return the CPU time of each action for a tensor of `kind`, torch or numpy."""
    new: Callable[[np.ndarray], Any] = np.copy
    if kind == "torch":
        import torch

        new = torch.tensor
    state = new_state(tensors, new)
    config = CheckpointConfig(save_checkpoint_steps=1, format="safetensors", keep="last(2)")
    least: dict[str, float] = {}

    def measure(what: str, action: Callable[[], object]) -> None:
        start = time.process_time()
        action()
        spent_us = (time.process_time() - start) * 1e6 / tensors
        least[what] = min(least.get(what, spent_us), spent_us)

    with CheckpointManager(directory, config) as manager:
        manager.step_end(1, state)
        for step in range(2, 2 + _ROUNDS):
            measure("step_end", partial(manager.step_end, step, state))
    for what, target in (("resume", None), ("resume into", state)):
        for _ in range(_ROUNDS):
            with CheckpointManager(directory, config) as manager:
                measure(what, lambda: manager.resume(target))  # noqa: B023  called at once
    return least


def _in_turns(tensors: int, checkouts: Sequence[Path]) -> dict[tuple[Path, str], dict[str, float]]:
    """Measure each checkout with each kind of tensors, in processes of their own."""
    least: dict[tuple[Path, str], dict[str, float]] = {}
    for _ in range(_TURNS):
        for kind in ("torch", "numpy"):
            for checkout in checkouts:
                found = json.loads(
                    subprocess.run(
                        [sys.executable, "-P", __file__, str(tensors), "--kind", kind],
                        env={**os.environ, "PYTHONPATH": str(checkout)},
                        stdout=subprocess.PIPE,
                        check=True,
                    ).stdout
                )
                before = least.setdefault((checkout, kind), found)
                least[checkout, kind] = {what: min(before[what], found[what]) for what in found}
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each checkout and kind of tensors."""
    parser = argparse.ArgumentParser(prog="tools.bench.small", description="time of a tensor")
    parser.add_argument("tensors", type=int, nargs="?", default=TENSORS)
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--kind", choices=("torch", "numpy"), help="measure in this process")
    given = parser.parse_args(arguments)
    if given.kind is not None:
        with tempfile.TemporaryDirectory() as base:
            print(json.dumps(cpu_us(given.tensors, given.kind, Path(base))))
        return
    checkouts = [Path(__file__).parents[2], *([given.beside.resolve()] if given.beside else [])]
    print(f"{'CPU us for each tensor':<24}" + "".join(f"{what:>13}" for what in _ACTIONS))
    for (checkout, kind), least in _in_turns(given.tensors, checkouts).items():
        figures = "".join(f"{least[what]:>13.1f}" for what in _ACTIONS)
        print(f"{checkout.name[:16]} {kind:<7}".ljust(24) + figures, flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
