# SPDX-License-Identifier: Apache-2.0
"""Sizes in options, such as `500MB` or `1GiB`."""

from __future__ import annotations

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.core.sizes import bytes_in


def parse_size(text: str, *, option: str) -> int:
    """Return a size in bytes, as `bytes_in`.

    Raises:
        UsageProblem: It is not a size; names the option.
    """
    try:
        return bytes_in(text)
    except ValueError:
        raise UsageProblem(
            f"{option}: {text[:40]!r} is not a size", hint="write 500MB, 1GiB or 2g"
        ) from None
