# SPDX-License-Identifier: Apache-2.0
"""Encoding of skeletons as JSON, and the tensor shapes in them.

Most leaves of a large state differ only by name, so their text is built directly: dicts would cost
the garbage collector time. A sharded tensor has its whole shape in a stored skeleton, and the shape
of the local part in a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from ckptmgr.state.grammar import LEAVES, kind_of
from ckptmgr.state.leaves import Leaf, LeafForm
from ckptmgr.state.paths import Node, dump_skeleton, load_skeleton, version_of

_KINDS = {"f": "float", "c": "complex"}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def skeleton_of(nodes: Sequence[Node | Leaf]) -> str:
    """Return the text of a skeleton; its leaves must be planned already."""
    heads: dict[int, str] = {}
    parts: list[str] = []
    waiting: list[Node] = []
    for node in nodes:
        if type(node) is str and not waiting:
            parts.append(encode_basestring_ascii(node))
        elif isinstance(node, Leaf):
            if waiting:
                parts.append(_encode(waiting)[1:-1])
                waiting.clear()
            head = heads.get(id(node.form))
            if head is None:
                head = heads[id(node.form)] = _head(node.form)
            if node.node:
                parts.append(_leaf(node, head))
            else:  # most leaves
                parts.append(
                    f'{head},"tensor":{encode_basestring_ascii(node.tensor.spec.name)}}}}}'
                )
        else:
            waiting.append(node)
    if waiting:
        parts.append(_encode(waiting)[1:-1])
    return f'{{"version":{version_of(nodes)},"nodes":[{",".join(parts)}]}}'


def _head(form: LeafForm) -> str:
    """Return the text of leaves of this form up to their shape."""
    shape = ",".join(map(str, form.shape))
    return f'{{"{form.kind}":{{"dtype":{_encode(form.dtype)},"shape":[{shape}]'


def _leaf(leaf: Leaf, head: str) -> str:
    if "shape" in leaf.node:  # of a slice: that of the whole tensor
        form = leaf.form
        body: dict[str, Node] = {"dtype": form.dtype, "shape": list(form.shape), **leaf.node}
        return _encode({form.kind: {**body, "tensor": leaf.stored_name}})
    rest = {**leaf.node, "tensor": leaf.stored_name}
    return "".join([head, *[f',"{name}":{_encode(value)}' for name, value in rest.items()], "}}"])


def leaf_shapes(skeleton: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a skeleton; of several leaves the first counts."""
    found: dict[str, tuple[int, ...]] = {}
    for leaf in leaves_of(load_skeleton(skeleton)):
        shape = leaf.get("shape")
        if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape):
            found.setdefault(str(leaf.get("tensor")), tuple(shape))
    return found


def with_shapes(skeleton: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a skeleton in which the leaves of some tensors have other shapes."""
    if not shapes:
        return skeleton
    nodes = load_skeleton(skeleton)
    for leaf in leaves_of(nodes):
        shape = shapes.get(str(leaf.get("tensor")))
        if shape is not None:
            leaf["shape"] = list(shape)
    return dump_skeleton(nodes)


def types_of_bytes(skeleton: str) -> dict[str, str]:
    """Return the names of the tensors that are stored as bytes, with the one type of their elements."""
    if '"stored":' not in skeleton and '"offset":' not in skeleton:
        return {}
    found: dict[str, set[str]] = {}
    for leaf in leaves_of(load_skeleton(skeleton)):
        if "stored" in leaf or "offset" in leaf:
            found.setdefault(str(leaf.get("tensor")), set()).add(_type_name(leaf["dtype"]))
    return {name: types.pop() for name, types in found.items() if len(types) == 1}


def _type_name(dtype: Node) -> str:
    """Return the name of a type as `formats.dtypes` spells it; NumPy has short ones."""
    kind = _KINDS.get(dtype[1:2]) if isinstance(dtype, str) and dtype[:1] == "<" else None
    return str(dtype) if kind is None else f"{kind}{8 * int(str(dtype)[2:])}"


def leaves_of(nodes: list[Node]) -> Iterator[dict[str, Any]]:
    """Yield the bodies of the tensor nodes; the caller may change them."""
    for node in nodes:
        kind, body = kind_of(node)
        if kind in LEAVES and isinstance(body, dict):
            yield body
