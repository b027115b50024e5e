# SPDX-License-Identifier: Apache-2.0
"""The skeleton of a state: its JSON, the paths in it, and its errors.

A skeleton is a postfix program, `{"version":1,"nodes":[...]}`: a node is a value, or takes the values before it and
puts one in their place (`{"list":3}`). In version 2, `{"shared":0}` puts the first value that it follows in the place of
every other one that it follows. So the JSON is flat however deep the state is, and a cycle cannot be written
down. Numbers that JSON would change are hexadecimal. The text is ASCII and the same state gives the same text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NoReturn

from ckptmgr.core.errors import CkptmgrError, UnsupportedState

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]

SHARED = "shared"
"""The kind of node after a value that is one object with every other value before a node of the same number."""
_VERSIONS = (1, 2)
MAX_DEPTH = 500
_MAX_INT_DIGITS = 20
_MANY_DIGITS = "0" * _MAX_INT_DIGITS
_DIGITS_AS_ZEROS = str.maketrans("123456789", "0" * 9)
_SHOWN_CHARS = 60
_MAX_DECIMAL_BITS = 1000


class TreeError(CkptmgrError, ValueError):
    """Report a skeleton that is damaged or does not fit its tensors; names the node."""


class StateMismatch(UnsupportedState, ValueError):
    """Report that a stored state does not fit the state it should be restored into; nothing was changed."""


class Path:
    """Where a value is in the state; linked, so that a deep tree costs nothing until a path is printed."""

    __slots__ = ("_kind", "_parent", "_prefix", "_step")

    def __init__(
        self,
        parent: Path | None = None,
        kind: Literal["root", "key", "index", "object"] = "root",
        step: object = None,
    ) -> None:
        self._parent = parent
        self._kind = kind
        self._step = step
        self._prefix: str | None = None

    def key(self, key: object) -> Path:
        """Return the path of the value under `key`."""
        return Path(self, "key", key)

    def index(self, index: int) -> Path:
        """Return the path of the element at `index`."""
        return Path(self, "index", index)

    def state_dict(self) -> Path:
        """Return the path of what `state_dict()` gives."""
        return Path(self, "object")

    def _steps(self) -> list[Path]:
        steps: list[Path] = []
        at: Path | None = self
        while at is not None and at._parent is not None:
            steps.append(at)
            at = at._parent
        return steps[::-1]

    def __str__(self) -> str:
        parts = (
            ".state_dict()" if at._kind == "object" else f"[{shown(at._step)}]"
            for at in self._steps()
        )
        return "state" + "".join(parts)

    def tensor_name(self) -> str:
        """Return the name under which a tensor at this path is stored (made unique by the caller)."""
        parent = self._parent
        if parent is None or self._kind == "object":
            name = self._name_prefix()[:-1] or "state"
        else:
            name = (parent._prefix or parent._name_prefix()) + _escaped(self._step) or "state"
        # Names that begin with `__` belong to the file formats, such as `__metadata__`.
        return f"~{name}" if name.startswith("__") else name

    def _name_prefix(self) -> str:
        """Return what the names of all tensors below start with; kept, because they may be many."""
        if self._prefix is None:
            steps = [_escaped(at._step) for at in self._steps() if at._kind != "object"]
            self._prefix = "".join([f"{step}/" for step in steps])
        return self._prefix


def shown(step: object) -> str:
    """Return a value as messages print it: shortened."""
    text = _hex_if_long(step) or repr(step)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _hex_if_long(step: object) -> str:
    # Python refuses to print very long integers in decimal.
    if isinstance(step, int) and step.bit_length() > _MAX_DECIMAL_BITS:
        return hex(step)
    return ""


def _escaped(step: object) -> str:
    if type(step) is str and step.isascii() and "~" not in step and "/" not in step:
        return step
    # The order in which a frozenset prints its elements changes from run to run.
    text = (
        type(step).__name__
        if isinstance(step, frozenset | tuple)
        else _hex_if_long(step) or str(step)
    )
    text = text.replace("~", "~0").replace("/", "~1")
    return re.sub("[\ud800-\udfff]", lambda match: f"~u{ord(match[0]):x}", text)


def unsupported(path: Path, problem: str, hint: str) -> UnsupportedState:
    """Return the error for a value that cannot be stored."""
    return UnsupportedState(f"{path} {problem}", hint=hint)


def dump_skeleton(nodes: list[Json]) -> str:
    """Return the JSON of a node list."""
    body = {"version": version_of(nodes), "nodes": nodes}
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def version_of(nodes: Iterable[object]) -> int:
    """Return the version of a skeleton: 2 where objects are shared, which readers of version 1 do not know."""
    return 2 if any(isinstance(node, dict) and SHARED in node for node in nodes) else 1


def load_skeleton(skeleton: str) -> list[Json]:
    """Return the node list of a skeleton.

    Raises:
        TreeError: Not the JSON of a skeleton, or of a version this library does not know.
    """
    try:
        # A call for each number would take most of the time; only where one may be too long is it worth it.
        may_be_long = _MANY_DIGITS in skeleton.translate(_DIGITS_AS_ZEROS)
        body = json.loads(
            skeleton,
            object_pairs_hook=_unique_pairs,
            parse_int=_parse_int if may_be_long else int,
            parse_float=_reject_number,
            parse_constant=_reject_number,
        )
    except TreeError:
        raise
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TreeError(f"the skeleton of the state is not JSON: {error}") from None
    if not isinstance(body, dict) or "version" not in body:
        raise TreeError("the skeleton of the state has no version")
    if type(body["version"]) is not int or body["version"] not in _VERSIONS:
        raise TreeError(
            f"the skeleton of the state has version {shown(body['version'])}, this library reads 1 and 2",
            hint="read it with a newer ckptmgr",
        )
    nodes = body.get("nodes")
    if body.keys() != {"version", "nodes"} or not isinstance(nodes, list):
        raise TreeError("the skeleton of the state is not a version and a list of nodes")
    return nodes


def _unique_pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise TreeError(f"the skeleton of the state says {shown(twice)} twice")
    return result


def _parse_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        _reject_number(text)
    return int(text)


def _reject_number(text: str) -> NoReturn:
    raise TreeError(f"the skeleton of the state has the number {shown(text)}")
