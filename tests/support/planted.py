# SPDX-License-Identifier: Apache-2.0
"""Entries that somebody else puts beside the checkpoints of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ckptmgr import Trust
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.store.manifest.codec import FileEntry, Manifest, encode, manifest_name
from ckptmgr.store.store import Store

SHARD = "net-40.1-of-2.67d2f1a41f0c9a2e.ckpt"
FOREIGN_NAMES = (
    "train.py",
    "numpy.py",
    "ckptmgr.toml",
    "notes.txt",
    "data.bin",
    ".net-9.ckpt",
    SHARD,
)
"""Names that no checkpoint of a directory has."""


def describing(directory: Path, name: str, content: bytes, *, step: int = 0) -> Manifest:
    """Return a manifest of a file, made from one of the run of the directory."""
    present = (one for one in Store(directory).scan() if one.is_countable and one.run_id)
    model = min(present, key=lambda one: one.step)
    read = Store(directory, trust=Trust()).manifests.read_unproven(model.name)
    assert read is not None
    entry = FileEntry(
        name=name, digest=digest_of(BytesSource(content)), format="ckpt", cipher=None, key_id=None
    )
    return replace(read, file=entry, step=step, sequence=step, previous=None, auth=None)


def plant(directory: Path, name: str, content: bytes, *, step: int = 0, by: int = -1) -> list[Path]:
    """Put a file and its manifest into a directory; return both, which belong to the user `by`."""
    manifest = describing(directory, name, content, step=step)
    return write_planted(directory, manifest, content, by=by)


def write_planted(directory: Path, manifest: Manifest, content: bytes, *, by: int) -> list[Path]:
    """Write a manifest and its data."""
    paths = [directory / manifest.name, directory / manifest_name(manifest.name)]
    for path, data in zip(paths, (content, encode(manifest)), strict=True):
        path.write_bytes(data)
        path.chmod(0o644)
        os.chown(path, by, -1)
    return paths


def dead_token() -> str:
    """Return the token of a writer that is known to be dead: of this host, but another start."""
    host, boot, _, _ = ProcProcesses().token().split("-")
    return f"{host}-{boot}-4194304-1"


def plant_temp(directory: Path, name: str, content: bytes) -> Path:
    """Put the manifest of a dead writer into a directory, which describes a file of that name."""
    temp = directory / temp_name(manifest_name(name), token=dead_token(), series="net")
    temp.write_bytes(encode(describing(directory, name, content)))
    return temp
