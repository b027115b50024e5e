"""Fit a small network with Flax NNX and optax. Kill it and start it again: it goes on, bit for bit."""

import sys

import jax
import numpy as np
import optax
from flax import nnx

from ckptmgr import CheckpointConfig, CheckpointManager


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Batches:
    """Rows in a new order for each epoch."""

    def __init__(self, inputs, size):
        self.inputs, self.size, self.rng = inputs, size, np.random.default_rng(1)

    def __iter__(self):
        order = self.rng.permutation(len(self.inputs))
        for start in range(0, len(order), self.size):
            yield self.inputs[order[start : start + self.size]]


@nnx.jit
def train_step(model, optimizer, x):
    def loss_of(model):
        return ((model(x) - x.sum(1, keepdims=True)) ** 2).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def main(directory, steps):
    batches = Batches(np.random.default_rng(0).normal(size=(160, 8)).astype(np.float32), 16)
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer, "key": jax.random.key(2)}
    with CheckpointManager(directory, CheckpointConfig(keep="last(2)")) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for x in manager.batches(batches):
                state["key"], noise = jax.random.split(state["key"])
                x += 0.01 * np.asarray(jax.random.normal(noise, x.shape))
                loss = train_step(model, optimizer, x)
                step += 1
                manager.step_end(step, state, metrics={"loss": float(loss)})
                if step == steps or manager.should_stop:
                    break
    return state


if __name__ == "__main__":
    state = main(sys.argv[1] if len(sys.argv) > 1 else "runs/jax", 25)
    print(state["model"].last.bias[...])
