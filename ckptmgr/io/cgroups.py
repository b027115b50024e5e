# SPDX-License-Identifier: Apache-2.0
"""Limits of the control group of this process: those of a container or a batch job.

`/proc/meminfo` and the number of processors are those of the machine. A group has the limits of all
groups above it, too. Both versions are read:

| | version 2 | version 1 |
|---|---|---|
| limit | `memory.max` | `memory.limit_in_bytes` |
| in use | `memory.current` | `memory.usage_in_bytes` |
| page cache in use | `active_file`, `inactive_file` of `memory.stat` | `total_active_file` and so on |
| processors | `cpu.max` | `cpu.cfs_quota_us`, `cpu.cfs_period_us` |

>>> quota_of("150000 100000"), quota_of("max 100000")
(1.5, None)
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 has no word for it, and says the largest number of pages


class GroupMemory(NamedTuple):
    """The memory of a group, in bytes."""

    limit: int
    used: int
    inactive_file: int = 0
    active_file: int = 0

    @property
    def available(self) -> int:
        """Bytes that a program can use without slowing down others: the kernel drops unused cache first."""
        return max(0, self.limit - self.used + self.inactive_file)

    @property
    def room(self) -> int:
        """Bytes that a program can use before it is killed: the kernel can drop all of the page cache."""
        return max(0, self.limit - self.used + self.inactive_file + self.active_file)


def memory_limit(*, root: Path = _ROOT, groups: Path = _GROUPS) -> GroupMemory | None:
    """Return the memory of the group that has the least available; None without a limit."""
    found = [
        memory
        for place in _places("memory", root, groups)
        if (memory := memory_of(_texts(place, *_MEMORY_FILES))) is not None
    ]
    return min(found, key=lambda one: one.available, default=None)


def cpu_limit(*, root: Path = _ROOT, groups: Path = _GROUPS) -> float | None:
    """Return how many processors the groups may use at a time; None without a limit."""
    quotas = [
        quota
        for place in _places("cpu", root, groups)
        if (quota := cpus_of(_texts(place, *_CPU_FILES))) is not None
    ]
    return min(quotas, default=None)


_own_cpu_limit = cache(cpu_limit)


def usable_cpus() -> int:
    """Return how many processors this process may use at a time."""
    quota = _own_cpu_limit()
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def memory_of(texts: Mapping[str, str]) -> GroupMemory | None:
    """Return the memory that the files of a group state, by their names; None without a limit."""
    limit = _number(texts.get("memory.max", texts.get("memory.limit_in_bytes")))
    used = _number(texts.get("memory.current", texts.get("memory.usage_in_bytes")))
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    lines = [line.partition(" ") for line in texts.get("memory.stat", "").splitlines()]
    figures = {name: _number(value) or 0 for name, _, value in lines}

    def figure(name: str) -> int:
        return figures.get(f"total_{name}", figures.get(name, 0))

    return GroupMemory(limit, used, figure("inactive_file"), figure("active_file"))


def cpus_of(texts: Mapping[str, str]) -> float | None:
    """Return the processors that the files of a group state, by their names; None without a limit."""
    if "cpu.max" in texts:
        return quota_of(texts["cpu.max"])
    return quota_of(f"{texts.get('cpu.cfs_quota_us', '')} {texts.get('cpu.cfs_period_us', '')}")


def quota_of(text: str) -> float | None:
    """Return the processors of a quota and its period, in microseconds; None without a quota."""
    quota, _, period = text.partition(" ")
    allowed, per = _number(quota), _number(period)
    return allowed / per if allowed and per else None


_MEMORY_FILES = (
    *("memory.max", "memory.current", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "memory.stat",
)
_CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")


def _number(text: str | None) -> int | None:
    """Return a number without a sign; None for `max`, -1, and whatever else there is."""
    stripped = "" if text is None else text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() else None


def _texts(directory: Path, *names: str) -> dict[str, str]:
    texts = {}
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            texts[name] = (directory / name).read_text()
    return texts


def _places(controller: str, root: Path, groups: Path) -> list[Path]:
    """Return the directories of a group with a controller, and of all groups above it."""
    try:
        lines = groups.read_text().splitlines()
    except (OSError, ValueError):
        return []
    places: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        # Version 2 has no names, and may be mounted beside those of version 1.
        mounts = [root / one for one in ((controller, names) if names else (".", "unified"))]
        # In a container its own group may be mounted there, while the path is that of the machine.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in [one for one in mounts if one.is_dir()]:
            places += [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return places
