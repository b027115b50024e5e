# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import random
import sys
from collections import defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CorruptCheckpoint
from ckptmgr.state import stored_arrays
from ckptmgr.state.tree import TreeError, flatten, unflatten
from tests.support.trees import reader

STORED: dict[str, np.ndarray] = {
    "f": np.arange(4, dtype=np.float32),
    "u": np.arange(32, dtype=np.uint8),
    "e": np.empty(0, np.uint8),
}


def decode(*nodes: object) -> object:
    return unflatten(json.dumps({"version": 1, "nodes": nodes}), STORED.__getitem__)


@pytest.mark.parametrize(
    ("skeleton", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"version":1,"nodes":' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ("null", "no version"),
        ("[]", "no version"),
        ('{"nodes":[1]}', "no version"),
        ('{"version":4,"nodes":[1]}', "has version 4.*newer ckptmgr"),
        ('{"version":true,"nodes":[1]}', "has version True"),
        ('{"version":1}', "not a version and a list"),
        ('{"version":1,"nodes":{}}', "not a version and a list"),
        ('{"version":1,"nodes":[1],"more":1}', "not a version and a list"),
        ('{"version":1,"version":1,"nodes":[1]}', "'version' twice"),
        ('{"version":1,"nodes":[NaN]}', "number 'NaN'"),
        ('{"version":1,"nodes":[1.5]}', "number '1.5'"),
        ('{"version":1,"nodes":[' + "9" * 5000 + "]}", "the number"),
        (None, "not JSON"),
    ],
)
def test_unflatten_of_no_skeleton_raises_tree_error(skeleton: Any, message: str) -> None:
    with pytest.raises(TreeError, match=rf"(?s){message}"):
        unflatten(skeleton, STORED.__getitem__)


LEAF = {"tensor": "f", "dtype": "<f4", "shape": [4]}
VIEW = {**LEAF, "offset": 0}

BAD: list[tuple[list[object], str]] = [
    ([], "leaves 0 values"),
    ([1, 2], "leaves 2 values"),
    ([[1]], "a list is no node"),
    ([{}], "a node has 0 kinds"),
    ([{"int": "0x1", "text": ""}], "a node has 2 kinds"),
    ([{"object": "os.system"}], "no kind of node called 'object'"),
    ([{"int": 5}], "an integer is spelled"),
    ([{"int": "0x"}], "an integer is spelled"),
    ([{"float": "1.5"}], "a float is spelled"),
    ([{"float": "0x1.0p+99999"}], "a float is spelled"),
    ([{"float": None}], "a float is spelled"),
    ([{"complex": ["nan"]}], "a complex number is spelled"),
    ([{"complex": "nan"}], "a complex number is spelled"),
    ([{"bytes": "0"}], "bytes are spelled"),
    ([{"text": "ff"}], "a string is spelled"),
    ([{"scalar": 1}], "a NumPy scalar is spelled"),
    ([{"scalar": ["<f8", "00"]}], "has 1 bytes"),
    ([{"scalar": ["|O8", "00" * 8]}], "no NumPy element type"),
    ([{"list": 1}], "1 values are taken, 0 are there"),
    ([{"list": -1}], "-1 values are taken"),
    ([{"list": True}], "True values are taken"),
    ([{"list": 10**18}], "values are taken"),
    ([1, {"dict": 1}], "2 values are taken"),
    ([{"dict": None}], "has None entries"),
    ([1, 2, 1, 3, {"dict": 2}], "a key twice"),
    ([{"list": 0}, 2, {"dict": 1}], "a list is used as a key"),
    ([{"array": LEAF}, {"tuple": 1}, 2, {"dict": 1}], "a tuple is used as a key"),
    ([{"bytearray": ""}, {"set": 1}], "a bytearray is used as a key"),
    ([{"scalar": [{"fields": [], "itemsize": 0}, ""]}, {"set": 1}], "a void is used as a key"),
    ([1, 1, {"set": 2}], "a value twice"),
    ([1, {"namedtuple": ["P"]}], "no name and fields"),
    ([1, {"namedtuple": ["P", ["x", "y"]]}], "2 values are taken"),
    ([1, 2, {"with_metadata": 2}], "belongs to an OrderedDict"),
    ([1, {"to_bytes": 1}], "not stored as uint8"),
    ([{"array": LEAF}, {"to_bytearray": 1}], "not stored as uint8"),
    ([1, {"bytesio": 0}], "not bytes and a position"),
    ([{"bytes": "00"}, {"bytesio": -1}], "not bytes and a position"),
    ([{"bytes": "00"}, {"bytesio": True}], "not bytes and a position"),
    ([{"bytesio": 0}], "1 values are taken"),
    ([{"deque": None}], "1 values are taken"),
    ([1, {"deque": None}], "a deque with maxlen None is not a list"),
    ([{"tuple": 0}, {"deque": None}], "a deque with maxlen None is not a list"),
    ([1, {"list": 1}, {"deque": 0}], "a deque with maxlen 0 is not a list of as many"),
    ([{"list": 0}, {"deque": -1}], "a deque with maxlen -1 is"),
    ([{"list": 0}, {"deque": True}], "a deque with maxlen True is"),
    ([{"list": 0}, {"deque": 2**63}], "a deque with maxlen 9223372036854775808 is"),
    ([{"list": 0}, {"deque": "5"}], "a deque with maxlen '5' is"),
    ([{"defaultdict": None}], "a defaultdict has None entries"),
    ([1, 2, 1, 3, {"defaultdict": 2}], "a defaultdict holds a key twice"),
    ([{"decimal": "sNaN"}, {"set": 1}], "a Decimal is used as a key"),
    ([1, {"rng": "builtins.exec"}], "no random number generator called 'builtins.exec'"),
    ([1, {"rng": 5}], "no random number generator called 5"),
    ([1, {"rng": "numpy.Generator"}], "numpy.Generator cannot be restored"),
    (["bit_generator", "os", {"dict": 1}, {"rng": "numpy.Generator"}], "cannot be restored"),
    ([{"dict": 0}, {"rng": "numpy.RandomState"}], "cannot be restored"),
    ([{"tuple": 0}, {"rng": "python.Random"}], "cannot be restored"),
    ([{"array": 1}], "not described by"),
    ([{"array": {"tensor": "f"}}], "not described by"),
    ([{"array": {**LEAF, "code": "1"}}], "not described by"),
    ([{"array": {**LEAF, "tensor": 1}}], "a tensor is called 1"),
    ([{"array": {**LEAF, "tensor": "x"}}], "there is no tensor called 'x'"),
    ([{"array": {**LEAF, "dtype": "<i4"}}], "it holds float32, not int32"),
    ([{"array": {**LEAF, "stored": "uint8"}}], "it holds float32, not uint8"),
    ([{"array": {**LEAF, "shape": [5]}}], "it has 16 bytes, not 20"),
    ([{"array": {**LEAF, "shape": [2**62, 2**62]}}], "it has 16 bytes"),
    ([{"array": {**LEAF, "shape": [-1]}}], "a shape is spelled"),
    ([{"array": {**LEAF, "shape": 4}}], "a shape is spelled"),
    ([{"array": {**LEAF, "shape": [True]}}], "a shape is spelled"),
    ([{"array": {**LEAF, "shape": [1] * 100, "offset": 0}}], "cannot be restored"),
    (
        [{"array": {"tensor": "e", "dtype": "<f4", "shape": [0, 2**62], "stored": "uint8"}}],
        "cannot",
    ),
    ([{"array": {**VIEW, "offset": -4}}], r"bytes \[-4, 12\) of 16 are wanted"),
    ([{"array": {**VIEW, "offset": 4}}], r"bytes \[4, 20\) of 16 are wanted"),
    ([{"array": {**VIEW, "offset": "0"}}], "the offset is '0'"),
    ([{"array": {**VIEW, "strides": [8]}}], r"bytes \[0, 28\) of 16"),
    ([{"array": {**VIEW, "strides": [-4]}}], r"bytes \[-12, 4\) of 16"),
    ([{"array": {**VIEW, "strides": []}}], "the strides are"),
    ([{"array": {**VIEW, "strides": [2**62]}}], "the strides are"),
    ([{"array": {**VIEW, "strides": 4}}], "the strides are"),
    ([{"array": {**LEAF, "dtype": "object"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "O"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "<f4,<f4"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "<M8[xx]"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "<f3"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "finfo"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": "__loader__"}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": 5}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": {"base": "<f4"}}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": {"base": "<f4", "shape": [2**40]}}}], "no NumPy element type"),
    ([{"array": {**LEAF, "dtype": {"fields": 5, "itemsize": 4}}}], "no NumPy element type"),
    (
        [{"array": {**LEAF, "dtype": {"fields": [["a", "<f4", 4]], "itemsize": 4}}}],
        "no NumPy element type",
    ),
]


@pytest.mark.parametrize(("nodes", "message"), BAD, ids=range(len(BAD)))
def test_unflatten_of_bad_node_names_what_is_wrong(nodes: list[object], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        decode(*nodes)


def test_unflatten_without_torch_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stored_arrays.torch_values.cache_clear()
    monkeypatch.delattr("ckptmgr.state.torch_values", raising=False)
    monkeypatch.setitem(sys.modules, "ckptmgr.state.torch_values", None)

    with pytest.raises(TreeError, match=r"(?s)torch is not installed.*pip install"):
        decode({"torch": TORCH_LEAF})


def test_unflatten_names_the_node() -> None:
    with pytest.raises(TreeError, match=r"^node 2 of the skeleton: an integer is spelled"):
        decode(1, 2, {"int": "x"})


def test_unflatten_of_endless_nesting_is_refused() -> None:
    with pytest.raises(TreeError, match="too deep"):
        decode(1, *[{"list": 1}] * 100_000)


def test_unflatten_of_deeply_nested_type_is_refused() -> None:
    dtype: Any = "<f4"
    for _ in range(200):
        dtype = {"base": dtype, "shape": [1]}

    with pytest.raises(TreeError):
        decode({"array": {**LEAF, "dtype": dtype, "shape": []}})


def test_unflatten_passes_on_what_reading_raises() -> None:
    def read(name: str) -> np.ndarray:
        raise CorruptCheckpoint("damaged", tensor=name)

    with pytest.raises(CorruptCheckpoint, match="damaged"):
        unflatten(flatten([np.zeros(2)]).skeleton, read)


def test_unflatten_reads_each_tensor_once() -> None:
    array = np.arange(6.0)
    flat = flatten([array, array[2:], array[:3]])
    asked: list[str] = []

    def read(name: str) -> np.ndarray:
        asked.append(name)
        return reader(flat)(name)

    unflatten(flat.skeleton, read)

    assert asked == ["0"]


def test_unflatten_copies_what_it_may_not_write_to() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    back: Any = unflatten(flatten([frozen]).skeleton, lambda _: frozen)

    back[0][0] = 1

    assert not frozen.any()


TORCH_LEAF = {"tensor": "f", "dtype": "float32", "shape": [4]}
TORCH_VIEW = {**TORCH_LEAF, "offset": 0}
PER_CHANNEL = {"quantized": {"dtype": "qint8", "axis": 9}}

BAD_TORCH: list[tuple[list[object], str]] = [
    ([{"torch": {**TORCH_LEAF, "dtype": "load"}}], "torch has no element type 'load'"),
    ([{"torch": {**TORCH_LEAF, "dtype": 3}}], "torch has no element type 3"),
    ([{"torch": {**TORCH_LEAF, "dtype": "float64"}}], "it holds float32, not float64"),
    ([{"torch": {**TORCH_VIEW, "strides": [-4], "offset": 12}}], "no negative strides"),
    ([{"torch": {**TORCH_VIEW, "strides": [2]}}], "lie unaligned"),
    ([{"torch": {**TORCH_VIEW, "offset": 2, "shape": [2]}}], "lie unaligned"),
    ([{"torch": {**TORCH_VIEW, "offset": 2**60}}], "are wanted"),
    ([{"torch": {**TORCH_VIEW, "dtype": "int32", "requires_grad": True}}], "cannot be restored"),
    ([{"torch.dtype": "nn"}], "torch has no element type"),
    ([{"torch.device": "cpu; rm"}], "torch has no device"),
    ([{"torch.device": "nowhere"}], "torch has no device"),
    ([{"torch.device": 1}], "torch has no device"),
    ([{"torch.Size": [-1]}], "a shape is spelled"),
    ([1, 2, {"sparse": 1}], "is spelled"),
    ([1, 2, {"sparse": {}}], "parts that are no tensors"),
    ([{"torch": TORCH_LEAF}, {"torch": TORCH_LEAF}, {"sparse": {}}], "cannot be restored"),
    (
        [
            {"torch": {"tensor": "u", "dtype": "int64", "shape": [1, 2], "offset": 8}},
            {"torch": {**TORCH_VIEW, "shape": [2]}},
            {"sparse": {"shape": [3], "coalesced": False}},
        ],
        "cannot be restored",
    ),
    ([{"torch": TORCH_LEAF}, {"quantized": {"dtype": "qint8"}}], "parts of another type"),
    ([{"torch": TORCH_LEAF}, {"quantized": {"dtype": []}}], "parts of another type"),
    (
        [
            {"torch": {"tensor": "u", "dtype": "int8", "shape": [1], "offset": 0}},
            {"quantized": {"dtype": "qint8", "scale": "x", "zero_point": 0}},
        ],
        "cannot be restored|a float is spelled",
    ),
    (
        [
            {"torch": {"tensor": "u", "dtype": "int8", "shape": [1], "offset": 0}},
            {"torch": TORCH_LEAF},
            {"torch": TORCH_LEAF},
            PER_CHANNEL,
        ],
        "has the axis 9",
    ),
    (["cpu", 1, {"list": 2}, {"rng": "torch.Generator"}], "is not a tensor"),
    (["cpu", {"torch": TORCH_LEAF}, {"list": 2}, {"rng": "torch.Generator"}], "takes the stored"),
    (["x", {"torch": TORCH_LEAF}, {"list": 2}, {"rng": "torch.Generator"}], "torch has no device"),
    ([1, {"rng": "torch.Generator"}], "cannot be restored"),
    ([{"torch": TORCH_LEAF}, {"set": 1}], "a Tensor is used as a key"),
]


@pytest.mark.parametrize(("nodes", "message"), BAD_TORCH, ids=range(len(BAD_TORCH)))
def test_unflatten_of_bad_torch_node_names_what_is_wrong(nodes: list[object], message: str) -> None:
    pytest.importorskip("torch", reason="needs torch")

    with pytest.raises(TreeError, match=message):
        decode(*nodes)


def _rich_nodes() -> tuple[list[Any], dict[str, np.ndarray]]:
    base = np.arange(20, dtype=np.int16)
    record = np.zeros(2, [("a", "i4"), ("b", ">f8", (2,))])
    state = {
        "views": [base[2:9], base[4:], base[::-3]],
        (1, 2.5): {"r": record, "rng": np.random.default_rng(1), "py": random.Random(1)},
        "plain": [2**70, -0.0, 1j, b"ab", "\ud800", {1, 2}, np.float16(1), b"x" * 2000],
        "c": np.zeros(2, np.complex64),
        "std": [datetime(2026, 11, 23), timedelta(1), Decimal("1.5"), range(3), Path("a/b")],
        "window": deque([base[:2], {date(1, 1, 1): 1}], 5),
        "counts": defaultdict(int, {"a": 1}),
    }
    flat = flatten(state)
    read = reader(flat)
    nodes = json.loads(flat.skeleton)["nodes"]
    return nodes, {tensor.spec.name: read(tensor.spec.name) for tensor in flat.tensors}


RICH_NODES, RICH_TENSORS = _rich_nodes()
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(
        ["", "0x1", "<f4", "|O", "float32", "views/0", "nan", "cpu", "a" * 30, "1E+9999999"]
    ),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [1, 2]),
)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON value, as its container and key."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node)
    found: list[tuple[Any, Any]] = []
    for key, value in items:
        found.append((node, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_unflatten_of_changed_skeleton_gives_a_state_or_a_tree_error(data: st.DataObject) -> None:
    nodes = json.loads(json.dumps(RICH_NODES))
    for _ in range(data.draw(st.integers(1, 3))):
        places = _places(nodes)
        container, key = places[data.draw(st.integers(0, len(places) - 1))]
        match data.draw(st.sampled_from(["change", "drop", "copy"])):
            case "drop" if isinstance(container, list):
                del container[key]
            case "copy" if isinstance(container, list):
                container.insert(key, container[key])
            case _:
                container[key] = data.draw(JUNK)
    try:
        unflatten(json.dumps({"version": 1, "nodes": nodes}), RICH_TENSORS.__getitem__)
    except TreeError as error:
        refusal = str(error)
    else:
        refusal = "skeleton: none"
    assert "skeleton" in refusal


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_unflatten_of_any_text_raises_tree_error(text: str) -> None:
    with pytest.raises(TreeError):
        unflatten(text, STORED.__getitem__)
