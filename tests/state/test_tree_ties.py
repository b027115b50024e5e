# SPDX-License-Identifier: Apache-2.0
"""Objects that a state holds in several places: one object before, one object after."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Snapshots
from ckptmgr.state.paths import dump_skeleton
from ckptmgr.state.skeleton_merge import merge_skeletons
from ckptmgr.state.tree import TreeError, flatten, unflatten
from tests.support.trees import round_trip


class Holder:
    """Gives the very same dict as its state each time."""

    def __init__(self) -> None:
        self.state = {"w": np.ones(3), "n": 1}

    def state_dict(self) -> dict[str, Any]:
        return self.state


def legacy() -> np.random.RandomState:
    return np.random.RandomState(1)


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1.0, 2.0],
    "empty list": list,
    "dict": lambda: {"a": [1]},
    "ordered": lambda: OrderedDict(a=1),
    "counter": lambda: Counter("abca"),
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(b"short"),
    "long bytearray": lambda: bytearray(5000),
    "array": lambda: np.arange(3.0),
    "generator": lambda: np.random.default_rng(1),
    "bit generator": lambda: np.random.PCG64(1),
    "legacy generator": legacy,
    "python generator": lambda: random.Random(1),
    "object": Holder,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_one_object_comes_back_as_one_and_equal_ones_as_several(make: Callable[[], Any]) -> None:
    one = make()
    state = {"a": one, "deep": [{"b": (one,)}], "other": make()}
    back = round_trip(state)
    assert back["a"] is back["deep"][0]["b"][0]
    assert back["a"] is not back["other"]
    assert type(back["a"]) is type(back["other"])


def test_torch_objects_come_back_as_one() -> None:
    torch: Any = pytest.importorskip("torch")
    for one in (
        torch.Generator(),
        torch.zeros(3),
        torch.eye(3).to_sparse(),
        torch.nn.Linear(2, 2),
        torch.nn.Parameter(torch.zeros(2)),
    ):
        back = round_trip([one, {"x": one}])
        assert back[0] is back[1]["x"]


def test_two_generators_over_one_stream_draw_from_one_stream() -> None:
    stream = np.random.PCG64(5)
    one, other = round_trip([np.random.Generator(stream), np.random.Generator(stream)])
    assert one.bit_generator is other.bit_generator


def test_shared_parts_of_shared_objects_are_tied_once_more() -> None:
    history: list[float] = []
    inner = {"history": history}
    back = round_trip([inner, inner, history])
    back[2].append(1.0)
    assert back[0] is back[1]
    assert back[0] == {"history": [1.0]}


def test_immutable_values_are_no_ties_and_the_text_stays_as_it_was() -> None:
    one, text = (1, 2), "name"
    state = {"a": [one, text, b"x" * 5000, frozenset((1,)), ()], "b": [one, text, ()]}
    assert flatten(state).skeleton.startswith('{"version":1,')
    shared: list[int] = []
    assert flatten([shared, shared]).skeleton == (
        '{"version":2,"nodes":[{"list":0},{"shared":0},{"list":0},{"shared":0},{"list":2}]}'
    )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"shared": 0}], "a value is shared as 0"),
        ([{"list": 0}, {"shared": "x"}], "a value is shared as 'x'"),
        (
            [{"list": 0}, {"shared": 0}, {"dict": 0}, {"shared": 0}, {"list": 2}],
            "the values that are shared as 0 are of several types",
        ),
    ],
)
def test_damaged_ties_are_refused(nodes: list[Any], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        unflatten(dump_skeleton(nodes), no_tensors)


@pytest.mark.parametrize("config", [CheckpointConfig(), CheckpointConfig(format="safetensors")])
def test_generators_and_lists_stay_shared_in_a_new_state(
    tmp_path: Path, config: CheckpointConfig
) -> None:
    rng, history = np.random.default_rng(3), [0.5]
    state = {"sampler": {"rng": rng, "history": history}, "model": {"rng": rng}, "seen": history}
    with CheckpointManager(tmp_path, config, snapshots=Snapshots(1)) as manager:
        manager.save(1, state)
        manager.snapshot(1, state)
        manager.step_end(2, state)
        found: list[Any] = [manager.load(1), manager.rollback(None).state]
    with CheckpointManager(tmp_path, config) as manager:
        found.append(manager.resume(None).state)
    expected = [rng.random(), rng.random()]
    for new in found:
        draws = [new["sampler"]["rng"].random(), new["model"]["rng"].random()]
        assert draws == expected
        new["seen"].append(1.0)
        assert new["sampler"]["history"] == [0.5, 1.0]


def test_state_that_was_stored_as_copies_is_restored_into_one_object(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.random.default_rng(3), "b": np.random.default_rng(3)})
        rng = np.random.default_rng(4)
        manager.resume({"a": rng, "b": rng})
    assert rng.random() == np.random.default_rng(3).random()


def test_ranks_that_agree_keep_what_is_shared_and_one_with_values_of_its_own_takes_copies() -> None:
    shared, own = ["s"], ["own"]
    first, second = (flatten({"x": shared, "y": shared, "mine": [n]}).skeleton for n in (0, 1))
    untied = flatten({"x": ["s"], "y": ["s"], "mine": [0]}).skeleton
    assert merge_skeletons(first, [first, untied], None, has=lambda _: True).skeleton == first
    target = flatten({"x": own, "y": own, "mine": own}).skeleton
    found = merge_skeletons(first, [second], target, has=lambda _: True)
    assert unflatten(found.skeleton, no_tensors) == {"x": ["s"], "y": ["s"], "mine": ["own"]}
    assert found.kept == ("state['mine'][0]",)


def no_tensors(name: str) -> np.ndarray:
    raise KeyError(name)
