# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of many ranks on this machine, of shares and of copies of a model; and the planning for very many."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptmgr.parallel.balance import Replicated, balance_by_bytes
from ckptmgr.parallel.layout import ParallelLayout
from ckptmgr.parallel.redundancy import groups_of
from tools.bench.session import Session
from tools.bench.team import Failed

WORLDS = (1, 2, 4)
REPLICATED = ", replicated"
PLAN = "4096 ranks, 2000 tensors"
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 600
_LAYERS = 500
_WIDTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank is to do, once for every round.

    Attributes:
        directory: Where the ranks save and meet.
        rank: Its number.
        world: How many there are.
        size_bytes: Of its part of the model.
        is_replicated: Whether the others hold the same, which is written once.
        rounds: How often, after one round to warm up.
        rest_s: Seconds of rest before every measurement.
    """

    directory: str
    rank: int
    world: int
    size_bytes: int
    is_replicated: bool
    rounds: int
    rest_s: float


def measure_ranks(session: Session, worlds: Sequence[int]) -> None:
    """Save and load with each number of ranks, until the last one is done; then plan for 4096."""
    for is_replicated in (False, True):
        for world in worlds:
            ranks = "1 rank" if world == 1 else f"{world} ranks"
            mode = f"{ranks}{REPLICATED if is_replicated else ''}"
            session.report(f"{session.section}: {mode}")
            for measured in _of_a_job(session, world, is_replicated=is_replicated):
                for what, seconds in measured.items():
                    session.note(mode, what, seconds)
    for _ in session.turns():
        session.note(PLAN, "plan", planning_s())


def planning_s() -> float:
    """Return how long it takes to plan who saves which rows of a model of 2000 tensors on 4096 ranks."""
    sharded = groups_of(ParallelLayout(device_matrix=(512, 8), tensor_map=((0,), ())))
    replicated = groups_of(ParallelLayout(device_matrix=(4096,), tensor_map=((), ())))
    shapes = ((_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH), (_WIDTH,))
    tensors = [
        Replicated(
            name=f"layer{layer}.{number}",
            shape=shape,
            item_bytes=2,
            groups=replicated if len(shape) == 1 else sharded,
        )
        for layer in range(_LAYERS)
        for number, shape in enumerate(shapes)
    ]
    started = time.perf_counter()
    balance_by_bytes(tensors)
    return time.perf_counter() - started


def _of_a_job(session: Session, world: int, *, is_replicated: bool) -> list[dict[str, float]]:
    """Run a job; return what rank 0 has measured in each round.

    Raises:
        Failed: A rank failed.
    """
    name = f"ranks-{world}{'-replicated' if is_replicated else ''}"
    directory = session.directory / name
    log = session.directory / f"{name}.log"
    parts = [
        Part(
            directory=str(directory),
            rank=rank,
            world=world,
            size_bytes=session.workload.size_bytes // (2 if is_replicated else world),
            is_replicated=is_replicated,
            rounds=session.pace.rounds,
            rest_s=session.pace.rest_s,
        )
        for rank in range(world)
    ]
    with log.open("ab") as errors:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "tools.bench.rank", json.dumps(asdict(part))],
                cwd=_ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for part in parts
        ]
    told = [child.communicate(timeout=_PATIENCE_S)[0] for child in children]
    if any(child.returncode for child in children):
        raise Failed(log.read_text()[-400:])
    found: list[dict[str, float]] = json.loads(told[0])
    return found
