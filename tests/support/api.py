# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as tests of behaviour handle them: a room that is rebuilt changes this file, not those tests.

Tests write `api.place(tmp_path)`. What is public is imported from `ckptmgr`; what one room alone
has is imported from it by the tests of that room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptmgr import Checkpoint, Trust
from ckptmgr.core.model import Pin, State
from ckptmgr.core.trust import DEFAULT_TRUST
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.io.filesystem import FileSystem, InputFile, OsFileSystem, OutputFile
from ckptmgr.maintenance.verdict import Level, Status, Verification
from ckptmgr.maintenance.verify import verify_checkpoint
from ckptmgr.objects.requests import Objects, open_objects
from ckptmgr.store.manifest.codec import SUFFIX as MANIFEST_SUFFIX
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.codec import decode as decode_manifest
from ckptmgr.store.manifest.codec import encode as encode_manifest
from ckptmgr.store.store import Store as Place

__all__ = [
    "DEFAULT_TRUST",
    "MANIFEST_SUFFIX",
    "FileEntry",
    "FileSystem",
    "InputFile",
    "Key",
    "Level",
    "Manifest",
    "Objects",
    "OsFileSystem",
    "OutputFile",
    "Pin",
    "Place",
    "ReadOptions",
    "SaveFacts",
    "SaveOptions",
    "SigningKey",
    "State",
    "Status",
    "Trust",
    "Verification",
    "decode_manifest",
    "encode_manifest",
    "listed",
    "manifest_name",
    "manifest_of",
    "open_objects",
    "place",
    "reading",
    "verify",
]

_OF_TRUST = ("keys", "trusted_keys", "signing_key", "allow_unsealed", "allow_unencrypted")


def place(directory: Path, **options: Any) -> Place:
    """Return the place in a directory; `options` are those of the place, or the fields of `Trust`."""
    return Place(directory, **_with_trust(options))


def listed(directory: Path, **options: Any) -> list[Checkpoint]:
    """Return the checkpoints of a directory, in no particular order; `options` as for `place`."""
    return place(directory, **options).scan()


def reading(**options: Any) -> ReadOptions:
    """Return how a file is read; `options` are its own, or the fields of `Trust`."""
    return ReadOptions(**_with_trust(options))


def verify(
    store: Place,
    checkpoint: Checkpoint,
    *,
    level: Level = Level.FULL,
    options: ReadOptions | None = None,
    **others: Any,
) -> Verification:
    """Check a checkpoint of a place, with `options` or the fields of `Trust`."""
    keys = {name: others.pop(name) for name in _OF_TRUST if name in others}
    read = reading(**keys) if keys else options
    return verify_checkpoint(store, checkpoint, level=level, options=read, **others)


def manifest_of(path: Path) -> Path:
    """Return the path of the manifest of a checkpoint."""
    return path.with_name(manifest_name(path.name))


def _with_trust(options: dict[str, Any]) -> dict[str, Any]:
    keys = {name: options.pop(name) for name in _OF_TRUST if name in options}
    return {**options, "trust": Trust(**keys)} if keys else options
