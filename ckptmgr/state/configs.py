# SPDX-License-Identifier: Apache-2.0
"""omegaconf's configurations in a state: stored as plain dicts and lists, never resolved.

Nothing here imports omegaconf before the program does. An interpolation such as `${oc.env:KEY}`
calls a resolver when it is read, so a checkpoint never brings one into a configuration: one is
restored only where the target has the same text already.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

from ckptmgr.state.paths import Path

_INTERPOLATION = "${"
_FLAGS = ["readonly", "struct"]


def is_config(value: object) -> bool:
    """Return whether a value is a DictConfig or a ListConfig."""
    module = sys.modules.get("omegaconf")
    return module is not None and isinstance(value, module.DictConfig | module.ListConfig)


def config_content(config: Any) -> object:
    """Return the content as dicts, lists and plain values; interpolations stay text."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=False)


def problems_of(target: Any, stored: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each reason why a stored value cannot be put into a configuration, with its path."""
    found = [*_differences(config_content(target), stored, path)]
    if not found:
        try:
            fill_config(copy.deepcopy(target), stored)
        except Exception as error:  # such as a text where the configuration wants a number
            found.append((path, f"cannot take the stored values: {error}"))
    yield from found


def _differences(held: object, stored: object, path: Path) -> Iterator[tuple[Path, str]]:
    match held, stored:
        case dict(), dict():
            for key in held.keys() - stored.keys():
                yield path.key(key), "is not in the checkpoint"
            for key in stored.keys() - held.keys():
                yield path.key(key), "is only in the checkpoint"
            for key in held.keys() & stored.keys():
                yield from _differences(held[key], stored[key], path.key(key))
        case list(), list():
            for index, value in enumerate(stored):
                mine = held[index] if index < len(held) else None
                yield from _differences(mine, value, path.index(index))
        case None, dict():
            for key, value in stored.items():
                yield from _differences(None, value, path.key(key))
        case None, list():
            yield from _differences([], stored, path)
        case dict() | list(), _:
            kind = type(held).__name__
            yield path, f"is a {kind} of a configuration, stored is a {type(stored).__name__}"
        case _, str() if _INTERPOLATION in stored and stored != held:
            yield path, f"is an interpolation in the checkpoint, {stored!r}, and not here"


def interpolations_of(stored: object, held: object = None) -> list[str]:
    """Return the interpolations in stored values, with their paths, that `held` has not, too."""
    if is_config(held):
        held = config_content(held)
    return [f"{path} is {text!r}" for path, text in _interpolations(stored, held, Path())]


def _interpolations(stored: object, held: object, path: Path) -> Iterator[tuple[Path, str]]:
    match stored:
        case dict():
            mine = held if isinstance(held, dict) else {}
            for key, value in stored.items():
                yield from _interpolations(value, mine.get(key), path.key(key))
        case list() | tuple():
            own = held if isinstance(held, list | tuple) else ()
            for index, value in enumerate(stored):
                one = own[index] if index < len(own) else None
                yield from _interpolations(value, one, path.index(index))
        case str() if _INTERPOLATION in stored and stored != held:
            yield path, stored


def fill_config(target: Any, stored: Any) -> Any:
    """Give a configuration the stored values, also where it is read-only; return it."""
    from omegaconf import flag_override

    with flag_override(target, _FLAGS, [False, False]):
        _fill(target, config_content(target), stored)
    return target


def _fill(target: Any, held: Any, stored: Any) -> None:
    if isinstance(stored, list):
        while len(target) > len(stored):
            del target[len(target) - 1]
        for value in stored[len(held) :]:
            target.append(value)
        stored = dict(enumerate(stored[: len(held)]))
    for key, value in stored.items():
        mine = held[key]
        if isinstance(mine, dict | list) and type(mine) is type(value):
            _fill(target[key], mine, value)
        elif type(mine) is not type(value) or mine != value:
            target[key] = value
