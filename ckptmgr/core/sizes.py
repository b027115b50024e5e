# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as texts for people, and sizes that people write."""

from __future__ import annotations

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_WRITTEN = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?:([kmgtp])(i?b)?|b)?", re.ASCII | re.IGNORECASE
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def size_text(size_bytes: float) -> str:
    """Return e.g. `512 B`, `1.5 KiB`, `301 MiB`: powers of 1024, as `df -h` and `ls -lh`."""
    value, unit = float(size_bytes), 0
    while value >= 1023.5 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1
    return f"{value:.{digits}f} {_BINARY[unit]}"


def rate_text(bytes_per_s: float) -> str:
    """Return e.g. `512 B/s`, `1.5 GB/s`: powers of 1000, as disks and networks are sold."""
    value, unit = float(bytes_per_s), 0
    while value >= 999.5 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{1 if unit else 0}f} {_DECIMAL[unit]}/s"


def bytes_in(text: str) -> int:
    """Return the bytes that a text such as `500MB` means: `GB` is 10**9, `GiB` and `g` are 2**30.

    Raises:
        ValueError: It is not a size.

    >>> [bytes_in(text) for text in ("12", "1.5k", "2GB", "1 GiB")]
    [12, 1536, 2000000000, 1073741824]
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a size such as 500MB, 1GiB or 2g")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").lower()])
