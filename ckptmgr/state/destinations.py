# SPDX-License-Identifier: Apache-2.0
"""Destinations: existing arrays that a load fills, all compared with the file before any write.

| destination | how it is filled |
|---|---|
| NumPy array: writable, C-contiguous, little-endian | straight from the file |
| torch tensor: on the CPU, contiguous | straight from the file |
| any other NumPy array or strided torch tensor | through a buffer of its size |
| memory that overlaps an earlier array | through a buffer, if both get the same values |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import CkptEntry
from ckptmgr.state.arrays import framework_of, is_wrapper, torch_tensor
from ckptmgr.state.fill import can_copy_into
from ckptmgr.state.leaves import are_disjoint, owner_of
from ckptmgr.state.overlaps import conflicts, overlapping_targets
from ckptmgr.state.paths import mismatch
from ckptmgr.state.torch_memory import memory_of_tensor

_HINT = "give arrays of the stored shapes and types, or load without into"
_INTO = "the arrays given as into"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Destinations of some tensors."""

    entries: tuple[TensorEntry, ...]  # in file order
    arrays: Mapping[int, np.ndarray]  # `id` of an entry to C-contiguous memory of its size
    copies: tuple[Callable[[], None], ...]  # to call when the memory is filled
    sharing: frozenset[str]  # arrays that may share memory; see `check_overlaps`

    def finish(self) -> None:
        """Copy each buffer to its array."""
        for copy in self.copies:
            copy()


def match_arrays(stored: Iterable[CkptEntry], into: Mapping[str, Any]) -> Destinations:
    """Return the destinations of the stored tensors that `into` names; nothing is written yet.

    Raises:
        StateMismatch: Names every difference: missing tensors, other shapes or types, read-only
            arrays.
    """
    entries = {entry.name: entry for entry in stored if entry.name in into}
    problems = [_problem(name, value, entries.get(name)) for name, value in into.items()]
    differences = [problem for problem in problems if problem is not None]
    if differences:
        raise mismatch(_INTO, differences, hint=_HINT)
    tensors = [entry for entry in entries.values() if isinstance(entry, TensorEntry)]
    arrays, copies = {}, []
    direct = disjoint({entry.name: _memory(into[entry.name], entry) for entry in tensors})
    for entry in tensors:
        memory = direct.get(entry.name)
        if memory is None:
            memory = np.empty(entry.spec.shape, entry.spec.dtype.to_numpy())
            copies.append(partial(_copy, into[entry.name], memory))
        arrays[id(entry)] = memory
    groups: list[list[str]] = overlapping_targets(
        {entry.name: into[entry.name] for entry in tensors}
    )
    return Destinations(
        entries=tuple(tensors),
        arrays=arrays,
        copies=tuple(copies),
        sharing=frozenset(name for group in groups for name in group),
    )


def check_overlaps(
    targets: Mapping[str, Any], values: Mapping[str, np.ndarray], *, what: str = _INTO
) -> None:
    """Raise StateMismatch unless arrays that share memory get the same values there.

    Args:
        targets: Name to NumPy array or torch tensor.
        values: Name to the value of a target: of the same shape, and of a type that is converted.
        what: The targets, for messages.
    """
    filled = {name: targets[name] for name in values if has_memory(targets[name])}
    names = [name for group in overlapping_targets(filled) for name in group]
    if not names:
        return
    stored = {name: _as_given(filled[name], values[name]) for name in names}
    found = conflicts({name: filled[name] for name in names}, stored)
    differences = [f"{one.later!r} {one.naming(repr)}" for one in found]
    if differences:
        raise mismatch(what, differences, hint=_HINT)


def has_memory(value: Any) -> bool:
    """Return whether a value is an array whose elements have separate memory (no stride of 0)."""
    return isinstance(value, np.ndarray) or (framework_of(value) == "torch" and _is_plain(value))


def _as_given(target: Any, value: np.ndarray) -> Any:
    if isinstance(target, np.ndarray):
        return value.astype(target.dtype, copy=False)
    return torch_tensor(value).to(target.dtype)


def _problem(name: str, value: Any, entry: CkptEntry | None) -> str | None:
    """Return why a value cannot take the tensor of its name, or None."""
    if entry is None:
        return f"{name!r} is not in the checkpoint"
    if not isinstance(entry, TensorEntry):
        return f"{name!r} is stored as a {type(entry).__name__.removesuffix('Entry').lower()}"
    framework = None if isinstance(value, np.generic) else framework_of(value)
    if framework not in ("numpy", "torch"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"{name!r} is a {kind}, not a NumPy array or torch tensor"
    found = (_spelling(value.dtype), tuple(value.shape))
    wanted = (_spelling(entry.spec.dtype.to_numpy()), entry.spec.shape)
    if found != wanted:
        return f"{name!r} is {found[0]}{list(found[1])}, stored is {wanted[0]}{list(wanted[1])}"
    is_writable = value.flags.writeable if framework == "numpy" else _is_plain(value)
    return None if is_writable else f"{name!r} cannot be written to"


@cache
def _spelling(dtype: object) -> str:
    # Cached, because NumPy computes the name on each access.
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _is_plain(tensor: Any) -> bool:
    return not is_wrapper(tensor) and can_copy_into(tensor)


def _memory(value: Any, entry: TensorEntry) -> np.ndarray | None:
    """Return the memory of a value if the file's bytes can go straight into it, else None."""
    if isinstance(value, np.ndarray) and value.dtype != entry.spec.dtype.to_numpy():
        return None
    return memory_of(value)


def memory_of(value: Any) -> np.ndarray | None:
    """Return the host memory of a writable, C-contiguous NumPy array or torch tensor, or None."""
    if isinstance(value, np.ndarray):
        is_direct = value.flags.c_contiguous and value.flags.writeable
        return np.asarray(value) if is_direct else None

    if not value.is_cpu or not _is_plain(value) or not value.is_contiguous():
        return None
    if value.is_conj() or value.is_neg():  # the bytes mean something else
        return None
    return memory_of_tensor(value)


def disjoint(memories: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return the memories that overlap none of those kept before them."""
    known = {name: one for name, one in memories.items() if one is not None}
    if are_disjoint(map(owner_of, known.values()), len(known)):
        return known
    addresses = {name: _address(one) for name, one in known.items()}
    kept, end = {}, 0
    for name in sorted(known, key=addresses.__getitem__):
        start = addresses[name]
        if start >= end or not known[name].nbytes:
            kept[name] = known[name]
            end = max(end, start + known[name].nbytes)
    return kept


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _copy(value: Any, memory: np.ndarray) -> None:
    if isinstance(value, np.ndarray):
        value[...] = memory
        return
    # Not through autograd: weights are leaves, and loading is no step of a computation.
    value.detach().copy_(torch_tensor(memory))
