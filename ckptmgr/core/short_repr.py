# SPDX-License-Identifier: Apache-2.0
"""Short texts of values that hold a whole state: a line of a log, not a screen of names."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

_MOST_NAMES = 4
_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = _MOST_NAMES
_SHORT.maxstring = _SHORT.maxother = 160


def short_repr(value: object, **facts: object) -> str:
    """Return the type of a value with some facts, each shortened."""
    shown = (
        f"{name}={_SHORT.repr(dict(fact) if isinstance(fact, Mapping) else fact)}"
        for name, fact in facts.items()
    )
    return f"{type(value).__name__}({', '.join(shown)})"
