# SPDX-License-Identifier: Apache-2.0
"""Compare an optimizer or a schedule of torch with a stored state.

torch's `load_state_dict` takes the state of another class, or of other parameters: the run then
fails at its next step, or goes on with the hyperparameters of the stored class. That of a schedule
takes everything, and goes on with its own options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptmgr.state.paths import Path, StateMismatch

# Hyperparameters that tell classes apart. Those that torch added to all classes in later versions,
# and those that schedulers add, are not among them.
_OF_A_CLASS = {"alpha", "amsgrad", "beta2_decay", "betas", "centered", "dampening", "etas", "lambd"}
_OF_A_CLASS |= {"history_size", "lr_decay", "momentum", "momentum_decay", "nesterov", "rho"}
_OF_A_CLASS |= {"step_sizes", "t0"}
_OF_A_SCHEDULE = {"T_0", "T_max", "_milestones", "_schedulers", "end_factor", "factor", "gamma"}
_OF_A_SCHEDULE |= {
    "lr_lambdas",
    "milestones",
    "patience",
    "power",
    "start_factor",
    "step_ratio",
    "step_size",
}
_OF_A_SCHEDULE |= {"total_iters", "total_steps"}
_OF_EACH_ELEMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf")
_OF_TORCH = "torch.optim."
_Problems = Iterator[tuple[Path, str]]


def class_of(optimizer: object) -> str:
    """Return the name under which the class of an optimizer is recorded.

    The module is part of it only for torch's own classes: programs move theirs.
    """
    kind = type(_unwrapped(optimizer) if _is_of_accelerate(optimizer) else optimizer)
    return f"{_OF_TORCH if kind.__module__.startswith(_OF_TORCH) else ''}{kind.__name__}"


def all_problems(
    optimizer: Any, stored: Mapping[Any, Any], stored_class: str | None, path: Path
) -> list[tuple[Path, str]]:
    """Return that an optimizer is not of the recorded class, or else its `optimizer_problems`.

    A class that was not recorded is None.
    """
    given = class_of(optimizer)
    if stored_class not in (None, given):
        return [(path, f"is a {given}, stored is the state of a {stored_class}")]
    return list(optimizer_problems(optimizer, stored, path))


def check_same(problems: Iterable[tuple[Path, str]], *, hint: str) -> None:
    """Raise StateMismatch for problems of an optimizer whose state the framework itself loads."""
    lines = [f"{path} {problem}" for path, problem in problems]
    if lines:
        text = "\n  ".join(lines)
        raise StateMismatch(
            f"the checkpoint is of another optimizer or schedule:\n  {text}", hint=hint
        )


def keep_stored_types(target: Any, stored: Mapping[Any, Any]) -> None:
    """Give the moments of an optimizer the types that are stored.

    torch's `load_state_dict` converts them to the type of their parameters: float32 moments of
    bfloat16 weights lose their lower bits.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(target, torch.optim.Optimizer):
        return
    target = _unwrapped(target)
    loaded = target.state_dict()  # of a class of the program, which may convert both ways
    if not all({"state", "param_groups"} <= one.keys() for one in (loaded, stored)):
        return
    held = [one for group in target.param_groups for one in group["params"]]
    indices, stored_indices = (
        [index for group in one["param_groups"] for index in group["params"]]
        for one in (loaded, stored)
    )
    for parameter, index, stored_index in zip(held, indices, stored_indices, strict=True):
        moments = loaded["state"].get(index, {})
        for name, value in stored["state"].get(stored_index, {}).items():
            moment = moments.get(name)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(moment, torch.Tensor)
                and moment.dtype is not value.dtype
            ):
                target.state[parameter][name] = value.to(moment.device)


def _is_of_accelerate(one: object) -> bool:
    return type(one).__module__.startswith("accelerate.")


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in Accelerate's wrapper, or the one that is given."""
    torch = sys.modules.get("torch")
    inner = getattr(optimizer, "optimizer", None)
    return inner if torch and isinstance(inner, torch.optim.Optimizer) else optimizer


def loads_as_stored(one: Any) -> bool:
    """Return whether torch itself loads the state of an optimizer, and no hook rewrites it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(one, torch.optim.Optimizer):
        return False
    one = _unwrapped(one)
    is_torchs = type(one).load_state_dict is torch.optim.Optimizer.load_state_dict
    return is_torchs and not getattr(one, "_optimizer_load_state_dict_pre_hooks", None)


def optimizer_problems(target: Any, stored: Mapping[Any, Any], path: Path) -> _Problems:
    """Yield the path and the sentence of what torch's `load_state_dict` would take, or raise late.

    Only optimizers whose state torch itself loads, as it is stored, are compared.
    """
    if not loads_as_stored(target):
        return
    target = _unwrapped(target)
    stored_groups, stored_state = stored.get("param_groups"), stored.get("state")
    if not (isinstance(stored_groups, list | tuple) and isinstance(stored_state, Mapping)):
        return
    groups, at = target.param_groups, path.key("param_groups")
    if len(groups) != len(stored_groups):
        way_out = (
            "add those that the saved run has added, with add_param_group, before the resumption"
            if len(groups) < len(stored_groups)
            else "add those that the saved run had not added yet after the resumption"
        )
        yield at, f"has {len(groups)} groups, stored are {len(stored_groups)}: {way_out}"
        return
    parameters: dict[Any, Any] = {}
    for index, (group, stored_group) in enumerate(zip(groups, stored_groups, strict=True)):
        count, stored_count = len(group["params"]), len(stored_group["params"])
        if count != stored_count:
            yield at.index(index).key("params"), f"are {count}, stored are {stored_count}"
        parameters |= zip(stored_group["params"], group["params"], strict=False)
        if type(target).__module__.startswith(_OF_TORCH):
            yield from _hyperparameter_problems(target, group, stored_group, at.index(index))
    if type(target).__module__.startswith(_OF_TORCH):
        yield from _shape_problems(parameters, stored_state, path.key("state"))
    yield from _order_problems(groups, stored_groups, at)


def _order_problems(
    groups: Iterable[Mapping[str, Any]], stored: Iterable[Mapping[str, Any]], path: Path
) -> _Problems:
    """Yield the parameters in another order, where both optimizers were given their names."""
    names, stored_names = (
        [name for group in one for name in group.get("param_names", ())] for one in (groups, stored)
    )
    if set(names) == set(stored_names):
        for name, stored_name in zip(names, stored_names, strict=False):
            if name != stored_name:
                yield path, f"have {name} where {stored_name} is stored"


def _hyperparameter_problems(
    target: Any, group: Mapping[str, Any], stored: Mapping[str, Any], path: Path
) -> _Problems:
    why = f"whose optimizer is another than {type(target).__name__}"
    for key in sorted(_OF_A_CLASS & target.defaults.keys() - stored.keys()):
        yield path.key(key), f"is not in the checkpoint, {why}"
    for key in sorted(_OF_A_CLASS & stored.keys() - group.keys()):
        yield path.key(key), f"is only in the checkpoint, {why}"
    key = "decoupled_weight_decay"  # all that tells Adam from AdamW; an option of others
    if key in group and "amsgrad" in group and group[key] != stored.get(key, group[key]):
        yield (
            path.key(key),
            f"is {group[key]}, stored is {stored[key]}: Adam and AdamW differ in it",
        )


def _shape_problems(
    parameters: Mapping[Any, Any], stored: Mapping[Any, Any], path: Path
) -> _Problems:
    for index, values in stored.items():
        for name in _OF_EACH_ELEMENT:
            if index in parameters and getattr(values.get(name), "shape", None) is not None:
                wanted, found = list(parameters[index].shape), list(values[name].shape)
                if wanted != found:
                    at = path.key(index).key(name)
                    yield at, f"is stored with shape {found}, its parameter has {wanted}"


def schedule_problems(target: Any, stored: Mapping[Any, Any], path: Path) -> _Problems:
    """Yield the hyperparameters that tell another schedule of torch; none for those of programs."""
    target = getattr(target, "scheduler", target) if _is_of_accelerate(target) else target
    if type(target).__module__ != "torch.optim.lr_scheduler":
        return
    why = f"whose schedule is another than this {type(target).__name__}"
    given = target.state_dict()
    for key in sorted(_OF_A_SCHEDULE & given.keys() - stored.keys()):
        yield path.key(key), f"is not in the checkpoint, {why}"
    for key in sorted(_OF_A_SCHEDULE & stored.keys() - given.keys()):
        yield path.key(key), f"is only in the checkpoint, {why}"
    at = path.key("_schedulers")
    parts, stored_parts = getattr(target, "_schedulers", ()), stored.get("_schedulers", ())
    if len(parts) != len(stored_parts) and "_schedulers" in given.keys() & stored.keys():
        yield at, f"has {len(parts)} schedules, stored are {len(stored_parts)}"
    for index, (part, stored_part) in enumerate(zip(parts, stored_parts, strict=False)):
        yield from schedule_problems(part, stored_part, at.index(index))
