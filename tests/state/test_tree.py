# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
import json
import math
import random
import sys
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import UnsupportedState
from ckptmgr.state.tree import flatten, unflatten
from tests.support.trees import reader, round_trip, same

Point = namedtuple("Point", ["x", "y"])

PLAIN: list[object] = [
    None,
    True,
    False,
    0,
    -1,
    2**53 - 1,
    2**53,
    -(2**53),
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    complex(-0.0, math.inf),
    complex(math.nan, 1),
    b"",
    bytes(range(256)),
    b"x" * 5000,
    bytearray(b"ab"),
    bytearray(b"ab" * 1000),
    "",
    "a\0b",
    "\ud83d\ude00",
    "😀 ü",
    "\ud800",
    (),
    [],
    {},
    set(),
    frozenset(),
    (1, (2.0,), [3]),
    {1, "a", None, (1, 2.5), b"b", frozenset([3])},
    frozenset({True, "x"}),
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({"a": 3, 4: -1}),
    {"a": 1, 1: 2, (1, "x"): 3, None: 4, 0.5: 5, b"k": 6, "": 7, frozenset([1]): 8, 1j: 9},
    {True: "bool", "True": "str"},
    np.float32(0.1),
    np.float64("nan"),
    np.int8(-3),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2026-11-21T08:00", "s"),
    np.datetime64("NaT"),
    np.timedelta64(5, "D"),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"raw"),
    np.longdouble("0.1"),
    ml_dtypes.bfloat16(1.5),
    {np.int64(3): "numpy key"},
]


@pytest.mark.parametrize(
    "value", PLAIN, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(PLAIN)]
)
def test_round_trip_of_plain_value_is_identical(value: object) -> None:
    assert same(round_trip(value), value)


def _arrays() -> list[np.ndarray]:
    numbers = np.arange(24)
    names = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    names += " complex64 complex128 longdouble clongdouble >f4 >i8 >c16 U7 S5"
    arrays = [numbers.astype(name) for name in names.split()]
    arrays.append(np.array([b"abc", b"def"], dtype="V3"))
    arrays += [np.array([1, "NaT"], "M8[ns]"), np.array([1, 2], "m8[25us]")]
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and issubclass(kind, np.generic) and "complex" not in name:
            arrays.append(np.array([0, 1], np.float32).astype(kind))
    record = np.dtype([("a", ">i4"), ("b", "f8", (2, 2)), ("c", [("d", "U2"), ("e", "M8[s]")])])
    arrays += [np.zeros(3, record), np.zeros(2, np.dtype("i1,i8", align=True))]
    arrays += [np.zeros(2, [("w", ml_dtypes.bfloat16)]), np.zeros(2, [])]
    arrays += [np.array(2.5), np.zeros((0,)), np.zeros((3, 0, 2), "f4"), np.ndarray((2,), "S0")]
    grid = np.arange(12.0).reshape(3, 4)
    arrays += [grid.T.copy()[::-1, ::2], grid[:, ::-2], np.asfortranarray(grid + 1)]
    return arrays


@pytest.mark.parametrize("array", _arrays(), ids=lambda array: f"{array.dtype}-{array.shape}")
def test_round_trip_of_array_keeps_type_shape_and_bytes(array: np.ndarray) -> None:
    back = round_trip({"a": array})["a"]

    assert same(back, array)
    assert back.flags.writeable


def test_flatten_stores_types_of_every_format_as_themselves() -> None:
    flat = flatten({"w": np.zeros((2, 3), np.float32), "c": np.zeros(2, np.complex64)})

    specs = {tensor.spec.name: tensor.spec for tensor in flat.tensors}
    assert (specs["w"].dtype.name, specs["w"].shape) == ("float32", (2, 3))
    assert (specs["c"].dtype.name, specs["c"].shape) == ("uint8", (2, 8))


def test_flatten_content_of_contiguous_array_is_its_own_memory() -> None:
    array = np.zeros(4, np.float32)
    [tensor] = flatten([array]).tensors

    array[0] = 1

    assert bytes(tensor.content()[:4]) == np.float32(1).tobytes()


def test_tensor_names_are_escaped_unique_paths() -> None:
    one = np.zeros(1)
    state = {
        "a/b": {"~": one.copy(), 0: one.copy(), "0": one.copy()},
        "a": {"b": [one.copy()]},
        "__metadata__": one.copy(),
        "\ud800": one.copy(),
        (1, 2): one.copy(),
        "x~": {"": one.copy()},
    }

    names = [tensor.spec.name for tensor in flatten(state).tensors]

    expected = ["a~1b/~0", "a~1b/0", "a~1b/0~2", "a/b/0", "~__metadata__", "~ud800", "tuple"]
    assert names == [*expected, "x~0/"]


def test_tensor_name_of_bare_array_is_state() -> None:
    assert flatten(np.zeros(1)).tensors[0].spec.name == "state"


def test_arrays_that_want_one_name_are_numbered() -> None:
    state = {(number,): np.zeros(1) for number in range(4)}
    names = [tensor.spec.name for tensor in flatten(state).tensors]
    assert names == ["tuple", "tuple~2", "tuple~3", "tuple~4"]


def test_namedtuple_comes_back_as_plain_tuple() -> None:
    assert same(round_trip(Point(1, [2])), (1, [2]))


def test_object_whose_state_dict_fails_is_named() -> None:
    class Broken:
        def state_dict(self) -> object:
            raise ZeroDivisionError("no batches yet")

    with pytest.raises(ZeroDivisionError) as caught:
        flatten({"meters": [Broken()]})
    assert caught.value.__notes__ == ["while saving state['meters'][0]"]


def test_object_with_state_dict_comes_back_as_its_state_dict() -> None:
    class Counting:
        def state_dict(self) -> dict[str, object]:
            return {"n": 3}

    assert round_trip({"c": Counting()}) == {"c": {"n": 3}}


def test_ordered_dict_metadata_survives() -> None:
    state: Any = OrderedDict(a=1)
    state._metadata = {"": {"version": 2}}

    assert round_trip(state)._metadata == {"": {"version": 2}}


def test_same_array_twice_is_stored_once_and_comes_back_as_one_object() -> None:
    weight = np.arange(6.0)
    flat = flatten({"a": weight, "b": weight})

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [tensor.spec.name for tensor in flat.tensors] == ["a"]
    assert flat.aliases == {"b": "a"}
    assert back["a"] is back["b"]


@pytest.mark.parametrize(
    "look_at",
    [
        lambda array: array[2:],
        lambda array: np.frombuffer(memoryview(array), array.dtype),
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.ctypeslib.as_array(np.ctypeslib.as_ctypes(array)),
    ],
    ids=["view", "buffer", "asarray", "ctypes"],
)
def test_memory_of_an_owner_is_found_whoever_looks_at_it(look_at: Any) -> None:
    own = np.arange(8.0)
    flat = flatten({"other": np.ones(3), "own": own, "look": look_at(own), "again": own})
    assert len(flat.tensors) == 2
    loaded = unflatten(flat.skeleton, reader(flat))
    assert isinstance(loaded, dict)
    assert loaded["again"] is loaded["own"]
    loaded["own"][:] = 7
    assert (loaded["look"] == 7).all()


def test_owner_whose_elements_lie_on_each_other_is_refused() -> None:
    array: np.ndarray = np.ndarray((5,), np.float64, strides=(0,))
    with pytest.raises(UnsupportedState, match="no storage holds both"):
        flatten([array])


def test_views_of_a_stored_array_share_its_memory_again() -> None:
    base = np.arange(24.0).reshape(4, 6)
    state = {"row": base[1], "back": base[::-1, ::2], "int": base.view(np.int64), "all": base}
    flat = flatten(state)

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [tensor.spec.name for tensor in flat.tensors] == ["int"]
    assert same(back, state)
    back["all"][1, 0] = -1.0
    assert back["row"][0] == back["back"][2, 0] == -1.0


def test_view_shares_the_memory_of_an_array_that_came_unaligned() -> None:
    own = np.arange(8.0)
    flat = flatten({"own": own, "view": own[2:].view(np.complex128)})
    unaligned = np.zeros(9)
    stored = unaligned[1 if unaligned.ctypes.data % 16 == 0 else 0 :][:8]
    stored[:] = own
    loaded = unflatten(flat.skeleton, {"own": stored}.__getitem__)
    assert isinstance(loaded, dict)
    loaded["own"][2:4] = (5, 6)
    assert loaded["view"][0] == 5 + 6j


def test_partially_overlapping_views_share_a_run_of_bytes() -> None:
    base = np.arange(100, dtype=np.int16)
    state = {"a": base[10:30], "b": base[20:40], "c": base[39:41]}
    flat = flatten(state)

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [tensor.spec.name for tensor in flat.tensors] == ["a~storage"]
    assert flat.tensors[0].spec.size_bytes < 100
    assert same(back, state)
    back["a"][-1] = 7
    assert back["b"][9] == 7


def test_overlapping_views_of_a_fortran_array_share_memory_again() -> None:
    base = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    state = [base[:, :3], base[:, 1:]]

    back = round_trip(state)

    assert same(back, state)
    assert np.shares_memory(*back)


def test_disjoint_views_are_stored_compactly_under_their_own_names() -> None:
    base = np.zeros(1000)
    flat = flatten({"a": base[:3], "b": base[900:]})

    sizes = {tensor.spec.name: tensor.spec.size_bytes for tensor in flat.tensors}
    assert sizes == {"a": 24, "b": 800}


def test_transposed_array_used_twice_is_stored_once_as_itself() -> None:
    view = np.arange(6.0).reshape(2, 3).T
    flat = flatten([view, view[:]])

    back: Any = unflatten(flat.skeleton, reader(flat))

    assert [tensor.spec.shape for tensor in flat.tensors] == [(3, 2)]
    assert same(back, [view, view])
    assert np.shares_memory(*back)


def test_broadcast_array_is_stored_as_the_bytes_it_has() -> None:
    wide = np.broadcast_to(np.float64(3), (1000, 1000))
    flat = flatten({"w": wide})

    assert flat.tensors[0].spec.size_bytes == 8
    assert same(round_trip(wide), np.asarray(wide))


def test_overlapping_views_without_common_storage_are_refused() -> None:
    buffer = bytearray(64)
    left = np.frombuffer(buffer, np.uint8, 40)
    right = np.frombuffer(buffer, np.uint8, 40, 20)

    with pytest.raises(UnsupportedState, match=r"state\['l'\] and state\['r'\] overlap"):
        flatten({"l": left, "r": right})


GENERATORS = [
    np.random.default_rng(1),
    np.random.Generator(np.random.MT19937(1)),
    np.random.Generator(np.random.PCG64DXSM(1)),
    np.random.Generator(np.random.Philox(1)),
    np.random.Generator(np.random.SFC64(1)),
    np.random.RandomState(1),
]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda value: str(value)[:40])
def test_numpy_generator_continues_its_sequence(generator: Any) -> None:
    generator.normal(size=3)
    back = round_trip({"rng": generator})["rng"]

    assert back is not generator
    assert back.normal(size=5).tobytes() == generator.normal(size=5).tobytes()


def test_bit_generator_continues_its_sequence() -> None:
    generator = np.random.PCG64(5)
    back = round_trip(generator)

    assert back.random_raw() == generator.random_raw()


def test_python_generator_continues_its_sequence() -> None:
    generator = random.Random(3)
    generator.gauss(0, 1)
    back = round_trip([generator])[0]

    assert [back.gauss(0, 1) for _ in range(3)] == [generator.gauss(0, 1) for _ in range(3)]


def test_generator_state_values_are_accepted_by_their_setters() -> None:
    old = np.random.RandomState(4)
    state = {"python": random.Random(2).getstate(), "numpy": old.get_state()}
    back = round_trip(state)

    fresh, python = np.random.RandomState(0), random.Random(0)
    fresh.set_state(back["numpy"])
    python.setstate(back["python"])
    assert fresh.rand() == old.rand()
    assert python.random() == random.Random(2).random()


class Colour(enum.IntEnum):
    RED = 1


class Custom:
    pass


class Text(str):
    __slots__ = ()


REFUSED: list[tuple[object, str]] = [
    (lambda: None, "is a function"),
    (Custom(), "is a .*Custom, which.*hint: .*state_dict"),
    (Custom, "is a type"),
    (sys, "is a module"),
    (Text("a"), "is a .*Text"),
    (np.array([None]), "is an array with elements of type object"),
    (
        np.zeros(2, {"names": ["a"], "formats": ["i4"], "titles": ["t"]}),
        "is an array with elements of type",
    ),
    (np.ma.array([1]), "is a .*MaskedArray"),
    (random.SystemRandom(), "is a .*SystemRandom"),
    (np.random.RandomState(np.random.PCG64(1)), "is a .*RandomState"),
    (iter([]), "is a list_iterator"),
    (np.zeros((), [("a", "O")])[()], "is a numpy.void"),
    (np.zeros((), [("a", "f4")]).astype([("a", "O")]), "is an array with elements of type"),
]


@pytest.mark.parametrize(
    ("value", "message"), REFUSED, ids=[type(value).__name__ for value, _ in REFUSED]
)
def test_flatten_of_unknown_type_names_its_path(value: object, message: str) -> None:
    with pytest.raises(UnsupportedState, match=rf"(?s)state\['model'\]\[3\]\['x'\] {message}"):
        flatten({"model": [0, 1, 2, {"x": value}]})


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="needs NumPy 2")
def test_flatten_of_strings_of_any_length_names_their_type() -> None:
    text = np.array(["a"], dtype=np.dtypes.StringDType())
    with pytest.raises(UnsupportedState, match="is an array with elements of type StringDType"):
        flatten({"x": text})


@pytest.mark.parametrize("key", [Colour.RED, (1, Text("a")), Custom], ids=str)
def test_flatten_of_unknown_key_names_its_path(key: Any) -> None:
    with pytest.raises(UnsupportedState, match=r"state\['a'\] has a key of type"):
        flatten({"a": {key: 1}})


def test_flatten_of_ordered_dict_with_attributes_is_refused() -> None:
    state: Any = OrderedDict()
    state.owner = 3

    with pytest.raises(UnsupportedState, match="attributes"):
        flatten(state)


def test_flatten_of_cycle_is_refused() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)

    with pytest.raises(UnsupportedState, match=r"state\['a'\]\[0\] contains itself"):
        flatten(state)


def test_flatten_allows_one_list_in_two_places() -> None:
    shared = [1]

    assert round_trip([shared, shared]) == [[1], [1]]


def _nested(depth: int) -> Any:
    state: Any = 1
    for level in range(depth):
        state = [state] if level % 2 else {"k": state}
    return state


def test_state_nested_500_deep_survives() -> None:
    assert flatten(round_trip(_nested(500))).skeleton == flatten(_nested(500)).skeleton


@pytest.mark.parametrize("depth", [501, 100_000])
def test_flatten_nested_too_deep_is_refused(depth: int) -> None:
    with pytest.raises(UnsupportedState, match="more than 500 deep"):
        flatten(_nested(depth))


def test_flatten_of_keys_nested_too_deep_is_refused() -> None:
    key: Any = ()
    for _ in range(5000):
        key = (key,)

    with pytest.raises(UnsupportedState, match="key of type tuple"):
        flatten({key: 1})


def test_tensor_under_a_very_long_integer_has_a_hexadecimal_name() -> None:
    [tensor] = flatten({10**5000: np.zeros(1)}).tensors

    assert tensor.spec.name == hex(10**5000)


def test_message_shortens_long_keys() -> None:
    with pytest.raises(UnsupportedState) as caught:
        flatten({"k" * 1000: Custom()})

    assert len(str(caught.value)) < 400


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(max_size=8),
    st.tuples(st.integers(), st.text()),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None, categories=None)),
    st.binary(max_size=20),
    st.sets(st.integers(), max_size=4),
    st.integers(0, 5).map(lambda size: np.arange(size, dtype=np.float16)),
    st.integers(0, 5).map(lambda size: np.arange(size, dtype=np.complex128)[::-1]),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(STATES)
def test_skeleton_of_any_state_is_spelled_as_json_spells_it(state: object) -> None:
    skeleton = flatten(state).skeleton
    assert json.dumps(json.loads(skeleton), separators=(",", ":")) == skeleton


@settings(max_examples=150, deadline=None)
@given(STATES)
def test_round_trip_of_any_state_is_identical(state: object) -> None:
    assert same(round_trip(state), state)
