# SPDX-License-Identifier: Apache-2.0
"""Arrays that exist already as the places a load fills: all compared with the file before the first byte is written.

| given | how it is filled |
|---|---|
| NumPy array: writable, C-contiguous, little-endian | straight from the file |
| torch tensor: on the CPU, contiguous | straight from the file |
| any other NumPy array or strided torch tensor | through a buffer of its size |
| memory that an array before it covers as well | through a buffer, once it is known that both are given the same values |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import CkptEntry
from ckptmgr.state.arrays import framework_of, memory_of_tensor, torch_tensor
from ckptmgr.state.leaves import are_disjoint, owner_of
from ckptmgr.state.overlaps import conflicts, overlapping_targets
from ckptmgr.state.paths import StateMismatch

_SHOWN_DIFFERENCES = 100
_INTO = "the arrays given as into"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where the contents of some tensors go.

    Attributes:
        entries: The tensors, in file order.
        arrays: `id` of an entry to C-contiguous memory of its size.
        copies: What is left to do when the memory is filled.
        sharing: The names of arrays that may share memory; see `check_shared`.
    """

    entries: tuple[TensorEntry, ...]
    arrays: Mapping[int, np.ndarray]
    copies: tuple[Callable[[], None], ...]
    sharing: frozenset[str]

    def finish(self) -> None:
        """Copy what was read into a buffer to where it belongs."""
        for copy in self.copies:
            copy()


def match_arrays(stored: Iterable[CkptEntry], into: Mapping[str, Any]) -> Destinations:
    """Return where the tensors go whose names are in `into`; nothing is written yet.

    Args:
        stored: What the file holds, in file order.
        into: Name to NumPy array or torch tensor.

    Raises:
        StateMismatch: Names every difference: what the file lacks, other shapes or types, what cannot be written to.
    """
    entries = {entry.name: entry for entry in stored if entry.name in into}
    problems = [_problem(name, value, entries.get(name)) for name, value in into.items()]
    differences = [problem for problem in problems if problem is not None]
    if differences:
        raise _mismatch(differences)
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


def check_shared(
    targets: Mapping[str, Any], values: Mapping[str, np.ndarray], *, what: str = _INTO
) -> None:
    """Check that arrays which share memory are given the same values there.

    Args:
        targets: Name to NumPy array or torch tensor; more than `values` has are passed over.
        values: Name to what goes there: of the same shape, and of a type that is converted.
        what: The targets, for messages.

    Raises:
        StateMismatch: They are not; names both.
    """
    filled = {name: targets[name] for name in values if has_memory(targets[name])}
    names = [name for group in overlapping_targets(filled) for name in group]
    if not names:
        return
    stored = {name: _as_given(filled[name], values[name]) for name in names}
    found = conflicts({name: filled[name] for name in names}, stored)
    differences = [f"{one.later!r} {one.naming(repr)}" for one in found]
    if differences:
        raise _mismatch(differences, what)


def has_memory(value: Any) -> bool:
    """Return whether a value is an array with memory of its own for every element, as far as strides of 0 tell."""
    return isinstance(value, np.ndarray) or (framework_of(value) == "torch" and _is_plain(value))


def _as_given(target: Any, value: np.ndarray) -> Any:
    if isinstance(target, np.ndarray):
        return value.astype(target.dtype, copy=False)
    return torch_tensor(value).to(target.dtype)


def _problem(name: str, value: Any, entry: CkptEntry | None) -> str | None:
    """Return why a value cannot take what is stored under its name, or None."""
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
    # NumPy puts the name together anew each time it is asked for.
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _is_plain(tensor: Any) -> bool:
    """Return whether a torch tensor has memory of its own for every element."""
    import torch

    if getattr(type(tensor), "__torch_dispatch__", None) is not getattr(
        torch.Tensor, "__torch_dispatch__", None
    ):
        return False  # DTensor and the like keep their data elsewhere
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return False
    return all(
        stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _memory(value: Any, entry: TensorEntry) -> np.ndarray | None:
    """Return the memory of a value as the file would fill it, or None where it is laid out otherwise."""
    if isinstance(value, np.ndarray) and value.dtype != entry.spec.dtype.to_numpy():
        return None
    return memory_of(value)


def memory_of(value: Any) -> np.ndarray | None:
    """Return the memory of a NumPy array or torch tensor that has one and is C-contiguous in it, or None."""
    if isinstance(value, np.ndarray):
        is_direct = value.flags.c_contiguous and value.flags.writeable
        return np.asarray(value) if is_direct else None

    if not _is_plain(value) or value.device.type != "cpu" or not value.is_contiguous():
        return None
    if value.is_conj() or value.is_neg():  # the bytes mean something else
        return None
    return memory_of_tensor(value)


def disjoint(memories: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return those memories that no other one before them covers, too."""
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


def _mismatch(differences: list[str], what: str = _INTO) -> StateMismatch:
    shown = sorted(differences)[:_SHOWN_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"... and {len(differences) - len(shown)} more")
    return StateMismatch(
        f"the checkpoint does not fit {what}; nothing was changed:\n  " + "\n  ".join(shown),
        hint="give arrays of the stored shapes and types, or load without into",
    )
