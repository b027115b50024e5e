# SPDX-License-Identifier: Apache-2.0
"""Rate of `ckptmgr verify` of cold files beside `cat`: `python -m tools.bench.verify_rate`.

In turns, each in a process of its own: `cat FILES > /dev/null`, and `ckptmgr verify` of the same
directory, of plain safetensors files, of such with MindSpore's CRC32, and of encrypted ones. Before
each, the files leave the page cache. Shown are the medians of GiB per second and of CPU seconds,
those of the kernel, too, per GiB, with the start of Python.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager
from tools.bench.listing import Used, used_by

_KEY = bytes(range(32))
_ROUNDS = 3
MODES: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "CRC32": {"crc_check": True},
    "AES-GCM": {"enc_key": _KEY},
}


def make_files(directory: Path, *, count: int, size_bytes: int, mode: str) -> list[Path]:
    """Save `count` checkpoints of random bytes; return their files."""
    config = CheckpointConfig(format="safetensors", keep="all", **MODES[mode])  # type: ignore[arg-type]
    chance = np.random.default_rng(0)
    state = {
        f"w{part}": chance.integers(0, 1 << 32, size_bytes // 64, np.uint32) for part in range(16)
    }
    with CheckpointManager(directory, config) as manager:
        for step in range(count):
            manager.save(step, state)
        return [one.path for one in manager.checkpoints()]


def evict(files: Sequence[Path]) -> None:
    """Let the files leave the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure(
    directory: Path, files: Sequence[Path], options: Sequence[str], rounds: int
) -> dict[str, list[Used]]:
    """Return what `cat` and `verify` used in each round."""
    commands = {
        "cat": ("cat", *map(str, files)),
        "verify": (sys.executable, "-m", "ckptmgr", "verify", str(directory), *options),
    }
    used: dict[str, list[Used]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            evict(files)
            used[name].append(used_by(command))
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each mode and command."""
    parser = argparse.ArgumentParser(prog="tools.bench.verify_rate", description="rate of verify")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--mib", type=int, default=1024, help="of each file")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    given = parser.parse_args(arguments)
    print(f"{'mode':<8} {'command':<8} {'GiB/s':>7} {'CPU s/GiB':>10} {'of cat':>7}")
    for mode in MODES:
        with tempfile.TemporaryDirectory(dir=given.directory) as base:
            key_file = Path(base) / "key"
            key_file.touch(mode=0o600)
            key_file.write_text(_KEY.hex() + "\n")
            options = ("--key", f"file:{key_file}") if "enc_key" in MODES[mode] else ()
            runs = Path(base) / "runs"
            files = make_files(runs, count=given.files, size_bytes=given.mib << 20, mode=mode)
            total_gib = sum(path.stat().st_size for path in files) / 2**30
            used = measure(runs, files, options, given.rounds)
        walls = {
            name: statistics.median(one.wall_s for one in found) for name, found in used.items()
        }
        for name, found in used.items():
            cpu_s = statistics.median(one.cpu_s for one in found)
            share = walls["cat"] / walls[name]
            print(
                f"{mode:<8} {name:<8} {total_gib / walls[name]:>7.2f} {cpu_s / total_gib:>10.2f} {share:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
