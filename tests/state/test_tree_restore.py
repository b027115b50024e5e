# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

from ckptmgr import StateMismatch, UnsupportedState
from ckptmgr.state.tree import flatten, restore
from tests.support.trees import reader, same

Point = namedtuple("Point", ["x", "y"])


def saved(state: object, target: object) -> Any:
    """Restore a flattened state into a target."""
    flat = flatten(state)
    return restore(target, flat.skeleton, reader(flat))


def test_restore_fills_arrays_in_place() -> None:
    weight = np.zeros((2, 3))
    target = {"layers": [{"w": weight}]}

    restored = saved({"layers": [{"w": np.ones((2, 3))}]}, target)

    assert restored is target
    assert target["layers"][0]["w"] is weight
    assert weight.all()


def test_restore_fills_a_strided_view_in_place() -> None:
    base = np.zeros(6)

    saved([np.ones(3)], [base[::2]])

    assert base.tolist() == [1, 0, 1, 0, 1, 0]


def test_restore_replaces_a_read_only_array() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False

    assert same(saved([np.ones(2)], [frozen]), [np.ones(2)])


def test_restore_replaces_plain_values_in_their_containers() -> None:
    target: dict[str, Any] = {"step": 0, "name": "", "best": None, "lr": 1, "np": np.float32(0)}

    saved({"step": 7, "name": "run", "best": 0.5, "lr": 0.1, "np": np.float32(2)}, target)

    assert same(target, {"step": 7, "name": "run", "best": 0.5, "lr": 0.1, "np": np.float32(2)})


def test_restore_puts_an_array_of_one_number_where_a_number_was() -> None:
    torch: Any = pytest.importorskip("torch")
    restored: Any = saved({"n": np.array(3), "best": torch.ones(())}, {"n": 0, "best": 1.0})
    assert (restored["n"], restored["best"].item()) == (3, 1.0)
    with pytest.raises(StateMismatch, match=r"state\['n'\] is a int, stored is int64\[1\]"):
        saved({"n": np.array([3])}, {"n": 0})


def test_restore_puts_anything_where_nothing_was() -> None:
    target: dict[str, Any] = {"momentum": None}

    saved({"momentum": {"w": np.ones(2)}}, target)

    assert same(target, {"momentum": {"w": np.ones(2)}})


def test_restore_updates_sets_counters_and_bytearrays_in_place() -> None:
    target: dict[str, Any] = {"s": {1}, "c": Counter(a=5), "b": bytearray(b"xyz"), "f": frozenset()}
    inner = [target["s"], target["c"], target["b"]]

    saved({"s": {2}, "c": Counter(a=1), "b": bytearray(b"q"), "f": frozenset([1])}, target)

    assert target == {"s": {2}, "c": Counter(a=1), "b": bytearray(b"q"), "f": frozenset([1])}
    assert all(old is new for old, new in zip(inner, target.values(), strict=False))


def test_restore_rebuilds_tuples_around_their_arrays() -> None:
    mean = np.zeros(2)
    target = (Point(mean, 0), (1, 2))

    restored = saved((Point(np.ones(2), 5), (3, 4)), target)

    assert type(restored[0]) is Point
    assert restored[0].x is mean
    assert (restored[0].y, restored[1]) == (5, (3, 4))
    assert mean.all()


def test_restore_replaces_a_history_of_another_length() -> None:
    losses: list[Any] = []
    target = {"losses": losses, "pair": ()}

    saved({"losses": [0.5, 0.25], "pair": (1,)}, target)

    assert target == {"losses": [0.5, 0.25], "pair": (1,)}
    assert target["losses"] is losses


def test_restore_replaces_a_history_of_dicts_and_tuples() -> None:
    target: dict[str, Any] = {"epochs": [], "curve": [(0, 1.0)]}
    stored = {"epochs": [{"loss": 0.5, "lr": [0.1, 0.2]}, {}], "curve": [(0, 1.0), (1, 0.5)]}

    saved(stored, target)

    assert same(target, stored)


def test_restore_of_a_list_that_has_grown_arrays_names_the_way_out() -> None:
    target: dict[str, Any] = {"replay": [{"x": np.ones(2)}]}

    with pytest.raises(StateMismatch, match="None in a target takes whatever is stored"):
        saved({"replay": [{"x": np.ones(2)}] * 2}, target)


def test_restore_gives_objects_their_state() -> None:
    class Counting:
        def __init__(self, n: int) -> None:
            self.n = n

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n, "w": np.full(2, self.n)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

    target = {"a": [Counting(0)]}

    saved({"a": [Counting(3)]}, target)

    assert target["a"][0].n == 3


def test_restore_notes_the_path_when_an_object_refuses() -> None:
    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise LookupError("wrong version")

    with pytest.raises(LookupError, match="wrong version") as caught:
        saved({"a": {}}, {"a": Refusing()})

    assert "state['a']" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: np.random.default_rng(seed),
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda seed: np.random.RandomState(seed),
    ],
)
def test_restore_sets_numpy_generators_in_place(make: Any) -> None:
    source, target = make(1), make(2)
    source.normal(size=3)

    restored = saved({"rng": source}, {"rng": target})

    assert restored["rng"] is target
    assert target.normal() == source.normal()


def test_restore_sets_bit_and_python_generators_in_place() -> None:
    bits, python = np.random.PCG64(1), random.Random(1)
    target: list[Any] = [np.random.PCG64(2), random.Random(2)]

    saved([bits, python], target)

    assert target[0].random_raw() == bits.random_raw()
    assert target[1].random() == python.random()


def test_restore_sets_generators_after_objects() -> None:
    rng = random.Random(1)

    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            rng.random()

    saved([random.Random(5), Drawing()], [rng, Drawing()])

    assert rng.random() == random.Random(5).random()


MISMATCHES: list[tuple[object, object, str]] = [
    ({"a": 1}, {"b": 1}, r"state\['b'\] is not in the checkpoint"),
    ({"a": 1}, {}, r"state\['a'\] is only in the checkpoint"),
    ([np.zeros(2)], [np.zeros(3)], r"state\[0\] is float64\[3\], stored is float64\[2\]"),
    ([np.zeros(2, "f4")], [np.zeros(2)], r"is float64\[2\], stored is float32\[2\]"),
    ([np.zeros(2)], [1], "is a int, stored is float64"),
    ([1], [np.zeros(2)], "is float64.*, stored is a int"),
    ([None], [np.zeros(2)], "stored is a NoneType"),
    ([1], (1,), "is a tuple, stored is a list"),
    ({"a": 1}, [1], "is a list, stored is a dict"),
    ([np.zeros(1)], [np.zeros(1), np.zeros(1)], "has 2 elements, stored are 1"),
    (Point(1, 2), Point(1, 2)._replace(x=Point(1, 2)), "is a Point, stored is a int"),
    ((1, 2, 3), Point(1, 2), "has 2 elements, stored are 3"),
    ([(1, 2)], [Point(1, 2), Point(3, 4)], "has 2 elements, stored are 1"),
    ({1}, frozenset([1]), "is a frozenset, stored is a set"),
    (bytearray(b"a"), b"a", "is a bytes, stored is a bytearray"),
    (np.random.default_rng(1), np.random.RandomState(1), "numpy.RandomState"),
    ([1], [object()], "is a object"),
]


@pytest.mark.parametrize(("state", "target", "message"), MISMATCHES)
def test_restore_of_other_structure_names_the_difference(
    state: object, target: object, message: str
) -> None:
    with pytest.raises(StateMismatch, match=message):
        saved(state, target)


def test_restore_into_an_object_needs_a_state_dict() -> None:
    class Loading:
        def load_state_dict(self, state: object) -> None:
            raise AssertionError("must not be called")

    with pytest.raises(StateMismatch, match="is a Loading, stored is a int"):
        saved([1], [Loading()])


def test_restore_that_does_not_fit_changes_nothing_and_names_every_path() -> None:
    rng = random.Random(1)
    before = rng.getstate()
    target: dict[str, Any] = {"w": np.zeros(2), "n": 0, "rng": rng, "l": [0]}
    target |= {"bad": np.zeros(1), "old": 1}
    state = {"w": np.ones(2), "n": 5, "rng": random.Random(2), "bad": np.zeros(3), "new": 1}

    with pytest.raises(StateMismatch) as caught:
        saved({**state, "l": [7]}, target)

    assert not target["w"].any()
    assert (target["n"], target["l"], rng.getstate()) == (0, [0], before)
    text = str(caught.value)
    assert all(f"state['{key}']" in text for key in ("bad", "old", "new"))
    assert "state['w']" not in text
    assert isinstance(caught.value, UnsupportedState | ValueError)


def test_restore_names_at_most_a_hundred_differences() -> None:
    with pytest.raises(StateMismatch, match=r"and 50 more"):
        saved(dict.fromkeys(range(150), 1), {})


def test_restore_into_a_deep_state_works() -> None:
    state: Any = [1]
    target: Any = [0]
    for _ in range(490):
        state, target = [state], [target]

    restored = saved(state, target)

    while isinstance(restored, list):
        restored = restored[0]
    assert restored == 1


def test_restore_into_an_ordered_dict_keeps_it() -> None:
    target = OrderedDict(a=0, b=0)

    assert saved({"b": 2, "a": 1}, target) is target
    assert target == OrderedDict(a=1, b=2)


class Descent:
    """Noisy gradient descent in plain NumPy."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weight = self.rng.normal(size=4)
        self.velocity = np.zeros(4)
        self.progress: dict[str, Any] = {"step": 0, "norms": []}

    def state(self) -> dict[str, Any]:
        progress = self.progress
        return {"rng": self.rng, "w": (self.weight, self.velocity), "progress": progress}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            gradient = self.weight + self.rng.normal(size=4)
            self.velocity *= 0.9
            self.velocity -= 0.1 * gradient
            self.weight += self.velocity
            self.progress["step"] += 1
            self.progress["norms"].append(float(np.linalg.norm(self.weight)))


def test_descent_resumed_from_flat_state_equals_descent_without_a_break() -> None:
    whole, first, second = Descent(1), Descent(1), Descent(2)
    whole.run(12)
    first.run(5)

    saved(first.state(), second.state())
    second.run(7)

    assert second.progress == whole.progress
    assert second.weight.tobytes() == whole.weight.tobytes()


def test_restore_copies_into_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    strided = torch.zeros(3, 2).T
    target = {"p": parameter, "s": strided, "size": torch.Size([1])}

    saved({"p": torch.ones(2, 3), "s": torch.ones(2, 3), "size": torch.Size([2])}, target)

    assert target["p"] is parameter
    assert target["s"] is strided
    assert (parameter == 1).all()
    assert (strided == 1).all()
    assert target["size"] == torch.Size([2])


def test_restore_replaces_tensors_that_cannot_be_filled() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    target = [torch.zeros(1).expand(3), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")]

    restored = saved([torch.ones(3), 2 * torch.eye(2).to_sparse(), torch.ones(2)], target)

    assert (restored[0] == 1).all()
    assert torch.equal(restored[1].to_dense(), 2 * torch.eye(2))
    assert (restored[2] == 1).all()


def test_restore_into_a_module_without_memory_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    net = torch.nn.Linear(2, 3, device="meta")

    with pytest.raises(StateMismatch, match=r"\['bias'\] is on the meta device"):
        saved({"n": torch.nn.Linear(2, 3)}, {"n": net})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": "2x2", "bias": "2"}, r"state\['n'\]\.state_dict\(\)\['weight'\]"),
        ({"weight": "3x2"}, r"state_dict\(\)\['bias'\] is not in the checkpoint"),
        ([1], "is a OrderedDict, stored is a list"),
    ],
)
def test_restore_compares_modules_before_loading(state: Any, message: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    net, other = torch.nn.Linear(2, 3), np.zeros(2)
    before = net.weight.detach().clone()
    if isinstance(state, dict):
        state = {key: torch.zeros(*map(int, size.split("x"))) for key, size in state.items()}

    with pytest.raises(StateMismatch, match=message):
        saved({"n": state, "other": np.ones(2)}, {"n": net, "other": other})

    assert torch.equal(net.weight, before)
    assert not other.any()


def test_restore_of_another_tensor_type_names_both() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    with pytest.raises(StateMismatch, match=r"is torch.float32\[2\], stored is torch.float64\[2\]"):
        saved([torch.zeros(2, dtype=torch.float64)], [torch.zeros(2)])


def test_restore_sets_torch_generators_in_place() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    source, target = torch.Generator().manual_seed(1), torch.Generator()

    saved([source], [target])

    assert torch.rand(1, generator=target) == torch.rand(1, generator=source)


class Cells(dict[str, Any]):
    """A mapping that gives copies of its arrays away, and takes new ones."""

    def get(self, key: str, default: object = None) -> Any:
        return np.copy(self[key])


def test_restore_puts_arrays_back_into_a_mapping_that_returns_copies() -> None:
    target = Cells(w=np.zeros(2))

    saved({"w": np.ones(2)}, target)

    assert target["w"].all()


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_restore_keeps_the_arrays_and_the_order_of_a_dict(kind: type[dict[str, Any]]) -> None:
    first, last = np.zeros(2), np.zeros(3)
    target = kind(last=last, step=0, first=first)

    saved(OrderedDict(first=np.ones(2), step=1, last=np.ones(3)), target)

    assert list(target) == ["last", "step", "first"]
    assert (target["first"] is first, target["last"] is last) == (True, True)
    assert same(dict(target), {"last": np.ones(3), "step": 1, "first": np.ones(2)})
