# SPDX-License-Identifier: Apache-2.0
"""`GlobalRandom`: the global random number generators of a process as one part of a state.

```
state = {"model": model, "optimizer": optimizer, "random": GlobalRandom()}
```

It covers Python's `random` and `numpy.random`, and `torch` and its CUDA devices as far as the
program has loaded and used them. Its repr names them. JAX has no global generator: keys given
to it are stored beside the others.
"""

from __future__ import annotations

import ctypes
import logging
import random
import struct
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from ckptmgr.formats.file_crc import crc32
from ckptmgr.state.records import JAX_KEY, is_jax_key

_LOG = logging.getLogger(__name__)
_DRAWN = struct.Struct("<3Id3Id")


def global_draws() -> tuple[object, ...]:
    """Return a value that changes when anything draws from a global generator of the host."""
    numpy_state: Any = np.random.get_state()
    torch: Any = sys.modules.get("torch")
    drawn = () if torch is None else (torch.get_rng_state().numpy().tobytes(),)
    return (random.getstate(), numpy_state[1].tobytes(), numpy_state[2], *drawn)


def mark_of(states: Mapping[str, Any]) -> int:
    """Return a mark of states that `GlobalRandom.state_dict` has just returned, never 0, of two halves.

    The lower half is 15 bits of a CRC32 over those of Python and NumPy, the upper one over that of torch and
    of the current CUDA device, with a bit that says whether there is one; 0 without torch. Of each
    counts how far it has come, and some of its words, which another seed or more draws change.
    """
    words, drawn = states["python"]["words"], states["numpy"]
    key, gauss = drawn["state"]["key"], states["python"]["gauss"] or 0.0
    found = crc32(
        _DRAWN.pack(
            *(words[-1], words[1], words[397], gauss),  # the first word may be a constant
            *(drawn["state"]["pos"], key[1], key[397], drawn["gauss"]),
        )
    )
    mark = found & 0x7FFF or 1
    if "torch" in states:
        found = crc32(_begin_of(states["torch"]))
        if "cuda" in states:  # pragma: no cover - needs CUDA
            current = sys.modules["torch.cuda"].current_device()
            found = crc32(_begin_of(states["cuda"][current]), found)
        mark |= (found & 0x7FFF or 1) << 16 | ("cuda" in states) << 31
    return mark


def _begin_of(state: Any) -> bytes:
    """Return the begin of a state of torch, a tensor of bytes: the position, and some words or the seed."""
    return ctypes.string_at(state.data_ptr(), min(state.numel(), 64))


class GlobalRandom:
    """The global random number generators of this process; sits anywhere in a state.

    Restored into a state, they are set after everything else, because loading may draw from them.
    Code between the restore and the first step, such as `iter(loader)` of torch, may still draw:
    `CheckpointManager.batches` puts them back where they were taken.

    Args:
        keys: Name to JAX key, typed or raw.

    Attributes:
        keys: A dict of these keys; the loop replaces the values as it splits them.

    >>> import random
    >>> generators = GlobalRandom()
    >>> stored = generators.state_dict()
    >>> drawn = random.random()
    >>> generators.load_state_dict(stored)
    >>> random.random() == drawn
    True
    """

    def __init__(self, keys: Mapping[str, Any] | None = None) -> None:
        self.keys: dict[str, Any] = dict(keys or {})

    def __repr__(self) -> str:
        """Return the generators that it covers now."""
        covered = ["python", "numpy", *(["torch"] if "torch" in sys.modules else [])]
        devices = _cuda_generators()
        if devices:  # pragma: no cover - needs CUDA
            covered.append(f"cuda x {len(devices)}")
        keys = f", keys={sorted(self.keys)}" if self.keys else ""
        return f"GlobalRandom({', '.join(covered)}{keys})"

    def state_dict(self) -> dict[str, object]:
        """Return copies of the states, by the name of the library, and of the keys."""
        found: dict[str, object] = {
            "python": _python_state(),
            "numpy": np.random.get_state(legacy=False),
        }
        if "torch" in sys.modules:
            found["torch"] = sys.modules["torch"].get_rng_state()
        devices = _cuda_generators()
        if devices:  # pragma: no cover - needs CUDA
            found["cuda"] = [generator.get_state() for generator in devices]
        if self.keys:
            found["keys"] = {name: _key_state(key) for name, key in self.keys.items()}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators.

        Generators that are not stored stay as they are. With another number of CUDA devices a warning is logged,
        and the devices that both have are set.

        Raises:
            ValueError: The state is damaged, or its keys are others. Nothing was changed.
            ImportError: The state has that of a library which is not installed.
        """
        self.plan(state)()

    def plan(self, state: object) -> Callable[[], None]:
        """Check a state; return a function that sets the generators. Raises as the restore."""
        if not isinstance(state, Mapping) or not state.keys() <= {*_SETTERS, "cuda", "keys"}:
            raise ValueError("is a GlobalRandom, stored is no state of one")
        steps = [_SETTERS[name](state[name]) for name in _SETTERS if name in state]
        steps += _cuda_steps(state)
        made = self._planned_keys(state.get("keys", {}))

        def carry_out() -> None:
            for step in steps:
                step()
            for name, make in made.items():
                self.keys[name] = make()

        return carry_out

    def _planned_keys(self, stored: object) -> dict[str, Callable[[], object]]:
        if not isinstance(stored, Mapping) or stored.keys() != self.keys.keys():
            names = sorted(stored) if isinstance(stored, Mapping) else []
            raise ValueError(f"has the keys {sorted(self.keys)}, stored are {names}")
        return {name: _planned_key(self.keys[name], stored[name], name) for name in stored}


def _cuda_generators() -> tuple[Any, ...]:
    """Return the generators of all CUDA devices; none before the program has used CUDA."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return ()
    return tuple(cuda.default_generators)  # pragma: no cover - needs CUDA


def _python_state() -> dict[str, object]:
    version, words, gauss = random.getstate()
    packed = struct.pack(f"={len(words)}I", *words)  # `np.array` takes three times as long
    found = np.frombuffer(bytearray(packed), np.uint32)
    return {"version": version, "words": found, "gauss": gauss}


def _set_python(state: Any) -> Callable[[], None]:
    try:
        words = tuple(int(word) for word in state["words"])
        made = (state["version"], words, state["gauss"])
        random.Random().setstate(made)  # noqa: S311 - raises unless the state is one
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"the state of Python's generator is damaged: {error!r}") from None
    return lambda: random.setstate(made)


def _set_numpy(state: Any) -> Callable[[], None]:
    from ckptmgr.state.random import build_generator

    try:
        build_generator("numpy.RandomState", state)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the state of NumPy's generator is damaged: {error!r}") from None
    return lambda: np.random.set_state(state)


def _set_torch(state: Any) -> Callable[[], None]:
    torch: Any = import_module("torch")
    try:
        torch.Generator().set_state(state)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"the state of torch's generator is damaged: {error}") from None
    return lambda: torch.set_rng_state(state)


_SETTERS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "python": _set_python,
    "numpy": _set_numpy,
    "torch": _set_torch,
}


def _cuda_steps(state: Mapping[str, Any]) -> list[Callable[[], None]]:
    stored = state.get("cuda", [])
    here = len(_cuda_generators())
    if not stored and not (here and "torch" in state):
        return []
    cuda: Any = import_module("torch.cuda")
    here = cuda.device_count()
    if len(stored) != here:  # pragma: no branch - needs CUDA
        _LOG.warning(
            "the random states of %d CUDA devices were saved, and %d devices are here: those of %d devices are set, "
            "so the run does not go on bit for bit",
            len(stored),
            here,
            min(len(stored), here),
        )
    return [_cuda_step(cuda, index, one) for index, one in enumerate(stored[:here])]


def _cuda_step(cuda: Any, index: int, state: Any) -> Callable[[], None]:  # pragma: no cover - CUDA
    return lambda: cuda.set_rng_state(state, index)


def _key_state(key: Any) -> object:
    if is_jax_key(key):
        content: Any = JAX_KEY.content(key)
        return {"impl": content["impl"], "data": np.array(content["data"])}
    return np.array(key)


def _planned_key(key: Any, stored: Any, name: str) -> Callable[[], object]:
    if is_jax_key(key):
        assert JAX_KEY.prepare is not None  # noqa: S101 - keys have no fields
        return JAX_KEY.prepare(key, stored)
    if not isinstance(stored, np.ndarray) or (stored.shape, stored.dtype) != (key.shape, key.dtype):
        raise ValueError(f"has the key {name!r} as {key.dtype}{list(key.shape)}, stored is another")
    return lambda: sys.modules["jax"].numpy.asarray(stored)
