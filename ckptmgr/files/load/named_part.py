# SPDX-License-Identifier: Apache-2.0
"""One part of a saved state, such as its network, as named tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.files.load.state import SKELETON
from ckptmgr.state.part import checked_parts, name_prefix
from ckptmgr.state.paths import StateMismatch

if TYPE_CHECKING:
    from ckptmgr.files.load.open import OpenCheckpoint

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class NamedPart:
    """A part of a state by its name, whose tensors are named `NAME/...` in a file."""

    name: str

    @classmethod
    def checked(cls, only: object) -> NamedPart:
        """Return the part that a load was asked for.

        Raises:
            TypeError, ValueError: It is no name, or not one.
        """
        names = checked_parts(only)
        if names is None or len(names) != 1:
            raise TypeError(f"only must be the name of one part, but got {only!r}")
        return cls(names[0])

    def has(self, name: str) -> bool:
        """Return whether a tensor belongs to the part, or is all of it."""
        prefix = name_prefix(self.name)
        return name.startswith(prefix) or name == prefix.removesuffix("/")

    def read(self, opened: OpenCheckpoint, *, check_crc: bool) -> dict[str, Any]:
        """Return the values of the part, checked, by their names in it; tied weights under each.

        Raises:
            StateMismatch: The file has no such part.
            CorruptCheckpoint: It is damaged.
        """
        from ckptmgr.files.load.values import read_values

        stored = {entry.name for entry in opened.index.entries}
        aliases = {
            alias: name
            for alias, name in opened.metadata.items()
            if self.has(alias) and name in stored and alias not in stored
        }
        wanted = {name for name in stored if self.has(name)} | set(aliases.values())
        if not wanted:
            raise self._missing(tops_of(stored, opened.metadata), opened.path)
        values = read_values(opened, choose=wanted.__contains__, check_crc=check_crc)
        found = {name: value for name, value in values.items() if self.has(name)}
        found |= {alias: values[name] for alias, name in aliases.items()}
        return self.named(found, path=opened.path)

    def named(
        self, values: Mapping[str, Any], *, path: str | os.PathLike[str] | Any
    ) -> dict[str, Any]:
        """Return values by their names in the part; raise StateMismatch if there are none."""
        prefix = name_prefix(self.name)
        if not values:
            raise self._missing((), path)
        return {name.removeprefix(prefix): value for name, value in values.items()}

    def _missing(self, parts: Sequence[str], path: Any) -> StateMismatch:
        known = f"; its parts are {', '.join(map(repr, parts[:_SHOWN]))}" if parts else ""
        return StateMismatch(
            f"the checkpoint has no tensors of a part {self.name!r}{known}",
            path=path,
            hint="only takes a name at the top of the state that a CheckpointManager or save_state saved",
        )


def tops_of(stored: Iterable[str], metadata: Mapping[str, str]) -> list[str]:
    """Return the parts with tensors, for a message: in a file of a state also lone tensors.

    `metadata` is that of the file, with the second names of tied tensors.
    """
    names = {*stored}
    names |= {alias for alias, name in metadata.items() if name in names}
    if SKELETON not in metadata:
        names = {name for name in names if "/" in name}
    return sorted({name.partition("/")[0] for name in names})


def as_framework(values: Mapping[str, Any], framework: str) -> dict[str, Any]:
    """Return values with their arrays as tensors of a framework; texts stay.

    Raises:
        UnsupportedCheckpoint: The framework has no such tensor; names it.
    """
    if framework == "np":  # a call for each of very many would take as long as reading it
        return dict(values)
    return {name: converted(name, value, framework) for name, value in values.items()}


def converted(name: str, value: Any, framework: str) -> Any:
    """Return one value as that of a framework; raises as `as_framework`."""
    import numpy as np

    from ckptmgr.files.load.values import MapArrays
    from ckptmgr.formats.tensor import PackedArray

    if framework == "np" or isinstance(value, str):
        return value
    if isinstance(value, MapArrays):
        return MapArrays(*(converted(name, one, framework) for one in value))
    if isinstance(value, PackedArray):
        raise UnsupportedCheckpoint(
            f"{name!r} has packed elements", hint="load it with framework='np' and convert it"
        )
    if framework == "pt":
        from ckptmgr.state.arrays import torch_tensor

        return torch_tensor(np.require(value, requirements=["C", "W"]))
    import jax.numpy as jnp

    found = jnp.asarray(value)
    if found.dtype.name != value.dtype.name:
        raise UnsupportedCheckpoint(
            f"{name!r} is {value.dtype.name}, which JAX would make {found.dtype.name}",
            hint="enable 64 bits: jax.config.update('jax_enable_x64', True), or load it with framework='np'",
        )
    return found
