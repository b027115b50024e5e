# SPDX-License-Identifier: Apache-2.0
"""Durable, verified and encrypted checkpoints with safe retention for any Python training loop.

Names are imported on first use, so that `import ckptmgr` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptmgr._version import __version__
from ckptmgr.core.errors import CkptmgrError

if TYPE_CHECKING:
    from ckptmgr.config.config import CheckpointConfig
    from ckptmgr.core.model import Checkpoint, Plan
    from ckptmgr.files.load.network import load_param_into_net
    from ckptmgr.files.open_checkpoint import open_checkpoint
    from ckptmgr.files.serialization import load_checkpoint, save_checkpoint
    from ckptmgr.files.state_file import load_state, save_state
    from ckptmgr.formats.tensor import PackedArray
    from ckptmgr.integrations.safetensors.files import load_file, save_file
    from ckptmgr.integrations.safetensors.opening import safe_open
    from ckptmgr.io.object_store import RangeSource
    from ckptmgr.policy.retention import plan
    from ckptmgr.policy.text import parse_policy
    from ckptmgr.training.callback import ModelCheckpoint
    from ckptmgr.training.manager import CheckpointManager
    from ckptmgr.training.resume import Resumption

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointManager",
    "CkptmgrError",
    "ModelCheckpoint",
    "PackedArray",
    "Plan",
    "RangeSource",
    "Resumption",
    "__version__",
    "load_checkpoint",
    "load_file",
    "load_param_into_net",
    "load_state",
    "open_checkpoint",
    "parse_policy",
    "plan",
    "safe_open",
    "save_checkpoint",
    "save_file",
    "save_state",
]

_HOMES = {
    "Checkpoint": "core.model",
    "CheckpointConfig": "config.config",
    "CheckpointManager": "training.manager",
    "ModelCheckpoint": "training.callback",
    "PackedArray": "formats.tensor",
    "Plan": "core.model",
    "RangeSource": "io.object_store",
    "Resumption": "training.resume",
    "load_checkpoint": "files.serialization",
    "load_file": "integrations.safetensors.files",
    "load_param_into_net": "files.load.network",
    "load_state": "files.state_file",
    "open_checkpoint": "files.open_checkpoint",
    "parse_policy": "policy.text",
    "plan": "policy.retention",
    "safe_open": "integrations.safetensors.opening",
    "save_checkpoint": "files.serialization",
    "save_file": "integrations.safetensors.files",
    "save_state": "files.state_file",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"ckptmgr.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
