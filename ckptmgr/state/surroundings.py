# SPDX-License-Identifier: Apache-2.0
"""Surroundings of a state: what a training depends on, and no `state_dict()` returns.

| fact | at a resume |
|---|---|
| `requires_grad` of torch parameters, `training` of torch modules | set; a warning where the program had set another one |
| the parameters in each group of a torch optimizer | compared |
| weak types of JAX arrays | set |
| options of the process, such as the default type of torch | compared; a difference is a warning |
| the stride of the steps | compared with the first step |
| arrays of the objects that `state_dict()` leaves out | said |

They are one JSON text beside the skeleton, encrypted with it. A fact that is as by default is
absent. A row of flags is stored as its changes: `[3, 5]` are the parameters 3 and 4, in the order
of `named_parameters()`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from ckptmgr.formats.file_crc import crc32
from ckptmgr.formats.strict_json import parse_bounded
from ckptmgr.state.optimizers import loads_as_stored
from ckptmgr.state.paths import StateMismatch, TreeError
from ckptmgr.state.wrappers import inner_names

_VERSION = 1
_FLAGS = ("requires_grad", "training")
_Objects = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The facts that are not as by default.

    Attributes:
        flags: Name of a torch module in the state to its flags, by the name of the flag: a CRC32 of
            the names of the parameters or modules, and the changes of the flag.
        groups: Name of a torch optimizer in the state to the changes of each of its groups, over
            the parameters of all modules of the state.
        weak: Names of the weakly typed arrays of JAX; None where there are no arrays of JAX.
        empty: Names of the containers and arrays that were empty when the run began; None where it did
            not say how it began.
        process: Options of the process.
        left_out: Arrays that objects of the state hold, and that it does not return: path, type and shape.
        stride: The largest difference between two steps that ended one after the other; None if only
            one has.
    """

    flags: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    weak: Sequence[str] | None = None
    empty: Sequence[str] | None = None
    process: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    stride: int | None = None

    @classmethod
    def of(
        cls,
        objects: _Objects,
        *,
        weak: Sequence[str] | None = None,
        empty: Sequence[str] | None = None,
        left_out: Sequence[str] = (),
        stride: int | None = None,
    ) -> Surroundings:
        """Return those of the objects in a state, each with its name."""
        return cls(
            flags={name: _flags_of(one) for name, one in objects if _is_module(one)},
            groups=dict(_groups_of(objects)),
            weak=weak,
            empty=empty,
            process=_process_options(),
            left_out=left_out,
            stride=stride,
        )

    @classmethod
    def from_text(cls, text: str | None) -> Surroundings | None:
        """Return those of a text, which may be untrusted; None for those of a later version.

        Raises:
            TreeError: It is damaged.
        """
        if text is None:
            return None
        try:
            body = parse_bounded(text, what="surroundings")
            if body["version"] != _VERSION:
                return None
            found = cls(**{name: body[name] for name in cls.__slots__ if name in body})
            found._check()
        except TreeError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise TreeError(f"the surroundings of the state are damaged: {error!r}") from None
        return found

    def _check(self) -> None:
        """Raise ValueError or TypeError for facts of another form."""
        lists: list[object] = [one for flags in self.flags.values() for one in flags.values()]
        lists += [one for groups in self.groups.values() for one in groups]
        is_numbers = all(type(number) is int for one in lists for number in one)  # type: ignore[attr-defined]
        rows = [one[1:] for flags in self.flags.values() for one in flags.values()]
        if any(one >= other for row in rows for one, other in pairwise(row)):
            raise ValueError("changes of a flag in no order")
        texts = [*(self.weak or ()), *(self.empty or ()), *self.left_out]
        texts += [*self.process, *self.process.values()]
        is_step = self.stride is None or type(self.stride) is int
        if not (is_numbers and is_step and all(type(one) is str for one in texts)):
            raise ValueError("a value of another type")

    def to_text(self) -> str | None:
        """Return the text; None where all facts are as by default."""
        held = ((name, getattr(self, name)) for name in self.__slots__)
        body = {
            name: one
            for name, one in held
            if one or (name in ("weak", "empty") and one is not None)
        }
        return json.dumps({"version": _VERSION, **body}) if body else None

    def check_groups(self, objects: _Objects, *, path: Path) -> None:
        """Raise StateMismatch if an optimizer holds other parameters than the stored one.

        Only where both hold parameters of the modules of the state alone.
        """
        held = dict(_groups_of(objects))
        for name, groups in self.groups.items():
            if name in held and [*map(list, groups)] != held[name]:
                raise StateMismatch(
                    f"the groups of the optimizer {name!r} hold other parameters of the model than the stored ones, or in"
                    " another order: their moments would go to others; nothing was changed",
                    path=path,
                    hint="build the optimizer from the same parameters in the same order",
                )

    def other_options(self) -> list[str]:
        """Return the options of the process that are other than the stored ones."""
        found = []
        for name, read, usual in _OPTIONS:
            held = read()
            stored = self.process.get(name, usual)
            if held not in (None, stored):
                found.append(f"{name} is {held}, at the save it was {stored}")
        return found

    def set_flags(self, objects: _Objects, keep: Callable[[str, str], bool]) -> list[str]:
        """Set the flags of parameters and modules; return those that the program had set otherwise.

        Those that `keep`, given the name of the object and of the flag, stay as they are.
        """
        found = []
        for name, one in objects:
            if not _is_module(one) or name not in self.flags:
                continue
            for flag in _FLAGS:
                parts = [*_parts(one, flag)]
                stored = self.flags[name].get(flag, ())
                is_known = not stored or stored[0] == _names_crc(parts)
                if not is_known or keep(name, flag):
                    continue
                off = _indices(stored[1:], len(parts))
                for index, (path, part) in enumerate(parts):
                    wanted = index not in off
                    if getattr(part, flag) is not wanted:
                        found.append(f"{name}/{path}: {flag} is {not wanted}, stored is {wanted}")
                        setattr(part, flag, wanted)
        return found


def _is_module(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _parts(module: Any, flag: str) -> Iterator[tuple[str, Any]]:
    """Return the parameters, or modules, that have a flag, with their names."""
    found: Iterator[tuple[str, Any]]
    found = module.named_parameters() if flag == "requires_grad" else module.named_modules()
    return found


def _flags_of(module: Any) -> dict[str, list[int]]:
    """Return the flags of a torch module that are not as by default: all are true."""
    modules = [*module.modules()]
    rows = {
        "requires_grad": [one.requires_grad for one in _parameters_of(modules)],
        "training": [one.training for one in modules],
    }
    return {
        flag: [_names_crc(_parts(module, flag)), *_changes(not one for one in row)]
        for flag, row in rows.items()
        if not all(row)
    }


def _parameters_of(modules: Iterable[Any]) -> list[Any]:
    """Return the parameters in the order of `named_parameters()`, in a fifth of its time."""
    held = [one for module in modules for one in module._parameters.values() if one is not None]
    return list({id(one): one for one in held}.values())


def _names_crc(parts: Iterable[tuple[str, Any]]) -> int:
    return crc32("\n".join(inner_names(name for name, _ in parts)).encode())


def _changes(flags: Iterable[bool]) -> list[int]:
    """Return the indices at which a row of flags, false before and behind it, changes."""
    found, last, index = [], False, -1
    for index, one in enumerate(flags):
        if one is not last:
            found.append(index)
            last = one
    return [*found, index + 1] if last else found


def _indices(changes: Sequence[int], count: int) -> set[int]:
    """Return the indices between the changes; those past `count` are not."""
    starts, stops = changes[::2], changes[1::2]
    pairs = zip(starts, stops, strict=False)
    return {index for start, stop in pairs for index in range(start, min(stop, count))}


def _groups_of(objects: _Objects) -> Iterator[tuple[str, list[list[int]]]]:
    """Return the groups of each optimizer that holds parameters of the modules alone."""
    optimizers = [(name, one) for name, one in objects if loads_as_stored(one)]
    modules = [one for _, one in sorted(objects, key=itemgetter(0)) if _is_module(one)]
    if not (optimizers and modules):
        return
    places: dict[int, int] = {}
    for module in modules:
        for parameter in _parameters_of(module.modules()):
            places.setdefault(id(parameter), len(places))
    for name, one in optimizers:
        groups = [
            [places.get(id(each), -1) for each in group["params"]] for group in one.param_groups
        ]
        if all(min(group, default=0) >= 0 for group in groups):
            yield name, [*map(_runs, groups)]


def _runs(places: Sequence[int]) -> list[int]:
    """Return start and stop of each run of successive numbers, in the order of the numbers."""
    found: list[int] = []
    for place in places:
        if found and found[-1] == place:
            found[-1] = place + 1
        else:
            found += [place, place + 1]
    return found


_Option = tuple[str, Callable[[], str | None], str]


def _of_torch(read: Callable[[Any], object]) -> Callable[[], str | None]:
    def found() -> str | None:
        torch: Any = sys.modules.get("torch")
        return None if torch is None else str(read(torch))

    return found


def _of_jax(name: str) -> Callable[[], str | None]:
    def found() -> str | None:
        jax: Any = sys.modules.get("jax")
        return None if jax is None else str(getattr(jax.config, name, None))

    return found


_OPTIONS: tuple[_Option, ...] = (
    ("torch default type", _of_torch(lambda one: one.get_default_dtype()), "torch.float32"),
    (
        "torch.use_deterministic_algorithms",
        _of_torch(lambda one: one.are_deterministic_algorithms_enabled()),
        "False",
    ),
    (
        "torch.set_float32_matmul_precision",
        _of_torch(lambda one: one.get_float32_matmul_precision()),
        "highest",
    ),
    (
        "torch.backends.cudnn.deterministic",
        _of_torch(lambda one: one.backends.cudnn.deterministic),
        "False",
    ),
    (
        "torch.backends.cudnn.allow_tf32",
        _of_torch(lambda one: one.backends.cudnn.allow_tf32),
        "True",
    ),
    ("jax_enable_x64", _of_jax("jax_enable_x64"), "False"),
    ("jax_default_matmul_precision", _of_jax("jax_default_matmul_precision"), "None"),
    ("jax_default_prng_impl", _of_jax("jax_default_prng_impl"), "threefry2x32"),
)
"""Options of the process: the name, what reads it, None where the library is not loaded, and the default."""


def _process_options() -> dict[str, str]:
    held = ((name, read(), usual) for name, read, usual in _OPTIONS)
    return {name: one for name, one, usual in held if one is not None and one != usual}
