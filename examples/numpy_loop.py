"""Fit a line to noisy points with plain NumPy. Kill it and start it again: it goes on, bit for bit."""

import sys

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager


class Batches:
    """Points in a new order for each epoch."""

    def __init__(self, points, size):
        self.points, self.size, self.rng = points, size, np.random.default_rng(1)

    def __iter__(self):
        order = self.rng.permutation(len(self.points))
        for start in range(0, len(order), self.size):
            yield self.points[order[start : start + self.size]]


def main(directory, steps):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 160)
    points = np.stack([x, 3 * x + 1 + rng.normal(0, 0.1, 160)], axis=1)
    batches = Batches(points, 16)
    state = {"weights": np.zeros(2), "rng": rng, "losses": []}
    with CheckpointManager(directory, CheckpointConfig(keep="last(2)")) as manager:
        step = manager.resume(state).step
        while step < steps and not manager.should_stop:
            for batch in manager.batches(batches):
                inputs = np.stack([batch[:, 0], np.ones(len(batch))], axis=1)
                inputs *= rng.random(inputs.shape) > 0.1  # dropout
                error = inputs @ state["weights"] - batch[:, 1]
                state["weights"] -= 0.1 * inputs.T @ error / len(batch)
                state["losses"].append(float(np.mean(error**2)))
                step += 1
                manager.step_end(step, state, metrics={"loss": state["losses"][-1]})
                if step == steps or manager.should_stop:
                    break
    return state


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/numpy", 25)["weights"])
