# SPDX-License-Identifier: Apache-2.0
"""Checks of the keys of `mindspore.set_offload_context`, MegEngine's and Ascend's memory options.

Source: `mindspore/context.py` and `mindspore/parallel/_offload_context.py` 2.7.0 (the messages,
recorded); `megengine/jit/dtr_config.py`, `megengine/dtr/dtr.py`;
`npu_device/configs/memory_config.py` (the ranges).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Any

_GIB = 1 << 30
_SIZE = r"[1-9][0-9]*(\.)?[0-9]*GB|0\.[0-9]*GB"
_DTR_SIZE = r"(\d+(?:\.\d+)?)\s*([kmg]?b)"
_MAX_SIZE_CHARS = 64
_UNITS = ("b", "kb", "mb", "gb")


def checked_offload_config(offload_config: object) -> dict[str, Any]:
    """Return a checked `offload_config`, sizes in bytes; raise MindSpore's errors."""
    if offload_config is None:
        raise TypeError("'NoneType' object is not iterable")
    if not isinstance(offload_config, Mapping):
        raise TypeError(
            f"The parameter 'offload_config' must be <class 'dict'>, but got {type(offload_config)}"
        )
    checked: dict[str, Any] = {}
    for key, value in offload_config.items():
        name = "aio_queue_depth" if key == "aio_queue_size" else key
        check = _CHECKS.get(name)
        if check is None:
            raise ValueError(f"Unknown config: [{key!r}]")
        if name in checked:
            raise ValueError("'aio_queue_size' and 'aio_queue_depth' are one key; give it once.")
        checked[name] = check(name, value)
    return checked


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(
            f"For 'set_{name}', the argument '{name}' must be str, but got the type : {type(value)}."
        )
    return value


def _checked_place(name: str, value: object) -> str:
    text = _checked_text(name, value).lower()
    if text not in ("cpu", "disk"):
        raise ValueError(
            f"For 'set_{name}', the '{name}' must be str and must be in '['cpu', 'disk']',"
            f" but got '{value}'."
        )
    return text


def _checked_size(name: str, value: object) -> int:
    text = _checked_text(name, value)
    if len(text) > _MAX_SIZE_CHARS or re.fullmatch(_SIZE, text, re.ASCII) is None:
        raise ValueError(
            f"The '{text}' is illegal, it must be match regular'{_SIZE}' by flags're.ASCII.'"
        )
    whole, _, fraction = text[:-2].partition(".")
    size = int(whole) * _GIB + int((fraction + "0" * 18)[:18]) * _GIB // 10**18
    if size == 0:
        raise ValueError(f"For 'set_{name}', '{text}' is less than one byte.")
    return size


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(
            f"For 'set_{name}', the '{name}' must be a bool, but got {type(value).__name__}."
        )
    return value


def _checked_ratio(name: str, value: object) -> float:
    kind = type(value).__name__
    if not isinstance(value, float):
        raise TypeError(f"The '{name}' must be 'float',  but got '{kind}'.")
    if not 0 < value <= 1:
        raise ValueError(
            f"The '{name}' must be in range of (0, 1], but got {value} with type '{kind}'."
        )
    return value


def _checked_depth(name: str, value: object) -> int:
    kind = type(value).__name__
    if not isinstance(value, int):
        raise TypeError(f"For 'set_{name}', the '{name}' must be int, but got '{kind}'")
    if isinstance(value, bool) or value <= 0:
        error = TypeError if isinstance(value, bool) else ValueError
        raise error(
            f"For 'set_{name}', the '{name}' must be int and must > 0,"
            f" but got '{value}' with type '{kind}'."
        )
    return value


_CHECKS = {
    "offload_path": _checked_text,
    "offload_cpu_size": _checked_size,
    "offload_disk_size": _checked_size,
    "hbm_ratio": _checked_ratio,
    "cpu_ratio": _checked_ratio,
    "enable_pinned_mem": _checked_bool,
    "enable_aio": _checked_bool,
    "aio_block_size": _checked_size,
    "aio_queue_depth": _checked_depth,
    "offload_param": _checked_place,
    "offload_checkpoint": _checked_place,
    "auto_offload": _checked_bool,
    "host_mem_block_size": _checked_size,
}


def checked_dtr(
    eviction_threshold: object,
    evictee_minimum_size: object,
    recomp_memory_factor: object,
    recomp_time_factor: object,
    enable_sqrt_sampling: object,
) -> dict[str, Any]:
    """Return the options of `MemoryConfig` for the arguments of a `DTRConfig`.

    The first argument may be a `DTRConfig` that has the values as attributes. Raises TypeError, or
    ValueError with the text of MegEngine's assertion.
    """
    if hasattr(eviction_threshold, "eviction_threshold"):
        source: Any = eviction_threshold
        return checked_dtr(
            source.eviction_threshold,
            getattr(source, "evictee_minimum_size", 1 << 20),
            getattr(source, "recomp_memory_factor", 1),
            getattr(source, "recomp_time_factor", 1),
            getattr(source, "enable_sqrt_sampling", False),
        )
    threshold = _dtr_size("eviction_threshold", eviction_threshold)
    if threshold <= 0:
        raise ValueError("eviction_threshold must be greater to zero")
    minimum = _dtr_size("evictee_minimum_size", evictee_minimum_size)
    if minimum < 0:
        raise ValueError("evictee_minimum_size must be greater or equal to zero")
    return {
        "snapshot_budget_bytes": threshold,
        "smallest_evictee_bytes": minimum,
        "restore_memory_exponent": _factor("recomp_memory_factor", recomp_memory_factor),
        "restore_time_exponent": _factor("recomp_time_factor", recomp_time_factor),
        "is_sampling": bool(enable_sqrt_sampling),
    }


def _dtr_size(name: str, value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(_DTR_SIZE, value.strip(), re.ASCII | re.IGNORECASE)
        if match is None or len(value) > _MAX_SIZE_CHARS:
            raise ValueError(
                "Formatting of `value` only supports bytes(B), kilobyte(KB), megabyte(MB) and"
                " gigabyte(GB) units"
            )
        return int(float(match[1]) * 1024 ** _UNITS.index(match[2].lower()))
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or a str such as '5GB', but got {type(value)}")
    return value


def _factor(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, but got {type(value)}")
    if not 0 <= value < inf:
        raise ValueError(f"{name} must be greater or equal to zero")
    return float(value)


def check_ascend(
    atomic_clean_policy: object,
    static_memory_policy: object,
    memory_optimization_policy: object,
    variable_use_1g_huge_page: object,
) -> None:
    """Raise ValueError unless Ascend's `MemoryConfig` accepts these arguments."""
    _check_option("atomic_clean_policy", atomic_clean_policy, (0, 1))
    _check_option("static_memory_policy", static_memory_policy, (0, 1, 2, 3, 4))
    _check_option("memory_optimization_policy", memory_optimization_policy, (None,))
    _check_option("variable_use_1g_huge_page", variable_use_1g_huge_page, (0, 1, 2))


def _check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # True equals 1 but is not accepted.
    if value not in allowed or type(value) not in {type(option) for option in allowed}:
        raise ValueError(f"{name} must be one of {list(allowed)}, but got {value!r}")
