# SPDX-License-Identifier: Apache-2.0
"""`AutoParallelContext`: the settings of `mindspore.set_auto_parallel_context`, as a value.

A manager, a callback or a function takes one as `context=`; without it, the context of the process
counts, which `set_auto_parallel_context` sets. Only settings that were given have an effect; the
defaults have none. `docs/mindspore.md` lists the effect of each key.

Keys, defaults, checks and messages are MindSpore's. Different on purpose:

* `set` is atomic: it changes nothing after an error. MindSpore applies the keys before the bad one.
* No directory is made for `strategy_ckpt_save_file`.
* `device_num` has MindSpore's documented upper bound, 4096, which MindSpore 2.10 does not check.
* `grad_accumulation_step` may be any positive number, as MindSpore documents; 2.10 takes only 1.

>>> context = AutoParallelContext(device_num=8, parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL)
>>> context.get("device_num"), context.get("dataset_strategy")
(8, 'data_parallel')
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from ckptmgr.parallel.mindspore.context_keys import KEY_CHECKS, PARALLEL_MODES


class ParallelMode:
    """The names of the parallel modes."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST: ClassVar[list[str]] = list(PARALLEL_MODES)


_FUSION: dict[str, object] = {"mode": "auto", "config": None}
_DEFAULTS: dict[str, object] = {
    "all_reduce_fusion_config": [],
    "auto_parallel_new_interface": False,
    "auto_parallel_search_mode": "recursive_programming",
    "auto_pipeline": False,
    "comm_fusion": {
        "openstate": True,
        "allreduce": _FUSION,
        "allgather": _FUSION,
        "reducescatter": _FUSION,
    },
    "communi_parallel_mode": "all_group_parallel",
    "dataset_strategy": "data_parallel",
    "device_num": 1,
    "dump_device_local_norm": False,
    "dump_local_norm": False,
    "dump_local_norm_path": "",
    "enable_alltoall": False,
    "enable_parallel_optimizer": False,
    "force_fp32_communication": False,
    "full_batch_is_set": False,
    "global_rank": 0,
    "grad_accumulation_step": 1,
    "gradient_fp32_sync": True,
    "gradients_mean": False,
    "init_param_in_compile": True,
    "loss_repeated_mean": True,
    "optimizer_weight_shard_aggregated_save": False,
    "optimizer_weight_shard_size": -1,
    "parallel_mode": "stand_alone",
    "parameter_broadcast": False,
    "pipeline_interleave": False,
    "pipeline_result_broadcast": False,
    "pipeline_scheduler": "1f1b",
    "pipeline_stages": 1,
    "search_mode": "recursive_programming",
    "sharding_propagation": False,
    "strategy_ckpt_load_file": "",
    "strategy_ckpt_save_file": "",
}


class AutoParallelContext:
    """Parallel settings under MindSpore's names.

    Args:
        settings: As for `set`.
    """

    def __init__(self, **settings: object) -> None:
        self._values: dict[str, object] = {}
        self._given: frozenset[str] = frozenset()
        self.reset()
        self.set(**settings)

    def set(self, **settings: object) -> None:
        """Change settings, all of them or none.

        Args:
            settings: MindSpore's keys.

        Raises:
            TypeError, ValueError, KeyError: A key or value is unusable; messages as MindSpore's.
        """
        values, given = dict(self._values), set(self._given)
        for key, value in settings.items():
            if key not in KEY_CHECKS:
                raise ValueError(f"Set context keyword {key} is not recognized!")
            changes = KEY_CHECKS[key](key, value)
            fusions = changes.get("comm_fusion")
            if isinstance(fusions, dict):
                known = values["comm_fusion"]
                changes["comm_fusion"] = {**(known if isinstance(known, dict) else {}), **fusions}
            values |= changes
            given |= changes.keys()
        self._values, self._given = values, frozenset(given)

    def get(self, key: str) -> object:
        """Return a setting.

        Raises:
            ValueError: There is no such key, or it can only be set; the message is MindSpore's.
        """
        if key == "full_batch":
            return self._values["dataset_strategy"] == "full_batch"
        if key == "strategy_ckpt_config":
            return {
                "load_file": self._values["strategy_ckpt_load_file"],
                "save_file": self._values["strategy_ckpt_save_file"],
                "only_trainable_params": self._values.get("only_trainable_params", True),
            }
        if key not in _DEFAULTS:
            raise ValueError(f"Get context keyword {key} is not recognized!")
        return copy.deepcopy(self._values[key])

    def given(self, key: str) -> Any:
        """Return a setting that `set` or the constructor was given, or None."""
        return copy.deepcopy(self._values[key]) if key in self._given else None

    def reset(self) -> None:
        """Return to the defaults; nothing counts as given."""
        self._values, self._given = copy.deepcopy(_DEFAULTS), frozenset()


_OF_PROCESS = AutoParallelContext()


def set_auto_parallel_context(**settings: object) -> None:
    """Change settings of the context of this process, all of them or none.

    Managers and callbacks that are made later, and calls of the functions of `ckptmgr.parallel`,
    follow it unless they get a `context=` of their own. Takes and raises as
    `AutoParallelContext.set` does.
    """
    _OF_PROCESS.set(**settings)


def get_auto_parallel_context(attr_key: str) -> object:
    """Return a setting of the context of this process, or its default.

    Raises:
        ValueError: There is no such key, or it can only be set; the message is MindSpore's.
    """
    return _OF_PROCESS.get(attr_key)


def reset_auto_parallel_context() -> None:
    """Return the context of this process to the defaults, so that it has no effect."""
    _OF_PROCESS.reset()


def context_in_force(context: AutoParallelContext | None) -> AutoParallelContext:
    """Return the given context, or that of this process for None.

    Raises:
        TypeError: It is no context.
    """
    if context is not None and not isinstance(context, AutoParallelContext):
        raise TypeError(f"context must be an AutoParallelContext, but got {type(context)}.")
    return _OF_PROCESS if context is None else context
