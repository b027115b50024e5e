# SPDX-License-Identifier: Apache-2.0
"""Sizes in options, such as `500MB` or `1GiB`."""

from __future__ import annotations

import re

from ckptmgr.cli.exits import UsageProblem

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:([kmgtp])(i?b)?|b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str, *, option: str) -> int:
    """Return a size in bytes; `GB` is 10**9 bytes, and `GiB` or `g` is 2**30.

    Raises:
        UsageProblem: It is not a size; names the option.

    >>> [parse_size(text, option="--size") for text in ("12", "1.5k", "2GB", "1 GiB")]
    [12, 1536, 2000000000, 1073741824]
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"{option}: {text[:40]!r} is not a size", hint="write 500MB, 1GiB or 2g")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * base ** _POWERS[(match[2] or "").lower()])
