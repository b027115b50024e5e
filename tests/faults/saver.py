# SPDX-License-Identifier: Apache-2.0
"""A process that saves one step, for strace: `python -m tests.faults.saver DIRECTORY STEP MODE [OPTION]`.

It resumes first, keeps one checkpoint besides the one it resumed from, and prints `acknowledged` once the save is durable.
With the option `verified` it reads its file back; with `starved` it saves the next step, too, when no process of it
has a file descriptor left.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy  # noqa: F401  imports come first: the injected fault must meet the save, not the loading of NumPy

from ckptmgr import CheckpointConfig, CheckpointManager
from tests.faults.training import state_of


def main(directory: str, step: int, mode: str, option: str = "") -> None:
    """Save, wait for the disk, and say so."""
    config = CheckpointConfig(
        keep="last(1)",
        async_save=False if mode == "sync" else mode,
        verify_after_write=option == "verified",
    )
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.resume()
        save(manager, step)
        if option == "starved":
            starve()
            save(manager, step + 1)
        print("acknowledged", flush=True)  # noqa: T201 - the parent waits for it


def save(manager: CheckpointManager, step: int) -> None:
    """Save one step."""
    handle = manager.save(step, state_of(10.0 * step))
    assert handle is not None
    handle.wait()


def starve() -> None:
    """Let this process and its worker open no further file."""
    for process in (os.getpid(), *_children()):
        held = {int(name) for name in os.listdir(f"/proc/{process}/fd")}
        if process == os.getpid():
            held = {number for number in held if _is_open(number)}
        free = next(number for number in range(len(held) + 1) if number not in held)
        _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (free, hard))


def _children() -> list[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _is_open(number: int) -> bool:
    """Return whether a descriptor is more than that of the list of descriptors itself."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
