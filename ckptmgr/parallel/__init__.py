# SPDX-License-Identifier: Apache-2.0
"""Tensors cut over many ranks: layouts, deduplicated saves, and checkpoints of N ranks for M.

```
strategy file | DTensor | NamedSharding ──> ParallelLayout ──> redundancy, balance    savers
                                                          └──> reshard ──> transform  readers
```
Functions that MindSpore has bear its names and return its results, except where those lose data.
Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmgr.parallel.balance import BalancedPlan, Replicated, Share, balance_by_bytes
    from ckptmgr.parallel.coordinator import Coordinator, KeyValueCoordinator
    from ckptmgr.parallel.errors import LayoutError, MixedSteps, SliceMissing
    from ckptmgr.parallel.foreign_layouts import from_dtensor, from_named_sharding, from_placements
    from ckptmgr.parallel.layout import ParallelLayout, read_layouts
    from ckptmgr.parallel.mindspore.context import (
        AutoParallelContext,
        ParallelMode,
        get_auto_parallel_context,
        reset_auto_parallel_context,
        set_auto_parallel_context,
    )
    from ckptmgr.parallel.mindspore.distributed import (
        load_distributed_checkpoint,
        load_segmented_checkpoints,
    )
    from ckptmgr.parallel.mindspore.merge import SlicedParameter, merge_sliced_parameter
    from ckptmgr.parallel.mindspore.outputs import WrittenFiles
    from ckptmgr.parallel.mindspore.reshard import plan_region, plan_slice, rank_list_for_transform
    from ckptmgr.parallel.mindspore.strategy_files import (
        build_searched_strategy,
        merge_pipeline_strategys,
        restore_group_info_list,
    )
    from ckptmgr.parallel.mindspore.transform import (
        transform_checkpoint_by_rank,
        transform_checkpoints,
    )
    from ckptmgr.parallel.mindspore.unified import unified_safetensors
    from ckptmgr.parallel.redundancy import get_parameter_redundancy, remove_param_redundancy
    from ckptmgr.parallel.shared_directory import SharedDirectory

__all__ = [
    "AutoParallelContext",
    "BalancedPlan",
    "Coordinator",
    "KeyValueCoordinator",
    "LayoutError",
    "MixedSteps",
    "ParallelLayout",
    "ParallelMode",
    "Replicated",
    "Share",
    "SharedDirectory",
    "SliceMissing",
    "SlicedParameter",
    "WrittenFiles",
    "balance_by_bytes",
    "build_searched_strategy",
    "from_dtensor",
    "from_named_sharding",
    "from_placements",
    "get_auto_parallel_context",
    "get_parameter_redundancy",
    "load_distributed_checkpoint",
    "load_segmented_checkpoints",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "plan_region",
    "plan_slice",
    "rank_list_for_transform",
    "read_layouts",
    "remove_param_redundancy",
    "reset_auto_parallel_context",
    "restore_group_info_list",
    "set_auto_parallel_context",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
]

_NAMES_OF = {
    "balance": "BalancedPlan Replicated Share balance_by_bytes",
    "coordinator": "Coordinator KeyValueCoordinator",
    "errors": "LayoutError MixedSteps SliceMissing",
    "foreign_layouts": "from_dtensor from_named_sharding from_placements",
    "layout": "ParallelLayout read_layouts",
    "mindspore.context": "AutoParallelContext ParallelMode get_auto_parallel_context reset_auto_parallel_context "
    "set_auto_parallel_context",
    "mindspore.distributed": "load_distributed_checkpoint load_segmented_checkpoints",
    "mindspore.merge": "SlicedParameter merge_sliced_parameter",
    "mindspore.outputs": "WrittenFiles",
    "mindspore.reshard": "plan_region plan_slice rank_list_for_transform",
    "mindspore.strategy_files": "build_searched_strategy merge_pipeline_strategys restore_group_info_list",
    "mindspore.transform": "transform_checkpoint_by_rank transform_checkpoints",
    "mindspore.unified": "unified_safetensors",
    "redundancy": "get_parameter_redundancy remove_param_redundancy",
    "shared_directory": "SharedDirectory",
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
