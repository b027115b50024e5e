# SPDX-License-Identifier: Apache-2.0
"""Programs that share one directory until they are killed: a run, a prune, a verify and a `save_checkpoint` over old names.

They note their acts, in the order in which they happen, in one file, `journal`:

| line | written |
|---|---|
| `begun STEP`, `saved STEP` | before a save, and when it is acknowledged |
| `dropping NAMES because of NAMES` | before a prune is carried out |
| `overwriting NAME`, `overwrote NAME` | before and after a save over a name |
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    StoreLocked,
    parse_policy,
    save_checkpoint,
)
from ckptmgr.maintenance.verify import was_removed
from tests.support import api
from tests.support.pruning import carry_out, propose

OVERWRITTEN = -1.0


def note(path: Path, line: str) -> None:
    """Append a line, whole, whoever else does."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def state(value: float) -> dict[str, np.ndarray]:
    """Return the state to save."""
    return {"w": np.full(2000, value, np.float32)}


def train(directory: Path, notes: Path, seed: int) -> None:
    """Save one step after the other, higher than any before."""
    config = CheckpointConfig(keep="last(3)")
    with CheckpointManager(directory, config, prefix="net") as manager:
        step = seed * 1000
        while True:
            step += 1
            note(notes / "journal", f"begun {step}")
            manager.save(step, state(step))
            note(notes / "journal", f"saved {step}")


def prune(directory: Path, notes: Path, seed: int) -> None:
    """Prune to two, into the trash and for good, and empty the trash."""
    rng, store = random.Random(seed), api.place(directory)
    while True:
        now = datetime.now(UTC)
        proposal = propose(store, parse_policy("last(2)"), now=now, grace=timedelta(0))
        for one in (series.plan for series in proposal.plans if series.plan.dropped):
            dropped, kept = (",".join(c.name for c in those) for those in (one.dropped, one.kept))
            note(notes / "journal", f"dropping {dropped} because of {kept}")
        carry_out(store, proposal, at_once=rng.random() < 0.5)
        time.sleep(rng.random() / 100)


def verify(directory: Path, notes: Path, seed: int) -> None:
    """Note damaged checkpoints."""
    store = api.place(directory)
    while True:
        for checkpoint in store.scan():
            if checkpoint.state in (api.State.LEFTOVER, api.State.WRITING):
                continue
            answer = api.verify(store, checkpoint)
            if answer.status is not api.Status.OK and not was_removed(store, answer):
                note(notes / "damaged", f"{checkpoint.name}: {answer.problems}")


def overwrite(directory: Path, notes: Path, seed: int) -> None:
    """Save over names that are there."""
    rng = random.Random(seed)
    while True:
        names = sorted(path.name for path in directory.glob("*.ckpt"))
        if names:
            name = rng.choice(names)
            note(notes / "journal", f"overwriting {name}")
            save_checkpoint(state(OVERWRITTEN), directory / name)
            note(notes / "journal", f"overwrote {name}")
        time.sleep(rng.random() / 100)


def start(
    program: Callable[[Path, Path, int], None], directory: Path, notes: Path, seed: int
) -> int:
    """Run a program in a child process, again when somebody else was in its way; return the process."""
    child = os.fork()
    if child:
        return child
    while True:
        try:
            program(directory, notes, seed)
        except (StoreLocked, FileNotFoundError):
            time.sleep(0.002)
        except (CkptmgrError, OSError) as error:
            note(notes / "failed", f"{program.__name__}: {error!r}")
            os._exit(1)
        except BaseException as error:
            note(notes / "failed", f"{program.__name__}: {error!r}")
            os._exit(2)
