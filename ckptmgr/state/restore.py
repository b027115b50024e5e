# SPDX-License-Identifier: Apache-2.0
"""Restore into an existing state: compare first, then fill.

The comparison collects every difference and plans the steps; only a plan without differences is
carried out. Random number generators come last, because loading other objects may draw from them.
"""

from __future__ import annotations

import io
import logging
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np

from ckptmgr.core.regions import region_shape
from ckptmgr.state.arrays import Framework, described, framework_of, is_instance_by_name
from ckptmgr.state.configs import fill_config, is_config, problems_of
from ckptmgr.state.fill import (
    Fill,
    SharedTargets,
    are_alike,
    can_copy_into,
    fill_all,
    fill_mindspore,
    has_dtensors,
    load_object,
    local_part,
    replace_content,
    takes_directly,
    with_values,
)
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.growth import as_rows, is_empty, takes_rows, with_entries
from ckptmgr.state.jax_shards import addressable_region, is_multi_device, placed_as, rebuild_array
from ckptmgr.state.optimizers import optimizer_problems, schedule_problems
from ckptmgr.state.paths import Path, TreeError, mismatch
from ckptmgr.state.random import (
    build_generator,
    generator_key,
    generator_kind,
    global_generators,
    set_generator,
)
from ckptmgr.state.read_back import READ_BACK, ReadBack, StateComparison, Tags, frozen
from ckptmgr.state.records import JAX_KEY, Record, is_jax_key, is_nnx, record_of
from ckptmgr.state.restore_steps import Parts, Plan, Step, Value, Visit, restored_by
from ckptmgr.state.scalars import PLAIN_TYPES, is_atom, is_history
from ckptmgr.state.surroundings import Surroundings
from ckptmgr.state.wrappers import renamed

_LOG = logging.getLogger(__name__)
_NUMBERS = frozenset({bool, int, float, complex})


class Restorer:
    """Compares one state with a stored one and fills it; see `tree.restore`.

    Args:
        read_contents: Called with a stored value before the contents of arrays in it are compared.
        seen: As for `tree.plan_restore`.

    Attributes:
        shared: The objects and the memory that are filled.
        fills: The copies to make, known once `plan` returned.
        filled: `id` of stored arrays whose target is filled already.
    """

    def __init__(
        self,
        *,
        read_contents: Callable[[object], None] = lambda _: None,
        seen: Surroundings | None = None,
    ) -> None:
        self._seen = seen or Surroundings()
        self._grown: list[str] = []
        self.shared = SharedTargets(read_contents=read_contents)
        self._read_contents = read_contents
        self._differences: list[str] = []
        self._generators: list[Callable[[], None]] = []
        self._steps: list[Step | Value] = []
        self._stored: object = None
        self.fills: list[Fill] = []
        self.filled: set[int] = set()

    def plan(self, target: object, stored: object) -> None:
        """Compare; raise StateMismatch when structure, shape or type differ. Nothing is changed."""
        self._stored = stored
        steps = self._steps
        stack: list[Visit | Step] = [(target, stored, Path())]
        while stack:
            item = stack.pop()
            if isinstance(item, Step):
                steps.append(item)
                continue
            plan = self._plan(*item)
            if isinstance(plan, Parts):
                stack.append(plan.step)
                stack.extend(reversed(plan.visits))
            else:
                steps.append(plan)
        self._differences += self.shared.problems(self.fills)
        if self._differences:
            raise mismatch(
                "this state",
                self._differences,
                hint="build the same model and optimizer that was saved, or load the state without"
                " a target; None in a target takes whatever is stored, and only= of load and"
                " load_state takes a part of the state",
            )

    def carry_out(
        self, how: ReadBack | None = None, comparison: StateComparison | None = None
    ) -> object:
        """Fill the state that was compared, and return it; `comparison` knows what is `filled`.

        Raises:
            StateMismatch: The restored state is another than the stored one.
        """
        how = how or READ_BACK
        if self._grown:
            _LOG.warning("took what is stored into what is empty here: %s", ", ".join(self._grown))
        stored = frozen(self._stored) if how.is_on else None
        fill_all([one for one in self.fills if id(one.stored) not in self.filled])
        restored = restored_by(self._steps)
        comparison = comparison or StateComparison({}, Tags())
        if how.is_on:
            comparison.run(stored, restored, Path())
        for set_state in self._generators:
            set_state()
        comparison.run_generators()
        comparison.check(how)
        return restored

    def _differ(self, path: Path, problem: str) -> Value:
        self._differences.append(f"{path} {problem}")
        return Value(None)

    def _differ_in_type(self, path: Path, target: Any, stored: Any) -> Value:
        return self._differ(path, f"is {described(target)}, stored is {described(stored)}")

    def _claim(self, target: Any, stored: Any, path: Path, *, key: object = None) -> None:
        """Record that `stored` will be put into `target`, for which there may be only one value."""
        problem = self.shared.add_object(key or id(target), target, stored, path)
        if problem is not None:
            self._differ(path, problem)

    def _plan(self, target: Any, stored: Any, path: Path) -> Plan:
        """Return the value, or the step, or the parts and the step, that give the restored `target`."""
        kind = type(target)
        if target is None or (kind in PLAIN_TYPES and type(stored) in PLAIN_TYPES):
            return Value(stored)
        if kind in _NUMBERS and _is_single(stored):  # as of jit, or a loss that became a tensor
            return Value(stored)
        if path.is_part and is_empty(target) and self._may_grow(path):
            grown = self._plan_growth(target, stored, path)
            if grown is not None:
                return grown
        if kind is dict and isinstance(stored, dict):
            self._claim(target, stored, path)
            return self._plan_mapping(target, stored, path)
        framework = framework_of(target)
        if framework == "torch":
            return self._plan_tensor(target, stored, path)
        if framework is not None and not isinstance(target, np.generic):
            return self._plan_array(target, stored, path, framework)
        if is_config(target):
            return self._plan_config(target, stored, path)
        if callable(getattr(target, "load_state_dict", None)) and not isinstance(target, type):
            return self._plan_object(target, stored, path)
        if generator_kind(target):
            return self._plan_generator(target, stored, path)
        if type(target) is ModuleType:
            return self._plan_module(target, stored, path)
        if is_atom(target) and is_atom(stored):
            return Value(stored)
        match target:
            case MutableMapping() if isinstance(stored, Mapping) and not is_nnx(target):
                self._claim(target, stored, path)
                return self._plan_mapping(target, stored, path)
            case list() if isinstance(stored, list):
                self._claim(target, stored, path)
                return self._plan_sequence(target, stored, path)
            case deque() if isinstance(stored, deque):
                self._claim(target, stored, path)
                return self._plan_deque(target, stored, path)
            case tuple() if isinstance(stored, tuple):
                return self._plan_sequence(target, stored, path)
            case set() | bytearray() | io.BytesIO() if type(stored) is type(target):
                self._claim(target, stored, path)
                return Step(0, lambda _: replace_content(target, stored))
            case frozenset() if isinstance(stored, frozenset):
                return Value(stored)
        record = record_of(target)
        if record is not None:
            return self._plan_record(record, target, stored, path)
        return self._differ_in_type(path, target, stored)

    def _may_grow(self, path: Path) -> bool:
        """Return whether a container was empty when the saved run began, or nothing says so."""
        empty = self._seen.empty
        return empty is None or path.tensor_name() in empty

    def _plan_growth(self, target: Any, stored: Any, path: Path) -> Plan | None:
        """Return how an empty container or array takes what is stored; None if it is another kind."""
        if takes_rows(target, stored):
            grown: Plan = Value(as_rows(target, stored))
        elif isinstance(target, MutableMapping) and isinstance(stored, Mapping) and stored:
            grown = Step(0, lambda _: with_entries(target, stored))
        elif isinstance(target, list | tuple) and isinstance(stored, list | tuple) and stored:
            grown = Step(0, lambda _: with_values(target, stored))
        elif isinstance(stored, Mapping) and stored and framework_of(target) is None:
            record = record_of(target)
            put = None if record is None else record.put
            if put is None:
                return None
            grown = Step(0, lambda _: put(target, stored))
        else:
            return None
        if framework_of(target) is None:
            self._claim(target, stored, path)
        if self._seen.empty is None and not is_history(stored):
            self._grown.append(str(path))
        return grown

    def _plan_record(self, record: Record, target: Any, stored: Any, path: Path) -> Plan:
        if record.is_mutable:
            self._claim(target, stored, path)
        try:
            if record.prepare is not None:
                self._read_contents(stored)
                carry_out = record.prepare(target, stored)
                return Step(0, lambda _: carry_out())
            content: Any = record.content(target)
        except ValueError as error:
            return self._differ(path, str(error))
        if not isinstance(stored, Mapping):
            return self._differ_in_type(path, target, stored)
        put, parts = record.put, self._plan_mapping(content, stored, path)
        assert put is not None  # noqa: S101 - it has fields

        def make(values: list[Any]) -> object:
            parts.step.make(values)
            return put(target, content)

        return Parts(parts.visits, Step(parts.step.takes, make))

    def _plan_deque(self, target: Any, stored: Any, path: Path) -> Plan:
        if target.maxlen != stored.maxlen:
            return self._differ(path, f"has maxlen {target.maxlen}, stored is {stored.maxlen}")
        if len(target) != len(stored):  # it grows as it is used, from nothing in a fresh state
            return Step(0, lambda _: with_values(target, stored))
        return self._plan_sequence(target, stored, path)

    def _plan_config(self, target: Any, stored: Any, path: Path) -> Step:
        self._claim(target, stored, path)
        for at, problem in problems_of(target, stored, path):
            self._differ(at, problem)
        return Step(0, lambda _: fill_config(target, stored))

    def _plan_mapping(
        self, target: MutableMapping[Any, Any], stored: Mapping[Any, Any], path: Path
    ) -> Parts:
        is_open = isinstance(target, defaultdict)  # its keys come as they are used
        self._compare_keys(target, stored, path, is_open=is_open)
        keys: list[Any] = []
        visits: list[Visit] = []
        keeps_values = type(target) in (dict, OrderedDict)  # another type may return copies
        for key, value in stored.items():
            if is_open or key in target:
                held = target.get(key)
                if keeps_values and takes_directly(held, value):
                    self.fills.append(Fill(held, value, (path, "key", key)))
                else:
                    keys.append(key)
                    visits.append((held, value, Path(path, "key", key)))

        def make(values: list[Any]) -> object:
            # Not update(), which would add the counts of a Counter.
            for key, value in zip(keys, values, strict=True):
                target[key] = value
            return target

        return Parts(visits, Step(len(keys), make))

    def _compare_keys(
        self,
        target: Mapping[Any, Any],
        stored: Mapping[Any, Any],
        path: Path,
        *,
        is_open: bool = False,
    ) -> None:
        if target.keys() == stored.keys():
            return
        for key in target:
            if key not in stored:
                self._differ(path.key(key), "is not in the checkpoint")
        for key in () if is_open else stored:
            if key not in target:
                self._differ(path.key(key), "is only in the checkpoint")

    def _plan_sequence(self, target: Any, stored: Any, path: Path) -> Plan:
        if len(target) != len(stored):
            if all(map(is_history, (*target, *stored))) and not hasattr(target, "_fields"):
                return Step(0, lambda _: with_values(target, stored))
            return self._differ(path, f"has {len(target)} elements, stored are {len(stored)}")
        if PLAIN_TYPES.issuperset(map(type, chain(target, stored))):
            return Step(0, lambda _: with_values(target, stored))
        visits = [(target[index], value, path.index(index)) for index, value in enumerate(stored)]
        return Parts(visits, Step(len(visits), lambda values: with_values(target, values)))

    def _plan_array(self, target: Any, stored: Any, path: Path, framework: Framework) -> Plan:
        if framework == "jax" and is_jax_key(target):
            return self._plan_record(JAX_KEY, target, stored, path)
        if framework == "jax" and type(stored) in _NUMBERS and _is_single(target):
            return Value(stored)
        if not isinstance(stored, np.ndarray):
            return self._differ_in_type(path, target, stored)
        if framework != "numpy":
            return self._plan_foreign(target, stored, path)
        if (target.shape, target.dtype) != (stored.shape, stored.dtype):
            return self._differ_in_type(path, target, stored)
        if not target.flags.writeable:
            return Value(stored)
        self.fills.append(Fill(target, stored, path.place))
        return Value(target)

    def _plan_tensor(
        self, target: Any, stored: Any, path: Path, *, via_load_state_dict: bool = False
    ) -> Value:
        local = local_part(target)
        if framework_of(stored) != "torch" or not are_alike(local, stored):
            return self._differ_in_type(path, local, stored)
        if via_load_state_dict and local.is_meta:  # load_state_dict would warn and do nothing
            return self._differ(path, "is on the meta device, which holds no elements")
        if not can_copy_into(local):
            return Value(stored)
        self.fills.append(Fill(local, stored, path.place, via_load_state_dict))
        return Value(target)

    def _plan_foreign(self, target: Any, stored: np.ndarray, path: Path) -> Plan:
        if is_multi_device(target):
            return self._plan_multi_device(target, stored, path)
        if (tuple(target.shape), str(target.dtype).lower()) != (stored.shape, stored.dtype.name):
            return self._differ_in_type(path, target, stored)
        if is_instance_by_name(target, "mindspore.common.tensor", "Tensor"):
            self._claim(target, stored, path)
            return Step(0, lambda _: fill_mindspore(target, stored))
        weak = self._seen.weak
        is_weak = target.weak_type if weak is None else path.tensor_name() in weak
        return Step(0, lambda _: placed_as(target, stored, is_weak=is_weak))

    def _plan_multi_device(self, target: Any, stored: np.ndarray, path: Path) -> Plan:
        lengths = region_shape(addressable_region(target) or ())
        if (lengths, str(target.dtype)) != (stored.shape, stored.dtype.name):
            held = f"{target.dtype}{list(lengths)} here"
            return self._differ(path, f"is {held}, stored is {described(stored)}")
        return Step(0, lambda _: rebuild_array(target, stored))

    def _plan_object(self, target: Any, stored: Any, path: Path) -> Plan:
        if not isinstance(stored, Mapping | list | tuple):
            return self._differ_in_type(path, target, stored)
        self._claim(target, stored, path)
        if isinstance(target, GlobalRandom):
            self._read_contents(stored)
            try:
                self._generators.append(target.plan(stored))
            except ValueError as error:
                return self._differ(path, str(error))
            return Value(target)
        torch = sys.modules.get("torch")
        is_sharded = has_dtensors(target)
        if torch is not None and isinstance(target, torch.nn.Module) and not is_sharded:
            current = target.state_dict()
            stored = renamed(stored, current)
            self._compare_module(current, stored, path.state_dict())
        elif isinstance(stored, Mapping) and not is_sharded:
            for problems_of_kind in (optimizer_problems, schedule_problems):
                for at, problem in problems_of_kind(target, stored, path.state_dict()):
                    self._differ(at, problem)
        if is_instance_by_name(target, "mindspore.nn.cell", "Cell") and isinstance(stored, Mapping):
            return self._plan_cell(target, stored, path.state_dict())
        if isinstance(stored, Mapping) and is_sharded:
            return self._plan_sharded(target, stored, path.state_dict())
        return Step(0, lambda _: load_object(target, stored, path))

    def _plan_cell(self, target: Any, stored: Mapping[Any, Any], path: Path) -> Parts:
        # MindSpore's load_state_dict takes only its tensors, and not the state_dict of its
        # optimizers.
        parts = self._plan_mapping(target.state_dict(), stored, path)
        return Parts(parts.visits, Step(parts.step.takes, lambda _: target))

    def _plan_sharded(self, target: Any, stored: Mapping[Any, Any], path: Path) -> Plan:
        # Its load_state_dict takes DTensors: the stored tensors are copied into the current ones.
        current = target.state_dict()
        if isinstance(target, sys.modules["torch"].optim.Optimizer):
            if stored.get("state") and not current["state"]:
                return self._differ(
                    path.key("state"),
                    "is empty, and DTensors are filled in place: before, take a step or call"
                    " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)",
                )
            for at, problem in optimizer_problems(target, {**stored, "state": {}}, path):
                self._differ(at, problem)
            current["param_groups"] = None  # takes the stored ones, also of an older torch
        parts = self._plan_mapping(current, stored, path)

        def make(values: list[Any]) -> object:
            parts.step.make(values)
            target.load_state_dict(current)
            return target

        return Parts(parts.visits, Step(parts.step.takes, make))

    def _compare_module(self, current: Mapping[str, Any], stored: Any, path: Path) -> None:
        if not isinstance(stored, Mapping):
            self._differ_in_type(path, current, stored)
            return
        self._compare_keys(current, stored, path)
        for key in current:
            if key in stored and framework_of(current[key]) == "torch":
                self._plan_tensor(
                    current[key], stored[key], path.key(key), via_load_state_dict=True
                )

    def _plan_generator(self, target: Any, stored: Any, path: Path) -> Value:
        if generator_kind(target) != generator_kind(stored):
            return self._differ(
                path, f"is a {generator_kind(target)}, stored is a {generator_kind(stored)}"
            )
        self._claim(target, stored, path, key=generator_key(target))
        self._generators.append(lambda: set_generator(target, stored))
        return Value(target)

    def _plan_module(self, target: ModuleType, stored: Any, path: Path) -> Value:
        generators = global_generators(target)
        if not isinstance(generators, tuple):
            self._plan_generator(generators, stored, path)
            return Value(target)
        if not isinstance(stored, tuple) or len(stored) != len(generators):
            many = f" of {len(stored)}" if isinstance(stored, tuple) else ""
            return self._differ(
                path, f"has {len(generators)} generators, stored is {described(stored)}{many}"
            )
        self._read_contents(stored)
        for index, generator in enumerate(generators):
            try:
                made = build_generator("torch.Generator", [str(generator.device), stored[index]])
            except TreeError as error:
                self._differ(path.index(index), error.message)
            else:
                self._plan_generator(generator, made, path.index(index))
        return Value(target)


def _is_single(value: Any) -> bool:
    """Return whether a value is an array of one number, without dimensions."""
    return framework_of(value) is not None and value.ndim == 0
