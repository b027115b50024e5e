# SPDX-License-Identifier: Apache-2.0
"""LearningRateFinder and BatchSizeFinder in a run that goes on.

They search in `on_fit_start`, and load a checkpoint of their own afterwards, in place of that of the
run. A run that goes on does not search again: it is given what the first one found.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.integrations.lightning.stand_ins import StandIns

_RATE, _SIZE = "LearningRateFinder", "BatchSizeFinder"


def found_values(trainer: Any) -> dict[str, float]:
    """Return what the finders have set, by the name of the attribute of the module."""
    parsing = _parsing(trainer)
    return {
        name: parsing.lightning_getattr(trainer.lightning_module, name)
        for one in trainer.callbacks
        for name in _attributes(one, trainer)
    }


def skip_finders(trainer: Any, found: Mapping[str, Any], stand_ins: StandIns) -> None:
    """Have the finders set what was found, where they would search."""

    def set_found(_: Any, trainer: Any, module: Any) -> None:
        for name, value in found.items():
            _parsing(trainer).lightning_setattr(module, name, value)

    for one in trainer.callbacks:
        if _kinds(one) & {_RATE, _SIZE}:
            stand_ins.put(one, "on_fit_start", set_found)


def _attributes(callback: Any, trainer: Any) -> Iterator[str]:
    kinds, names = _kinds(callback), list[str]()
    if _RATE in kinds:
        names = [callback._attr_name] if callback._attr_name else ["lr", "learning_rate"]
    elif _SIZE in kinds:
        names = [callback._batch_arg_name]
    has = _parsing(trainer).lightning_hasattr
    yield from [name for name in names if has(trainer.lightning_module, name)][:1]


def _kinds(callback: Any) -> set[str]:
    return {one.__name__ for one in type(callback).__mro__}


def _parsing(trainer: Any) -> Any:
    package = type(trainer.fit_loop).__module__.partition(".loops")[0]
    return importlib.import_module(f"{package}.utilities.parsing")
