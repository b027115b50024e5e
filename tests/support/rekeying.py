# SPDX-License-Identifier: Apache-2.0
"""Runs whose keys are changed: made on a model disk or a real one, and opened with whatever keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save as save_safetensors

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, CkptmgrError, KeyProblem, Trust
from ckptmgr.core.model import State
from ckptmgr.core.shard_names import shard_name
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.leases import Processes
from ckptmgr.maintenance.rekey import RekeyPlan, open_for_rekeying, rekey_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from ckptmgr.maintenance.verify import Status, verify_checkpoint
from ckptmgr.store.manifest.codec import FileEntry, encode, manifest_name
from ckptmgr.store.store import Store
from tests.crypto.container.containers import seal
from tests.faults.training import RUNS, ModelProcesses
from tests.support.crashmodel import ModelDisk
from tests.support.damage import put
from tests.support.manifests import manifest
from tests.support.runs import manager_on
from tests.support.shard_sets import ATTEMPT

OLD, NEW, OTHER = (Key(bytes([number]) * 32) for number in (1, 2, 3))


def ring(*materials: Key | str | bytes) -> KeyRing:
    """Return a ring of keys, passphrases (text) and PEM files (bytes)."""
    return KeyRing([_material(one) for one in materials])


def _material(one: Key | str | bytes) -> KeyMaterial:
    if isinstance(one, Key):
        return KeyMaterial.of_key(one)
    if isinstance(one, str):
        return KeyMaterial(KeyKind.PHRASE, one.encode())
    return KeyMaterial(KeyKind.PEM, one)


ROTATION = KeyChange(keys=ring(OLD), add=(ring(NEW),), remove=(ring(OLD),))


def save_run(
    disk: ModelDisk | None = None,
    *,
    directory: Path = RUNS,
    steps: int = 2,
    form: str = "safetensors",
    mode: str = "AES-GCM",
    key: Key = OLD,
    signing_key: SigningKey | None = None,
    compression: str | None = None,
) -> None:
    """Save some encrypted checkpoints."""
    config = CheckpointConfig(
        keep="all",
        enc_key=key.raw,
        enc_mode=mode,
        format=form,
        signing_key=signing_key,
        compression=compression,
    )
    processes = None if disk is None else ModelProcesses(disk)
    with manager_on(
        directory, config, fs=disk, processes=processes, clock=lambda: 1_700_000_000.0, prefix="net"
    ) as manager:
        for step in range(1, steps + 1):
            manager.save(step, {"w": np.full(3, step, np.float32)})


def rekey(
    change: KeyChange,
    *,
    fs: FileSystem | None = None,
    directory: Path = RUNS,
    processes: Processes | None = None,
) -> list[RekeyPlan]:
    """Change the keys of everything in a directory."""
    store = open_for_rekeying(directory, change, fs=fs, processes=processes)
    unfinished = (State.LEFTOVER, State.WRITING)
    found = [one for one in store.scan() if one.state not in unfinished]
    found.sort(key=lambda one: one.name)
    return [rekey_checkpoint(store, checkpoint, change) for checkpoint in found]


def opens(checkpoint: Checkpoint, keys: KeyRing, *, fs: FileSystem | None = None) -> bool:
    """Return whether a checkpoint verifies with these keys."""
    store = Store(checkpoint.path.parent, fs=fs, trust=Trust(keys=keys))
    answer = verify_checkpoint(store, checkpoint, options=ReadOptions(trust=Trust(keys=keys)))
    return answer.status in (Status.OK, Status.UNPROVEN)  # a file without manifest opens, too


def openers(
    checkpoint: Checkpoint, rings: Iterable[KeyRing], *, fs: FileSystem | None = None
) -> list[int]:
    """Return which of the rings open a checkpoint, by number."""
    return [number for number, one in enumerate(rings) if opens(checkpoint, one, fs=fs)]


def resumed_step(keys: Key, *, directory: Path) -> int | type[CkptmgrError]:
    """Return what step a manager with this key resumes from, or the error."""
    config = CheckpointConfig(keep="all", enc_key=keys.raw, format="safetensors")
    try:
        with CheckpointManager(directory, config, prefix="net") as manager:
            return manager.resume().step
    except KeyProblem as error:
        return type(error)


def save_set(disk: ModelDisk) -> None:
    """Save an encrypted checkpoint of two ranks."""
    disk.make_directory(RUNS, mode=0o700)
    plain = save_safetensors({"w": np.arange(3, dtype=np.float32)})
    entries = []
    for rank in range(2):
        name = shard_name("net-1", rank, world=2, attempt_id=ATTEMPT, format="safetensors.ckpe")
        content = seal(plain, recipients=[RawKey(OLD)], content=Content.SAFETENSORS)
        put(disk, RUNS / name, content)
        digest = digest_of(BytesSource(content), blank_bytes=8192)
        entries.append(FileEntry(name=name, digest=digest, format="safetensors", cipher="AES-GCM"))
    found = replace(manifest(), file=entries[0], shards=tuple(entries), world_size=2)
    put(disk, RUNS / manifest_name("net-1.shards"), encode(found, trust=Trust(keys=OLD)))
    disk.settle()
