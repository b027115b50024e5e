# SPDX-License-Identifier: Apache-2.0
"""Weights in a folder of the Hugging Face Hub layout whose safetensors files may be encrypted.

The files are `model.safetensors`, or the shards that `model.safetensors.index.json` names. An
encrypted one has that name, as `save_file` writes it, or that of a container, as `ckptmgr encrypt`
does: `model.safetensors.ckpe`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptmgr.core.errors import CheckpointFileNotFound, CorruptCheckpoint
from ckptmgr.core.names import CONTAINER_SUFFIX
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.strict_json import parse_object
from ckptmgr.integrations.safetensors.files import load_file

CONFIGURATION = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def is_hub_folder(directory: Path) -> bool:
    """Return whether a directory has the configuration of a model and its weights."""
    has_weights = any(
        (directory / name).exists() for name in (_INDEX, _WEIGHTS, _WEIGHTS + CONTAINER_SUFFIX)
    )
    return has_weights and (directory / CONFIGURATION).is_file()


def weights_in(directory: Path, key: bytes | str | None) -> dict[str, Any]:
    """Return the tensors of all files by name, as torch tensors.

    Raises:
        CheckpointFileNotFound: A shard is missing.
        CorruptCheckpoint: The index is damaged, or names a tensor that its file does not have.
        KeyProblem: A file needs a key, or another one; or a file is plain though a key is given.
    """
    found: dict[str, Any] = {}
    index = directory / _INDEX
    files = _files_of(index) if index.exists() else {_WEIGHTS: None}
    for name, expected in files.items():
        tensors = load_file(_existing(directory / name, key), key=key)
        missing = sorted((expected or set()) - tensors.keys())
        if missing:
            raise CorruptCheckpoint(
                f"{name} lacks {missing[0]!r}, which it should have", path=index
            )
        found |= tensors
    return found


def _files_of(index: Path) -> dict[str, set[str]]:
    """Return file name to names of tensors, in the order of the index."""
    try:
        document = parse_object(index.read_bytes(), what="the index", offset=0)
    except FormatError as error:
        raise CorruptCheckpoint(str(error), path=index) from None
    weights = document.get("weight_map")
    files: dict[str, set[str]] = {}
    for tensor, name in _pairs(weights, index):
        files.setdefault(name, set()).add(tensor)
    return files


def _pairs(weights: object, index: Path) -> Iterator[tuple[str, str]]:
    if not isinstance(weights, dict):
        raise CorruptCheckpoint("has no weight_map", path=index)
    for tensor, name in weights.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CorruptCheckpoint(
                f"the file of {tensor!r} is none of this directory: {name!r}", path=index
            )
        yield tensor, name


def _existing(path: Path, key: object) -> Path:
    """Return the path of a file or of its container; of both, the container if there is a key."""
    sealed = path.with_name(path.name + CONTAINER_SUFFIX)
    for one in (path, sealed) if key is None else (sealed, path):
        if one.exists():
            return one
    raise CheckpointFileNotFound(
        "no such file",
        path=path,
        hint=f"the weights are in this file, or encrypted in {sealed.name}",
    )
