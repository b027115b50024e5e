# SPDX-License-Identifier: Apache-2.0
"""`safetensors.torch`, with files that may be encrypted; all other names are the library's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch as _library

from ckptmgr.integrations.safetensors.files import load_file, save_file

__all__ = ["load_file", "load_model", "save_file", "save_model"]


def save_model(
    model: Any,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    key: bytes | str | None = None,
    manifest: bool = True,
) -> None:
    """Save a module; of tensors that share memory one, and the names of the others in the metadata.

    Arguments and errors as `save_file`; with `force_contiguous` tensors are packed first.
    """
    state = model.state_dict()
    strings = None if metadata is None else dict(metadata)
    for kept, others in _library._remove_duplicate_names(state).items():
        strings = {**dict.fromkeys(others, kept), **(strings or {})}
        for name in others:
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, strings, key=key, manifest=manifest)
    except ValueError as error:
        raise ValueError(f"{error} Or use save_model(..., force_contiguous=True).") from error


def load_model(
    model: Any,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: Any = "cpu",
    **options: Any,
) -> tuple[Any, list[str]]:
    """Load a file that `save_model` wrote into a module; options as `safe_open`.

    Returns:
        Names of the module that the file lacks, and names of the file that the module lacks.

    Raises:
        RuntimeError: There are such names, and `strict`.
    """
    state = load_file(filename, device, **options)
    shared = _library._remove_duplicate_names(model.state_dict(), preferred_names=list(state))
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = set(missing)
    for name in (name for names in shared.values() for name in names):
        if name in missing:
            missing.remove(name)
        else:
            unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"    {kind} key(s) in state_dict: {quoted}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def __getattr__(name: str) -> object:
    return getattr(_library, name)
