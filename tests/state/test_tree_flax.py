# SPDX-License-Identifier: Apache-2.0
"""Objects of Flax in a state: stored as nested dicts of their variables, restored in kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, StateMismatch

pytestmark = pytest.mark.kit
nnx: Any = pytest.importorskip("flax.nnx", reason="needs flax: make kit FRAMEWORK=jax")
optax: Any = pytest.importorskip("optax", reason="needs optax")
jax: Any = pytest.importorskip("jax")


def _saved(directory: Path, state: object) -> CheckpointManager:
    manager = CheckpointManager(directory, CheckpointConfig(), prefix="net")
    manager.save(1, state)
    return manager


def _equal(one: Any, other: Any) -> bool:
    left, right = (nnx.to_pure_dict(nnx.state(value)) for value in (one, other))
    return bool(jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), left, right)))


def _parts(seed: int) -> dict[str, Any]:
    model = nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
    )
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(seed), wrt=nnx.Param)}


def test_module_and_optimizer_are_restored_in_place(tmp_path: Path) -> None:
    stored, target = _parts(1), _parts(2)
    gradients = jax.tree.map(jax.numpy.ones_like, nnx.state(stored["model"], nnx.Param))
    stored["optimizer"].update(stored["model"], gradients)
    model = target["model"]
    _saved(tmp_path, stored).resume(target)
    assert target["model"] is model
    assert all(_equal(target[name], stored[name]) for name in stored)
    assert int(target["optimizer"].step[...]) == 1


def test_state_is_restored_into_a_state(tmp_path: Path) -> None:
    stored, target = (nnx.state(_parts(seed)["model"]) for seed in (1, 2))
    restored: Any = _saved(tmp_path, {"s": stored}).resume({"s": target}).state
    assert restored["s"] is target
    kernels = (nnx.to_pure_dict(one)["layers"][0]["kernel"] for one in (target, stored))
    assert (next(kernels) == next(kernels)).all()


def test_module_of_another_shape_is_named(tmp_path: Path) -> None:
    manager = _saved(tmp_path, {"m": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})
    with pytest.raises(StateMismatch, match=r"state\['m'\]\['kernel'\] is float32\[2, 4\]"):
        manager.resume({"m": nnx.Linear(2, 4, rngs=nnx.Rngs(0))})


def test_train_state_keeps_its_functions(tmp_path: Path) -> None:
    train_state: Any = pytest.importorskip("flax.training.train_state")

    def made(value: float) -> Any:
        weights = {"w": jax.numpy.full(3, value)}
        return train_state.TrainState.create(apply_fn=len, params=weights, tx=optax.adam(0.1))

    stored, target = made(1.0), made(0.0)
    restored: Any = _saved(tmp_path, {"t": stored}).resume({"t": target}).state
    assert type(restored["t"]) is train_state.TrainState
    assert restored["t"].params["w"].tolist() == [1, 1, 1]
    assert (restored["t"].tx, restored["t"].apply_fn) == (target.tx, len)
    assert type(restored["t"].opt_state[0]) is type(target.opt_state[0])


def test_train_state_goes_on_whose_step_was_a_number_before_it_was_compiled(tmp_path: Path) -> None:
    train_state: Any = pytest.importorskip("flax.training.train_state")
    scales: Any = pytest.importorskip("flax.training.dynamic_scale")

    class Scaled(train_state.TrainState):  # type: ignore[misc]
        scale: Any = None

    adam = optax.adam(0.1)

    def made() -> Any:
        weights, scale = {"w": jax.numpy.ones(3)}, scales.DynamicScale(growth_interval=2)
        return Scaled.create(apply_fn=None, params=weights, tx=adam, scale=scale)

    def stepped(state: Any) -> Any:
        found = state.scale.value_and_grad(lambda p: (p["w"] ** 2).sum())(state.params)
        return state.apply_gradients(grads=found[3], scale=found[0])

    step = jax.jit(stepped)
    expected = made()
    for _ in range(5):
        expected = step(expected)
    saved = step(step(made()))
    state = {"t": made()}
    _saved(tmp_path, {"t": saved}).resume(state)
    for _ in range(3):
        state["t"] = step(state["t"])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state["t"], expected))
    assert int(state["t"].step) == 5


def test_array_takes_the_number_that_it_was_before_it_was_compiled(tmp_path: Path) -> None:
    state = {"step": jax.numpy.int32(3), "rows": jax.numpy.ones(2)}
    _saved(tmp_path, {"step": 0, "rows": jax.numpy.zeros(2)}).resume(state)
    assert state["step"] == 0
    with pytest.raises(StateMismatch, match=r"state\['step'\] is int32\[1\], stored is a int"):
        _saved(tmp_path, {"step": 0}).resume({"step": jax.numpy.ones(1, "int32")})
