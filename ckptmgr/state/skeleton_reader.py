# SPDX-License-Identifier: Apache-2.0
"""Reading of skeletons with many leaves: plain ones are cut out of the text before JSON is parsed.

A plain leaf is a tensor as it is stored, in the one spelling that `skeleton` writes. The parser
calls Python for each JSON object, which for a leaf takes twice the time of the regular expression.

>>> text = '{"version":1,"nodes":["w",{"array":{"dtype":"<f4","shape":[2],"tensor":"w"}},{"dict":1}]}'
>>> nodes_of(text)
['w', ('array":{"dtype":"<f4","shape":[2]', 'w'), {'dict': 1}]
"""

from __future__ import annotations

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
_MARK = "\xff"
"""Stands for a plain leaf in the text: no other value is equal to it, as the rest is checked."""


def nodes_of(skeleton: str) -> list[Node | PlainLeaf]:
    """Return the nodes of a skeleton; raise TreeError as `load_skeleton`."""
    try:
        nodes = _with_plain_leaves(skeleton)
    except (TreeError, AttributeError):  # the message is that of the text as it is
        nodes = None
    return [*load_skeleton(skeleton)] if nodes is None else nodes


def _with_plain_leaves(skeleton: str) -> list[Node | PlainLeaf] | None:
    """Return the nodes with the plain leaves in their places; None if that is not certain."""
    if not skeleton.isascii() or "\\u00" in skeleton:  # a text might be the mark
        return None
    parts = _LEAF.split(skeleton)
    leaves = list(zip(parts[1::3], parts[2::3], strict=True))
    nodes = load_skeleton(f'"{_MARK}"'.join(parts[::3]))
    if nodes.count(_MARK) != len(leaves):  # one is part of another node
        return None
    left = iter(leaves)
    return [next(left) if node == _MARK else node for node in nodes]


def body_of(leaf: PlainLeaf) -> tuple[str, dict[str, Node]]:
    """Return the kind and the body of the node of a plain leaf."""
    [(kind, body)] = json.loads(f'{{"{leaf[0]}}}}}').items()
    return kind, {**body, "tensor": leaf[1]}
