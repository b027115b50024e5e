# SPDX-License-Identifier: Apache-2.0
"""The cost of a save in the background for the training loop beside it: three loops with steps of about a millisecond."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.bench.contestant import Background

LOOPS = ("python", "numpy", "torch")
Step = Callable[[], object]

_PYTHON_TURNS = 20_000
_WIDTH = 256


def new_step(loop: str) -> Step:
    """Return one step of the loop called `loop`."""
    match loop:
        case "python":
            return _python_step
        case "numpy":
            return _numpy_step()
        case "torch":
            return _torch_step()
    raise ValueError(f"{loop!r} is no loop; choose from {', '.join(LOOPS)}")


def _python_step() -> int:
    total = 0
    for number in range(_PYTHON_TURNS):
        total += number & 7
    return total


def _numpy_step() -> Step:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((_WIDTH, _WIDTH), dtype=np.float32) / np.float32(_WIDTH)
    inputs = rng.standard_normal((_WIDTH, _WIDTH), dtype=np.float32)

    def step() -> None:
        np.tanh(np.tanh(inputs @ weights) @ weights)

    return step


def _torch_step() -> Step:
    import torch

    torch.set_num_threads(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, 16)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    inputs = torch.randn(_WIDTH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()

    return step


def lost_share(
    background: Background, path: Path, step: Step, *, window_s: float
) -> tuple[float, float]:
    """Return the share of steps that are lost while a save runs, and how many seconds it ran.

    Compared with the mean of two windows without a save, one before and one after. The time in which the caller was blocked
    is another figure and not part of this one.

    Args:
        background: What saves.
        path: Where to.
        step: One step of training.
        window_s: Length of each window without a save.
    """
    before = _steps_per_s(step, window_s)
    flight = background.start(path)
    is_over = threading.Event()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            flight.wait()
        except BaseException as error:
            failures.append(error)
        finally:
            is_over.set()

    threading.Thread(target=wait).start()
    started = time.perf_counter()
    steps = 0
    while not is_over.is_set():
        step()
        steps += 1
    passed_s = time.perf_counter() - started
    if failures:
        raise failures[0]
    after = _steps_per_s(step, window_s)
    return 1 - steps / passed_s / ((before + after) / 2), passed_s


def _steps_per_s(step: Step, window_s: float) -> float:
    started = time.perf_counter()
    steps = 0
    while time.perf_counter() - started < window_s:
        step()
        steps += 1
    return steps / (time.perf_counter() - started)
