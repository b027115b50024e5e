# SPDX-License-Identifier: Apache-2.0
"""Probes of `MemoryConfig`: a save in the background that is held up, and snapshots; see `options`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, MemoryConfig, Snapshots
from ckptmgr.engine.staging import StagingPool
from tests.engine.test_staging_spill import CountedWrites
from tests.engine.test_wipe import SECRET, staged_secrets
from tests.state.test_devices import DictDevice
from tests.support.held import HeldDisk
from tests.support.options import Ticks, tried
from tests.support.runs import manager_on
from tests.support.staging_memory import MIB, filled


def state(size_bytes: int = MIB) -> dict[str, Any]:
    """A state of equal bytes that no other memory has."""
    return {"w": np.full(size_bytes, SECRET, np.uint8)}


def spilled_bytes(directory: Path) -> int:
    """Return the size of the nameless files of this process in a directory."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if link.readlink().is_relative_to(directory / "spill"):
                found += os.stat(link).st_size
        except FileNotFoundError:
            continue
    return found


def locked_kib() -> int:
    """Return how much memory of this process is locked."""
    (found,) = re.findall(r"VmLck:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    return int(found)


def huge_pages_free() -> str:
    """Return how many huge pages the system has left."""
    (found,) = re.findall(r"HugePages_Free:\s+([0-9]+)", Path("/proc/meminfo").read_text())
    return str(found)


def held(directory: Path, /, *, is_afterwards: bool = False, **memory: Any) -> object:
    """Where the state of a save is while it waits for the disk; or whether it still is afterwards."""
    disk = HeldDisk()
    disk.gate.clear()
    config = CheckpointConfig(async_save=True, memory=MemoryConfig(**memory))
    manager = manager_on(directory / "runs", config, fs=disk)
    locked = locked_kib()

    def save() -> object:
        handle = manager.save(1, state())
        assert handle is not None
        disk.arrive()
        staging = handle.stats.staging_bytes
        return staging, spilled_bytes(directory), locked_kib() > locked, huge_pages_free()

    seen = tried(save)
    disk.gate.set()
    if is_afterwards:
        manager.wait()
        seen = staged_secrets() > 0
    manager.close()
    return seen


def written(directory: Path, /, **memory: Any) -> object:
    """The sizes of writes to a spill file, and how many run at once."""
    writes = CountedWrites(expected=memory["writes_in_flight"])
    places: dict[str, Any] = {
        "is_automatic": False,
        "staging_place": "disk",
        "spill_directory": directory,
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        StagingPool(MemoryConfig(**places, **memory)) as pool,
    ):
        patch.setattr(os, "pwrite", writes)
        pool.stage([filled("a", MIB)]).release()
    return set(writes.sizes), writes.most_running


def on_device(directory: Path, /, **memory: Any) -> object:
    """Which tensors are copied on their device."""
    del directory
    device = DictDevice({"gpu": 10 * MIB})
    with StagingPool(MemoryConfig(**memory), device=device) as pool:
        pool.stage([filled("gpu.a", MIB)]).release()
    return device.copied


def snapped(directory: Path, /, *, sizes: Mapping[int, int], **memory: Any) -> object:
    """Which snapshots of some sizes, by step, stay; and how much of them is on the disk."""
    config = CheckpointConfig(save_checkpoint_steps=10**6, memory=MemoryConfig(**memory))
    clock = Ticks()
    with manager_on(
        directory / "runs", config, clock=clock, snapshots=Snapshots(most=99)
    ) as manager:
        taken = [manager.snapshot(step, state(size)) for step, size in sizes.items()]
        spilled, found, back = spilled_bytes(directory), [], 0
        while isinstance(step := tried(lambda: manager.rollback(steps_back=back).step), int):  # noqa: B023
            found.append(step)
            back = 1
    return taken, spilled, found


def evicted(directory: Path, /, **memory: Any) -> object:
    """Which of three snapshots stay in room for two: one that is dear to get again, a near one, the last."""
    room = MemoryConfig(snapshot_budget_bytes=2500, smallest_evictee_bytes=0, **memory)
    config = CheckpointConfig(save_checkpoint_steps=10**6, keep="all", memory=room)
    clock = Ticks()
    with manager_on(directory, config, clock=clock, snapshots=Snapshots(most=9)) as manager:
        manager.save(0, state(1 << 19))
        for seconds, step in ((500, 5), (10, 10), (1, 11), (1, 12)):
            clock.now += seconds
            (manager.save if step == 10 else manager.snapshot)(step, state(1024))
        found = [manager.rollback(steps_back=back) for back in (0, 1, 1)]
        return [(one.step, one.checkpoint is None) for one in found]


def made(directory: Path, /, *, of: str, **keys: Any) -> object:
    """The configuration that another library's keys make."""
    del directory
    make = getattr(MemoryConfig, of)
    return replace(make(keys) if of == "from_mindspore" else make(**keys))
