# SPDX-License-Identifier: Apache-2.0
"""Compare an optimizer or a schedule of torch with a stored state.

torch's `load_state_dict` takes the state of another class, or of other parameters: the run then
fails at its next step, or goes on with the hyperparameters of the stored class. That of a schedule
takes everything, and goes on with what it was made with.
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
_OF_A_SCHEDULE = {"T_0", "T_max", "_schedulers", "end_factor", "factor", "gamma", "lr_lambdas"}
_OF_A_SCHEDULE |= {"milestones", "patience", "power", "start_factor", "step_ratio", "step_size"}
_OF_A_SCHEDULE |= {"total_iters", "total_steps"}
_OF_EACH_ELEMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf")
_OF_TORCH = "torch.optim."
_Problems = Iterator[tuple[Path, str]]


def class_of(optimizer: object) -> str:
    """Return the name under which the class of an optimizer is recorded.

    The module is part of it only for torch's own classes: programs move theirs.
    """
    is_wrapped = type(optimizer).__module__.startswith("accelerate.")
    kind = type(_unwrapped(optimizer) if is_wrapped else optimizer)
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


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in Accelerate's wrapper, or the one that is given."""
    torch = sys.modules.get("torch")
    inner = getattr(optimizer, "optimizer", None)
    return inner if torch and isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizer_problems(target: Any, stored: Mapping[Any, Any], path: Path) -> _Problems:
    """Yield the path and the sentence of what torch's `load_state_dict` would take, or raise late.

    Only optimizers whose state torch itself loads are compared.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(target, torch.optim.Optimizer):
        return
    target = _unwrapped(target)
    is_torchs = type(target).load_state_dict is torch.optim.Optimizer.load_state_dict
    stored_groups = stored.get("param_groups")
    if not is_torchs or not isinstance(stored_groups, list | tuple):
        return
    groups, at = target.param_groups, path.key("param_groups")
    if len(groups) != len(stored_groups):
        yield at, f"has {len(groups)} groups, stored are {len(stored_groups)}"
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
        yield from _shape_problems(parameters, stored["state"], path.key("state"))


def _hyperparameter_problems(
    target: Any, group: Mapping[str, Any], stored: Mapping[str, Any], path: Path
) -> _Problems:
    why = f"whose optimizer is another than {type(target).__name__}"
    for key in sorted(_OF_A_CLASS & target.defaults.keys() - stored.keys()):
        yield path.key(key), f"is not in the checkpoint, {why}"
    for key in sorted(_OF_A_CLASS & stored.keys() - group.keys()):
        yield path.key(key), f"is only in the checkpoint, {why}"
    key = "decoupled_weight_decay"  # all that tells Adam from AdamW
    if key in group and group[key] != stored.get(key, group[key]):
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
    inner = getattr(target, "scheduler", None)  # of Accelerate's wrapper
    target = target if inner is None else inner
    if type(target).__module__ == "torch.optim.lr_scheduler":
        yield from _schedule_problems(type(target).__name__, target.state_dict(), stored, path)


def _schedule_problems(
    name: str, given: Mapping[str, Any], stored: Mapping[Any, Any], path: Path
) -> _Problems:
    for key in sorted(_OF_A_SCHEDULE & given.keys() - stored.keys()):
        yield path.key(key), f"is not in the checkpoint, whose schedule is another than this {name}"
    for key in sorted(_OF_A_SCHEDULE & stored.keys() - given.keys()):
        yield (
            path.key(key),
            f"is only in the checkpoint, whose schedule is another than this {name}",
        )
    at = path.key("_schedulers")
    parts, stored_parts = given.get("_schedulers", ()), stored.get("_schedulers", ())
    if len(parts) != len(stored_parts) and "_schedulers" in given.keys() & stored.keys():
        yield at, f"has {len(parts)} schedules, stored are {len(stored_parts)}"
    for index, (part, stored_part) in enumerate(zip(parts, stored_parts, strict=False)):
        yield from _schedule_problems(f"part of a {name}", part, stored_part, at.index(index))
