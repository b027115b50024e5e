# SPDX-License-Identifier: Apache-2.0
"""Parallel settings: MindSpore's keys, defaults and messages; a bad call changes nothing."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.parallel import AutoParallelContext, ParallelMode
from ckptmgr.parallel.mindspore.context_keys import KEY_CHECKS

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "auto_parallel_context.json").read_text()
)
# MindSpore documents 4096 as the bound, but 2.10 does not check it.
DIFFERS = {"{'device_num': 4097}"}
SET = [case for case in RECORDED["cases"] if "set" in case and case["set"] not in DIFFERS]
GET = [case for case in RECORDED["cases"] if "get" in case]


def test_modes_are_mindspores() -> None:
    names = {name: getattr(ParallelMode, name) for name in RECORDED["ParallelMode"]}
    assert names == RECORDED["ParallelMode"]


def test_keys_are_mindspores() -> None:
    assert sorted(KEY_CHECKS) == sorted(RECORDED["settable"])


def test_defaults_are_mindspores() -> None:
    context = AutoParallelContext()
    assert {key: context.get(key) for key in RECORDED["gettable"]} == RECORDED["defaults"]


@pytest.mark.parametrize(
    "case", [case for case in SET if case["result"][0] == "ok"], ids=lambda case: case["set"]
)
def test_good_setting_reads_back_as_in_mindspore(case: dict[str, Any]) -> None:
    context = AutoParallelContext(**ast.literal_eval(case["set"]))
    for key, value in case["result"][1].items():
        if key in RECORDED["gettable"]:
            assert context.get(key) == value
        else:
            with pytest.raises(ValueError, match=f"Get context keyword {key}"):
                context.get(key)


@pytest.mark.parametrize(
    "case", [case for case in SET if case["result"][0] != "ok"], ids=lambda case: case["set"]
)
def test_bad_setting_gives_mindspores_error_and_changes_nothing(case: dict[str, Any]) -> None:
    kind, message = case["result"]
    context = AutoParallelContext(device_num=16)
    before = {key: context.get(key) for key in RECORDED["gettable"]}
    with pytest.raises((TypeError, ValueError, KeyError)) as caught:
        context.set(**ast.literal_eval(case["set"]))
    assert type(caught.value).__name__ == kind
    if "incompatible function arguments" not in message:  # the binding's own text
        assert str(caught.value) == message
    assert {key: context.get(key) for key in RECORDED["gettable"]} == before


@pytest.mark.parametrize("case", GET, ids=lambda case: case["get"])
def test_unknown_key_is_refused_with_mindspores_message(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Get context keyword") as caught:
        AutoParallelContext().get(ast.literal_eval(case["get"]))
    assert f"ValueError: {caught.value}" == case["result"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device_num": 4097}, ValueError, r"must be in \[1, 4096\].*4097"),
        ({"grad_accumulation_step": 0}, ValueError, "must > 0, but got '0'"),
        ({"communi_parallel_mode": 5}, TypeError, "must be str"),
        ({"communi_parallel_mode": "x"}, ValueError, "only support 'ALL_GROUP_PARALLEL'"),
        ({"dataset_strategy": ((1.5,),)}, TypeError, "must be int type"),
        ({"all_reduce_fusion_config": []}, ValueError, "can not be empty"),
        ({"comm_fusion": {"openstate": 1}}, TypeError, "'openstate' must be bool"),
        ({"comm_fusion": {"x": 1}}, KeyError, "comm fusion type"),
        ({"comm_fusion": {"allgather": 1}}, TypeError, "allgather config must be dict"),
        ({"comm_fusion": {"allreduce": 1}}, TypeError, "the 'allreduce' config must be dict"),
        (
            {"comm_fusion": {"allgather": {"mode": "index", "config": [1]}}},
            KeyError,
            "auto or size, but got index",
        ),
        ({"pipeline_config": 5}, TypeError, "must be dict"),
        (
            {"pipeline_config": {"pipeline_interleave": 1, "pipeline_scheduler": "1f1b"}},
            TypeError,
            "must be a bool",
        ),
        (
            {"pipeline_config": {"pipeline_interleave": False, "pipeline_scheduler": "gpipe"}},
            TypeError,
            "is not supported",
        ),
        (
            {
                "parallel_optimizer_config": {
                    "gradient_accumulation_shard": True,
                    "optimizer_level": "level1",
                }
            },
            ValueError,
            "cannot set grad_accumulation_shard",
        ),
        ({"pipeline_segments": 0}, ValueError, "value of segments : 0"),
        ({"device_num": None}, TypeError, "'device_num' must be"),
    ],
)
def test_other_bad_settings_are_refused(
    settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AutoParallelContext(**settings)


def test_settings_that_mean_the_same_move_together() -> None:
    context = AutoParallelContext(search_mode="sharding_propagation", full_batch=True)
    assert context.get("auto_parallel_search_mode") == "sharding_propagation"
    assert (context.get("dataset_strategy"), context.get("full_batch_is_set")) == (
        "full_batch",
        True,
    )
    context.set(parallel_optimizer_config={"optimizer_weight_shard_size": 4}, gradients_mean=None)
    assert (context.get("optimizer_weight_shard_size"), context.get("gradients_mean")) == (4, False)
    context.set(comm_fusion={"allreduce": {"mode": "index", "config": [3, 9]}, "openstate": False})
    assert context.get("all_reduce_fusion_config") == [3, 9]
    context.set(communi_parallel_mode="no_group_parallel", auto_pipeline=True)
    context.reset()
    assert context.get("communi_parallel_mode") == "all_group_parallel"


def test_gradient_accumulation_takes_any_positive_number_as_mindspore_documents() -> None:
    assert AutoParallelContext(grad_accumulation_step=4).get("grad_accumulation_step") == 4


def test_value_that_was_read_can_be_changed_without_harm() -> None:
    context = AutoParallelContext()
    fusions = context.get("comm_fusion")
    assert isinstance(fusions, dict)
    fusions["allreduce"]["mode"] = "size"
    assert context.get("comm_fusion") == RECORDED["defaults"]["comm_fusion"]


def test_saving_a_strategy_makes_no_directory(tmp_path: Path) -> None:
    AutoParallelContext(strategy_ckpt_save_file=str(tmp_path / "sub" / "s.ckpt"))
    assert not (tmp_path / "sub").exists()
