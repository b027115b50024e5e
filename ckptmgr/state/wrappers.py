# SPDX-License-Identifier: Apache-2.0
"""Names in torch modules without those of wrappers that change nothing: torch.compile and DDP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

_COMPILED = "_orig_mod."
_DISTRIBUTED = "module."


def inner_names(names: Iterable[str]) -> list[str]:
    """Return the names of the module in the wrappers, in the same order."""
    found = [name.replace(_COMPILED, "") for name in names]
    while found and all(name.startswith(_DISTRIBUTED) for name in found):
        found = [name.removeprefix(_DISTRIBUTED) for name in found]
    return found


def renamed(stored: Any, current: Mapping[str, Any]) -> Any:
    """Return a stored `state_dict()` under the names of another wrapping of the same module.

    It stays as it is where the names are equal, or those of another module.
    """
    if not isinstance(stored, Mapping) or stored.keys() == current.keys():
        return stored
    if not all(isinstance(name, str) for name in stored):
        return stored
    names = dict(zip(inner_names(current), current, strict=True))
    inner = inner_names(stored)
    if sorted(inner) != sorted(names):
        return stored
    made = OrderedDict(zip([names[one] for one in inner], stored.values(), strict=True))
    metadata = getattr(current, "_metadata", None)
    if metadata is not None:  # of the versions of the modules, which are the same
        made._metadata = metadata  # type: ignore[attr-defined]
    return made
