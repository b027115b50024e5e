# SPDX-License-Identifier: Apache-2.0
"""Objects that a state holds as plain values: records, enum members, sparse arrays, JAX keys.

A checkpoint names no class. The plain values become an object of a kind again where they are
restored into one, whose class then is that of the target. Nothing here imports a library before the
program does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.state.jax_shards import placed_as
from ckptmgr.state.paths import shown


class Record(NamedTuple):
    """How objects of a kind become plain values, and plain values become one of them.

    Attributes:
        matches: Returns whether a value is of the kind.
        content: Returns the plain values; raises ValueError for an object without such.
        put: Returns the object with other field values, changed in place if it is mutable. None
            for a kind without fields.
        prepare: Compares an object with stored plain values, whose arrays are read, and returns a
            function that gives the object these values; raises ValueError where they do not fit.
        is_mutable: Whether an object in several places has to become one again.
    """

    matches: Callable[[Any], bool]
    content: Callable[[Any], object]
    put: Callable[[Any, Mapping[str, Any]], object] | None = None
    prepare: Callable[[Any, Any], Callable[[], object]] | None = None
    is_mutable: bool = True


def record_of(value: object) -> Record | None:
    """Return the record of the kind of a value; None for all other values."""
    return next((record for record in _RECORDS if record.matches(value)), None)


def is_jax_key(value: Any) -> bool:
    """Return whether a JAX array consists of typed keys."""
    dtypes = sys.modules.get("jax.dtypes")
    return dtypes is not None and bool(dtypes.issubdtype(value.dtype, dtypes.prng_key))


def _is_dataclass(value: Any) -> bool:
    # One with a `__new__` of its own, such as a dict with fields, is more than its fields.
    kind = type(value)
    return dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__


def _fields(value: Any) -> dict[str, Any]:
    names = [
        field.name
        for field in dataclasses.fields(value)
        # Static ones belong to the program: functions and sizes, for flax.struct and for JAX.
        if field.metadata.get("pytree_node", True) and not field.metadata.get("static", False)
    ]
    absent = [name for name in names if not hasattr(value, name)]
    if absent:
        raise ValueError(f"is a dataclass whose field {absent[0]!r} is not set")
    return {name: getattr(value, name) for name in names}


def _with_fields(target: Any, values: Mapping[str, Any]) -> object:
    # Neither __init__ nor a __setattr__ of the class runs, which may refuse, or change other fields.
    made = target
    if type(target).__dataclass_params__.frozen:
        made = object.__new__(type(target))
        kept = getattr(target, "__dict__", {}).items()
        kind = type(target)
        getattr(made, "__dict__", {}).update(
            # Values computed from the old fields are computed again.
            {k: v for k, v in kept if not isinstance(getattr(kind, k, None), cached_property)}
        )
        held = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
        values = {**held, **values}
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _is_namespace(value: object) -> bool:
    argparse = sys.modules.get("argparse")
    return isinstance(value, SimpleNamespace) or (
        argparse is not None and isinstance(value, argparse.Namespace)
    )


def _with_attributes(target: Any, values: Mapping[str, Any]) -> object:
    vars(target).update(values)
    return target


def _member(value: enum.Enum) -> object:
    if not isinstance(value, enum.Flag):
        return value.name
    return int(value.value)  # several flags together may have no name


def _same_member(target: enum.Enum, stored: Any) -> Callable[[], object]:
    kind = type(target)
    made: Any = None
    if not isinstance(target, enum.Flag):
        made = kind.__members__.get(stored) if type(stored) is str else None
    elif type(stored) is int:
        with contextlib.suppress(ValueError):
            made = kind(stored)
        # A class may drop unknown flags, or give a plain number for them.
        made = made if type(made) is kind and made.value == stored else None
    if made is None:
        raise ValueError(f"is a {kind.__name__}, which has no member {shown(stored)}")
    return lambda: made


_SPARSE_ARRAYS = {
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "bsr": ("data", "indices", "indptr"),
    "dia": ("data", "offsets"),
    "coo": ("data", "coords"),
}


def _is_sparse(value: object) -> bool:
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and bool(sparse.issparse(value))


def _sparse_content(value: Any) -> object:
    if value.format not in _SPARSE_ARRAYS:
        raise ValueError(f"is a sparse array in the format {value.format!r}: store its tocsr()")
    arrays = {name: getattr(value, name) for name in _SPARSE_ARRAYS[value.format]}
    return {"format": value.format, "shape": list(value.shape), **arrays}


def _same_sparse(target: Any, stored: Any) -> Callable[[], object]:
    names = _SPARSE_ARRAYS.get(target.format, ())
    if not isinstance(stored, dict) or stored.keys() != {"format", "shape", *names}:
        raise ValueError(f"is a sparse array in the format {target.format!r}, stored is another")
    held, shape = [target.format, list(target.shape)], [stored["format"], stored["shape"]]
    if held != shape:
        raise ValueError(f"is a sparse array {held}, stored is {shown(shape)}")
    data, *indices = (stored[name] for name in names)
    flat = [*indices[0]] if target.format == "coo" and isinstance(indices[0], tuple) else indices
    if not all(isinstance(array, np.ndarray) for array in (data, *flat)):
        raise ValueError("is a sparse array, stored are not its arrays")
    if data.dtype != target.dtype or any(array.dtype.kind != "i" for array in flat):
        raise ValueError(f"is a sparse array of {target.dtype}, stored is one of {data.dtype}")
    try:
        if target.format in ("csr", "csc", "bsr"):  # scipy's check subtracts, which may overflow
            places, starts = indices
            if starts.size and not 0 <= starts.min() <= starts.max() <= len(places):
                raise ValueError("its index pointer leads outside of the array")
        made = type(target)((data, *indices), shape=target.shape)
        if hasattr(made, "check_format"):  # places outside the array would reach other memory
            made.check_format(full_check=True)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"is a sparse array, stored are no arrays of one: {error}") from None

    def carry_out() -> object:
        vars(target).clear()
        vars(target).update(vars(made))
        return target

    return carry_out


def _key_content(key: Any) -> object:
    random = sys.modules["jax"].random
    return {"impl": str(random.key_impl(key)), "data": random.key_data(key)}


def _same_key(target: Any, stored: Any) -> Callable[[], object]:
    random = sys.modules["jax"].random
    impl, held = random.key_impl(target), random.key_data(target)
    if not isinstance(stored, dict) or stored.keys() != {"impl", "data"}:
        raise ValueError("is a JAX key, stored is none")
    if stored["impl"] != str(impl):
        raise ValueError(f"is a JAX key of {impl!s}, stored is one of {shown(stored['impl'])}")
    data = stored["data"]
    if not isinstance(data, np.ndarray) or (data.dtype, data.shape) != (held.dtype, held.shape):
        raise ValueError(f"is a JAX key{list(target.shape)}, stored are keys of another shape")
    return lambda: random.wrap_key_data(placed_as(held, data), impl=impl)


def is_nnx(value: object) -> bool:
    """Return whether a value is a State, Module or Optimizer of flax.nnx."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.State | nnx.Pytree)


def way_out(value: object) -> str | None:
    """Return how to save a model or optimizer of Keras, or a module of Equinox; None for others.

    With torch, a model of Keras passes for its `nn.Module`, without optimizer, metrics and seeds.
    """
    equinox: Any = sys.modules.get("equinox")
    if equinox is not None and isinstance(value, equinox.Module):
        return (
            "store the arrays of the tree: arrays, static = eqx.partition(model, eqx.is_array), and in the state"
            " jax.tree.leaves(arrays); then model = eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays),"
            ' start.state["model"]), static)'
        )
    keras: Any = sys.modules.get("keras")
    kinds = [getattr(keras, name, None) for name in ("Model", "Optimizer")]
    if not isinstance(value, tuple(kind for kind in kinds if kind is not None)):
        return None
    return (
        "save the fit with ckptmgr.integrations.keras.KerasCheckpoints, or store"
        " model.get_state_tree(value_format='numpy_array')"
    )


def _nnx_state(value: Any) -> Any:
    nnx: Any = sys.modules["flax.nnx"]
    return value if isinstance(value, nnx.State) else nnx.state(value)


def _pure_dict(value: Any) -> object:
    return sys.modules["flax.nnx"].to_pure_dict(_nnx_state(value))


def _with_pure_dict(target: Any, values: Mapping[str, Any]) -> object:
    nnx: Any = sys.modules["flax.nnx"]
    state = _nnx_state(target)
    nnx.replace_by_pure_dict(state, values)
    if state is not target:
        nnx.update(target, state)
    return target


JAX_KEY = Record(is_jax_key, _key_content, prepare=_same_key, is_mutable=False)
_RECORDS = (
    Record(lambda value: isinstance(value, enum.Enum), _member, None, _same_member, False),
    Record(is_nnx, _pure_dict, _with_pure_dict),
    Record(_is_dataclass, _fields, _with_fields),
    Record(_is_namespace, lambda value: copy.copy(vars(value)), _with_attributes),
    Record(_is_sparse, _sparse_content, prepare=_same_sparse),
)
