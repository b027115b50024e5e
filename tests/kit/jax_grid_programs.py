# SPDX-License-Identifier: Apache-2.0
"""The features of the grid in a loop with JAX, Flax NNX and optax."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-not-found, unused-ignore]
from flax import nnx  # type: ignore[import-not-found, unused-ignore]

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.testing.cell import BATCHES, EPOCHS, Moments, NoSuchFeature

# The runs that a server forks compile once for all; the directory goes when the server ends.
_compiled = tempfile.TemporaryDirectory(prefix="ckptmgr-jax-")
jax.config.update("jax_compilation_cache_dir", _compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

SIZE = 4
INPUTS = np.random.default_rng(0).normal(size=(BATCHES * SIZE, 8)).astype(np.float32)
ABSENT = {
    "finder": "a loop of its own has none; what it finds belongs into the state",
    "persistent workers": "JAX has no loader; those of torch are in the grid of torch",
    "torch.compile": "JAX compiles each step of this grid with `nnx.jit`",
}


class Net(nnx.Module):  # type: ignore[misc, unused-ignore]
    """Layers with batch norm and dropout."""

    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Return the prediction."""
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Batches:
    """Rows in a new order for each epoch."""

    def __init__(self, batches: int, seed: int) -> None:
        self.inputs, self.rng = INPUTS[: batches * SIZE], np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Any]:
        order = self.rng.permutation(len(self.inputs))
        return (self.inputs[order[at : at + SIZE]] for at in range(0, len(order), SIZE))


class Sized(Batches):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.inputs) // SIZE


def transformation_of(feature: str) -> Any:
    """Return the update rule of a feature."""
    if feature == "moments of another type":
        return optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    if feature == "accumulation that does not divide":
        return optax.MultiSteps(optax.adam(1e-2), 2)
    return optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


def loss_of(model: Any, batches: Sequence[Any]) -> Any:
    """Return the sum of the losses of loaders side by side."""
    return sum(((model(x) - x.sum(1, keepdims=True)) ** 2).mean() for x in batches)


@nnx.jit(static_argnames=("is_frozen", "has_two"))  # type: ignore[misc, untyped-decorator, unused-ignore]
def step_of(
    model: Any, optimizers: Any, batches: Sequence[Any], *, is_frozen: bool, has_two: bool
) -> Any:
    """Train on a batch."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batches)
    if is_frozen:
        gradients["first"] = jax.tree.map(jnp.zeros_like, gradients["first"])
    if has_two:
        optimizers[0].update(model.first, gradients["first"])
        optimizers[1].update(model.last, gradients["last"])
    else:
        optimizers[0].update(model, gradients)
    return loss


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature in ABSENT:
        raise NoSuchFeature(ABSENT[feature])
    model = Net(nnx.Rngs(0))
    has_two = feature == "two optimizers"
    parts = (model.first, model.last) if has_two else (model,)
    optimizers = [nnx.Optimizer(one, transformation_of(feature), wrt=nnx.Param) for one in parts]
    loader = (Batches if feature == "data without a length" else Sized)(BATCHES, 1)
    short = Sized(2, 2) if feature == "loaders of unequal length" else None
    state: dict[str, Any] = {
        "model": model,
        "optimizers": optimizers,
        "average": jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)),
        "key": jax.random.key(3),
        "is_frozen": feature == "frozen and unfrozen layers",
        "sum": 0.0,
        "means": [],
    }
    with CheckpointManager(directory, CheckpointConfig(**moments.options)) as manager:
        start = manager.resume(state)
        step = start.step
        for epoch in range(start.next_epoch, EPOCHS):
            for batches in side_by_side(manager, loader, short):
                moments.batch()
                state["key"], own = jax.random.split(state["key"])
                noisy = [x + 0.1 * jax.random.normal(own, x.shape) for x in batches]
                loss = step_of(
                    model, optimizers, noisy, is_frozen=state["is_frozen"], has_two=has_two
                )
                if feature == "EMA":
                    state["average"] = optax.incremental_update(
                        nnx.state(model, nnx.Param), state["average"], 0.2
                    )
                state["sum"] += float(loss)
                step += 1
                manager.step_end(step, state, epoch=epoch, metrics={"loss": float(loss)})
                if manager.should_stop:
                    return state
            validate(model, moments)
            end_epoch(feature, state)
            if manager.should_stop:
                return state
    return state


def side_by_side(manager: CheckpointManager, loader: Any, short: Any) -> Iterator[Sequence[Any]]:
    """Yield the batches of a loader, and of a short one that begins again."""
    if short is None:
        return ((batch,) for batch in manager.batches(loader))
    first = iter(manager.batches(short, name="short"))  # asked for before the other has ended
    others = (batch for _ in range(BATCHES) for batch in manager.batches(short, name="short"))
    return zip(manager.batches(loader), itertools.chain(first, others), strict=False)


def validate(model: Any, moments: Moments) -> None:
    """Measure, inside of which a run may end."""
    model.eval()
    for at in (0, SIZE):
        moments.validation()
        loss_of(model, [INPUTS[at : at + SIZE]])
    model.train()


def end_epoch(feature: str, state: dict[str, Any]) -> None:
    """Change what a feature changes at the end of an epoch."""
    state["means"].append(state["sum"] / BATCHES)
    state["sum"], state["is_frozen"] = 0.0, False
    if feature == "state changed at the end of an epoch":
        kernel = state["model"].last.kernel
        state["key"], own = jax.random.split(state["key"])
        kernel[...] = kernel[...] * 0.9 + jax.random.uniform(own, ())
