# SPDX-License-Identifier: Apache-2.0
"""States that grow during a training: a run that saves them can resume."""

from __future__ import annotations

import argparse
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager, StateMismatch

torch: Any = pytest.importorskip("torch")
jnp: Any = pytest.importorskip("jax.numpy")

GROWN: list[tuple[str, Callable[[], Any], Any]] = [
    ("dict", dict, {"a": 1, "b": {"c": [2]}}),
    ("ordered", OrderedDict, OrderedDict(a=1)),
    ("counter", Counter, Counter("aab")),
    ("list of numbers", list, [1, 2.5]),
    ("list of dicts", list, [{"a": 1}]),
    ("tuple", tuple, (1, 2)),
    ("namespace", argparse.Namespace, argparse.Namespace(best=0.5)),
]


@dataclass
class Early:
    best: object = None
    history: list[float] = field(default_factory=list)


def run(directory: Path, build: Callable[[], Any], grow: Callable[[Any], None]) -> Any:
    """Train as a program does: resume a fresh state, save what it became, and resume again."""
    state: Any = None
    for _ in range(2):
        with CheckpointManager(directory) as manager:
            state = build()
            if manager.resume(state).is_fresh:
                grow(state)
                manager.save(1, state)
    return state


@pytest.mark.parametrize(
    ("make", "grown"), [one[1:] for one in GROWN], ids=[one[0] for one in GROWN]
)
def test_container_that_began_empty_takes_what_is_stored_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], grown: Any
) -> None:
    found = run(tmp_path, lambda: {"x": make()}, lambda state: state.update(x=grown))
    assert found["x"] == grown
    assert type(found["x"]) is type(make())
    assert not caplog.records


def test_container_that_began_empty_is_filled_in_place(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        state: dict[str, Any] = {"d": {}, "l": []}
        manager.resume(state)
        state["d"]["a"] = torch.ones(2)
        state["l"].append({"t": np.ones(1)})
        manager.save(1, state)
    fresh: dict[str, Any] = {"d": {}, "l": []}
    held = dict(fresh)
    with CheckpointManager(tmp_path) as manager:
        manager.resume(fresh)
    assert all(fresh[name] is held[name] for name in held)
    assert torch.equal(fresh["d"]["a"], torch.ones(2))


@pytest.mark.parametrize("library", [np, torch, jnp], ids=lambda one: one.__name__)
def test_array_without_rows_takes_rows_of_its_type(tmp_path: Path, library: Any) -> None:
    found = run(
        tmp_path,
        lambda: {"x": library.zeros((0, 2))},
        lambda state: state.update(x=library.ones((3, 2))),
    )
    assert type(found["x"]) is type(library.ones(1))
    assert found["x"].tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("shape", [(3, 4), (3,)])
def test_array_without_rows_takes_no_rows_of_another_shape(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    with pytest.raises(StateMismatch, match=r"\['x'\] is float64\[0, 2\]"):
        run(
            tmp_path,
            lambda: {"x": np.zeros((0, 2))},
            lambda state: state.update(x=np.ones(shape)),
        )


def test_record_whose_fields_began_empty_takes_them(tmp_path: Path) -> None:
    found = run(
        tmp_path, lambda: {"s": Early()}, lambda state: state["s"].history.extend([0.5, 0.25])
    )
    assert found["s"] == Early(history=[0.5, 0.25])


def test_container_that_did_not_begin_empty_is_refused_if_it_is_now(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        state: dict[str, Any] = {"layers": [np.ones(1)]}
        manager.resume(state)
        manager.save(1, state)
    with CheckpointManager(tmp_path) as manager, pytest.raises(StateMismatch, match="0 elements"):
        manager.resume({"layers": []})


def test_whole_state_takes_nothing_when_it_is_empty(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.ones(1)})
        with pytest.raises(StateMismatch, match="only in the checkpoint"):
            manager.resume({})


def test_container_of_a_run_that_did_not_say_how_it_began_is_filled_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": [np.ones(1)]})
    with CheckpointManager(tmp_path) as manager:
        manager.resume({"x": []})
    assert "took what is stored into what is empty here: state['x']" in caplog.text


def test_record_of_what_began_empty_is_kept_over_a_resumption(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {}
    for step in range(1, 4):
        with CheckpointManager(tmp_path) as manager:
            state = {"x": []}
            manager.resume(state)
            state["x"].append(np.full(1, step))
            manager.save(step, state)
    assert len(state["x"]) == 3
    assert not caplog.records


def test_key_that_comes_later_is_said_at_the_first_save_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        state: dict[str, Any] = {"early": {"best": None}, "net": torch.nn.Linear(1, 1)}
        manager.resume(state)
        manager.save(1, state)
        assert not caplog.records
        state["early"]["weights"] = np.ones(3)
        with caplog.at_level(logging.WARNING):
            manager.save(2, state)
            manager.save(3, state)
    assert [one.message.count("early/weights") for one in caplog.records] == [1]
