# SPDX-License-Identifier: Apache-2.0
"""`safetensors.flax`, with files that may be encrypted; all other names are the library's."""

from __future__ import annotations

import os
from typing import Any

import safetensors.flax as _library

from ckptmgr.integrations.safetensors.files import load_file as _load_file
from ckptmgr.integrations.safetensors.files import save_file

__all__ = ["load_file", "save_file"]


def load_file(filename: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Return all arrays of a file, by name; options and errors as `safe_open`."""
    import jax.numpy as jnp

    arrays = _load_file(filename, framework="flax", **options)
    return {name: jnp.asarray(one) for name, one in arrays.items()}


def __getattr__(name: str) -> object:
    return getattr(_library, name)
