# SPDX-License-Identifier: Apache-2.0
"""Error policy of saves, and back-pressure of background saves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

BackPressure = Literal["wait", "skip", "coalesce"]
OnError = str | Callable[[BaseException], None]


class ErrorPolicy(NamedTuple):
    """The action after `attempts` failures of a save."""

    action: Literal["raise", "warn", "call"] = "raise"
    attempts: int = 1
    call: Callable[[BaseException], None] | None = None


def parse_on_error(on_error: OnError) -> ErrorPolicy:
    """Return the policy for `raise`, `warn`, `retry(n)` or a function; raise ValueError for others.

    >>> parse_on_error("retry(3)").attempts
    4
    """
    if callable(on_error):
        return ErrorPolicy(action="call", call=on_error)
    if on_error == "raise":
        return ErrorPolicy()
    if on_error == "warn":
        return ErrorPolicy(action="warn")
    match = re.fullmatch(r"retry\((\d{1,3})\)", on_error)
    if match is None:
        raise ValueError(
            f"on_error must be 'raise', 'warn', 'retry(n)' or a function, but got {on_error!r}"
        )
    return ErrorPolicy(attempts=1 + int(match[1]))


def check_back_pressure(value: BackPressure) -> BackPressure:
    """Return `wait`, `skip` or `coalesce`; raise ValueError for other values."""
    if value not in ("wait", "skip", "coalesce"):
        raise ValueError(f"back_pressure must be 'wait', 'skip' or 'coalesce', but got {value!r}")
    return value
