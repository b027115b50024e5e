# SPDX-License-Identifier: Apache-2.0
"""Random number generators in a state: NumPy's, torch's and Python's, saved by their state.

A stored name selects only among the bit generators listed here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptmgr.state.paths import Node, TreeError

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def global_generators(module: object) -> object | None:
    """Return the global generator that a module draws from; None if it is no such module.

    For `torch.cuda` it is the tuple of the generators of all its devices, whose states are stored.
    """
    match getattr(module, "__name__", None):
        case "random" if module is random:
            return _owner(random.getstate)
        case "numpy.random" if module is np.random:
            return _owner(np.random.get_state)
        case "torch" if module is sys.modules.get("torch"):
            generator: object = sys.modules["torch"].default_generator
            return generator
        case "torch.cuda" if module is sys.modules.get("torch.cuda"):
            cuda = sys.modules["torch.cuda"]
            if cuda.is_available():
                cuda.init()  # before it there are no generators
            return tuple(cuda.default_generators)
    return None


def _owner(method: Any) -> object:
    """Return the object that a bound method belongs to: the functions of `random` are such."""
    owner: object = method.__self__
    return owner


def generator_kind(value: Any) -> str:
    """Return the kind of a generator, which its state must match; empty when `value` is none."""
    if isinstance(value, random.Random):
        return f"python.{type(value).__name__}"
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(value, torch_module.Generator):
        return f"torch.Generator({value.device})"
    # NumPy imports it on first use, which takes time; before that there is no such generator.
    if "numpy.random" not in sys.modules:
        return ""
    match value:
        case np.random.Generator():
            return f"numpy.Generator({type(value.bit_generator).__name__})"
        case np.random.BitGenerator():
            return f"numpy.{type(value).__name__}"
        case np.random.RandomState():
            return f"numpy.RandomState({_legacy_state(value)['bit_generator']})"
    return ""


def generator_key(value: Any) -> object:
    """Return a key that is equal for generators which draw from the same stream."""
    return type(value), id(getattr(value, "bit_generator", value))


def generator_state(value: Any) -> tuple[Node, object] | None:
    """Return the skeleton node and state of a generator; None if it cannot be rebuilt."""
    kind, _, inner = generator_kind(value).rstrip(")").partition("(")
    if kind == "numpy.Generator" and inner in _BIT_GENERATORS:
        return {"rng": kind}, value.bit_generator.state
    if kind == f"numpy.{type(value).__name__}" and type(value).__name__ in _BIT_GENERATORS:
        return {"rng": "numpy.BitGenerator"}, value.state
    if kind == "numpy.RandomState" and inner == "MT19937":
        return {"rng": kind}, _legacy_state(value)
    if kind == "python.Random" and type(value) is random.Random:
        return {"rng": kind}, value.getstate()
    if kind == "torch.Generator":
        return {"rng": kind}, [str(value.device), value.get_state()]
    return None


def build_generator(kind: object, state: object) -> object:
    """Return a generator of a stored kind with a stored state; the generators' own errors pass."""
    build = _BUILDERS.get(kind) if isinstance(kind, str) else None
    if build is None:
        raise TreeError(f"there is no random number generator called {kind!r}")
    return build(state)


def set_generator(target: Any, source: Any) -> None:
    """Give a generator the state of another one of its kind."""
    match target:
        case random.Random():
            target.setstate(source.getstate())
        case np.random.Generator():
            target.bit_generator.state = source.bit_generator.state
        case np.random.BitGenerator():
            target.state = source.state
        case _:
            target.set_state(source.get_state())


def _legacy_state(value: np.random.RandomState) -> dict[str, Any]:
    state: dict[str, Any] = value.get_state(legacy=False)
    return state


def _bit_generator(state: Any) -> np.random.BitGenerator:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise KeyError(name)
    _check_position(state)
    made: np.random.BitGenerator = getattr(np.random, name)()
    made.state = state
    return made


def _check_position(state: Any) -> None:
    """Check where a generator stands in its buffer: NumPy takes any place, and reads there."""
    if not isinstance(state, dict):  # NumPy would also take a tuple
        raise TreeError("the state of a random number generator is no dict")
    places = {"MT19937": (state["state"], "pos", 624), "Philox": (state, "buffer_pos", 4)}
    holder, name, most = places.get(state["bit_generator"], ({"": 0}, "", 0))
    place = holder[name]
    if type(place) is not int or not 0 <= place <= most:
        raise TreeError(f"the {name} of a {state['bit_generator']} is not from 0 to {most}")


def _random_state(state: Any) -> np.random.RandomState:
    _check_position(state)
    made = np.random.RandomState(0)
    made.set_state(state)
    return made


def _python_random(state: Any) -> random.Random:
    made = random.Random()  # noqa: S311 - a training generator, not a source of keys
    made.setstate(state)
    return made


def _torch_generator(state: Any) -> object:
    from ckptmgr.state.torch_values import build_torch_generator

    device, content = state
    return build_torch_generator(device, content)


_BUILDERS: dict[str, Callable[[Any], object]] = {
    "numpy.BitGenerator": _bit_generator,
    "numpy.Generator": lambda state: np.random.Generator(_bit_generator(state)),
    "numpy.RandomState": _random_state,
    "python.Random": _python_random,
    "torch.Generator": _torch_generator,
}
