# SPDX-License-Identifier: Apache-2.0
"""A training run that stops in the middle of a chosen write and waits to be killed: `python -m tests.faults.killed ...`.

Half of the bytes of that write are on the disk then. It says `saved N` on standard output after each step whose save
returned, and `stopped` when it waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The output of a killed run: the step of its last save that returned (0: none), and whether it was stopped."""

    acknowledged: int
    was_stopped: bool


def kill_during_write(directory: Path, *, step: int, write: int, **options: Any) -> Killed:
    """Train in a child process and kill it with SIGKILL in the middle of a write.

    Args:
        directory: Where it saves.
        step: The step whose save is interrupted.
        write: Which write of that save, from 1.
        options: See `main`.
    """
    plan = {"directory": str(directory), "step": step, "write": write, **options}
    command = [sys.executable, "-m", "tests.faults.killed", json.dumps(plan)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged, was_stopped = 0, False
        for line in child.stdout:
            if line.startswith("saved"):
                acknowledged = int(line.split()[1])
            else:
                was_stopped = True
                child.kill()
    return Killed(acknowledged=acknowledged, was_stopped=was_stopped)


class _StoppingWrites:
    """Takes the place of `os.pwrite`, through which every byte goes."""

    def __init__(self) -> None:
        self.countdown = 0
        self._pwrite = os.pwrite

    def __call__(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self.countdown -= 1
        if self.countdown != 0:
            return self._pwrite(descriptor, data, offset)
        self._pwrite(descriptor, data[: len(data) // 2], offset)
        print("stopped", flush=True)  # noqa: T201 - the parent waits for it
        signal.pause()
        raise AssertionError


def main(plan: dict[str, Any]) -> None:
    """Train: `config` goes to CheckpointConfig; `name` fixes the file name; `function` uses save_checkpoint instead."""
    import numpy as np

    from ckptmgr import CheckpointConfig, ModelCheckpoint, save_checkpoint
    from tests.support.surface import KEY, Loop

    config = dict(plan.get("config", {}))
    if config.get("enc_mode"):
        config["enc_key"] = KEY
    directory, name = Path(plan["directory"]), plan.get("name")
    writes = _StoppingWrites()
    os.pwrite = writes  # type: ignore[assignment]
    loop = Loop(callbacks=())
    if not plan.get("function"):
        prefix = "CKP" if name is None else (lambda _: name)
        loop.callbacks = (ModelCheckpoint(prefix, str(directory), CheckpointConfig(**config)),)
    loop.begin()
    for step in range(1, STEPS + 1):
        if step == plan["step"]:
            writes.countdown = plan["write"]
        loop.run_step()
        if plan.get("function"):
            save_checkpoint({"w": np.full(4, step, np.float32)}, directory / str(name), **config)
        if config.get("async_save"):
            loop.callbacks[0].close()  # waits for the disk
        print(f"saved {step}", flush=True)  # noqa: T201 - the parent waits for it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
