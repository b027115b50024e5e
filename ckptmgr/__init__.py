# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that survive: durable, verified, encrypted saves and safe retention for any Python training loop.

Names are imported on first use, so that `import ckptmgr` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckptmgr._version import __version__
from ckptmgr.errors import CkptmgrError

if TYPE_CHECKING:
    from ckptmgr.callback import ModelCheckpoint
    from ckptmgr.config import CheckpointConfig
    from ckptmgr.manager import CheckpointManager, Resumption
    from ckptmgr.model import Checkpoint, Plan
    from ckptmgr.network import load_param_into_net
    from ckptmgr.policy_text import parse_policy
    from ckptmgr.ranges import RangeSource
    from ckptmgr.reader import open_checkpoint
    from ckptmgr.retention import plan
    from ckptmgr.serialization import load_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointManager",
    "CkptmgrError",
    "ModelCheckpoint",
    "Plan",
    "RangeSource",
    "Resumption",
    "__version__",
    "load_checkpoint",
    "load_param_into_net",
    "open_checkpoint",
    "parse_policy",
    "plan",
    "save_checkpoint",
]

_HOMES = {
    "Checkpoint": "model",
    "CheckpointConfig": "config",
    "CheckpointManager": "manager",
    "ModelCheckpoint": "callback",
    "Plan": "model",
    "RangeSource": "ranges",
    "Resumption": "manager",
    "load_checkpoint": "serialization",
    "load_param_into_net": "network",
    "open_checkpoint": "reader",
    "parse_policy": "policy_text",
    "plan": "retention",
    "save_checkpoint": "serialization",
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
