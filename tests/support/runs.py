# SPDX-License-Identifier: Apache-2.0
"""Managers and callbacks whose options are given by the names of their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from ckptmgr import CheckpointManager, ModelCheckpoint
from ckptmgr.training.options import SUBJECTS, System

_OBJECTS: dict[str, Any] = {**SUBJECTS, "system": System}
_FIELDS = {
    field.name: argument
    for argument, kind in _OBJECTS.items()
    for field in dataclasses.fields(kind)
}


def made(surface: Any, /, *args: Any, **options: Any) -> Any:
    """Return a manager or callback; fields of subjects and of its system may be loose."""
    given: dict[str, dict[str, Any]] = {"system": {}}
    for name in [one for one in options if one in _FIELDS]:
        given.setdefault(_FIELDS[name], {})[name] = options.pop(name)
    for argument, fields in given.items():
        present = options.get(argument)
        made = _OBJECTS[argument](**fields)
        options[argument] = made if present is None else dataclasses.replace(present, **fields)
    return surface._on(options.pop("system"), *args, **options)


def manager_on(*args: Any, **options: Any) -> CheckpointManager:
    """Return a manager, as `made`."""
    manager: CheckpointManager = made(CheckpointManager, *args, **options)
    return manager


def callback_on(*args: Any, **options: Any) -> ModelCheckpoint:
    """Return a callback, as `made`."""
    callback: ModelCheckpoint = made(ModelCheckpoint, *args, **options)
    return callback
