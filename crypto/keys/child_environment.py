# SPDX-License-Identifier: Apache-2.0
"""The environment of every program that this package starts, without variables that hold keys.

A program that is started to give one key must not get the others. Left out are all variables whose
names begin with `CKPTMGR_KEY`, and those that were named as the source of a secret (`env:RUN_KEY`).
Everything else stays: a program may need it to reach its own vault.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_OURS = "CKPTMGR_KEY"
_FORMS = ("env:", "passphrase:env:")

_named: set[str] = set()


def hide_variable(name: str) -> None:
    """Withhold a variable from all programs that are started from now on."""
    _named.add(name)


def hide_source_variables(sources: Iterable[str]) -> None:
    """Withhold the variables of these key sources, before a `cmd:` source among them runs."""
    for source in sources:
        for form in _FORMS:
            if source.startswith(form):
                hide_variable(source.removeprefix(form))


def child_environment() -> dict[str, str]:
    """Return the environment for a program to be started."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OURS) and name not in _named
    }
