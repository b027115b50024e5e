# SPDX-License-Identifier: Apache-2.0
"""Ways to damage files on a model disk, by another writer than the store."""

from __future__ import annotations

from pathlib import Path

from ckptmgr.store.manifest.codec import SUFFIX
from tests.faults.training import RUNS
from tests.support.crashmodel import ModelDisk


def put(disk: ModelDisk, path: Path, content: bytes) -> None:
    """Put a file in place of the entry of this name, durably."""
    if disk.status(path) is not None:
        disk.unlink(path)
    file = disk.create(path, mode=0o600)
    file.write_at(0, content)
    file.close()
    disk.settle()


def flip_bit(disk: ModelDisk, name: str, position: int = -9) -> None:
    """Flip one bit of a file; by default one of the last tensor's content."""
    content = bytearray(disk.read_bytes(RUNS / name))
    content[position] ^= 4
    put(disk, RUNS / name, bytes(content))


def truncate(disk: ModelDisk, name: str, size_bytes: int) -> None:
    """Cut the end of a file off."""
    put(disk, RUNS / name, disk.read_bytes(RUNS / name)[:size_bytes])


def copy(disk: ModelDisk, source: str, target: str) -> None:
    """Copy a file over another one."""
    put(disk, RUNS / target, disk.read_bytes(RUNS / source))


def replace_in(disk: ModelDisk, name: str, old: bytes, new: bytes) -> None:
    """Replace bytes of a file, which must be there."""
    content = disk.read_bytes(RUNS / name)
    assert old in content
    put(disk, RUNS / name, content.replace(old, new))


def manifest_of(name: str) -> str:
    """Return the name of the manifest of a data file."""
    return name + SUFFIX
