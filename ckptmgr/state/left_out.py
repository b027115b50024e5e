# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors that the objects of a state hold, and that a checkpoint of it does not.

Found by a walk that runs no code of the program: `__dict__`, `__slots__`, lists and dicts, but no
properties. Objects of frameworks, such as loggers, loaders and optimizers, are passed over, for they
say themselves what belongs to their state; of modules of torch the buffers that are not persistent are
looked at, and modules that are registered nowhere.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.state.array_leaves import stored_form
from ckptmgr.state.arrays import described, framework_of
from ckptmgr.state.tree import FlatState

_MOST_OBJECTS = 10_000
_MOST_S = 0.05
_MOST_NAMED = 100
_COMPARED_BYTES = 1 << 20  # larger arrays of the type and shape of a stored one count as that
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, tuple, deque)
_PASSED_OVER = sys.stdlib_module_names | {
    *("numpy", "scipy", "pandas", "pyarrow", "polars", "sklearn", "ml_dtypes", "ckptmgr", "PIL"),
    *("torch", "torchvision", "torchaudio", "torchdata", "torchmetrics", "torchao", "timm"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "ray"),
    *("transformers", "accelerate", "datasets", "tokenizers", "peft", "diffusers", "trl"),
    *("deepspeed", "megatron", "bitsandbytes", "apex", "xformers", "flash_attn", "ema_pytorch"),
    *("jax", "jaxlib", "flax", "optax", "orbax", "equinox", "keras", "tensorflow", "mindspore"),
    *("wandb", "mlflow", "tensorboard", "tensorboardX", "neptune", "comet_ml", "aim", "clearml"),
    *("omegaconf", "hydra", "tqdm", "rich", "loguru", "structlog", "nvidia", "webdataset"),
}
"""Packages whose objects are passed over."""


class _Visit(NamedTuple):
    value: Any
    path: str
    is_registered: bool = False


def left_out(flat: FlatState) -> list[str]:
    """Return path, type and shape of each array that is not stored, at most 100 in their order.

    A walk that takes longer than 50 ms, or meets more than 10,000 objects, ends with the part that it has found.
    """
    if not flat.objects or len(flat.tensors) > _MOST_OBJECTS:
        return []
    stored: dict[object, list[Any]] = {}
    for tensor in flat.tensors:
        stored.setdefault(tensor.spec._replace(name=""), []).append(tensor)
    found = (one for one in _walked(flat.objects) if not _is_stored(one.value, stored))
    return [f"{one.path}: {described(one.value)}" for one in islice(found, _MOST_NAMED)]


def _walked(objects: Sequence[tuple[str, object]]) -> Iterator[_Visit]:
    """Yield the arrays that the objects hold beside the parameters of their modules."""
    stop = time.perf_counter() + _MOST_S
    roots = [_Visit(one, name or "state", is_registered=True) for name, one in objects]
    seen = {id(one.value) for one in roots}
    inner: list[_Visit] = []
    for root in roots:  # first, because other objects may refer to them
        if _is_module(root.value):
            inner += _registered(root, seen)
    stack = [*reversed([*roots, *inner])]
    for _ in range(_MOST_OBJECTS):
        if not stack or time.perf_counter() > stop:
            return
        at = stack.pop()
        for part in _parts(at):
            if framework_of(part.value) is not None:
                if not isinstance(part.value, np.generic):
                    yield part
            elif id(part.value) not in seen and _is_walked(part.value):
                seen.add(id(part.value))
                stack.append(part)


def _registered(root: _Visit, seen: set[int]) -> list[_Visit]:
    """Return the modules below a module, which are stored with it."""
    found, stack = [], [root]
    while stack:
        at = stack.pop()
        for name, child in vars(at.value)["_modules"].items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(_Visit(child, f"{at.path}.{name}", is_registered=True))
                stack.append(found[-1])
    return found


def _is_walked(value: object) -> bool:
    kind = type(value)
    if kind in _DICTS or kind in _LISTS or _is_module(value):
        return True
    return _is_of_program(value) and not _is_data(value)


def _is_of_program(value: object) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package == "__main__" or package not in _PASSED_OVER


def _parts(at: _Visit) -> Iterator[_Visit]:
    value, path = at.value, at.path
    if type(value) in _DICTS:
        for key, one in value.items():
            yield _Visit(one, f"{path}[{key!r:.40}]")
    elif type(value) in _LISTS:
        for index, one in enumerate(value):
            yield _Visit(one, f"{path}[{index}]")
    elif _is_module(value):
        yield from _parts_of_module(at)
    elif _is_of_program(value):
        for name, one in _attributes(value):
            yield _Visit(one, f"{path}.{name}")


def _parts_of_module(at: _Visit) -> Iterator[_Visit]:
    held = vars(at.value)
    tensors = {**held["_parameters"], **held["_buffers"]}
    is_own = _is_of_program(at.value)
    for name, one in tensors.items():
        is_transient = name in held["_non_persistent_buffers_set"]
        if one is not None and ((is_transient and is_own) if at.is_registered else True):
            yield _Visit(one, f"{at.path}.{name}")
    if not at.is_registered:
        for name, one in held["_modules"].items():
            yield _Visit(one, f"{at.path}.{name}")
    if is_own:
        usual = vars(sys.modules["torch"].nn.Module()).keys()
        for name, one in held.items():
            if name not in usual:
                yield _Visit(one, f"{at.path}.{name}")


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the values of an object, without calling a method or a property of its class."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        held = {}
    if type(held) is dict:
        yield from list(held.items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member: Any = kind.__dict__.get(name)
            if type(member).__name__ == "member_descriptor":
                try:
                    yield name, member.__get__(value)
                except AttributeError:
                    continue


def _is_module(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_data(value: object) -> bool:
    """Return whether a value is a data set or loader of torch, which other texts are about."""
    data: Any = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(value, data.Dataset | data.DataLoader | data.Sampler)


def _is_stored(value: Any, stored: dict[object, list[Any]]) -> bool:
    """Return whether a stored tensor has the type, shape and elements of an array."""
    try:
        own = stored_form(value)
        same = stored.get(own.spec, ())
        if not same or own.spec.size_bytes > _COMPARED_BYTES:
            return bool(same)
        content = bytes(own.content())
    except Exception:  # an array of a kind that no checkpoint can hold
        return False
    return any(bytes(one.content()) == content for one in same)
