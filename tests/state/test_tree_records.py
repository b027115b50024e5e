# SPDX-License-Identifier: Apache-2.0
"""Objects that are stored as plain values: dataclasses, namespaces, enum members, JAX keys."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, CheckpointManager, StateMismatch, UnsupportedState
from ckptmgr.state.tree import flatten, restore
from tests.support.trees import reader, round_trip

NUMBERS = st.integers() | st.floats(allow_nan=False) | st.text()


@dataclass
class Progress:
    epoch: int
    losses: list[float] = field(default_factory=list)
    weights: np.ndarray = field(default_factory=lambda: np.zeros(2))


@dataclass(frozen=True, slots=True)
class Limits:
    low: Any
    high: Any
    check: Any = field(default=len, metadata={"pytree_node": False})
    seen: Any = field(default=0, init=False)


@dataclass(frozen=True)
class Model:
    step: int
    apply: Any = field(default=len, metadata={"static": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", {"a": 1})


class Phase(enum.Enum):
    WARMUP = enum.auto()
    TRAIN = enum.auto()
    FIT = TRAIN


class Optimizer(enum.StrEnum):
    ADAM = "adam"
    SGD = "sgd"


class Parts(enum.Flag):
    BODY = enum.auto()
    HEAD = enum.auto()


class Loose(enum.Flag, boundary=enum.CONFORM):
    ONE = 1


class Pair(NamedTuple):
    phase: Phase
    limits: Limits


def _into(target: object, state: object) -> Any:
    flat = flatten(state)
    return restore(target, flat.skeleton, reader(flat))


def test_objects_survive_a_save_and_a_resume_in_kind(tmp_path: Path) -> None:
    state = {
        "progress": Progress(3, [0.5], np.ones(2)),
        "limits": Limits(1, [2.0]),
        "args": argparse.Namespace(lr=0.5, layers=[1, 2]),
        "space": SimpleNamespace(a=SimpleNamespace(b=1)),
        "pair": Pair(Phase.TRAIN, Limits(None, Optimizer.SGD)),
        "parts": Parts.BODY | Parts.HEAD,
    }
    config = CheckpointConfig()
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, state)
    target: dict[str, Any] = {
        "progress": Progress(0),
        "limits": Limits(0, [0.0]),
        "args": argparse.Namespace(lr=0.1, layers=[]),
        "space": SimpleNamespace(a=SimpleNamespace(b=0)),
        "pair": Pair(Phase.WARMUP, Limits(None, Optimizer.ADAM)),
        "parts": Parts(0),
    }
    kept = (target["progress"], target["progress"].weights, target["args"], target["space"].a)
    CheckpointManager(tmp_path, config, prefix="net").resume(target)
    assert repr(target) == repr(state)
    after = (target["progress"], target["progress"].weights, target["args"], target["space"].a)
    assert all(one is other for one, other in zip(kept, after, strict=True))
    plain: Any = CheckpointManager(tmp_path, config, prefix="net").resume().state
    assert repr(plain) == repr(
        {
            "progress": {"epoch": 3, "losses": [0.5], "weights": np.ones(2)},
            "limits": {"low": 1, "high": [2.0], "seen": 0},
            "args": {"lr": 0.5, "layers": [1, 2]},
            "space": {"a": {"b": 1}},
            "pair": ("TRAIN", {"low": None, "high": "SGD", "seen": 0}),
            "parts": 3,
        }
    )


@settings(max_examples=60, deadline=None)
@given(NUMBERS, NUMBERS)
def test_record_of_any_fields_is_restored_into_one_of_its_kind(low: Any, high: Any) -> None:
    made = (Limits(low, high), SimpleNamespace(a=low, b=high), argparse.Namespace(a=[low], b=high))
    target = (Limits(0, 0), SimpleNamespace(a=0, b=0), argparse.Namespace(a=[0], b=0))
    back = _into(target, made)
    assert back == made
    assert round_trip(made[1]) == {"a": low, "b": high}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([*Phase, *Optimizer]), st.sampled_from([Parts(n) for n in range(4)]))
def test_enum_member_is_restored_into_a_member(member: Any, parts: Parts) -> None:
    kind: Any = type(member)
    target = [next(iter(kind)), Parts.HEAD]
    assert _into(target, [member, parts]) == [member, parts]
    assert round_trip([member, parts]) == [member.name, parts.value]


@dataclass(frozen=True)
class Doubled:
    base: int

    @cached_property
    def double(self) -> int:
        return 2 * self.base


def test_frozen_dataclass_forgets_what_it_computed_from_its_old_fields() -> None:
    target = Doubled(1)
    assert target.double == 2
    assert _into({"x": target}, {"x": Doubled(5)})["x"].double == 10


def test_frozen_dataclass_is_replaced_and_keeps_what_is_not_stored() -> None:
    old, model = Limits(0, 0, check=abs), Model(0, apply=abs)
    target, kept = [old, model], vars(model)["cache"]
    restored: Any = _into(target, [Limits(1, 2, check=max), Model(5, apply=max)])
    assert (old.low, restored[0].low, restored[0].check) == (0, 1, abs)
    assert (restored[1].step, restored[1].apply) == (5, abs)
    assert restored[1].cache is kept


def test_one_dataclass_in_two_places_takes_one_value() -> None:
    one = Progress(0)
    shared = Progress(1, weights=np.ones(2))
    _into([one, one], [shared, shared])
    assert one.weights.tolist() == [1, 1]
    with pytest.raises(StateMismatch, match="is the same object as"):
        _into([one, one], [Progress(1), Progress(2)])


@pytest.mark.parametrize(
    ("target", "stored", "problem"),
    [
        (Progress(0), {"epoch": 1}, r"\['x'\]\['losses'\] is not in the checkpoint"),
        (SimpleNamespace(b=1), {"a": 1, "b": 1}, r"\['x'\]\['a'\] is only in the checkpoint"),
        (Progress(0), [1], r"\['x'\] is a Progress, stored is a list"),
        (Progress(0), Progress(0, weights=np.ones(3)), r"\['x'\]\['weights'\] is float64\[2\]"),
        (Phase.TRAIN, "GONE", r"\['x'\] is a Phase, which has no member 'GONE'"),
        (Phase.TRAIN, 2, r"\['x'\] is a Phase, which has no member 2"),
        (Phase.TRAIN, "__init__", "which has no member '__init__'"),
        (Parts.BODY, "BODY", r"\['x'\] is a Parts, which has no member 'BODY'"),
        (Parts.BODY, 8, r"\['x'\] is a Parts, which has no member 8"),
        (Parts.BODY, True, "which has no member True"),
        (Loose.ONE, 3, "which has no member 3"),
    ],
)
def test_record_that_does_not_fit_is_named(target: object, stored: object, problem: str) -> None:
    with pytest.raises(StateMismatch, match=problem):
        _into({"x": target}, {"x": stored})


def test_alias_of_a_member_is_that_member() -> None:
    assert _into([Phase.WARMUP], ["FIT"]) == [Phase.TRAIN]


class Fields(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (argparse.Namespace(run=print), r"\['x'\]\['run'\] is a builtin_function"),
        (Limits(print, 0), r"\['x'\]\['low'\] is a builtin_function"),
        (dataclass(Fields)(), r"\['x'\] is a .*Fields, which cannot be stored"),
        (Progress, r"\['x'\] is a type, which cannot be stored"),
    ],
    ids=["namespace", "dataclass", "subclass", "class"],
)
def test_object_that_cannot_be_stored_is_refused_with_its_path(value: Any, problem: str) -> None:
    with pytest.raises(UnsupportedState, match=problem):
        flatten({"x": value})


def test_dataclass_with_an_unset_field_is_refused_and_is_no_target() -> None:
    broken = Progress(1)
    del broken.losses
    with pytest.raises(UnsupportedState, match=r"\['x'\] is a dataclass whose field 'losses' is"):
        flatten({"x": broken})
    with pytest.raises(StateMismatch, match=r"\['x'\] is a dataclass whose field 'losses' is"):
        _into({"x": broken}, {"x": Progress(2)})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_jax_keys_are_restored_into_keys(impl: str) -> None:
    jax: Any = pytest.importorskip("jax")
    state = {"key": jax.random.key(7, impl=impl), "keys": jax.random.split(jax.random.key(1), 3)}
    target = {"key": jax.random.key(0, impl=impl), "keys": jax.random.split(jax.random.key(0), 3)}
    restored = _into(target, state)
    assert (restored["key"] == state["key"]).all()
    assert (restored["keys"] == state["keys"]).all()
    plain = round_trip(state)["key"]
    assert plain["impl"] == impl
    assert (plain["data"] == np.asarray(jax.random.key_data(state["key"]))).all()


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (
            {"impl": "rbg", "data": np.zeros(4, np.uint32)},
            "of threefry2x32, stored is one of 'rbg'",
        ),
        ({"impl": "threefry2x32", "data": np.zeros(3, np.uint32)}, "stored are keys of another"),
        ({"impl": "threefry2x32", "data": np.zeros(2)}, "stored are keys of another shape"),
        ({"impl": "threefry2x32", "data": 5}, "stored are keys of another shape"),
        (np.zeros(2, np.uint32), "is a JAX key, stored is none"),
    ],
    ids=["impl", "shape", "dtype", "number", "array"],
)
def test_jax_key_that_does_not_fit_is_named(stored: object, problem: str) -> None:
    jax: Any = pytest.importorskip("jax")
    with pytest.raises(StateMismatch, match=r"state\['k'\] is a JAX key") as caught:
        _into({"k": jax.random.key(0)}, {"k": stored})
    assert problem in str(caught.value)


def test_jax_array_is_restored_into_a_jax_array() -> None:
    jax: Any = pytest.importorskip("jax")
    restored = _into({"w": jax.numpy.zeros(3)}, {"w": jax.numpy.arange(3.0)})
    assert isinstance(restored["w"], jax.Array)
    assert restored["w"].tolist() == [0, 1, 2]
