# SPDX-License-Identifier: Apache-2.0
"""Containers of a state that are being encoded: their parts, and the nodes around them."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, Literal, NamedTuple

from ckptmgr.state.paths import Node, Path, dump_skeleton, unsupported
from ckptmgr.state.random import global_generators
from ckptmgr.state.records import Record
from ckptmgr.state.scalars import MOST_EQUAL_HASHES, encode_key, has_too_many_equal_hashes

WAY_OUT = "store plain values and arrays, or give the object state_dict() and load_state_dict()"

Part = tuple[Sequence[Node], object, object]
"""Nodes to write before a value, the value, and its key or index."""


class ContainerFrame(NamedTuple):
    """A container whose parts are being encoded."""

    parts: Iterator[Part]
    path: Path
    step: (
        Literal["key", "index", "object"] | None
    )  # None when the one part stands for the container itself
    depth: int  # of the parts
    end: Sequence[Node]  # nodes to write after the parts
    container: int | None  # its id; None for a tensor that is split into parts
    tie: object = None  # identity of a mutable object, the same at every occurrence


def mapping_parts(value: Any, path: Path) -> Iterator[Part]:
    """Return the parts of a dict; raise UnsupportedState for a key that cannot be stored."""
    _check_hashes(value, path)
    # A list, because state_dict() of a part may change the mapping.
    parts = [
        ((key,) if type(key) is str and key.isascii() else encode_key(key, path), part, key)
        for key, part in value.items()
    ]
    return iter(parts)


def ordered_frame(value: Any, path: Path, depth: int) -> ContainerFrame:
    """Return the frame of an OrderedDict, with the metadata that torch attaches to it."""
    extra = vars(value)
    if extra.keys() - {"_metadata"}:
        raise unsupported(path, f"is an OrderedDict with attributes {sorted(extra)}", WAY_OUT)
    parts = mapping_parts(value, path)
    end: list[Node] = [{"ordered": len(value)}]
    if not extra:
        return ContainerFrame(parts, path, "key", depth, end, id(value), id(value))
    # torch keeps the versions of its modules there, for load_state_dict.
    metadata: list[Part] = [(end, extra["_metadata"], "_metadata")]
    end = [{"with_metadata": 2}]
    return ContainerFrame(chain(parts, metadata), path, "key", depth, end, id(value), id(value))


def sequence_frame(value: Any, path: Path, depth: int, *, end: list[Node]) -> ContainerFrame:
    """Return the frame of a list, tuple or deque."""
    parts: list[Part] = [((), child, index) for index, child in enumerate(value)]
    tie = id(value) if isinstance(value, list | deque) else None
    return ContainerFrame(iter(parts), path, "index", depth, end, id(value), tie)


def record_frame(record: Record, value: object, path: Path, depth: int) -> ContainerFrame:
    """Return the frame of a value that a record describes."""
    try:
        content = record.content(value)
    except ValueError as error:
        raise unsupported(path, str(error), WAY_OUT) from None
    tie = id(value) if record.is_mutable else None
    return ContainerFrame(iter([((), content, None)]), path, None, depth, (), id(value), tie)


def module_frame(value: ModuleType, path: Path, depth: int) -> ContainerFrame | None:
    """Return the frame of a module's global generators; None for a module without any."""
    generators = global_generators(value)
    if generators is None:
        return None
    if isinstance(generators, tuple):  # a machine without these devices reads their states, too
        generators = tuple(one.get_state() for one in generators)
    return ContainerFrame(iter([((), generators, None)]), path, None, depth, (), id(value))


def stream_frame(value: io.BytesIO, path: Path, depth: int) -> ContainerFrame:
    """Return the frame of a stream in memory."""
    end: list[Node] = [{"bytesio": value.tell()}]
    return ContainerFrame(
        iter([((), value.getvalue(), None)]), path, None, depth, end, id(value), id(value)
    )


def _check_hashes(keys: Collection[object], path: Path) -> None:
    """Raise UnsupportedState for a dict or set that a load would refuse."""
    if has_too_many_equal_hashes(keys):
        what = f"is a {type_name(keys)} of which more than {MOST_EQUAL_HASHES} keys share one hash"
        raise unsupported(path, what, "use strings as keys")


def set_nodes(value: Any, path: Path) -> list[Node]:
    """Return the nodes of a set."""
    _check_hashes(value, path)
    # Sets iterate in an order that changes from run to run; skeletons must not.
    parts = sorted((encode_key(element, path) for element in value), key=dump_skeleton)
    nodes = [node for part in parts for node in part]
    return [*nodes, {type(value).__name__: len(parts)}]


def type_name(value: object) -> str:
    """Return the name of a value's type, as messages print it."""
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
