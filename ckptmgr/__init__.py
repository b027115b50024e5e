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
    from safetensors import SafetensorError

    from ckptmgr.config.config import CheckpointConfig
    from ckptmgr.config.memory import MemoryConfig
    from ckptmgr.config.subjects import Resume, Snapshots, Stop
    from ckptmgr.core.errors import (
        CheckpointFileNotFound,
        CheckpointNotFound,
        ChecksumMismatch,
        CorruptCheckpoint,
        KeyProblem,
        SaveFailed,
        SaveSuperseded,
        StagingExhausted,
        StoreFull,
        StoreLocked,
        TamperedCheckpoint,
        TruncatedCheckpoint,
        UnprovenCheckpoint,
        UnsafePrune,
        UnsafeWrite,
        UnsealedCheckpoint,
        UnsupportedCheckpoint,
        UnsupportedState,
    )
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint, Plan
    from ckptmgr.core.trust import Trust
    from ckptmgr.files.load.network import load_param_into_net
    from ckptmgr.files.open_checkpoint import open_checkpoint
    from ckptmgr.files.serialization import load_checkpoint, save_checkpoint
    from ckptmgr.files.state_file import load_state, save_state
    from ckptmgr.formats.errors import TruncatedError
    from ckptmgr.formats.tensor import PackedArray
    from ckptmgr.integrations.safetensors.files import load_file, save_file
    from ckptmgr.integrations.safetensors.opening import safe_open
    from ckptmgr.io.object_store import RangeSource
    from ckptmgr.maintenance.export import export_weights
    from ckptmgr.parallel.coordinator import RanksMissing, RanksOutOfStep
    from ckptmgr.parallel.errors import RankFailed, ResumeFailed
    from ckptmgr.parallel.team import Ranks
    from ckptmgr.policy.forecast import Forecast
    from ckptmgr.policy.retention import plan
    from ckptmgr.policy.save import AtSteps, EverySeconds, EverySteps, Never, Overhead
    from ckptmgr.policy.text import PolicyTextError, parse_policy
    from ckptmgr.remote.mirror import Mirror
    from ckptmgr.series.candidates import Skipped
    from ckptmgr.state.global_random import GlobalRandom
    from ckptmgr.state.paths import StateMismatch
    from ckptmgr.training.callback import ModelCheckpoint
    from ckptmgr.training.manager import CheckpointManager
    from ckptmgr.training.resume import Resumed, Resumption
    from ckptmgr.training.witness_record import Witnessed

__all__ = [
    "AtSteps",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointFileNotFound",
    "CheckpointManager",
    "CheckpointNotFound",
    "ChecksumMismatch",
    "CkptmgrError",
    "CorruptCheckpoint",
    "EverySeconds",
    "EverySteps",
    "Forecast",
    "GlobalRandom",
    "KeyProblem",
    "MemoryConfig",
    "Mirror",
    "ModelCheckpoint",
    "Never",
    "Overhead",
    "PackedArray",
    "Plan",
    "PolicyTextError",
    "RangeSource",
    "RankFailed",
    "Ranks",
    "RanksMissing",
    "RanksOutOfStep",
    "Resume",
    "ResumeFailed",
    "Resumed",
    "Resumption",
    "SafetensorError",
    "SaveFailed",
    "SaveHandle",
    "SaveSuperseded",
    "Skipped",
    "Snapshots",
    "StagingExhausted",
    "StateMismatch",
    "Stop",
    "StoreFull",
    "StoreLocked",
    "TamperedCheckpoint",
    "TruncatedCheckpoint",
    "TruncatedError",
    "Trust",
    "UnprovenCheckpoint",
    "UnsafePrune",
    "UnsafeWrite",
    "UnsealedCheckpoint",
    "UnsupportedCheckpoint",
    "UnsupportedState",
    "Witnessed",
    "__version__",
    "export_weights",
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
    "AtSteps": "policy.save",
    "Checkpoint": "core.model",
    "CheckpointConfig": "config.config",
    "CheckpointFileNotFound": "core.errors",
    "CheckpointManager": "training.manager",
    "CheckpointNotFound": "core.errors",
    "ChecksumMismatch": "core.errors",
    "CorruptCheckpoint": "core.errors",
    "EverySeconds": "policy.save",
    "EverySteps": "policy.save",
    "Forecast": "policy.forecast",
    "GlobalRandom": "state.global_random",
    "KeyProblem": "core.errors",
    "MemoryConfig": "config.memory",
    "Mirror": "remote.mirror",
    "ModelCheckpoint": "training.callback",
    "Never": "policy.save",
    "Overhead": "policy.save",
    "PackedArray": "formats.tensor",
    "Plan": "core.model",
    "PolicyTextError": "policy.text",
    "RangeSource": "io.object_store",
    "RankFailed": "parallel.errors",
    "Ranks": "parallel.team",
    "RanksMissing": "parallel.coordinator",
    "RanksOutOfStep": "parallel.coordinator",
    "Resume": "config.subjects",
    "ResumeFailed": "parallel.errors",
    "Resumed": "training.resume",
    "Resumption": "training.resume",
    "SafetensorError": "integrations.safetensors.opening",
    "SaveFailed": "core.errors",
    "SaveHandle": "core.handle",
    "SaveSuperseded": "core.errors",
    "Skipped": "series.candidates",
    "Snapshots": "config.subjects",
    "StagingExhausted": "core.errors",
    "StateMismatch": "state.paths",
    "Stop": "config.subjects",
    "StoreFull": "core.errors",
    "StoreLocked": "core.errors",
    "TamperedCheckpoint": "core.errors",
    "TruncatedCheckpoint": "core.errors",
    "TruncatedError": "formats.errors",
    "Trust": "core.trust",
    "UnprovenCheckpoint": "core.errors",
    "UnsafePrune": "core.errors",
    "UnsafeWrite": "core.errors",
    "UnsealedCheckpoint": "core.errors",
    "UnsupportedCheckpoint": "core.errors",
    "UnsupportedState": "core.errors",
    "Witnessed": "training.witness_record",
    "export_weights": "maintenance.export",
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
