# SPDX-License-Identifier: Apache-2.0
"""Random states come back bit for bit, or the restore raises.

`CKPTMGR_EXAMPLES=100000` runs the campaign whose figures are in docs/reliability.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.state.paths import StateMismatch
from ckptmgr.state.tree import flatten, restore
from tests.support.trees import reader

torch: Any = pytest.importorskip("torch")
jnp: Any = pytest.importorskip("jax.numpy")

EXAMPLES = int(os.environ.get("CKPTMGR_EXAMPLES", "150"))
DTYPES = {
    "numpy": ["float32", "float64", "int64", "uint8", "bool", "complex64", ">f4"],
    "torch": ["float32", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"],
    "jax": ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"],
}


class Object:
    """An object of a program; `load` makes what it holds from what is stored."""

    def __init__(self, held: Any, load: Callable[[Any], Any] = lambda value: value) -> None:
        self.held, self._load = held, load

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.held = self._load(stored["held"])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    library = draw(st.sampled_from([*DTYPES]))
    dtype = draw(st.sampled_from(DTYPES[library]))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    numbers = np.frombuffer(draw(st.binary(min_size=9, max_size=9)), np.uint8)
    values = np.resize(numbers, shape).astype(np.float32)
    if library == "torch":
        made = torch.as_tensor(values).to(getattr(torch, dtype))
        wants_grad = dtype in ("float32", "bfloat16") and draw(st.booleans())
        return made.requires_grad_(wants_grad)
    if library == "jax":
        return jnp.asarray(3.5) if draw(st.booleans()) else jnp.asarray(values).astype(dtype)
    return values.astype(dtype)


ATOMS = st.one_of(
    st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.binary(max_size=3)
)
LEAVES = st.one_of(arrays(), ATOMS, st.integers(0, 9).map(np.random.default_rng))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
        inner.filter(lambda one: not holds_more(one)).map(Object),  # it gets what is stored
    ),
    max_leaves=6,
)


def holds_more(value: Any) -> bool:
    match value:
        case dict():
            return any(map(holds_more, value.values()))
        case list() | tuple():
            return any(map(holds_more, value))
    return isinstance(value, Object) or hasattr(value, "weak_type")


def fresh(value: Any) -> Any:
    """Return a state as a program builds it: of the same form, with other values."""
    match value:
        case dict():
            return {key: fresh(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(fresh(one) for one in value)
        case Object():
            return Object(fresh(value.held))
        case torch.Tensor():
            return torch.zeros_like(value, requires_grad=value.requires_grad)
        case np.ndarray():
            return np.zeros_like(value)
        case np.random.Generator():
            return np.random.default_rng(99)
    if hasattr(value, "weak_type"):
        return jnp.asarray(0.0) if value.weak_type else jnp.zeros_like(value)
    return value


def canonical(value: Any) -> Any:
    """Return what distinguishes two states, found without any code of the library."""
    match value:
        case Mapping():
            return {key: canonical(one) for key, one in value.items()}
        case list() | tuple():
            return [type(value).__name__, *map(canonical, value)]
        case Object():
            return canonical(value.held)
        case torch.Tensor():
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return "torch", str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
        case np.ndarray():
            return "numpy", value.dtype.str, value.shape, value.tobytes()
        case np.random.Generator():
            return str(value.bit_generator.state)
        case float():
            return value.hex()
    if hasattr(value, "weak_type"):
        content = np.asarray(value)
        return "jax", content.dtype.name, content.shape, value.weak_type, content.tobytes()
    return type(value).__name__, value


@settings(max_examples=EXAMPLES, deadline=None)
@given(TREES)
def test_restored_state_is_the_stored_one_bit_for_bit(tree: Any) -> None:
    state = {"state": tree}
    flat, wanted = flatten(state), canonical(state)
    assert canonical(restore(fresh(state), flat.skeleton, reader(flat))) == wanted


ALTERED: dict[str, Callable[[Any], Any]] = {
    "another type": lambda one: one.astype(np.float16),
    "another element": lambda one: one + np.float32(1),
    "another shape": lambda one: one.reshape(1, *one.shape),
    "dropped": lambda _: None,
    "a list": lambda one: one.tolist(),
}


@settings(max_examples=EXAMPLES, deadline=None)
@given(TREES, st.sampled_from([*ALTERED]), st.integers(1, 5))
def test_array_that_an_object_loads_otherwise_is_found_anywhere(
    tree: Any, change: str, size: int
) -> None:
    state = {"a": tree, "b": [Object(np.zeros(size, np.float32))]}
    flat = flatten(state)
    target: dict[str, Any] = {**fresh(state), "b": [Object(None, ALTERED[change])]}
    with pytest.raises(StateMismatch, match=r"state\['b'\]\[0\]"):
        restore(target, flat.skeleton, reader(flat))
