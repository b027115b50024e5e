# SPDX-License-Identifier: Apache-2.0
"""Cost of a compared resume, of records, fingerprints, and the look at floats: `python -m tools.bench.proof`.

Records are of steps, fingerprints of batches; a save looks for floats that are not finite.

All are measured in turns with what they are compared with, so that other work on the machine meets
both; shown are medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Resume

_ROUNDS = 7
_TENSORS = 16
_BATCHES = 300
_BATCH_BYTES = (1 << 10, 1 << 20, 100 << 20)


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall time and CPU time of a call, in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turns(
    works: Sequence[Callable[[], object]], rounds: int = _ROUNDS
) -> list[tuple[float, float]]:
    """Return the medians of wall and CPU time of each call, made in turns."""
    found: list[list[tuple[float, float]]] = [[] for _ in works]
    for _ in range(rounds):
        for times, work in zip(found, works, strict=True):
            times.append(seconds_of(work))
    return [tuple(map(statistics.median, zip(*times, strict=True))) for times in found]


def drop_from_cache(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def of_resumes(mebibytes: int) -> list[str]:
    """Return the lines about resumes with and without the comparison."""
    lines = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        count = (mebibytes << 20) // _TENSORS // 4
        state = {f"w{index}": np.full(count, index, np.float32) for index in range(_TENSORS)}
        with CheckpointManager(directory, CheckpointConfig(format="safetensors")) as manager:
            manager.save(1, state)
        for kind in ("warm", "cold"):

            def resume(*, compares: bool, is_cold: bool = kind == "cold") -> None:
                with CheckpointManager(directory) as manager:
                    manager.resume(state, Resume(read_back=compares))
                if is_cold:
                    drop_from_cache(directory)

            (bare, bare_cpu), (full, full_cpu) = in_turns(
                [lambda: resume(compares=False), lambda: resume(compares=True)]
            )
            lines.append(
                f"resume of {mebibytes} MiB, {kind}: {bare:.3f} s, compared {full:.3f} s: {full / bare - 1:+.0%};"
                f" CPU {bare_cpu:.3f} s, {full_cpu:.3f} s"
            )
    return lines


def of_saves(mebibytes: int, format: str) -> list[str]:
    """Return the lines about saves of floats, and of the same bytes as integers, which nobody looks at."""
    count = (mebibytes << 20) // _TENSORS // 4
    floats = [np.full(count, index, np.float32) for index in range(_TENSORS)]
    states = [
        {f"w{index}": one.view(dtype) for index, one in enumerate(floats)}
        for dtype in (np.int32, np.float32, np.int16, np.float16)
    ]
    with tempfile.TemporaryDirectory() as name:
        config = CheckpointConfig(format=format, keep="last(1)")
        with CheckpointManager(name, config) as manager:
            found = in_turns([partial(manager.save, 1, state) for state in states])
    return [
        f"save of {mebibytes} MiB as {format}, {kind}: {bare:.3f} s without the look, {full:.3f} s with it;"
        f" CPU {bare_cpu:.3f} s, {full_cpu:.3f} s"
        for kind, (bare, bare_cpu), (full, full_cpu) in zip(
            ("float32", "float16"), found[::2], found[1::2], strict=True
        )
    ]


def of_batches(size: int) -> str:
    """Return the line about batches of a size: a bare loop, and one over `manager.batches`."""
    count = max(4, min(_BATCHES, (1 << 30) // size))
    data = [np.zeros(size, np.uint8) for _ in range(min(count, 4))] * (count // 4)

    def loop(batches: Any, step_end: Callable[[int, Any], object]) -> None:
        for step, _ in enumerate(batches, 1):
            step_end(step, state)

    state = {"w": np.zeros(8)}
    with tempfile.TemporaryDirectory() as name:
        config = CheckpointConfig(save_checkpoint_steps=1 << 40)
        with CheckpointManager(name, config) as manager:
            (bare, _), (ours, cpu) = in_turns(
                [
                    lambda: loop(data, lambda step, state: None),
                    lambda: loop(manager.batches(data), manager.step_end),
                ]
            )
    each, each_cpu = 1e6 * (ours - bare) / len(data), 1e6 * cpu / len(data)
    return f"batch of {size} bytes and end of its step: {each:.0f} us more than a bare loop; CPU {each_cpu:.0f} us"


def of_records() -> str:
    """Return the line about the record of a step: runs before their first save, which have none, and after it."""
    data, config = (
        [np.zeros(1 << 10, np.uint8)] * 1000,
        CheckpointConfig(save_checkpoint_steps=1 << 40),
    )
    state, metrics = {"w": np.zeros(8)}, {"loss": 0.5, "accuracy": 0.25}

    def loop(manager: CheckpointManager) -> None:
        for step, _ in enumerate(manager.batches(data), 2):
            manager.step_end(step, state, metrics=metrics)

    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        CheckpointManager(one, config) as without,
        CheckpointManager(other, config) as recorded,
    ):
        recorded.save(1, state)
        (bare, bare_cpu), (full, full_cpu) = in_turns(
            [lambda: loop(without), lambda: loop(recorded)], 3 * _ROUNDS
        )
    each, each_cpu = (1e6 * one / len(data) for one in (full - bare, full_cpu - bare_cpu))
    whole = 1e6 * full / len(data)
    return f"record of a step with two metrics: {each:.1f} us of {whole:.0f} for batch and step; CPU {each_cpu:.1f} us"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    given = parser.parse_args(arguments)
    print(of_records(), flush=True)
    works = [partial(of_saves, given.mebibytes, format) for format in ("ckpt", "safetensors")]
    for work in [*works, partial(of_resumes, given.mebibytes)]:
        print(*work(), sep="\n", flush=True)
    for line in map(of_batches, _BATCH_BYTES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
