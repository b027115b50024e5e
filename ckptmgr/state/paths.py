# SPDX-License-Identifier: Apache-2.0
"""Skeleton of a state (the treedef, as JAX calls it): its JSON, the paths in it, and its errors.

A skeleton is a postfix program, `{"version":1,"nodes":[...]}`: a node is a value, or takes the
values before it and puts one in their place (`{"list":3}`). In version 2, the value before the
first `{"shared":0}` replaces the value before every other one; version 3 adds the kinds in
`KINDS_OF_VERSION_3`. So the JSON is flat however deep the state is, and a cycle cannot be written
down. Numbers that JSON would change are hexadecimal. The text is ASCII, and the same state gives
the same text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NoReturn

from ckptmgr.core.errors import CkptmgrError, UnsupportedState
from ckptmgr.formats.strict_json import int_parser

Node = None | bool | int | str | list["Node"] | dict[str, "Node"]

SHARED = "shared"
"""Kind of the node that follows each occurrence of one object; its number identifies the object."""
_TEXTS = "datetime date time timedelta decimal range path pureposixpath purewindowspath"
KINDS_OF_VERSION_3 = frozenset([*_TEXTS.split(), "deque", "defaultdict"])
_VERSIONS = (1, 2, 3)
MAX_DEPTH = 500
_SHOWN_CHARS = 60
_SHOWN_DIFFERENCES = 100
_MAX_DECIMAL_BITS = 1000
_MAX_SHORT_INT = 1 << 64


class TreeError(CkptmgrError, ValueError):
    """Report a skeleton that is damaged or does not fit its tensors; names the node."""


class StateMismatch(UnsupportedState, ValueError):
    """Report that a stored state does not fit the target of a restore; nothing was changed.

    Or that the restored state is another than the stored one: the message says so then.
    """


def mismatch(what: str, differences: list[str], *, hint: str) -> StateMismatch:
    """Return the error of `what` a checkpoint does not fit; names at most 100 differences."""
    shown_ones = sorted(differences)[:_SHOWN_DIFFERENCES]
    if len(differences) > len(shown_ones):
        shown_ones.append(f"... and {len(differences) - len(shown_ones)} more")
    lines = "\n  ".join(shown_ones)
    return StateMismatch(
        f"the checkpoint does not fit {what}; nothing was changed:\n  {lines}", hint=hint
    )


StepKind = Literal["root", "key", "index", "object"]
"""Kind of a step of a path."""

Place = tuple["Path | None", StepKind, object]
"""Arguments of a path that is made only when a message names it."""


class Path:
    """Path of a value in the state; linked, so that a deep tree is cheap until it is printed."""

    __slots__ = ("_kind", "_parent", "_prefix", "_step")

    def __init__(
        self,
        parent: Path | None = None,
        kind: StepKind = "root",
        step: object = None,
    ) -> None:
        self._parent = parent
        self._kind: StepKind = kind
        self._step = step
        self._prefix: str | None = None

    def key(self, key: object) -> Path:
        """Return the path of the value under `key`."""
        return Path(self, "key", key)

    def index(self, index: int) -> Path:
        """Return the path of the element at `index`."""
        return Path(self, "index", index)

    def state_dict(self) -> Path:
        """Return the path of the result of `state_dict()`."""
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

    @property
    def is_part(self) -> bool:
        """Whether it is of a part of the state, and not of the whole."""
        return self._parent is not None

    def tensor_name(self) -> str:
        """Return the stored name of a tensor at this path (the caller makes it unique)."""
        if self._parent is None:
            return "state"
        return self._parent.part_name(self._kind, self._step)

    @property
    def place(self) -> Place:
        """The arguments that make this path."""
        return self._parent, self._kind, self._step

    def part_name(self, kind: StepKind, step: object) -> str:
        """Return the stored name of a tensor one step from here (the caller makes it unique)."""
        prefix = self._prefix or self._name_prefix()
        name = (prefix[:-1] if kind == "object" else prefix + escaped(step)) or "state"
        # Names that begin with `__` belong to the file formats, such as `__metadata__`.
        return f"~{name}" if name[:2] == "__" else name

    def _name_prefix(self) -> str:
        """Return the prefix of the names of all tensors below; cached, as there may be many."""
        if self._prefix is None:
            steps = [escaped(at._step) for at in self._steps() if at._kind != "object"]
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


def escaped(step: object) -> str:
    """Return a step as it is in the stored name of a tensor."""
    if type(step) is str and step.isascii() and "~" not in step and "/" not in step:
        return step
    if type(step) is int and -_MAX_SHORT_INT < step < _MAX_SHORT_INT:
        return str(step)
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


def dump_skeleton(nodes: list[Node]) -> str:
    """Return the JSON of a node list."""
    body = {"version": version_of(nodes), "nodes": nodes}
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def version_of(nodes: Iterable[object]) -> int:
    """Return the first version that has all kinds of nodes in a skeleton."""
    version = 1
    for node in nodes:
        if isinstance(node, dict):
            if not KINDS_OF_VERSION_3.isdisjoint(node):
                return 3
            if SHARED in node:
                version = 2
    return version


def load_skeleton(skeleton: str) -> list[Node]:
    """Return the node list of a skeleton; raise TreeError for any other text or version."""
    try:
        body = json.loads(
            skeleton,
            object_pairs_hook=_unique_pairs,
            parse_int=int_parser(
                skeleton.encode("utf-8", "surrogatepass"), otherwise=_reject_number
            ),
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
            f"the skeleton of the state has version {shown(body['version'])}, this library reads 1 to 3",
            hint="read it with a newer ckptmgr",
        )
    nodes = body.get("nodes")
    if body.keys() != {"version", "nodes"} or not isinstance(nodes, list):
        raise TreeError("the skeleton of the state is not a version and a list of nodes")
    return nodes


def _unique_pairs(pairs: list[tuple[str, Node]]) -> dict[str, Node]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise TreeError(f"the skeleton of the state says {shown(twice)} twice")
    return result


def _reject_number(text: str) -> NoReturn:
    raise TreeError(f"the skeleton of the state has the number {shown(text)}")
