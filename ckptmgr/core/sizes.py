# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as texts for people."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(size_bytes: float) -> str:
    """Return e.g. `512 B`, `1.5 KiB`, `301 MiB`: powers of 1024, as `df -h` and `ls -lh`."""
    value, unit = float(size_bytes), 0
    while value >= 1023.95 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_BINARY[unit]}"


def rate_text(bytes_per_s: float) -> str:
    """Return e.g. `512 B/s`, `1.5 GB/s`: powers of 1000, as disks and networks are sold."""
    value, unit = float(bytes_per_s), 0
    while value >= 999.5 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{1 if unit else 0}f} {_DECIMAL[unit]}/s"
