# SPDX-License-Identifier: Apache-2.0
"""MindSpore with the checkpoints of ckptmgr: change `mindspore` in an import, and nothing else.

`from mindspore.train import Model, ModelCheckpoint` becomes
`from ckptmgr.integrations.mindspore.train import Model, ModelCheckpoint`; the same goes for
`mindspore` and `mindspore.parallel`. Names of `__all__` are ours, with MindSpore's objects: loads
return parameters, where `ckptmgr` itself returns NumPy arrays. All other names are MindSpore's
own. `docs/mindspore.md` lists the differences.
"""

from __future__ import annotations

from importlib import import_module

import mindspore as _library

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.files.load.network import load_param_into_net
from ckptmgr.files.serialization import save_checkpoint
from ckptmgr.integrations.mindspore.checkpoint_callback import MindSporeCheckpoints
from ckptmgr.integrations.mindspore.objects import (
    get_parameter_redundancy,
    load_checkpoint,
    load_distributed_checkpoint,
    load_segmented_checkpoints,
    merge_sliced_parameter,
)
from ckptmgr.parallel import (
    build_searched_strategy,
    merge_pipeline_strategys,
    rank_list_for_transform,
    remove_param_redundancy,
    restore_group_info_list,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from ckptmgr.training.callback import ModelCheckpoint

__all__ = [
    "CheckpointCallback",
    "CheckpointConfig",
    "MindSporeCheckpoints",
    "ModelCheckpoint",
    "build_searched_strategy",
    "get_parameter_redundancy",
    "load_checkpoint",
    "load_distributed_checkpoint",
    "load_param_into_net",
    "load_segmented_checkpoints",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "rank_list_for_transform",
    "remove_param_redundancy",
    "restore_group_info_list",
    "save_checkpoint",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
]

CheckpointCallback = MindSporeCheckpoints
"""The earlier name."""
_MODULES = ("parallel", "train")


def __getattr__(name: str) -> object:
    if name in _MODULES:  # MindSpore has modules of these names, too
        return import_module(f"{__name__}.{name}")
    return getattr(_library, name)
