# SPDX-License-Identifier: Apache-2.0
"""Put loaded values into a network: a mapping of arrays, a PyTorch module, or a MindSpore Cell.

Names that only the file has are ignored (appended counters, an optimiser's state). Everything is
checked before the first value is written, so that a network is never partly loaded.

>>> network = {"w": np.zeros(2, np.float32)}
>>> load_into(network, {"w": np.array([1.0, 2.0]), "epoch_num": np.array(3)})
>>> network["w"].tolist()
[1.0, 2.0]
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptmgr.files.load.values import Value
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.state.arrays import framework_of, torch_tensor
from ckptmgr.state.destinations import check_overlaps
from ckptmgr.state.part import name_prefix
from ckptmgr.state.paths import StateMismatch, mismatch

_LOG = logging.getLogger(__name__)
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_INTEGERS = frozenset({"int8", "int16", "int32", "int64"})
_MOST_SHOWN = 8
_MAY_BE_MISSING = "num_batches_tracked"  # torch takes files from before it had this one
_WRONG = "May you need to check whether the checkpoint you loaded is correct"


class NetworkMismatch(StateMismatch, RuntimeError):
    """Report that a checkpoint does not fit a PyTorch module; nothing was changed."""


def load_into(
    net: Any,
    values: Mapping[str, Value],
    *,
    strict: bool = False,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Put loaded values into a network.

    Args:
        net: A mapping of names to NumPy arrays or torch tensors (filled in place), an object with
            `load_state_dict()`, or a MindSpore Cell.
        values: Name to value.
        strict: For all but an object that only has `load_state_dict()`: refuse other element
            types, instead of converting one float or signed integer type to another.
        path: The file that the values are of, for errors.

    Raises:
        TypeError: It is none of these.
        RuntimeError: A value has another shape or type than the network's, or (PyTorch modules) is
            missing; then a StateMismatch, too, which lists every difference.
        StateMismatch: The file has none of the names of a mapping; or arrays of the network share
            memory, and their values differ there. Nothing was changed.
    """
    _check_mapping(values)
    if hasattr(net, "parameters_and_names"):
        from ckptmgr.files.load.mindspore_cell import load_into_cell

        load_into_cell(net, values, strict=strict)
    elif _is_torch_module(net):
        state = net.state_dict()
        _check_module(state, values, strict=strict, path=path)
        _check_shared({name: one for name, one in state.items() if _has_shape(one)}, values)
        given = {name: _for_torch(values[name]) for name in state if name in values}
        net.load_state_dict(given)
        _check_loaded(net, given, path)
    elif hasattr(net, "load_state_dict"):
        net.load_state_dict(dict(values))
    elif isinstance(net, Mapping):
        if path is not None and net and not any(name in values for name in net):
            missing = [f"{name!r} is not in the checkpoint" for name in net]
            raise _mismatch(StateMismatch, net, values, missing, path)
        _fill(net, values, strict=strict)
    else:
        raise TypeError(
            f"For 'load_param_into_net', the argument 'net' should be a Cell, but got {type(net)}."
        )


def _check_module(
    state: Mapping[str, Any],
    values: Mapping[str, Value],
    *,
    strict: bool,
    path: str | os.PathLike[str] | None,
) -> None:
    """Compare values with the state dict of a PyTorch module, which would be partly loaded else."""
    differences = []
    for name, mine in state.items():
        value = values.get(name)
        if value is None:
            if not name.endswith(_MAY_BE_MISSING):
                differences.append(f"{name!r} is not in the checkpoint")
        elif isinstance(value, np.ndarray) and _has_shape(mine):
            wanted, found = str(mine.dtype).removeprefix("torch."), value.dtype.name
            # torch takes a tensor of one element for a scalar.
            is_scalar = not mine.shape and value.shape == (1,)
            if (tuple(mine.shape) != value.shape and not is_scalar) or (strict and wanted != found):
                differences.append(
                    f"{name!r} is {wanted}{list(mine.shape)}, stored is {found}{list(value.shape)}"
                )
    if differences:
        raise _mismatch(NetworkMismatch, state, values, differences, path)


def _check_loaded(net: Any, given: Mapping[str, Any], path: str | os.PathLike[str] | None) -> None:
    """Raise StateMismatch if the module holds other weights than it was given, as a hook may cause."""
    live = net.state_dict()
    changed = [
        name
        for name, one in given.items()
        if _is_dense(one) and _is_dense(live.get(name)) and not _has_bytes_of(live[name], one)
    ]
    if changed:
        raise StateMismatch(
            f"the network now has other elements in {', '.join(changed[:_MOST_SHOWN])} than were loaded: its load_state_dict,"
            " or a hook of it, changes them",
            path=path,
            hint="load without net=, and assign the values yourself",
        )


def _is_dense(one: object) -> bool:
    is_tensor = framework_of(one) == "torch" and _has_shape(one)
    tensor: Any = one
    return is_tensor and str(tensor.layout) == "torch.strided" and not tensor.is_quantized


def _has_bytes_of(live: Any, given: Any) -> bool:
    """Return whether a tensor has the elements of another, in its own type."""
    torch = sys.modules["torch"]
    wanted = given.to(device=live.device, dtype=live.dtype).reshape(live.shape)
    one, other = (each.detach().reshape(-1).contiguous() for each in (live, wanted))
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


def _has_shape(mine: object) -> bool:
    """Return whether it is a tensor, and not a lazy one, which takes any shape."""
    return framework_of(mine) == "torch" and not type(mine).__name__.startswith("Uninitialized")


def _mismatch(
    kind: type[StateMismatch],
    net: Mapping[str, Any],
    values: Mapping[str, Value],
    differences: list[str],
    path: str | os.PathLike[str] | None,
) -> StateMismatch:
    parts = {name.partition("/")[0] for name in values if "/" in name}
    fitting = sorted(
        part for part in parts if all(name_prefix(part) + name in values for name in net)
    )
    hint = "build the network as it was saved"
    if fitting:
        hint = f"the file has the state of a training; load its part with only={fitting[0]!r}"
    else:
        differences += [f"{name!r} is only in the checkpoint" for name in values if name not in net]
    error = mismatch("this network", differences, hint=hint)
    return kind(error.message, path=path, hint=hint)


def load_param_into_net(
    net: Any,
    parameter_dict: Mapping[str, Any],
    strict_load: bool = False,
    remove_redundancy: bool = False,
) -> tuple[list[str], list[str]]:
    """Put the values of `load_checkpoint` into a network; MindSpore's takes no arrays.

    >>> load_param_into_net({"w": np.zeros(2), "b": np.zeros(1)}, {"w": np.ones(2), "epoch_num": np.array(3)})
    (['b'], ['epoch_num'])

    Args:
        net: As for `load_checkpoint`; a MindSpore Cell may be an optimizer, too.
        parameter_dict: Name to array or, for a Cell, to MindSpore parameter; names may have been
            changed or taken out.
        strict_load: Refuse other element types, instead of converting one float or signed integer
            type to another.
        remove_redundancy: For a Cell: MindSpore's, which broadcasts what other ranks saved.

    Returns:
        The names of the network that were not loaded, and those of the dict that the network does
        not have.

    Raises:
        TypeError: `net` is no network, or `parameter_dict` no mapping.
        RuntimeError: A value has another shape or type than the network's, or (PyTorch modules) is
            missing.
        StateMismatch: Arrays of the network share memory, and their values differ there. Nothing
            was changed.
    """
    _check_mapping(parameter_dict)
    if hasattr(net, "parameters_and_names"):
        from ckptmgr.files.load.mindspore_cell import load_into_cell

        return load_into_cell(
            net, parameter_dict, strict=strict_load, remove_redundancy=remove_redundancy
        )
    load_into(net, parameter_dict, strict=strict_load)
    names = _names_of(net, parameter_dict)
    missing = [name for name in names if name not in parameter_dict]
    return missing, [name for name in parameter_dict if name not in names]


def _check_mapping(values: object) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(
            "For 'load_param_into_net', the argument 'parameter_dict' should be a dict, "
            f"but got {type(values)}."
        )


def _names_of(net: Any, loaded: Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(net, Mapping):
        return net
    return net.state_dict() if _is_torch_module(net) else loaded


def _is_torch_module(net: object) -> bool:
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(net, torch_module.nn.Module)


def _for_torch(value: Value) -> object:
    return torch_tensor(value) if isinstance(value, np.ndarray) else value


def _fill(net: Mapping[str, Any], values: Mapping[str, Value], *, strict: bool) -> None:
    missing = [name for name in net if name not in values]
    if missing:
        _LOG.warning("not in the checkpoint, left as they are: %s", ", ".join(missing))
    fitting = {
        name: _fitting(name, net[name], values[name], strict=strict)
        for name in net
        if name in values
    }
    _check_shared(net, fitting)
    for name, value in fitting.items():
        mine = net[name]
        if isinstance(mine, np.ndarray):
            mine[...] = value
        else:
            # Not in place through autograd: weights are leaves, and loading is no step of a
            # computation.
            mine.detach().copy_(torch_tensor(value))


def _check_shared(net: Mapping[str, Any], values: Mapping[str, Value]) -> None:
    arrays = {
        name: value
        for name, value in values.items()
        if isinstance(value, np.ndarray) and getattr(net.get(name), "shape", None) == value.shape
    }
    check_overlaps(net, arrays, what="the network")


def _fitting(name: str, mine: Any, theirs: Value, *, strict: bool) -> np.ndarray:
    """Return a value in the shape and type of the network's array `mine`."""
    is_array = isinstance(mine, np.ndarray) or framework_of(mine) == "torch"
    if not is_array or not isinstance(theirs, np.ndarray):
        raise TypeError(
            f"{name!r} cannot be filled in place: the network has a {type(mine).__name__}, "
            f"the checkpoint a {type(theirs).__name__}"
        )
    shape = tuple(mine.shape)
    if shape != theirs.shape:
        raise RuntimeError(
            f"{_should(name, 'shape')} But got its shape {shape} in the argument 'net' and shape {theirs.shape} in "
            f"the argument 'parameter_dict'.{_WRONG} or the batch size and so on in the 'net' and 'parameter_dict' "
            "are same."
        )
    wanted = str(mine.dtype).removeprefix("torch.")
    found = theirs.dtype.name
    if wanted == found:
        return theirs
    pair = {wanted, found}
    if not strict and (pair <= _FLOATS or pair <= _INTEGERS):
        converted = theirs.astype(BY_NAME[wanted].to_numpy())
        # A float loses digits, as users expect; an integer would become another number.
        if pair <= _FLOATS or np.array_equal(converted, theirs):
            return converted
    raise RuntimeError(
        f"{_should(name, 'type')} but got its type {_spelling(wanted)} in the argument 'net' and type "
        f"{_spelling(found)} in the argument 'parameter_dict'.{_WRONG}."
    )


def _should(name: str, what: str) -> str:
    return (
        f"For 'load_param_into_net', {name} in the argument 'net' should have the same {what} as {name} in the "
        "argument 'parameter_dict'."
    )


def _spelling(dtype: str) -> str:
    row = BY_NAME.get(dtype)
    return dtype if row is None or row.mindspore is None else row.mindspore
