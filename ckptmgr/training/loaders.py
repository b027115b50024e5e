# SPDX-License-Identifier: Apache-2.0
"""Data loaders of any library: what their order depends on, and where they stand.

A loader is any iterable of batches. The order of a pass over it depends on random number
generators and on epoch numbers, of the loader itself or of its sampler and dataset:

* generators are attributes (`generator` of torch's DataLoader, `rng` of a class of the user's own),
  arguments of a generator function, and those that the user names;
* an epoch number belongs to the object with `set_epoch`, as torch's DistributedSampler has.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import GeneratorType
from typing import Any

import numpy as np

from ckptmgr.formats.file_crc import crc32
from ckptmgr.state.arrays import array_bytes, framework_of, is_instance_by_name, is_wrapper
from ckptmgr.state.random import build_generator, generator_kind, generator_state, set_generator
from ckptmgr.state.torch_memory import torch_bytes

_PARTS = (
    "sampler",
    "batch_sampler",
    "dataset",
    "root",
    "source",
)  # the last two of torchdata.nodes
_MOST_PARTS = 16  # below each other
_MAX_DEPTH = 3
_MOST_ARRAYS, _MOST_NUMBERS = 8, 16  # of a batch, that distinguish it from others
_BLOCKS, _BLOCK_BYTES = 16, 4096
_OF_RAY = "ray.train.torch.train_loop_utils"
_EPOCHS = ("epoch", "iteration", "_epoch")


class LoaderParts:
    """Inputs of the order of a loader; `given` are generators that the user names."""

    def __init__(self, loader: Any, given: Sequence[object] = ()) -> None:
        self.loader = loader
        self._generators: dict[str, Any] = {}
        self._epochs: dict[str, Any] = {}
        self._absent: dict[str, tuple[Any, str]] = {}
        seen: set[int] = set()
        for path, part in _walk(loader, "loader", 0):
            if callable(getattr(part, "set_epoch", None)) and id(part) not in seen:
                self._epochs[path] = part
            seen.add(id(part))
            for name, value in _attributes(part):
                self._note(f"{path}.{name}", value)
                if value is None:
                    self._absent[f"{path}.{name}"] = part, name
        for index, value in enumerate(given):
            if generator_state(value) is None:
                raise TypeError(
                    f"random[{index}] is a {type(value).__name__}, and no random number generator of Python, NumPy or torch"
                )
            self._note(f"random[{index}]", value)

    def _note(self, path: str, value: object) -> None:
        is_known = any(value is one for one in self._generators.values())
        if generator_kind(value) and generator_state(value) is not None and not is_known:
            self._generators[path] = value

    @property
    def has_state(self) -> bool:
        """Whether the loader says itself where it stands."""
        return not self.is_ahead and all(
            callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict")
        )

    @property
    def is_ahead(self) -> bool:
        """Whether it fetches a batch before it gives the last one: a loader of Accelerate or Ray.

        The `state_dict` of Accelerate's has neither the order nor the random numbers of that fetch.
        """
        is_of_ray = is_instance_by_name(self.loader, _OF_RAY, "_WrappedDataLoader")
        return is_of_ray or hasattr(self.loader, "use_stateful_dataloader")

    @property
    def is_torch(self) -> bool:
        """Whether it is a DataLoader of torch, or a subclass."""
        data = sys.modules.get("torch.utils.data")
        return data is not None and isinstance(self.loader, data.DataLoader)

    @property
    def restarts(self) -> bool:
        """Whether it begins a new pass where its state is the end of one: Loader of torchdata.nodes."""
        return bool(getattr(self.loader, "restart_on_stop_iteration", False))

    def continued(self, state: object) -> Iterator[Any]:
        """Return the rest of the pass that a state is of; none, where it is the end of the pass."""
        self.loader.load_state_dict(state)
        if not self.restarts:
            return iter(self.loader)
        self.loader.restart_on_stop_iteration = False
        try:
            return iter(self.loader)
        finally:
            self.loader.restart_on_stop_iteration = True

    @property
    def has_workers(self) -> bool:
        """Whether other processes fetch its batches."""
        return bool(getattr(self.loader, "num_workers", 0))

    def generators(self, shared_with: Sequence[LoaderParts] | None = None) -> dict[str, object]:
        """Return copies of the generators, by path; of those that are shared, or of all."""
        found = self._generators
        if shared_with is not None:
            known = {id(one) for other in shared_with for one in other._generators.values()}
            found = {path: one for path, one in found.items() if id(one) in known}
        return {path: _copy(one) for path, one in found.items()}

    def set_generators(self, stored: Mapping[str, Any]) -> None:
        """Set the generators; raise ValueError if others are stored.

        Those that a loader makes in its first pass are made here: Accelerate's samplers have such.
        """
        for path in stored.keys() & self._absent.keys():
            part, name = self._absent.pop(path)
            self._generators[path] = _copy(stored[path])
            setattr(part, name, self._generators[path])
        kinds = {path: generator_kind(one) for path, one in self._generators.items()}
        stored_kinds = {path: generator_kind(one) for path, one in stored.items()}
        if kinds != stored_kinds:
            raise ValueError(
                f"the loader draws from {_shown(kinds)}, but the checkpoint has {_shown(stored_kinds)}; build the same "
                "loader, and pass the same random="
            )
        for path, one in self._generators.items():
            set_generator(one, stored[path])

    def epochs(self) -> dict[str, int]:
        """Return the epoch numbers that can be read, by path."""
        found = {path: _epoch_of(part) for path, part in self._epochs.items()}
        return {path: epoch for path, epoch in found.items() if epoch is not None}

    def set_epochs(self, stored: Mapping[str, int]) -> None:
        """Set epoch numbers."""
        for path in stored.keys() & self._epochs.keys():
            self._epochs[path].set_epoch(stored[path])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch number of all parts that have one; raise ValueError if none has."""
        if not self._epochs:
            raise ValueError(
                "epoch= is for loaders that have set_epoch, or whose sampler or dataset has; this one has none"
            )
        for part in self._epochs.values():
            part.set_epoch(epoch)


def mark_of(batch: Any, depth: int = 0) -> int | None:
    """Return a CRC32 over the beginnings of the arrays of a batch in host memory; None without."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu":
            return None
        try:
            numbers = batch.detach().flatten()[:_MOST_NUMBERS].tolist()
        except RuntimeError:  # sparse, nested, quantized
            return None
        return zlib.crc32(repr(numbers).encode())
    if isinstance(batch, Mapping):
        return mark_of(list(batch.values()), depth)
    if isinstance(batch, list | tuple) and depth < _MAX_DEPTH:
        marks = [mark_of(one, depth + 1) for one in batch[:_MOST_ARRAYS]]
        found = [mark for mark in marks if mark is not None]
        return zlib.crc32(repr(found).encode()) if found else None
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        return zlib.crc32(batch.flat[:_MOST_NUMBERS].tobytes())
    return None


def fingerprint_of(batch: Any) -> int | None:
    """Return a CRC32 over samples of the arrays of a batch in host memory; None without any.

    Of each of its first arrays 16 blocks of 4 KiB count, the shape and the type, of others the shape
    and the type; an array on a device is not waited for.
    """
    found, is_known = 0, False
    for leaf in itertools.islice(_leaves(batch), _MOST_ARRAYS):
        found = crc32(f"{_name_of(leaf.dtype)}{tuple(leaf.shape)}".encode(), found)
        content = _host_bytes(leaf)
        if content is not None:
            is_known = True
            for start in _block_starts(len(content)):
                found = crc32(content[start : start + _BLOCK_BYTES], found)
    return found if is_known else None


@cache
def _name_of(dtype: object) -> str:
    """Return the name of a type of elements; NumPy makes it each time."""
    return str(dtype)


def _leaves(batch: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the arrays of a batch: of lists, tuples and mappings, also of classes of their own."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for one in batch if depth < _MAX_DEPTH else ():
            yield from _leaves(one, depth + 1)
    elif framework_of(batch) is not None:
        yield batch


def _host_bytes(leaf: Any) -> memoryview | None:
    """Return the bytes of an array in host memory; of one with gaps those of two rows."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(leaf, torch.Tensor):
            from ckptmgr.state.torch_values import is_plain

            if not (leaf.is_cpu and is_plain(leaf)) or is_wrapper(leaf):
                return None
            if not leaf.is_contiguous():
                leaf = torch.stack([leaf[0], leaf[-1]])
            return torch_bytes(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            is_whole = leaf.flags.c_contiguous
            rows = leaf if is_whole else np.stack([leaf[0], leaf[-1]])
            return array_bytes(rows)
    except (RuntimeError, ValueError, IndexError):  # no rows
        return None
    return None


def _block_starts(size: int) -> Sequence[int]:
    """Return the offsets of evenly spread blocks, the last one at the end."""
    if size <= _BLOCKS * _BLOCK_BYTES:
        return range(0, size, _BLOCK_BYTES)
    return [index * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for index in range(_BLOCKS)]


def _walk(part: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield a loader, its samplers and its dataset, with their paths."""
    yield path, part
    if depth < _MOST_PARTS:
        for name in _PARTS:
            inner = getattr(part, name, None)
            if inner is not None and not isinstance(inner, type):
                yield from _walk(inner, f"{path}.{name}", depth + 1)


def _attributes(part: Any) -> list[tuple[str, object]]:
    if isinstance(part, GeneratorType):
        return list(inspect.getgeneratorlocals(part).items()) if part.gi_frame else []
    return list(getattr(part, "__dict__", {}).items())


def _epoch_of(part: Any) -> int | None:
    for name in _EPOCHS:
        value = getattr(part, name, None)
        if type(value) is int:
            return value
    return None


def _copy(generator: Any) -> object:
    found = generator_state(generator)
    assert found is not None  # noqa: S101 - only such are noted
    node, state = found
    assert isinstance(node, dict)  # noqa: S101
    return build_generator(node["rng"], state)


def _shown(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({kind})" for path, kind in sorted(kinds.items())) or "no generator"
