# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptmgr import UnsupportedState
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, Text
from ckptmgr.state.arrays import framework_of, named_tensors, to_tensor
from ckptmgr.state.tree import flatten, restore, unflatten
from tests.support.trees import reader


def array_of(item: Item) -> np.ndarray:
    """Return the array that a tensor stores."""
    assert isinstance(item, Tensor)
    array = np.frombuffer(item.content(), item.spec.dtype.to_numpy())
    assert array.nbytes == item.spec.size_bytes
    return array.reshape(item.spec.shape)


GRID = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "array",
    [
        GRID,
        GRID.T,
        GRID[::-1, ::2],
        GRID.astype(">f4"),
        np.array(3, np.int8),
        np.zeros((2, 0, 3)),
        np.array([True, False]),
        np.arange(3).astype(ml_dtypes.bfloat16),
        np.arange(3).astype(ml_dtypes.float8_e4m3fn),
        np.arange(3).astype(np.complex128),
        np.broadcast_to(np.float32(2), (3, 3)),
        np.float16(1.5),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_to_tensor_of_numpy_keeps_values(array: Any) -> None:
    tensor = to_tensor("a", array)

    assert (tensor.spec.name, tensor.spec.shape) == ("a", array.shape)
    assert (array_of(tensor) == np.asarray(array)).all()


def test_to_tensor_of_contiguous_array_is_its_own_memory() -> None:
    array = np.zeros(2)
    tensor = to_tensor("a", array)

    array[0] = 1

    assert array_of(tensor)[0] == 1


OTHER: list[tuple[object, str]] = [
    (3, "'w' is a int, not an array"),
    (None, "'w' is a NoneType"),
    ([1], "'w' is a list"),
    (np.array(["a"]), "'w' has elements of type <U1"),
    (np.zeros(2, ml_dtypes.int4), "'w' has elements of type int4"),
    (np.array([None]), "'w' has elements of type object"),
    (np.zeros(2, np.longdouble), "'w' has elements of type float128"),
]


@pytest.mark.parametrize(("value", "message"), OTHER)
def test_to_tensor_of_other_value_names_it(value: object, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        to_tensor("w", value)


def test_framework_of_plain_values_is_none() -> None:
    values: list[object] = [1, "a", [], None]

    assert [framework_of(value) for value in values] == [None] * 4


def test_named_tensors_types_numbers_like_mindspore() -> None:
    mapping = {"i": 5, "u": 2**63, "f": 0.1, "big": 1e300, "b": True, "s": "text"}

    *numbers, text = named_tensors(mapping)

    stored = [array_of(number) for number in numbers]
    assert [str(array.dtype) for array in stored] == [
        "int64",
        "uint64",
        "float32",
        "float32",
        "bool",
    ]
    assert [array[()] for array in stored] == [5, 2**63, np.float32(0.1), np.inf, True]
    assert all(array.shape == () for array in stored)
    assert text == Text(name="s", text="text")


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_named_tensors_refuses_integers_of_more_than_64_bits(value: int) -> None:
    with pytest.raises(UnsupportedState, match=r"'n' is an integer of 6[45] bits"):
        named_tensors({"n": value})


def test_named_tensors_keeps_order_and_numpy_types() -> None:
    items = named_tensors({"b": np.float64(1), "a": GRID, "c": np.str_("x")})

    assert [item.spec.name for item in items if isinstance(item, Tensor)] == ["b", "a"]
    assert array_of(items[0]).dtype == np.float64
    assert items[2] == Text(name="c", text="x")


@pytest.mark.parametrize("empty", [[], {}])
def test_named_tensors_of_nothing_is_nothing(empty: object) -> None:
    assert named_tensors(empty) == []


def test_named_tensors_of_name_data_list_takes_arrays() -> None:
    [item] = named_tensors([{"name": "a", "data": GRID, "more": 1}])

    assert (array_of(item) == GRID).all()


SAVE_ERRORS: list[tuple[object, str]] = [
    (
        5,
        "For 'save_checkpoint', the parameter 'save_obj' must be nn.Cell, list or dict, "
        "but got <class 'int'>.",
    ),
    (
        None,
        "For 'save_checkpoint', the parameter 'save_obj' must be nn.Cell, list or dict, "
        "but got <class 'NoneType'>.",
    ),
    (
        (1, 2),
        "For 'save_checkpoint', the parameter 'save_obj' must be nn.Cell, list or dict, "
        "but got <class 'tuple'>.",
    ),
    (
        [{"name": "a"}],
        "For save_checkpoint, save_obj should be a list of dict items, and the dict should have key "
        "values 'name' and 'value', but got <class 'dict'> and {'name': 'a'}.",
    ),
    (
        [{"name": 1, "data": GRID}],
        "For save_checkpoint, when save_obj is a list of dict items, the name in dict should be "
        "string, but got <class 'int'>.",
    ),
    (
        [{"name": "a", "data": 1}],
        "For save_checkpoint, when save_obj is a list of dict items, the data in dict should be "
        "parameter, but got <class 'int'>.",
    ),
    (
        [GRID],
        "For save_checkpoint, when save_obj is made up by list of Parameter,the param should be "
        "parameter, but got <class 'numpy.ndarray'>",
    ),
    (
        {1: GRID},
        "For save_checkpoint, when save_obj is made up by dict, the key should be str andvalue should "
        "be Parameter, but got the type of key is <class 'int'> andthe type of value is "
        "<class 'numpy.ndarray'>",
    ),
]


@pytest.mark.parametrize(("save_obj", "message"), SAVE_ERRORS)
def test_named_tensors_of_wrong_shape_raises_what_mindspore_raises(
    save_obj: object, message: str
) -> None:
    with pytest.raises(TypeError) as caught:
        named_tensors(save_obj)

    assert type(caught.value) is TypeError
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [None, [1], {"b": GRID}, b"raw"])
def test_named_tensors_of_unknown_value_names_it(value: object) -> None:
    with pytest.raises(UnsupportedState, match="'a' is a"):
        named_tensors({"a": value})


def test_named_tensors_refuses_a_name_twice() -> None:
    with pytest.raises(UnsupportedState, match="two values are called 'a'"):
        named_tensors([{"name": "a", "data": GRID}] * 2)


class Holder:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state


def test_named_tensors_joins_nested_state_dicts_by_dots() -> None:
    state = {"net": {"0.w": GRID}, "groups": [{"lr": 0.5}, {"lr": 1.0}], "name": "run"}

    items = named_tensors(Holder(state))

    names = [item.spec.name if isinstance(item, Tensor) else item.name for item in items]
    assert names == ["net.0.w", "groups.0.lr", "groups.1.lr", "name"]


def test_named_tensors_refuses_names_that_meet_after_joining() -> None:
    with pytest.raises(UnsupportedState, match=r"two values are called 'a\.b'"):
        named_tensors(Holder({"a": {"b": 1}, "a.b": 2}))


def test_named_tensors_of_endless_state_dict_is_refused() -> None:
    state: dict[str, Any] = {}
    state["a"] = state

    with pytest.raises(UnsupportedState, match="nested more than"):
        named_tensors(Holder(state))


def test_named_tensors_of_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match="but got <class 'type'>"):
        named_tensors(Holder)


def test_named_tensors_of_torch_module_uses_its_state_dict() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))

    items = named_tensors(net)

    expected = {name: value.numpy() for name, value in net.state_dict().items()}
    stored = {item.spec.name: array_of(item) for item in items if isinstance(item, Tensor)}
    assert stored.keys() == expected.keys()
    assert all((stored[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "float8_e5m2", "bool"])
def test_to_tensor_of_torch_keeps_bits(name: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(getattr(torch, name)).T

    stored = to_tensor("t", tensor)

    assert (stored.spec.dtype.name, stored.spec.shape) == (name, (2, 2))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    assert bytes(stored.content()) == flat.numpy().tobytes()


def test_to_tensor_of_torch_resolves_views() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    waves = torch.tensor([1 + 2j, 3 - 4j])

    assert array_of(to_tensor("c", waves.conj())).tolist() == [1 - 2j, 3 + 4j]
    assert array_of(to_tensor("n", waves.conj().imag)).tolist() == [-2, 4]
    assert array_of(to_tensor("e", torch.ones(1).expand(2, 3))).shape == (2, 3)
    assert array_of(to_tensor("z", torch.tensor(2.5))).shape == ()
    assert array_of(to_tensor("0", torch.zeros(2, 0))).shape == (2, 0)
    assert array_of(to_tensor("p", torch.nn.Parameter(torch.ones(2)))).tolist() == [1, 1]


def test_to_tensor_of_torch_without_plain_bytes_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    with pytest.raises(UnsupportedState, match=r"'t' is sparse.*\n.*to_dense"):
        to_tensor("t", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedState, match=r"whose memory is not here"):
        to_tensor("t", torch.zeros(1, device="meta"))
    with pytest.raises(UnsupportedState, match=r"elements of type torch.bits8"):
        to_tensor("t", torch.zeros(1, dtype=torch.uint8).view(torch.bits8))


def foreign(module: str, name: str, *bases: type, **members: object) -> Any:
    """Return a class that looks as if it came from a framework that is not installed here."""
    return type(name, bases, {"__module__": module, **members})


class Stored:
    """The part of a MindSpore tensor that is looked at: dtype, shape, asnumpy."""

    def __init__(self, array: np.ndarray, *, dtype: str = "", name: str = "") -> None:
        self.array, self.name, self.has_init = array, name, True
        self.dtype = dtype or {"float32": "Float32", "bfloat16": "BFloat16"}[array.dtype.name]
        self.shape = array.shape
        self.param_info = SimpleNamespace(is_pipeline_shared_param=name == "shared")

    def asnumpy(self) -> np.ndarray:
        return self.array

    def init_data(self) -> Stored:
        self.has_init = False
        return self

    def assign(self, other: Stored) -> None:
        self.array = other.array


MsTensor = foreign("mindspore.common.tensor", "Tensor", Stored)
MsParameter = foreign("mindspore.common.parameter", "Parameter", MsTensor, set_data=Stored.assign)
AssignedTensor = foreign("here", "Plain", MsTensor, assign_value=Stored.assign)
ONES = np.ones((2, 3), np.float32)


def test_to_tensor_of_mindspore_tensor_reads_its_type() -> None:
    parameter = MsParameter(ONES)

    tensor = to_tensor("p", parameter)

    assert (array_of(tensor) == ONES).all()
    assert not parameter.has_init


def test_to_tensor_of_mindspore_bfloat16_and_int4_keeps_bytes() -> None:
    short = to_tensor("b", MsTensor(ONES.astype(ml_dtypes.bfloat16)))
    packed = to_tensor("q", MsTensor(np.array([1, 2], np.int8), dtype="Int4"))

    assert (short.spec.dtype.mindspore, packed.spec.dtype.mindspore) == ("BFloat16", "Int4")
    assert bytes(short.content()) == ONES.astype(ml_dtypes.bfloat16).tobytes()
    assert bytes(packed.content()) == b"\1\2"


def test_named_tensors_takes_mindspore_parameters_and_cells() -> None:
    parameters = [MsParameter(ONES, name="a"), MsParameter(ONES, name="shared")]
    cell = SimpleNamespace(parameters_and_names=lambda: [(p.name, p) for p in parameters])

    from_list, from_cell = named_tensors(parameters), named_tensors(cell)

    assert [item.spec.name for item in from_list if isinstance(item, Tensor)] == ["a", "shared"]
    assert [item.spec.name for item in from_cell if isinstance(item, Tensor)] == ["a"]


def test_named_tensors_takes_mindspore_generators_and_map_parameters() -> None:
    generator = foreign(
        "mindspore.common.generator", "Generator", get_state=lambda self: MsTensor(ONES)
    )
    parts = (np.arange(2, dtype=np.int32), np.ones((2, 2), np.float32), np.zeros(2, np.int32))
    table = foreign(
        "mindspore.experimental.map_parameter",
        "MapParameter",
        export_data=lambda self, incremental: parts,
    )

    state, mapped = named_tensors({"g": generator(), "m": table()})

    assert (array_of(state) == ONES).all()
    assert isinstance(mapped, MapTensors)
    stored = (mapped.key, mapped.value, mapped.status)
    assert all((array_of(a) == b).all() for a, b in zip(stored, parts, strict=True))


@pytest.fixture
def jax_array(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for `jax.Array`, with `jax` in place for as long as the test runs."""

    def convert(self: Any, dtype: object = None, copy: object = None) -> np.ndarray:
        array: np.ndarray = self.array
        return array

    alone = SimpleNamespace(device_set={"cpu"})
    kind = foreign("jaxlib", "ArrayImpl", Stored, __array__=convert, sharding=alone)
    kind.weak_type = kind.committed = False

    def asarray(array: np.ndarray) -> Any:
        return kind(array, dtype=array.dtype.name)

    jax: Any = ModuleType("jax")
    jax.Array = kind
    jax.numpy = SimpleNamespace(asarray=asarray)
    monkeypatch.setitem(sys.modules, "jax", jax)
    return asarray


def test_jax_array_is_stored_and_restored_into_an_array(jax_array: Any) -> None:
    half = np.arange(3).astype(ml_dtypes.bfloat16)
    state, target = {"w": jax_array(half)}, {"w": jax_array(np.zeros_like(half))}
    flat = flatten(state)

    restored: Any = restore(target, flat.skeleton, reader(flat))

    assert [tensor.spec.dtype.name for tensor in flat.tensors] == ["bfloat16"]
    assert framework_of(restored["w"]) == "jax"
    assert (restored["w"].array == half).all()
    with pytest.raises(UnsupportedState, match="stored is bfloat16"):
        restore({"w": jax_array(np.zeros(3))}, flat.skeleton, reader(flat))


def test_mindspore_cell_is_restored_through_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    cell_type = foreign(
        "mindspore.nn.cell",
        "Cell",
        SimpleNamespace,
        state_dict=lambda self: {"w": self.w},
        load_state_dict=None,
    )
    cell_type.load_state_dict = lambda self, state: None
    maker = SimpleNamespace(Tensor=lambda array, dtype: MsTensor(array, dtype=dtype))
    monkeypatch.setitem(sys.modules, "mindspore", maker)
    flat = flatten([cell_type(w=MsParameter(ONES))])
    target = cell_type(w=MsParameter(ONES * 0))

    restored: Any = restore([target], flat.skeleton, reader(flat))

    assert restored[0] is target
    assert (target.w.array == ONES).all()
    with pytest.raises(UnsupportedState, match="is only in the checkpoint"):
        restore([{"b": ONES}], flat.skeleton, reader(flat))


def test_mindspore_tensor_is_stored_and_restored_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(array: np.ndarray, dtype: str) -> Any:
        return MsTensor(array, dtype=dtype)

    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace(Tensor=make))
    target = MsParameter(ONES * 0)
    packed = MsTensor(np.array([1, 2], np.int8), dtype="Int4")
    flat = flatten({"w": MsParameter(ONES), "q": packed})

    back: Any = unflatten(flat.skeleton, reader(flat))
    plain = AssignedTensor(ONES * 0)
    restored: Any = restore({"w": target, "q": None}, flat.skeleton, reader(flat))
    restore({"w": plain, "q": None}, flat.skeleton, reader(flat))

    assert restored["w"] is target
    assert (target.array == ONES).all()
    assert (plain.array == back["w"]).all()
    assert back["q"].tolist() == [1, 2]
