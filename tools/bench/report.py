# SPDX-License-Identifier: Apache-2.0
"""The machine, the table and the JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tools.bench.measure import Figures
from tools.bench.memory import MIB, Peak

_PACKAGES = ("cryptography", "blake3", "isal", "numpy", "safetensors", "mindspore", "torch")


def machine(directory: Path) -> str:
    """Return one line: processor, cores, memory, kernel, file system, versions."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    parts = (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}",
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


def table(figures: Sequence[Figures], size_bytes: int) -> str:
    """Return medians by mode: seconds, GB/s, speed as a share of the bare disk's, and how often ours is faster."""
    columns = f"{'s':>9}{'GB/s':>7}{'of raw':>8}{'ours':>8}"
    lines = [f"{'':<36}{'save':^32}{'cold load':^32}", f"{'mode':<17}{'who':<19}{columns}{columns}"]
    raw = _find(figures, "limit")
    for one in figures:
        ours = _find(figures, one.contestant.mode, who="ckptmgr")
        cells = [
            _cells(_median(one, what), _median(raw, what), _median(ours, what), size_bytes)
            for what in ("save", "load")
        ]
        lines.append(f"{one.contestant.mode:<17}{one.contestant.name:<19}{''.join(cells)}")
    return "\n".join(lines)


def _median(figures: Figures | None, what: str) -> float:
    if figures is None:
        return 0.0
    return figures.median_save_s if what == "save" else figures.median_load_s


def _cells(seconds: float, raw_s: float, ours_s: float, size_bytes: int) -> str:
    of_raw = f"{raw_s / seconds:.2f}" if raw_s and raw_s != seconds else ""
    times = f"{seconds / ours_s:.1f}x" if ours_s and ours_s != seconds else ""
    return f"{seconds:>9.3f}{size_bytes / seconds / 1e9:>7.2f}{of_raw:>8}{times:>8}"


def _find(figures: Sequence[Figures], mode: str, *, who: str | None = None) -> Figures | None:
    for one in figures:
        if one.contestant.mode == mode and who in (None, one.contestant.name):
            return one
    return None


def memory_table(peaks: Sequence[Peak]) -> str:
    """Return the peaks in MiB beside their limits."""
    lines = [f"{'mode':<17}{'save MiB':>10}{'load MiB':>10}{'limit':>8}"]
    for peak in peaks:
        mib = [value / MIB for value in (peak.save_bytes, peak.load_bytes, peak.limit_bytes)]
        mark = "" if peak.is_within else "  over the limit"
        lines.append(f"{peak.mode:<17}{mib[0]:>10.1f}{mib[1]:>10.1f}{mib[2]:>8.0f}{mark}")
    return "\n".join(lines)


def as_json(
    where: str, size_bytes: int, figures: Sequence[Figures], peaks: Sequence[Peak]
) -> dict[str, object]:
    """Return everything that was measured."""
    return {
        "machine": where,
        "size_bytes": size_bytes,
        "figures": [
            {
                "mode": one.contestant.mode,
                "who": one.contestant.name,
                "save_s": one.save_s,
                "load_s": one.load_s,
                "median_save_s": one.median_save_s,
                "median_load_s": one.median_load_s,
            }
            for one in figures
        ],
        "memory": [
            {
                "mode": peak.mode,
                "save_bytes": peak.save_bytes,
                "load_bytes": peak.load_bytes,
                "limit_bytes": peak.limit_bytes,
            }
            for peak in peaks
        ],
    }
