# SPDX-License-Identifier: Apache-2.0
"""Seconds that a training loop on all processors loses to a save: `python -m tools.bench.seconds_lost`.

A loop in torch trains with a thread for each processor. Beside it one save of a state of torch
tensors runs, by thread, with `zero_stall` and by process; and, in turns with them, a process that
only writes as many bytes. Lost is the time of the steps until the save is durable, at least `--steps`
of them, less that of as many steps before and after it; the time in which the caller is blocked is
part of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tools.bench.contestant import Background, Flight
from tools.bench.disk import remove, sync
from tools.bench.peers.ours import Library
from tools.bench.raw_disk import MIB, Shape
from tools.bench.raw_writer import RawWriter
from tools.bench.workload import new_state

_RAW = "raw writes"
_SHAPE = Shape(threads=4, chunk_bytes=4 * MIB)
_WIDTH = 512
Step = Callable[[Callable[[], object] | None], object]


class Loss(NamedTuple):
    """Seconds: lost by the loop, blocked at the start of a save, and until it is durable."""

    lost_s: float
    blocked_s: float
    durable_s: float


def new_step() -> Step:
    """Return one step of training; it calls its argument, if any, before the update."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, _WIDTH)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    inputs = torch.randn(_WIDTH, _WIDTH)

    def step(before_update: Callable[[], object] | None = None) -> None:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        if before_update is not None:
            before_update()
        optimizer.step()

    return step


def step_s(step: Step, steps: int) -> float:
    """Return the seconds of a step without a save."""
    started = time.perf_counter()
    for _ in range(steps):
        step(None)
    return (time.perf_counter() - started) / steps


def loss_beside(start: Callable[[], Flight], step: Step, *, steps: int) -> Loss:
    """Return the cost of a save for the loop."""
    before = step_s(step, steps)
    durable: list[float] = []
    failures: list[BaseException] = []
    started = time.perf_counter()
    flight = start()
    blocked_s = time.perf_counter() - started

    def wait() -> None:
        try:
            flight.wait()
        except BaseException as error:
            failures.append(error)
        durable.append(time.perf_counter() - started)

    waiting = threading.Thread(target=wait)
    waiting.start()
    done = 0
    while done < steps or not durable:
        step(flight.before_update)
        done += 1
    passed_s = time.perf_counter() - started
    waiting.join()
    if failures:
        raise failures[0]
    quiet = (before + step_s(step, steps)) / 2
    return Loss(passed_s - done * quiet, blocked_s, durable[0])


def starts(
    directory: Path, backgrounds: Sequence[Background], raw: RawWriter, size_bytes: int
) -> dict[str, Callable[[], Flight]]:
    """Return what starts each kind of save."""
    target = directory / "raw"
    found: dict[str, Callable[[], Flight]] = {_RAW: lambda: raw.start(target, size_bytes)}
    for one in backgrounds:
        found[one.mode] = lambda one=one: one.start(target)  # type: ignore[misc]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each kind of save."""
    parser = argparse.ArgumentParser(prog="tools.bench.seconds_lost", description="seconds lost")
    parser.add_argument("--size", type=int, default=512, help="MiB of the state")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    given = parser.parse_args(arguments)
    state = {
        name: torch.from_numpy(array) if array.dtype == np.float32 else array
        for name, array in new_state(given.size * MIB).items()
    }
    step = new_step()
    with ExitStack() as opened:
        base = opened.enter_context(tempfile.TemporaryDirectory(dir=given.directory))
        directory = Path(base)
        library = Library(state, given.size * MIB, directory=directory, rest_s=0)  # type: ignore[arg-type]
        backgrounds = [one for one in library.backgrounds() if one.mode != "unit"]
        for one in backgrounds:
            opened.callback(one.close)
        raw = RawWriter(_SHAPE)
        opened.callback(raw.close)
        kinds = starts(directory, backgrounds, raw, given.size * MIB)
        losses: dict[str, list[Loss]] = {name: [] for name in kinds}
        for turn in range(given.rounds + 1):
            for name, start in kinds.items():
                remove(directory / "raw")
                sync(directory)
                loss = loss_beside(start, step, steps=given.steps)
                if turn:  # the first saves take new memory
                    losses[name].append(loss)
    print(f"{'save':<12} {'lost s':>8} {'least':>8} {'blocked s':>10} {'durable s':>10}")
    for name, found in losses.items():
        lost, blocked, durable = (statistics.median(part) for part in zip(*found, strict=True))
        least = min(one.lost_s for one in found)
        print(f"{name:<12} {lost:>8.2f} {least:>8.2f} {blocked:>10.3f} {durable:>10.2f}")


if __name__ == "__main__":
    main()
