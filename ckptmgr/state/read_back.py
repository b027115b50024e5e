# SPDX-License-Identifier: Apache-2.0
"""StateComparison of a restored state with the stored one, after the restore.

Frameworks and objects may alter what they load: torch casts the moments of an optimizer to the type
of its parameters, a hook writes other weights. Arrays, tensors, generators and the containers that
this library fills must be equal bit for bit. What else the `state_dict()` of an object returns is
only told, and only where two readings are equal: a clock moves by being read.

Contents are compared by a tag (GMAC under a random key of the comparison), because the contents of
tensors that were read straight into the state are nowhere else.
"""

from __future__ import annotations

import io
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from secrets import token_bytes
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from blake3 import blake3

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.core.notes import add_note
from ckptmgr.state.array_leaves import stored_form
from ckptmgr.state.arrays import described, framework_of
from ckptmgr.state.configs import config_content, is_config
from ckptmgr.state.fill import are_alike, local_part
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.jax_shards import addressable_part, addressable_region, is_multi_device
from ckptmgr.state.paths import Path, StateMismatch, shown
from ckptmgr.state.random import generator_kind, generator_state, global_generators
from ckptmgr.state.records import JAX_KEY, is_jax_key, is_nnx, record_of
from ckptmgr.state.scalars import PLAIN_TYPES, encode_atom
from ckptmgr.state.torch_memory import torch_bytes
from ckptmgr.state.wrappers import renamed

if TYPE_CHECKING:
    from ckptmgr.formats.tensor import Tensor

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 30  # OpenSSL takes at most 2 GiB at once
_SMALL_BYTES = (
    1 << 20
)  # the tag of such contents is a BLAKE3, whose library every load has imported
_PLAIN_BYTES = 64 << 10  # of arrays that are compared at once
_MOST_SHOWN = 8
_NONCE = bytes(12)
_SEQUENCES = (list, tuple, deque)
_EXACT = PLAIN_TYPES - {float, complex}  # types whose equal values are the same


@dataclass(frozen=True, slots=True)
class ReadBack:
    """How a restored state is compared with the stored one.

    Attributes:
        may_differ: Names of parts that may differ: `ema`, `model/head`.
        is_strict: Whether a plain value in the `state_dict()` of an object may not differ either.
        is_on: False for no comparison.
    """

    may_differ: tuple[str, ...] = ()
    is_strict: bool = False
    is_on: bool = True

    def accepts(self, name: str) -> bool:
        """Return whether a part, named as its tensor in the file, may differ."""
        parts = name.split("/")
        return any(
            name == one
            or name.startswith(f"{one}/")
            or any(part == one or part.startswith(f"{one}.") for part in parts)
            for one in self.may_differ
        )


READ_BACK = ReadBack()


class Tags:
    """Tags of contents, equal for equal bytes; of no meaning outside of this object."""

    @cached_property
    def _seal(self) -> Callable[[bytes, bytes, Any], bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        # The nonce may repeat: no tag leaves the process.
        return AESGCM(token_bytes(16)).encrypt

    def of(self, content: Any) -> bytes:
        """Return the tag of a flat content, as `Tensor.content` returns it."""
        memory = memoryview(content)
        if len(memory) <= _SMALL_BYTES:
            return blake3(memory).digest()
        starts = range(0, max(1, len(memory)), _PIECE_BYTES)
        return b"".join(
            self._seal(_NONCE, b"", memory[start : start + _PIECE_BYTES]) for start in starts
        )


def frozen(stored: Any) -> Any:
    """Return a stored value whose containers no `load_state_dict` can change; leaves are the same."""
    kind = type(stored)
    if kind in PLAIN_TYPES:
        return stored
    if isinstance(stored, Mapping):
        return {key: frozen(one) for key, one in stored.items()}
    if isinstance(stored, _SEQUENCES):
        return stored if PLAIN_TYPES.issuperset(map(type, stored)) else [*map(frozen, stored)]
    return copy(stored) if isinstance(stored, set | bytearray) else stored


class _Reading(NamedTuple):
    """An object, and what its `state_dict()` returned."""

    of: Any
    content: object
    path: Path


class _Visit(NamedTuple):
    stored: Any
    live: Any
    path: Path
    reading: _Reading | None = None  # the innermost object that is no container of ours


class StateComparison:
    """Compares the parts of a restored state with the stored ones, generators last.

    Args:
        tags: The tags of stored arrays whose contents are not in memory, by `id`; and what made them.
    """

    def __init__(self, known: Mapping[int, bytes], tags: Tags) -> None:
        self._known, self._tags = known, tags
        self._hard: list[tuple[Path, str]] = []
        self._soft: list[tuple[_Visit, str]] = []
        self._generators: list[_Visit] = []

    def run(
        self, stored: object, live: object, path: Path, reading: _Reading | None = None
    ) -> None:
        """Compare everything but the generators, which `load_state_dict` may move."""
        stack = [_Visit(stored, live, path, reading)]
        while stack:
            stack.extend(self._parts(stack.pop()))

    def run_generators(self) -> None:
        """Compare the generators."""
        visits, self._generators = self._generators, []
        for stored, live, path, _ in visits:
            if isinstance(live, GlobalRandom):  # which warns of other devices itself
                content = live.state_dict()
                self.run(stored, content, path, _Reading(live, content, path))
            else:
                self.run(_generator_content(stored), _generator_content(live), path)

    def check(self, how: ReadBack) -> None:
        """Raise StateMismatch, or warn, about what differs and may not."""
        hard = [one for one in self._hard if not how.accepts(one[0].tensor_name())]
        found = [(one.path, problem) for one, problem in self._lasting()]
        soft = [one for one in found if not how.accepts(one[0].tensor_name())]
        if how.is_strict:
            hard, soft = hard + soft, []
        if soft:
            _LOG.warning("restored otherwise than stored:%s", _listed(soft))
        if hard:
            raise StateMismatch(
                f"the restored state is another than the stored one, and is overwritten:{_listed(hard)}",
                hint="something changed it while it was loaded, such as a load_state_dict that converts, or a hook:"
                " mend that, or name the parts that may differ, Resume(may_differ=[...])",
            )

    def _lasting(self) -> list[tuple[_Visit, str]]:
        """Return the differences of plain values that a second reading of their object has, too."""
        readings = {id(one.reading): one.reading for one, _ in self._soft if one.reading}
        again = StateComparison({}, self._tags)
        for reading in readings.values():
            again.run(frozen(reading.content), reading.of.state_dict(), reading.path, reading)
        moving = {str(one.path) for one, _ in again._soft}
        return [one for one in self._soft if str(one[0].path) not in moving]

    def _differ(self, visit: _Visit, problem: str) -> None:
        if visit.reading is None or _has_arrays(visit.stored):
            self._hard.append((visit.path, problem))
        else:
            self._soft.append((visit, problem))

    def _parts(self, visit: _Visit) -> Iterable[_Visit]:
        """Compare a value, and return the visits to its parts."""
        stored, live = visit.stored, visit.live
        if id(stored) not in self._known and (stored is live or _are_small_and_equal(stored, live)):
            return ()
        if type(stored) in PLAIN_TYPES and type(live) in PLAIN_TYPES:
            return self._plain(visit)
        if framework_of(live) is not None and not isinstance(live, np.generic):
            return self._array(visit)
        if generator_kind(live) or type(live) is ModuleType or isinstance(live, GlobalRandom):
            self._generators.append(visit)
            return ()
        if is_config(live):
            return [visit._replace(live=config_content(live))]
        if callable(getattr(live, "load_state_dict", None)) and not isinstance(live, type):
            return self._object(visit)
        if isinstance(live, Mapping) and isinstance(stored, Mapping) and not is_nnx(live):
            return self._mapping(visit)
        if isinstance(live, _SEQUENCES) and isinstance(stored, _SEQUENCES):
            return self._sequence(visit)
        if isinstance(live, io.BytesIO) and isinstance(stored, io.BytesIO):
            both = [(one.getvalue(), one.tell()) for one in (stored, live)]
            return [visit._replace(stored=both[0], live=both[1])]
        record = record_of(live)
        if record is None:
            return self._plain(visit)
        if isinstance(live, Enum):  # which may have a second name
            is_same = record.prepare is not None and record.prepare(live, stored)() is live
            return () if is_same else self._plain(visit)
        return [visit._replace(live=record.content(live))]

    def _plain(self, visit: _Visit) -> tuple[()]:
        stored, live = visit.stored, visit.live
        atom = encode_atom(stored)  # by its bits: NaN is the same, and -0.0 is not 0.0
        try:
            is_same = atom == encode_atom(live) if atom else _is_equal(stored, live)
        except Exception:  # a type of the program whose comparison fails: it has no content for us
            return ()
        if not is_same:
            self._differ(visit, f"is {shown(live)}, stored is {shown(stored)}")
        return ()

    def _object(self, visit: _Visit) -> Iterable[_Visit]:
        live, path = visit.live, visit.path
        # An iteration, or a fetch, may begin when a loader is asked where it stands.
        is_loader = hasattr(type(live), "__iter__") and not _is_module(live)
        if is_loader or not callable(getattr(live, "state_dict", None)):
            return ()
        try:
            content = live.state_dict()
        except Exception as error:
            add_note(error, f"while {path} was read back after the restore")
            raise
        stored = renamed(visit.stored, content) if _is_module(live) else visit.stored
        at = path.state_dict()
        return [_Visit(stored, content, at, _Reading(live, content, at))]

    def _mapping(self, visit: _Visit) -> Iterator[_Visit]:
        stored, live, path, reading = visit
        for key, value in stored.items():
            if key in live:
                yield _Visit(value, live[key], path.key(key), reading)
            else:
                missing = _Visit(value, None, path.key(key), reading)
                self._differ(missing, "is stored, and missing in the restored state")
        if reading is None and len(live) > len(stored):
            for key in live.keys() - stored.keys():
                self._differ(_Visit(None, None, path.key(key)), "is not in the checkpoint")

    def _sequence(self, visit: _Visit) -> Iterator[_Visit]:
        stored, live, path, reading = visit
        if len(stored) != len(live):
            self._differ(visit, f"has {len(live)} elements, stored are {len(stored)}")
            return
        kinds = [*map(type, stored)]  # of a long history one comparison
        if _EXACT.issuperset(kinds) and kinds == [*map(type, live)] and [*stored] == [*live]:
            return
        for index, (value, held) in enumerate(zip(stored, live, strict=True)):
            yield _Visit(value, held, path.index(index), reading)

    def _array(self, visit: _Visit) -> Iterable[_Visit]:
        stored, live, path, _ = visit
        if framework_of(live) == "jax" and is_jax_key(live):
            return [visit._replace(live=JAX_KEY.content(live))]
        live = _part_here(live)
        if framework_of(stored) is None:
            self._hard.append((path, f"is {described(live)}, stored is {described(stored)}"))
            return ()
        try:
            parts = [_split(one, path) for one in (stored, live)]
        except UnsupportedState as error:  # a subclass of tensors
            self._hard.append((path, error.message))
            return ()
        if parts[0] is not None and parts[1] is not None:
            return [visit._replace(stored=parts[0], live=parts[1])]
        if _has_fields(stored) and _has_fields(live) and id(stored) not in self._known:
            fields = [{name: one[name] for name in one.dtype.names} for one in (stored, live)]
            return [visit._replace(stored=fields[0], live=fields[1])]  # without what pads them
        if not self._is_same(stored_form(stored), stored_form(live), self._known.get(id(stored))):
            is_alike = described(live) == described(stored)
            problem = "has other elements than the stored ones"
            kinds = f"is {described(live)}, stored is {described(stored)}"
            self._hard.append((path, problem if is_alike else kinds))
        return ()

    def _is_same(self, stored: Tensor, live: Tensor, known: bytes | None) -> bool:
        if stored.spec != live.spec:
            return False
        wanted = known or self._tags.of(stored.content())
        return wanted == self._tags.of(live.content())


def _has_arrays(stored: Any) -> bool:
    if isinstance(stored, Mapping):
        return any(map(_has_arrays, stored.values()))
    if isinstance(stored, _SEQUENCES):
        return any(map(_has_arrays, stored))
    return framework_of(stored) is not None and not isinstance(stored, np.generic)


def _are_small_and_equal(stored: Any, live: Any) -> bool:
    """Return whether two values are small plain arrays with the same bytes: most are."""
    if type(stored) is np.ndarray:
        return (
            type(live) is np.ndarray
            and stored.nbytes <= _PLAIN_BYTES
            and stored.dtype == live.dtype
            and stored.dtype.isbuiltin == 1
            and stored.shape == live.shape
            and stored.tobytes() == live.tobytes()
        )
    torch: Any = sys.modules.get("torch")
    if torch is None or type(stored) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return (
        type(live) in (torch.Tensor, torch.nn.Parameter)
        and are_alike(stored, live)
        and stored.layout is torch.strided
        and stored.is_cpu
        and live.is_cpu
        and not (stored.is_quantized or stored.is_nested)
        and stored.nbytes <= _PLAIN_BYTES
        and bytes(torch_bytes(stored)) == bytes(torch_bytes(live))
    )


def _has_fields(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.names is not None


def _is_equal(stored: object, live: object) -> bool:
    return type(stored) is type(live) and bool(stored == live)


def _part_here(live: Any) -> Any:
    """Return the part of a distributed array that this process holds."""
    if framework_of(live) == "jax" and is_multi_device(live):
        return addressable_part(live, addressable_region(live) or ())
    return local_part(live)


def _split(value: Any, path: Path) -> object:
    """Return the parts of a sparse or quantized tensor; None for every other array."""
    if framework_of(value) != "torch":
        return None
    from ckptmgr.state.torch_values import split_tensor

    found = split_tensor(value, path)
    return None if found is None else [str(found[0]), found[1]]


def _generator_content(value: Any) -> object:
    """Return the state of a generator, or of the generators of a module."""
    if isinstance(value, list | tuple):  # of the devices of a module, as stored
        return value
    found = global_generators(value) if type(value) is ModuleType else value
    if isinstance(found, tuple):
        return tuple(one.get_state() for one in found)
    state = generator_state(found)
    return None if state is None else state[1]


def _is_module(value: object) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _listed(differences: Sequence[tuple[Path, str]]) -> str:
    lines = [f"\n  {path} {problem}" for path, problem in differences[:_MOST_SHOWN]]
    more = len(differences) - len(lines)
    return "".join(lines) + (f"\n  and {more} more" if more else "")
