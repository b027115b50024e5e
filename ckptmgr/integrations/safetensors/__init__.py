# SPDX-License-Identifier: Apache-2.0
"""The interface of the safetensors library, for its files and for encrypted and compressed ones.

Change one import: `from ckptmgr.integrations.safetensors import safe_open`, and likewise `.numpy`,
`.torch` and `.flax` for `load_file` and `save_file`. Everything else is the library's own.
"""

from __future__ import annotations

from importlib import import_module

import safetensors as _library

from ckptmgr.integrations.safetensors.files import load_file, save_file
from ckptmgr.integrations.safetensors.opening import safe_open

__all__ = ["load_file", "safe_open", "save_file"]


_MODULES = ("flax", "numpy", "torch")


def __getattr__(name: str) -> object:
    if name in _MODULES:  # the library has modules of these names, too
        return import_module(f"{__name__}.{name}")
    return getattr(_library, name)
