# SPDX-License-Identifier: Apache-2.0
"""A training that kills itself, and goes on otherwise: `python witness_programs.py DIRECTORY LAST [WORD ...]`.

Prints what the steps that repeat have shown.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Resume

LENGTH = 7  # batches of an epoch
SAVED = 10


class Loader:
    """Batches in another order in each pass."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        for index in np.random.permutation(LENGTH):
            yield np.arange(4.0) * float(index + 1) * self.scale


def train(
    directory: Path,
    last: int,
    how: Resume | None = None,
    *,
    other: Collection[str] = (),
    killed: bool = False,
    dies: type[Exception] | None = None,
    **options: Any,
) -> CheckpointManager:
    """Train up to a step from the newest checkpoint; saves step 10 alone, and 20, 30, ..."""
    random.seed(1)
    np.random.seed(1)
    state = {"w": np.zeros(4)}
    config = CheckpointConfig(save_checkpoint_steps=SAVED, **options.pop("config", {}))
    with CheckpointManager(directory, config, prefix="net", **options) as manager:
        step = manager.resume(state, how).step
        loader = Loader(2.0 if "batch" in other and step else 1.0)
        while step < last:
            for batch in manager.batches(loader):
                step += 1
                noise = random.random()
                if "random" in other and step > SAVED + 2:
                    random.random()
                state["w"] += batch * noise
                loss = float(state["w"].sum())
                if "loss" in other and step > SAVED + 1:
                    loss += 1e-6
                metrics = {"loss": loss, "noise": noise}
                manager.step_end(step, state, metrics=metrics)
                if step == last:
                    break
        if dies is not None:
            raise dies
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
    return manager


def main(directory: str, last: str, *words: str) -> None:
    """Train as the words say; `killed` at the end, or `raise` at a difference."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    how = Resume(
        on_difference="raise" if "raise" in words else "warn",
        tolerance={"loss": 1e-3} if "within" in words else None,
        may_differ=["data"] if "batch" in words and "raise" not in words else (),
    )
    manager = train(Path(directory), int(last), how, other=words, killed="killed" in words)
    print(manager.witness)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
