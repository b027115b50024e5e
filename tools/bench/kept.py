# SPDX-License-Identifier: Apache-2.0
"""CPU time of a save in a directory of many checkpoints: `python -m tools.bench.kept [COUNT ...]`.

For each count and policy a run resumes in a directory of so many small checkpoints, and saves. The
first saves, which make the catalogue, are not counted. Shown are CPU and wall time of one save.
"""

from __future__ import annotations

import argparse
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


def save_times(directory: Path, count: int, policy: str) -> list[SaveTime]:
    """Return the mean time of a save in each round."""
    config = CheckpointConfig(
        save_checkpoint_steps=1, format=_FORMAT, keep=policy.format(count=count)
    )
    times = []
    with CheckpointManager(directory, config) as manager:
        step = manager.resume({"weight": np.empty(256, np.float32)}).next_step
        for turn in range(_ROUNDS + 1):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for step in range(step, step + _SAVES):  # noqa: B020  goes on where it stopped
                manager.step_end(step, _STATE)
            step += 1
            if turn:
                spent = time.process_time() - cpu_s, time.perf_counter() - wall_s
                times.append(SaveTime(spent[0] / _SAVES, spent[1] / _SAVES))
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each policy and count."""
    parser = argparse.ArgumentParser(prog="tools.bench.kept", description="time of a save")
    parser.add_argument("counts", type=int, nargs="*", default=COUNTS)
    given = parser.parse_args(arguments)
    print(f"{'policy':<30} {'kept':>7} {'CPU ms':>8} {'wall ms':>8}")
    for policy in POLICIES:
        for count in given.counts:
            with tempfile.TemporaryDirectory() as base:
                fill(Path(base), count)
                times = save_times(Path(base), count, policy)
            cpu_ms = 1e3 * statistics.median(one.cpu_s for one in times)
            wall_ms = 1e3 * statistics.median(one.wall_s for one in times)
            print(f"{policy:<30} {count:>7} {cpu_ms:>8.2f} {wall_ms:>8.2f}", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
