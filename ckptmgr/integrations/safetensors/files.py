# SPDX-License-Identifier: Apache-2.0
"""`save_file` and `load_file` of the safetensors library, durable and with a key."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmgr.config.keys import resolve_keys
from ckptmgr.core.arguments import check_is_bool
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.single_file import save_single_file
from ckptmgr.files.serialization_arguments import checked_strings
from ckptmgr.formats.tensor import PackedArray
from ckptmgr.integrations.safetensors.opening import safe_open
from ckptmgr.state.arrays import framework_of, named_tensors
from ckptmgr.store.reserved_names import is_reserved_name

_MODE = "AES-GCM"


def save_file(
    tensors: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    key: bytes | str | None = None,
    manifest: bool = True,
) -> None:
    """Save arrays or tensors to one file; when it returns, they survive a power cut.

    Without a key, the file has the bytes that the library writes. With one it is a container, under
    the same name. The file belongs to its owner only.

    Args:
        tensors: Name to array or tensor of NumPy, torch or JAX, or `PackedArray`.
        filename: The file, under this very name.
        metadata: Strings for the header.
        key: Encrypts the file: 16, 24 or 32 bytes, or a source as for `CheckpointConfig`.
        manifest: Leave a manifest with digests beside the file. Without one, damage to the contents
            of a plain file is not found: the library's files have no CRC32.

    Raises:
        ValueError: A value is no tensor; a torch tensor is sparse or not contiguous; the name is
            that of a manifest, a lease or another file that ckptmgr keeps.
        RuntimeError: torch tensors share memory, which would be written twice; use `save_model`.
        TypeError: Something in `metadata` is no string.
        UnsupportedState, UnsupportedCheckpoint: A type that no file can hold, or a name taken twice.
        StoreLocked: Another process is saving this file now.
        StoreFull, OSError: From the disk; an older file of this name is intact.
    """
    _check_tensors(tensors)
    strings = None if metadata is None else checked_strings(metadata)
    keys = resolve_keys("key", key, mode=_MODE, format="safetensors")
    path = Path(os.path.realpath(filename))
    if is_reserved_name(path.name):
        raise ValueError(
            f"the name {path.name!r} is that of another file of ckptmgr, such as a manifest or a"
            " lease; choose another name"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(2, os.strerror(2), str(path))
    save_single_file(
        path,
        named_tensors(dict(tensors)),
        options=SaveOptions(
            format="safetensors",
            key=keys,
            mode=_MODE,
            file_mode=0o600,
            is_as_library=True,
            has_manifest=check_is_bool("manifest", manifest),
        ),
        metadata=strings,
    )


def load_file(
    filename: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    framework: str = "pt",
    backend: str = "mmap",
    key: bytes | str | None = None,
    **trust: Any,
) -> dict[str, Any]:
    """Return all tensors of a file, by name; arguments and errors as `safe_open`."""
    with safe_open(filename, framework, device, backend=backend, key=key, **trust) as file:
        tensors: dict[str, Any] = file.get_tensors()
    return tensors


def _check_tensors(tensors: object) -> None:
    """Raise the library's errors, with its words, for values that it does not save."""
    if not isinstance(tensors, Mapping):
        raise ValueError(  # noqa: TRY004  as the library
            f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}"
        )
    for name, value in tensors.items():
        if framework_of(value) is None and not isinstance(value, PackedArray):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(value)}"
            )
    torch = sys.modules.get("torch")
    if torch is not None:
        of_torch = {n: one for n, one in tensors.items() if isinstance(one, torch.Tensor)}
        if of_torch:
            _check_torch_tensors(torch, of_torch)


def _check_torch_tensors(torch: Any, tensors: dict[str, Any]) -> None:
    from safetensors.torch import _find_shared_tensors

    sparse = [name for name, one in tensors.items() if one.layout is not torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support."
            " You can make it a dense tensor before saving with `.to_dense()` but be aware this might make a much larger"
            " file than needed."
        )
    shared = [names for names in _find_shared_tensors(tensors) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"Some tensors share memory, this will lead to duplicate memory on disk and potential differences when"
            f" loading them again: {shared}. A potential way to correctly save your model is to use `save_model`."
        )
    for name, one in tensors.items():
        if not one.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. Call `.contiguous()`"
                " on it to pack it before saving."
            )
        if one.is_meta:
            one.to("cpu")  # raises: there is nothing to copy
