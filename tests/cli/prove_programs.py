# SPDX-License-Identifier: Apache-2.0
"""Programs for `ckptmgr prove`, right and wrong: `python prove_programs.py KIND DIRECTORY`."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Resume

STEPS, LENGTH, EVERY = 24, 8, 5


class Loader:
    """Batches in another order in each pass; drawn outside what is saved where `kind` is `unseeded`."""

    def __init__(self, kind: str) -> None:
        self._draw: Any = np.random.default_rng() if kind == "unseeded" else np.random

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        # A generator of its own, which nothing saves.
        draw = self._draw
        order = draw.permutation(LENGTH)
        # No two batches are equal by chance.
        return iter([np.arange(4.0) * float(index + 1) + draw.random() for index in order])


def main(kind: str, directory: str) -> None:
    """Train."""
    random.seed(None if kind == "unused" else 1)
    np.random.seed(1)
    state: dict[str, Any] = {"w": np.zeros(4)}
    momentum, average = np.zeros(4), 0.0
    if kind != "unsaved":
        state["momentum"] = momentum
    how = Resume(may_differ=["data"] if kind == "unseeded" else ())
    config = CheckpointConfig(save_checkpoint_steps=EVERY)
    with CheckpointManager(directory, config, prefix="net") as manager:
        step, loader = manager.resume(state, how).step, Loader(kind)
        while step < STEPS:
            for batch in manager.batches(loader):
                step += 1
                momentum *= 0.5
                momentum += batch * (0.5 if kind == "unused" else random.random())
                state["w"] += momentum
                loss = float(state["w"].sum())
                average = 0.9 * average + 0.1 * loss
                metrics = {"loss": average if kind == "averaged" else loss}
                manager.step_end(step, state, metrics=metrics)
                if kind == "failing" and step == STEPS // 2:
                    raise RuntimeError("the program fails")
                if step == STEPS:
                    break


if __name__ == "__main__":
    main(*sys.argv[1:])
