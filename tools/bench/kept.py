# SPDX-License-Identifier: Apache-2.0
"""CPU time of a save in a directory of many checkpoints: `python -m tools.bench.kept [COUNT ...]`.

For each count and policy a run resumes in a directory of so many small checkpoints. The runs save in
turns, so that other work on the machine meets them all; the first saves, which make the catalogue,
are not counted. Shown are the medians of CPU and wall time of one save.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.core.model import Link
from ckptmgr.core.names import step_name
from ckptmgr.store.manifest.codec import decode, encode, manifest_name

COUNTS = (10, 100, 1_000, 10_000)
POLICIES = ("last({count})", "all", "last(5) | daily(7) | every(1)")
_FORMAT = "safetensors"
_ROUNDS = 5
_SAVES = 8
_STATE = {"weight": np.arange(256, dtype=np.float32)}


class SaveTime(NamedTuple):
    """Seconds of one save: CPU time of the process, and wall time."""

    cpu_s: float
    wall_s: float


def fill(directory: Path, count: int) -> None:
    """Make a directory of `count` checkpoints of one run, which are copies of a saved one."""
    with CheckpointManager(directory, CheckpointConfig(format=_FORMAT, keep="all")) as manager:
        manager.save(0, _STATE)
    first = step_name("ckpt", 0, attempt=0, format=_FORMAT)
    path, content = directory / manifest_name(first), (directory / first).read_bytes()
    manifest = saved = decode(path.read_bytes(), path=path)
    for step in range(1, count):
        name = step_name("ckpt", step, attempt=0, format=_FORMAT)
        manifest = replace(
            manifest,
            file=replace(manifest.file, name=name),
            step=step,
            sequence=saved.sequence + step,
            saved_at=saved.saved_at + timedelta(milliseconds=step),
            metrics={"loss": 1 / step},
            previous=Link(
                name=manifest.name,
                sequence=manifest.sequence,
                run_id=manifest.run_id,
                id=manifest.id,
            ),
        )
        (directory / name).write_bytes(content)
        (directory / manifest_name(name)).write_bytes(encode(manifest))


class Run:
    """A run that saves in a directory of `count` checkpoints under a policy."""

    def __init__(self, directory: Path, count: int, policy: str) -> None:
        config = CheckpointConfig(
            save_checkpoint_steps=1, format=_FORMAT, keep=policy.format(count=count)
        )
        self.policy, self.count = policy.format(count=count), count
        self.times: list[SaveTime] = []
        self._manager = CheckpointManager(directory, config)
        self._step = self._manager.resume({"weight": np.empty(256, np.float32)}).next_step

    def save(self) -> SaveTime:
        """Save a few times; return the mean time of a save."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(_SAVES):
            self._manager.step_end(self._step, _STATE)
            self._step += 1
        spent = time.process_time() - cpu_s, time.perf_counter() - wall_s
        return SaveTime(spent[0] / _SAVES, spent[1] / _SAVES)

    def close(self) -> None:
        """End the run."""
        self._manager.close()


def measure(base: Path, counts: Sequence[int]) -> list[Run]:
    """Return the runs, one for each policy and count, with their times: one round after another.

    In each round every run saves in turn, so that other work on the machine meets them all.
    """
    with contextlib.ExitStack() as opened:
        runs = []
        for number, (policy, count) in enumerate(itertools.product(POLICIES, counts)):
            directory = base / str(number)
            directory.mkdir()
            fill(directory, count)
            runs.append(Run(directory, count, policy))
            opened.callback(runs[-1].close)
        for turn in range(_ROUNDS + 1):
            for run in runs:
                spent = run.save()
                if turn:  # the first saves make the catalogue
                    run.times.append(spent)
    return runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each policy and count."""
    parser = argparse.ArgumentParser(prog="tools.bench.kept", description="time of a save")
    parser.add_argument("counts", type=int, nargs="*", default=COUNTS)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as base:
        runs = measure(Path(base), given.counts)
    print(f"{'policy':<30} {'kept':>7} {'CPU ms':>8} {'wall ms':>8}")
    for run in runs:
        cpu_ms = 1e3 * statistics.median(one.cpu_s for one in run.times)
        wall_ms = 1e3 * statistics.median(one.wall_s for one in run.times)
        print(f"{run.policy:<30} {run.count:>7} {cpu_ms:>8.2f} {wall_ms:>8.2f}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
