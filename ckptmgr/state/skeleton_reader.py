# SPDX-License-Identifier: Apache-2.0
"""Reading of skeletons with many leaves: plain ones are cut out of the text before JSON is parsed.

A plain leaf is a tensor as it is stored, in the one spelling that `skeleton` writes. The parser
calls Python for each JSON object, which for a leaf takes twice the time of the regular expression.

>>> text = '{"version":1,"nodes":["w",{"array":{"dtype":"<f4","shape":[2],"tensor":"w"}},{"dict":1}]}'
>>> nodes, leaves = nodes_of(text)
>>> nodes == ["w", MARK, {"dict": 1}]
True
>>> leaves
[('array":{"dtype":"<f4","shape":[2]', 'w')]
"""

from __future__ import annotations

import contextlib
import json
import re

from ckptmgr.state.paths import Node, TreeError, load_skeleton

PlainLeaf = tuple[str, str]
"""The text of a leaf that states its kind, element type and shape; and the name of its tensor."""

_SIZE = "(?:0|[1-9][0-9]{0,17})"
_LEAF = re.compile(
    r'\{"((?:array|torch)":\{"dtype":"[a-z0-9_<|]{1,32}",'
    rf'"shape":\[(?:{_SIZE}(?:,{_SIZE}){{0,63}})?\]),"tensor":"([ !#-\[\]-~]*)"\}}\}}'
)
MARK = "\xff"
"""Stands for a plain leaf among the nodes: no other node is equal to it, as the rest is checked."""


def nodes_of(skeleton: str) -> tuple[list[Node], list[PlainLeaf]]:
    """Return the nodes of a skeleton, and a plain leaf for each `MARK` among them.

    Raises TreeError as `load_skeleton`.
    """
    with contextlib.suppress(TreeError, AttributeError):  # the message is that of the text as it is
        found = _with_plain_leaves(skeleton)
        if found is not None:
            return found
    return load_skeleton(skeleton), []


def _with_plain_leaves(skeleton: str) -> tuple[list[Node], list[PlainLeaf]] | None:
    """Return the nodes and the plain leaves; None if their places are not certain."""
    if not skeleton.isascii() or "\\u00" in skeleton:  # a text might be the mark
        return None
    parts = _LEAF.split(skeleton)
    leaves = list(zip(parts[1::3], parts[2::3], strict=True))
    nodes = load_skeleton(f'"{MARK}"'.join(parts[::3]))
    if nodes.count(MARK) != len(leaves):  # one is part of another node
        return None
    return nodes, leaves


def body_of(leaf: PlainLeaf) -> tuple[str, dict[str, Node]]:
    """Return the kind and the body of the node of a plain leaf."""
    [(kind, body)] = json.loads(f'{{"{leaf[0]}}}}}').items()
    return kind, {**body, "tensor": leaf[1]}
