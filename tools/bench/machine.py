# SPDX-License-Identifier: Apache-2.0
"""The machine and the versions, in one line."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_PACKAGES = ("cryptography", "blake3", "isal", "numpy")


def machine(directory: Path) -> str:
    """Return processor, cores, memory, kernel, file system and the versions that ours uses."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    parts = (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, Linux {platform.release()}",
        f"{_file_system(directory)}, Python {platform.python_version()}",
        *_versions(),
    )
    return ", ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        if directory.resolve().is_relative_to(mount) and len(mount) > len(best[0]):
            best = (mount, kind)
    return best[1]


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
