# SPDX-License-Identifier: Apache-2.0
"""Checks and messages of the keys of `mindspore.set_auto_parallel_context` in MindSpore 2.10.

A check takes the key and the value and returns the changed keys with their values: one or several.

Source: `mindspore/context.py`, `mindspore/parallel/_auto_parallel_context.py` (messages of 2.10.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Changes = dict[str, object]

PARALLEL_MODES = (
    "stand_alone",
    "data_parallel",
    "hybrid_parallel",
    "semi_auto_parallel",
    "auto_parallel",
)

_CALL = "For 'set_auto_parallel_context',"
_SEARCHES = ("recursive_programming", "dynamic_programming", "sharding_propagation")
_SCHEDULERS = ("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v", "seqsmartvpp")
_COMMUNICATIONS = ("all_group_parallel", "same_server_group_parallel", "no_group_parallel")
_MAX_DEVICES = 4096
_MAX_RANK = _MAX_DEVICES - 1


def _typed(key: str, value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"The parameter '{key}' must be {kind}, but got {type(value)}")
    return value


def _bool(key: str, value: object) -> Changes:
    return {key: _typed(key, value, bool)}


def _optional_bool(key: str, value: object) -> Changes:
    return {key: False} if value is None else _bool(key, value)


def _truth(key: str, value: object) -> Changes:
    return {key: bool(value)}


def _text(key: str, value: object) -> Changes:
    return {key: _typed(key, value, str)}


def _device_num(key: str, value: object) -> Changes:
    number = int(_typed(key, value, int))
    if number < 1:
        raise ValueError(
            "The context configuration parameter 'device_num' must be a positive integer, but got the value of device_num :"
            f" {number}."
        )
    if number > _MAX_DEVICES:
        raise ValueError(
            f"The context configuration parameter 'device_num' must be in [1, {_MAX_DEVICES}], but got the value of"
            f" device_num : {number}."
        )
    return {key: number}


def _global_rank(key: str, value: object) -> Changes:
    number = int(_typed(key, value, int))
    if not 0 <= number <= _MAX_RANK:
        raise ValueError(
            f"The context configuration parameter 'global_rank' must be in [0, {_MAX_RANK}], but got the value of"
            f" global_rank : {number}."
        )
    return {key: number}


def _parallel_mode(key: str, value: object) -> Changes:
    if _typed(key, value, str) not in PARALLEL_MODES:
        raise ValueError(
            "The context configuration parameter 'parallel_mode' only support 'stand_alone', 'data_parallel',"
            " 'hybrid_parallel', 'semi_auto_parallel' and 'auto_parallel', but got the value :"
            f" {value}."
        )
    return {key: value}


def _search(key: str, value: object) -> Changes:
    if _typed(key, value, str) not in _SEARCHES:
        # MindSpore names the other one of the two keys.
        other = "search_mode" if key == "auto_parallel_search_mode" else "auto_parallel_search_mode"
        raise ValueError(
            f"The context configuration parameter '{other}' only support 'recursive_programming', 'dynamic_programming'"
            f" and 'sharding_propagation', but got the value: {value}."
        )
    return {"search_mode": value, "auto_parallel_search_mode": value}


def _count(key: str, value: object) -> Changes:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{_CALL} the argument '{key}' must be int, but got the type : {type(value)}."
        )
    if value < 1:
        what = "stages" if key == "pipeline_stages" else "segments"
        raise ValueError(
            f"{_CALL} the argument '{key}' should be greater or equal 1, but got the value of {what} : {value}."
        )
    return {key: value}


def _auto_pipeline(key: str, value: object) -> Changes:
    if not isinstance(value, bool):
        raise TypeError(
            f"{_CALL} the argument 'auto_pipeline' must be bool, but got the type : {type(value)}."
        )
    return {key: value}


def _full_batch(key: str, value: object) -> Changes:
    chosen = "full_batch" if _typed(key, value, bool) else "data_parallel"
    return {"dataset_strategy": chosen, "full_batch_is_set": True}


def _dataset_strategy(key: str, value: object) -> Changes:
    if isinstance(value, str):
        if value not in ("full_batch", "data_parallel"):
            raise ValueError(
                f"{_CALL} the argument 'dataset_strategy' must be 'full_batch' or 'data_parallel', but got the value :"
                f" {value}."
            )
        return {key: value}
    if not isinstance(value, tuple):
        raise TypeError(
            f"{_CALL} the argument 'dataset_strategy' must be str or tuple type, but got the type : {type(value)}."
        )
    element = f"{_CALL} the element of argument 'dataset_strategy' must be"
    for one in value:
        if not isinstance(one, tuple):
            raise TypeError(f"{element} tuple, but got the type : {type(one)} .")
        for pieces in one:
            if not isinstance(pieces, int):
                raise TypeError(f"{element} int type, but got the type : {type(pieces)} .")
    return {key: [[int(pieces) for pieces in one] for one in value]}


def _weight_shard_size(key: str, value: object) -> Changes:
    number = int(_typed(key, value, int))
    return {key: number if number > 1 else -1}


def _checked_int(key: str, value: object, low: int, sign: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"For '{key}', the input value must be int, but got '{type(value).__name__}'"
        )
    if value < low:
        raise ValueError(
            f"For '{key}', the input value must be int and must {sign}, but got '{value}' with type 'int'."
        )
    return value


def _grad_accumulation_step(key: str, value: object) -> Changes:
    return {key: _checked_int(key, _typed(key, value, int), 1, "> 0")}


def _fusion_indices(key: str, value: object) -> Changes:
    return {key: _indices(_typed(key, value, list))}


def _indices(indices: Sequence[object]) -> list[int]:
    function = "For 'set_auto_parallel_context().set_all_reduce_fusion_split_indices',"
    if not indices:
        raise ValueError(f"{function} the argument 'indices' can not be empty")
    numbers: list[int] = []
    for index in indices:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(
                f"{function} the argument 'index' must be int, but got the type : {type(index)} ."
            )
        numbers.append(index)
    if len(set(numbers)) < len(numbers):
        raise ValueError("The indices has duplicate elements")
    if sorted(numbers) != numbers:
        raise ValueError(
            f"{function} the elements in argument 'indices' must be sorted in ascending order"
        )
    return numbers


def _comm_fusion(key: str, value: object) -> Changes:
    fusions: dict[str, object] = {"openstate": True}
    changes: Changes = {key: fusions}
    for kind, config in _typed(key, value, dict).items():
        if kind == "openstate":
            if not isinstance(config, bool):
                raise TypeError(
                    f"For 'comm_fusion', the 'openstate' must be bool, but got the type : {type(config)}."
                )
            fusions[kind] = config
        elif kind in ("allreduce", "allgather", "reducescatter"):
            fusions[kind] = _fusion(kind, config)
            if fusions[kind] == config and config["mode"] == "index":
                changes["all_reduce_fusion_config"] = list(config["config"])
        else:
            raise KeyError(
                f"comm fusion type must be openstate,allreduce, allgather or reducescatter, but got {kind}"
            )
    return changes


def _fusion(kind: str, config: object) -> dict[str, object]:
    if not isinstance(config, dict):
        what = "the 'allreduce'" if kind == "allreduce" else kind
        raise TypeError(
            f"For 'comm_fusion', {what} config must be dict, but got the type : {type(config)}."
        )
    for part in ("mode", "config"):
        if part not in config:
            raise KeyError(f"For 'comm_fusion', the key '{part}' should be contained.")
    modes, names = ["auto", "size"], "auto or size"
    if kind == "allreduce":
        modes, names = ["auto", "index", "size"], "auto, index or size"
    mode, setting = config["mode"], config["config"]
    if mode not in modes:
        raise KeyError(f"fusion method mode must be {names}, but got {mode}")
    if mode == "size" and _typed("config", setting, int) <= 0:
        raise ValueError(f"fusion threshold must be larger than 0, but got {setting}")
    if mode == "index":
        _indices(_typed("config", setting, list))
    return dict(config)


def _strategy_config(key: str, value: object) -> Changes:
    config = _typed(key, value, dict)
    _refuse_unknown(config, ("load_file", "save_file", "only_trainable_params"))
    function = "For 'set_auto_parallel_context().set_strategy_ckpt_config',"
    changes: Changes = {}
    for part, setting in config.items():
        kind: type = bool if part == "only_trainable_params" else str
        if not isinstance(setting, kind):
            raise TypeError(
                f"{function} the argument '{part}' must be {kind.__name__}, but got the type : {type(setting)} ."
            )
        changes[part if kind is bool else f"strategy_ckpt_{part}"] = setting
    return changes


def _pipeline_config(key: str, value: object) -> Changes:
    if not isinstance(value, dict):
        raise TypeError(
            f"For 'set_pipeline_config', the argument 'pipeine_config' must be dict, but got the type : {type(value)}."
        )
    _refuse_unknown(value, ("pipeline_interleave", "pipeline_scheduler"))
    interleave, scheduler = value["pipeline_interleave"], value["pipeline_scheduler"]
    if not isinstance(interleave, bool):
        raise TypeError(
            "For 'pipeline_interleave', the 'pipeline_interleave' must be a bool, but got"
            f" {type(interleave).__name__}."
        )
    if scheduler not in _SCHEDULERS:
        raise ValueError(
            f"The 'parameter' must be str and must be in '{list(_SCHEDULERS)}', but got '{scheduler}'."
        )
    if not interleave and scheduler != "1f1b":
        raise TypeError(f"When pipeline_interleave is False, {scheduler!r} is not supported")
    return {"pipeline_interleave": interleave, "pipeline_scheduler": scheduler}


def _optimizer_config(key: str, value: object) -> Changes:
    config = _typed(key, value, dict)
    names = (
        "gradient_accumulation_shard",
        "parallel_optimizer_threshold",
        "optimizer_weight_shard_size",
        "optimizer_level",
    )
    _refuse_unknown(config, names)
    shard, threshold, size, level = (config.get(name) for name in names)
    if names[0] in config and not isinstance(shard, bool):
        raise TypeError(
            f"For '{names[0]}', the '{names[0]}' must be a bool, but got {type(shard).__name__}."
        )
    if names[1] in config:
        _checked_int(names[1], threshold, 0, ">= 0")
    changes: Changes = {key: dict(config)}
    if names[2] in config and size != -1:
        changes |= _weight_shard_size(names[2], _checked_int(names[2], size, 1, "> 0"))
    if names[3] in config:
        if level not in ("level1", "level2", "level3"):
            raise ValueError(
                f"Optimizer level should in ['level1', 'level2', 'level3'], but got {level}"
            )
        if shard and level != "level2":
            raise ValueError(
                f"The optimizer_level is set as {level}, thus cannot set grad_accumulation_shard as True."
            )
    return changes


def _communication(key: str, value: object) -> Changes:
    function = "For 'set_auto_parallel_context().set_communi_parallel_mode',"
    if not isinstance(value, str):
        raise TypeError(
            f"{function} the argument 'communi_parallel_mode' must be str, but got the type : {type(value)}."
        )
    if value not in _COMMUNICATIONS:
        raise ValueError(
            f"{function} the argument 'communi_parallel_mode' only support 'ALL_GROUP_PARALLEL',"
            f" 'SAME_SEVER_GROUP_PARALLEL' and 'NO_GROUP_PARALLEL', but got the value : {value}."
        )
    return {key: value}


def _refuse_unknown(config: Mapping[object, object], known: Sequence[str]) -> None:
    for name in config:
        if name not in known:
            raise ValueError(f"Unknown config: {[name]}")


KEY_CHECKS: Mapping[str, Callable[[str, object], Changes]] = {
    "all_reduce_fusion_config": _fusion_indices,
    "auto_parallel_new_interface": _bool,
    "auto_parallel_search_mode": _search,
    "auto_pipeline": _auto_pipeline,
    "comm_fusion": _comm_fusion,
    "communi_parallel_mode": _communication,
    "dataset_strategy": _dataset_strategy,
    "device_num": _device_num,
    "dump_device_local_norm": _truth,
    "dump_local_norm": _truth,
    "dump_local_norm_path": _text,
    "enable_alltoall": _bool,
    "enable_parallel_optimizer": _bool,
    "force_fp32_communication": _bool,
    "full_batch": _full_batch,
    "global_rank": _global_rank,
    "grad_accumulation_step": _grad_accumulation_step,
    "gradient_fp32_sync": _bool,
    "gradients_mean": _optional_bool,
    "group_ckpt_save_file": _text,
    "init_param_in_compile": _bool,
    "loss_repeated_mean": _bool,
    "optimizer_weight_shard_aggregated_save": _bool,
    "optimizer_weight_shard_size": _weight_shard_size,
    "parallel_mode": _parallel_mode,
    "parallel_optimizer_config": _optimizer_config,
    "parameter_broadcast": _bool,
    "pipeline_config": _pipeline_config,
    "pipeline_result_broadcast": _bool,
    "pipeline_segments": _count,
    "pipeline_stages": _count,
    "search_mode": _search,
    "sharding_propagation": _bool,
    "strategy_ckpt_config": _strategy_config,
    "strategy_ckpt_load_file": _text,
    "strategy_ckpt_save_file": _text,
}
