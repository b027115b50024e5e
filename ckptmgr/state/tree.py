# SPDX-License-Identifier: Apache-2.0
"""Nested state to named tensors and back, without pickle.

A state is any nesting of

* dicts (also OrderedDict, Counter, defaultdict), lists, deques, tuples, named tuples and sets;
* numbers, strings, bytes, `io.BytesIO`, `Decimal`, `range`, paths, dates, times and timedeltas;
* arrays of NumPy, torch, JAX and MindSpore, typed keys of JAX, sparse arrays of SciPy;
* random number generators, and the modules `random`, `numpy.random`, `torch` and `torch.cuda`, each
  for its global generator;
* dataclasses, `SimpleNamespace`, `argparse.Namespace`, members of an Enum, omegaconf's
  configurations, State, Module and Optimizer of flax.nnx, and objects with `state_dict()`.

Its arrays become named tensors that every file format can hold; everything else becomes one line of
JSON, the skeleton.

* The loaded state is equal: types, dtypes (also those that no file format knows), NaN and -0.0,
  keys and their order.
* Arrays that share memory share it again (tied weights); the shared bytes are stored once. One
  list, dict, set, bytearray, generator or object in several places is one again.
* A value that cannot be stored is refused with its path. Nothing in a skeleton is ever imported or
  called.

Some values come back in another form unless they are restored into one of their kind:

* a named tuple as a plain tuple, a dataclass or namespace as the dict of its fields, an object of
  flax.nnx as the nested dict of its variables;
* a DictConfig or ListConfig as a plain dict or list with its interpolations as text;
* a member of an Enum as its name, of a Flag as its number; a defaultdict without its factory;
* an object with `state_dict()` as its state dict, a module as its generator, `torch.cuda`
  as the states of its generators, one for each device;
* a torch tensor on the CPU, a JAX or MindSpore array as a NumPy array, a JAX key as the dict of its
  kind and data, a sparse array as the dict of its arrays.

A time zone comes back as its offset from UTC. Fields of a dataclass that JAX takes for static
(`pytree_node=False` in flax.struct) are not stored: the target keeps its own. Strides are not kept:
a lone transposed array comes back C-contiguous.

>>> import numpy as np
>>> state = {"weights": np.arange(3.0), "step": 7, "history": [0.5, float("nan")]}
>>> flat = flatten(state)
>>> [tensor.spec.name for tensor in flat.tensors]
['weights']
>>> stored = {t.spec.name: np.frombuffer(t.content(), t.spec.dtype.to_numpy()) for t in flat.tensors}
>>> unflatten(flat.skeleton, lambda name: stored[name])
{'weights': array([0., 1., 2.]), 'step': 7, 'history': [0.5, nan]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptmgr.formats.tensor import Tensor, flat_memory
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.state.flatten import Flattener
from ckptmgr.state.paths import StateMismatch, TreeError

if TYPE_CHECKING:  # one process has no slices, and a save needs nothing that restores
    from ckptmgr.state.read_back import ReadBack
    from ckptmgr.state.slices import Slice, Slicer
    from ckptmgr.state.stored_arrays import ReadTensor
    from ckptmgr.state.surroundings import Surroundings

__all__ = [
    "FlatState",
    "Restoration",
    "StateMismatch",
    "TreeError",
    "check_storable",
    "flatten",
    "plan_restore",
    "restore",
    "unflatten",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state as a file stores it.

    Attributes:
        tensors: In the order of the tree, with unique names, of types that every format can hold.
            Their contents are views of live memory: copy them before training goes on.
        skeleton: All other values, as ASCII JSON without a newline; the same state gives the same
            text.
        aliases: Second names of whole tensors (tied weights) to their stored names, for
            `__metadata__`.
        slices: Name to slice, for leaves that are parts of larger tensors; the skeleton has the
            shapes of the whole tensors.
        objects: The objects with a `state_dict()`, each with its name.
        weak: Names of the weakly typed arrays of JAX; None where there are no arrays of JAX.
    """

    tensors: list[Tensor]
    skeleton: str
    aliases: Mapping[str, str]
    slices: Mapping[str, Slice] = field(default_factory=dict)
    objects: Sequence[tuple[str, object]] = ()
    weak: Sequence[str] | None = None

    @property
    def size_bytes(self) -> int:
        """About the size of the file."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors) + len(self.skeleton)


def flatten(state: object, slicer: Slicer | None = None) -> FlatState:
    """Flatten a state; nothing in it is changed or copied.

    Raises:
        UnsupportedState: A value of another type, a cycle, or more than 500 levels; names the path.
    """
    with gc_paused():
        return _flattened(state, slicer)  # a call, so that the walk's objects die within the pause


def _flattened(state: object, slicer: Slicer | None) -> FlatState:
    flattener = Flattener(slicer)
    tensors, skeleton, aliases = flattener.run(state)
    return FlatState(
        tensors=tensors,
        skeleton=skeleton,
        aliases=aliases,
        slices=flattener.slices,
        objects=flattener.objects,
        weak=flattener.weak,
    )


def check_storable(state: object) -> Sequence[tuple[str, object]]:
    """Return the objects in a state, as `FlatState.objects`.

    Raises:
        UnsupportedState: It has a value that cannot be stored; names the path. No `state_dict()` is
            called: `flatten` finds the objects in its result.
    """
    flattener = Flattener(is_dry=True)
    flattener.walk(state)
    return flattener.objects


def unflatten(
    skeleton: str, read: ReadTensor, *, fill: Callable[[str], None] | None = None
) -> object:
    """Rebuild a state from its skeleton, which may be untrusted, and its tensors.

    `read` returns the tensor of a name as a NumPy array of its stored type; it is called once for
    each name. A writable array becomes part of the state; a read-only one is copied. With `fill`,
    the contents need not be there: it reads that of a tensor, where the state is built from it.

    Raises:
        TreeError: The skeleton is damaged or does not fit the tensors.
    """
    from ckptmgr.state.unflatten import Unflattener

    with gc_paused():
        return Unflattener(read, fill=fill).run(skeleton)


def restore(target: object, skeleton: str, read: ReadTensor, how: ReadBack | None = None) -> object:
    """Restore a stored state into an existing one; return it, or its replacement if immutable.

    All tensors are read and compared with the target first. Then objects get `load_state_dict`,
    arrays and tensors of equal shape and type are filled in place, dicts, lists and sets are
    updated in place, generators get their state last, and plain values are replaced. None in the
    target takes any stored value. A list whose length differs is replaced when it holds plain
    values only (a history), or dicts, lists and tuples of them. An empty deque takes any elements,
    and a defaultdict any keys that it lacks.

    Raises:
        StateMismatch: Missing or extra keys, other shapes or types, two values for one memory or
            object; names every path. Nothing was changed.
        TreeError: The skeleton is damaged or does not fit the tensors. Nothing was changed.
    """
    return plan_restore(target, skeleton, read, how)()


def plan_restore(
    target: object,
    skeleton: str,
    read: ReadTensor,
    how: ReadBack | None = None,
    *,
    seen: Surroundings | None = None,
) -> Callable[[], object]:
    """Read all tensors and compare them with the target; return a function that then restores.

    `seen` has the names of the weakly typed arrays of JAX, and of the containers that were empty
    when the run began; with None they are those of the target.

    Raises:
        StateMismatch, TreeError: As `restore`.
    """
    from ckptmgr.state.restore import Restorer

    restorer = Restorer(seen=seen)
    with gc_paused():
        restorer.plan(target, unflatten(skeleton, read))
    return partial(restorer.carry_out, how)


class Restoration:
    """`restore` in two steps, so that contents can be read straight into the target's memory.

    Args:
        target: As for `restore`.
        skeleton: As for `restore`.
        read: Returns an array for each tensor, whose content need not be read yet.
        fill: Reads the content of a tensor now.
        seen: As for `plan_restore`.

    Attributes:
        direct: Tensor name to the target's memory, where that memory is the only use of the
            content.

    Raises:
        StateMismatch, TreeError: As `restore`.
    """

    def __init__(
        self,
        target: object,
        skeleton: str,
        read: ReadTensor,
        *,
        fill: Callable[[str], None],
        seen: Surroundings | None = None,
    ) -> None:
        from ckptmgr.state.destinations import disjoint, memory_of
        from ckptmgr.state.restore import Restorer
        from ckptmgr.state.unflatten import Unflattener

        with gc_paused():
            unflattener = Unflattener(read, fill=fill)
            self._restorer = Restorer(read_contents=unflattener.arrays.read_contents, seen=seen)
            self._restorer.plan(target, unflattener.run(skeleton))
            self._fills = {
                name: one
                for one in self._restorer.fills
                if unflattener.arrays.whole.get(
                    name := unflattener.arrays.leaves.get(id(one.stored), "")
                )
            }
            found = {name: memory_of(one.target) for name, one in self._fills.items()}
            memories = {name: memory for name, memory in found.items() if memory is not None}
            has_overlaps = self._restorer.shared.has_overlaps
            self.direct = disjoint(memories) if has_overlaps else memories

    def finish(self, how: ReadBack | None = None) -> object:
        """Return the restored state; the caller has filled `direct` and all other arrays.

        Raises:
            StateMismatch: The restored state is another than the stored one.
        """
        from ckptmgr.state.read_back import READ_BACK, StateComparison, Tags

        how, tags, known = how or READ_BACK, Tags(), {}
        for name, memory in self.direct.items():
            one = self._fills[name]
            self._restorer.filled.add(id(one.stored))
            if how.is_on:  # later, other values may be there
                known[id(one.stored)] = tags.of(flat_memory(memory))
            if one.via_load_state_dict:
                one.stored.data = one.target.detach()
        return self._restorer.carry_out(how, StateComparison(known, tags))
