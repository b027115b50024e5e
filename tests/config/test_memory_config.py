# SPDX-License-Identifier: Apache-2.0
"""`MemoryConfig`: its own values, and the keys of MindSpore, MegEngine and Ascend."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr import MemoryConfig
from ckptmgr.memory_config import MIB

GIB = 1 << 30
GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "offload_context_ms2.7.0.json").read_text()
)
NATIVE = {
    "offload_param": "staging_place",
    "offload_checkpoint": "snapshot_place",
    "offload_path": "spill_directory",
    "offload_cpu_size": "host_budget_bytes",
    "offload_disk_size": "disk_budget_bytes",
    "aio_block_size": "write_block_bytes",
    "aio_queue_depth": "writes_in_flight",
    "enable_pinned_mem": "is_page_locked",
    "auto_offload": "is_automatic",
    "hbm_ratio": "device_copy_share",
    "cpu_ratio": "host_share",
    "host_mem_block_size": "slab_bytes",
}
ARGUMENTS: dict[str, Any] = {"None": None, "5": 5, "[]": [], "'x'": "x"}


def native(key: str, answer: Any) -> Any:
    """A recorded answer of MindSpore under the native name."""
    if key in ("offload_param", "offload_checkpoint"):
        return {"cpu": "host", "disk": "disk"}[answer]
    if key == "offload_path":
        return Path(answer)
    if isinstance(answer, float):
        return pytest.approx(answer)  # MindSpore keeps float32
    return answer


def case_id(case: dict[str, Any]) -> str:
    return f"{case['key']}={case['value']}" if "key" in case else case["arg"]


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN["cases"] if case["result"][0] == "ok"], ids=case_id
)
def test_from_mindspore_accepted_value_has_the_recorded_meaning(case: dict[str, Any]) -> None:
    key, answer = case["key"], case["result"][1]
    config = MemoryConfig.from_mindspore({key: case["value"]})
    if key == "enable_aio":
        assert config.writes_in_flight == (8 if answer else 1)
    elif key == "offload_cpu_size":  # MindSpore takes 80 % of the given size
        assert answer == pytest.approx(0.8 * getattr(config, NATIVE[key]))
    else:
        assert getattr(config, NATIVE[key]) == native(key, answer)


@pytest.mark.parametrize(
    "case", [case for case in GOLDEN["cases"] if case["result"][0] != "ok"], ids=case_id
)
def test_from_mindspore_refused_value_gives_the_recorded_error(case: dict[str, Any]) -> None:
    kind, message = case["result"]
    offload_config: Any = {case["key"]: case["value"]} if "key" in case else ARGUMENTS[case["arg"]]
    with pytest.raises((TypeError, ValueError)) as caught:
        MemoryConfig.from_mindspore(offload_config)
    assert type(caught.value).__name__ == kind
    assert str(caught.value) == message


def test_from_mindspore_knows_every_recorded_key() -> None:
    assert set(GOLDEN["defaults"]) == {*NATIVE, "enable_aio"}


def test_from_mindspore_without_keys_takes_our_defaults_and_the_strict_places() -> None:
    config = MemoryConfig.from_mindspore({})
    assert config.is_automatic is GOLDEN["defaults"]["auto_offload"] is False
    assert config == MemoryConfig(is_automatic=False, spill_directory=Path("./offload/"))


def test_from_mindspore_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"^Unknown config: \['zzz'\]$"):
        MemoryConfig.from_mindspore({"offload_param": "cpu", "zzz": 1})


def test_from_mindspore_takes_both_spellings_of_the_queue() -> None:
    assert MemoryConfig.from_mindspore({"aio_queue_size": 3}).writes_in_flight == 3
    assert MemoryConfig.from_mindspore({"aio_queue_depth": 3}).writes_in_flight == 3


def test_from_mindspore_refuses_both_spellings_at_once() -> None:
    keys = ("aio_queue_size", "aio_queue_depth")
    for order in (keys, keys[::-1]):
        with pytest.raises(ValueError, match="give it once"):
            MemoryConfig.from_mindspore(dict.fromkeys(order, 3))


@pytest.mark.parametrize("text", ["0.0GB", "0.GB", "1" * 5000 + "GB"])
def test_from_mindspore_size_of_nothing_or_of_any_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"less than one byte|is illegal"):
        MemoryConfig.from_mindspore({"aio_block_size": text})


def test_from_mindspore_fractions_of_a_gigabyte_are_exact() -> None:
    assert (
        MemoryConfig.from_mindspore({"offload_cpu_size": "1.5GB"}).host_budget_bytes == 3 * GIB // 2
    )
    assert MemoryConfig.from_mindspore({"offload_cpu_size": "5.GB"}).host_budget_bytes == 5 * GIB


def test_from_mindspore_without_aio_writes_one_at_a_time() -> None:
    config = MemoryConfig.from_mindspore({"enable_aio": False, "aio_queue_depth": 16})
    assert config.writes_in_flight == 1


def test_from_dtr_takes_sizes_as_numbers_and_texts() -> None:
    config = MemoryConfig.from_dtr("5GB", "2.5 mb", 2, 3, enable_sqrt_sampling=True)
    assert config.snapshot_budget_bytes == 5 * GIB
    assert config.smallest_evictee_bytes == 5 * MIB // 2
    assert config.restore_memory_exponent == 2
    assert config.restore_time_exponent == 3
    assert config.is_sampling


def test_from_dtr_defaults_are_those_of_megengine() -> None:
    config = MemoryConfig.from_dtr(7)
    assert config == MemoryConfig(snapshot_budget_bytes=7, smallest_evictee_bytes=1 << 20)


def test_from_dtr_takes_an_object_with_the_attributes() -> None:
    theirs = SimpleNamespace(
        eviction_threshold=9, evictee_minimum_size=1, recomp_memory_factor=0, recomp_time_factor=2
    )
    assert MemoryConfig.from_dtr(theirs) == MemoryConfig.from_dtr(9, 1, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "eviction_threshold must be greater to zero"),
        ({"eviction_threshold": -1}, "eviction_threshold must be greater to zero"),
        (
            {"eviction_threshold": 1, "evictee_minimum_size": -1},
            "evictee_minimum_size must be greater or equal to zero",
        ),
        (
            {"eviction_threshold": 1, "recomp_memory_factor": -0.1},
            "recomp_memory_factor must be greater or equal to zero",
        ),
        (
            {"eviction_threshold": 1, "recomp_time_factor": float("nan")},
            "recomp_time_factor must be greater or equal to zero",
        ),
    ],
)
def test_from_dtr_out_of_range_gives_the_text_of_the_assertion(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        MemoryConfig.from_dtr(**arguments)


@pytest.mark.parametrize("text", ["5", "5 TB", "GB", "5GB5GB", "9" * 400 + "GB"])
def test_from_dtr_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Formatting of `value` only supports"):
        MemoryConfig.from_dtr(text)


@pytest.mark.parametrize(
    "arguments",
    [{"eviction_threshold": 1.5}, {"eviction_threshold": True}]
    + [{"eviction_threshold": 1, "recomp_time_factor": value} for value in ("2", True)],
)
def test_from_dtr_value_of_another_type_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a"):
        MemoryConfig.from_dtr(**arguments)


@pytest.mark.parametrize(
    ("policy", "allocation"),
    [(0, "exact"), (1, "arena"), (2, "arena"), (3, "slabs"), (4, "arena_and_slabs")],
)
def test_from_ascend_static_memory_policy_is_an_allocation(policy: int, allocation: str) -> None:
    assert MemoryConfig.from_ascend(static_memory_policy=policy).allocation == allocation


def test_from_ascend_atomic_clean_policy_is_when_to_wipe() -> None:
    assert MemoryConfig.from_ascend(0).wipe == "at_end"
    assert MemoryConfig.from_ascend(1).wipe == "each_buffer"


@pytest.mark.parametrize("policy", [0, 1, 2])
def test_from_ascend_huge_page_policy_is_kept(policy: int) -> None:
    assert MemoryConfig.from_ascend(variable_use_1g_huge_page=policy).huge_pages == policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("atomic_clean_policy", 2),
        ("atomic_clean_policy", True),
        ("static_memory_policy", 5),
        ("static_memory_policy", "2"),
        ("memory_optimization_policy", "MemoryPriority"),
        ("variable_use_1g_huge_page", -1),
        ("variable_use_1g_huge_page", 1.0),
    ],
)
def test_from_ascend_value_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be one of"):
        MemoryConfig.from_ascend(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_budget_bytes", 0),
        ("disk_budget_bytes", -1),
        ("snapshot_budget_bytes", 0),
        ("write_block_bytes", 0),
        ("writes_in_flight", 0),
        ("slab_bytes", 0),
        ("smallest_evictee_bytes", -1),
        ("restore_time_exponent", -1),
        ("restore_memory_exponent", float("inf")),
        ("host_share", 0),
        ("host_share", 1.5),
        ("device_copy_share", -0.1),
        ("staging_place", "cpu"),
        ("snapshot_place", "ssd"),
        ("wipe", True),
        ("allocation", "exactly"),
        ("huge_pages", 3),
    ],
)
def test_memory_config_value_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        MemoryConfig(**{name: value})


def test_memory_config_without_budget_has_no_usable_bytes() -> None:
    assert MemoryConfig().usable_host_bytes is None
    assert MemoryConfig(host_budget_bytes=1000, host_share=0.5).usable_host_bytes == 500
