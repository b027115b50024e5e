# SPDX-License-Identifier: Apache-2.0
"""Names of a stored state that are others in the live one: `{"encoder.*": "backbone.*"}`.

A pattern is compared with the name of each value, as `inspect` shows those of tensors, and with its
ends behind each `/`: `encoder.*` is `model/encoder.0.weight`, `model/encoder.*` is that alone. The
keys of the skeleton change, before it is compared; the tensors in the file keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckptmgr.state.grammar import MAPPINGS, fold
from ckptmgr.state.paths import Node, StateMismatch, dump_skeleton, escaped, load_skeleton

_SHOWN = 8


class _Value(NamedTuple):
    at: int
    kind: str
    parts: list[_Value]


class _Named(NamedTuple):
    """The keys that lead to a value: their names, and their nodes; None for an index."""

    names: tuple[str, ...]
    keys: tuple[int | None, ...]

    def below(self, key: Node, node: int | None) -> _Named:
        is_text = isinstance(key, str)
        return _Named((*self.names, escaped(key)), (*self.keys, node if is_text else None))


class _Rename:
    """One pattern and its replacement."""

    def __init__(self, pattern: str, target: str) -> None:
        self.pattern, self.target = pattern, target
        self._matches = _regex(pattern).fullmatch
        self._is_done = _regex(target).fullmatch
        self.is_used = False

    def of(self, name: str) -> str | None:
        """Return the new name, or None where the pattern does not match."""
        found = self._matches(name)
        if found is None:
            self.is_used |= self._is_done(name) is not None
            return None
        self.is_used = True
        head, *stars = found.groups()
        texts = self.target.split("*")
        return (
            head
            + texts[0]
            + "".join(star + text for star, text in zip(stars, texts[1:], strict=True))
        )


def renamed_skeleton(skeleton: str, renames: Mapping[str, str]) -> str:
    """Return a skeleton under other names.

    A pattern of which the state has only the new names already is none that matches nothing: the run
    has saved since.

    Raises:
        StateMismatch: A pattern matches nothing; two values get one name; or a pattern matches only
            some of the values below a key.
        TreeError: The skeleton is damaged.
    """
    nodes = load_skeleton(skeleton)
    patterns = [_Rename(*one) for one in renames.items()]
    found: dict[int, str] = {}
    names = []
    for value in _values(nodes, fold(nodes, _Value)):
        name = "/".join(value.names)
        names.append(name)
        new = _renamed(patterns, name).split("/")
        for key, part in zip(value.keys, new, strict=True):
            if key is not None and found.setdefault(key, part) != part:
                raise StateMismatch(
                    f"renamed: {found[key]!r} and {part!r} would be new names of one part, {name!r}",
                    hint="rename all that is below a key, or nothing of it",
                )
    unused = [one.pattern for one in patterns if not one.is_used]
    if unused:
        shown = ", ".join(sorted(names)[:_SHOWN])
        raise StateMismatch(
            f"renamed: no stored name is {', '.join(map(repr, unused))}; there are {shown}",
            hint="ckptmgr inspect shows the names; nothing was changed",
        )
    for key, part in found.items():
        nodes[key] = part.replace("~1", "/").replace("~0", "~")
    fold(nodes, partial(_checked, nodes))
    return dump_skeleton(nodes)


def _renamed(patterns: Sequence[_Rename], name: str) -> str:
    found = [one.of(name) for one in patterns]
    return next((one for one in found if one is not None), name)


def _values(nodes: Sequence[Node], root: _Value) -> Iterator[_Named]:
    """Yield the values that are no containers, and of a module the names of its parts."""
    stack = [(root, _Named((), ()))]
    while stack:
        value, at = stack.pop()
        if value.kind in MAPPINGS:
            for key, part in zip(value.parts[::2], value.parts[1::2], strict=True):
                stack.append((part, at.below(nodes[key.at], key.at)))
        elif value.kind == "with_metadata":
            content, versions = value.parts
            stack.append((content, at))
            for key in versions.parts[::2]:
                yield at.below(f"{nodes[key.at]}", key.at)
        elif len(value.parts) == 1:
            stack.append((value.parts[0], at))
        elif value.parts:
            stack += [(part, at.below(i, None)) for i, part in enumerate(value.parts)]
        else:
            yield at


def _checked(nodes: Sequence[Node], index: int, kind: str, parts: list[int]) -> int:
    """Raise StateMismatch where two keys of a dict are equal now."""
    if kind in MAPPINGS:
        keys = [nodes[one] for one in parts[::2] if isinstance(nodes[one], str)]
        if len(set(map(str, keys))) < len(keys):
            twice = next(one for one in keys if keys.count(one) > 1)
            raise StateMismatch(
                f"renamed: two values would be called {twice!r}; nothing was changed",
                hint="give each a name of its own",
            )
    return index


def _regex(pattern: str) -> re.Pattern[str]:
    body = "(.*)".join(map(re.escape, pattern.split("*")))
    return re.compile(f"((?:.*?/)?){body}", re.DOTALL)
