# SPDX-License-Identifier: Apache-2.0
"""A run that another number of processes continues: its pass begins anew, and no two ranks draw the same numbers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, GlobalRandom, Ranks
from ckptmgr.parallel import SharedDirectory
from tests.support.forked import run_forked

SAMPLES, BATCH = 48, 4
Collate = Callable[[list[int]], object]


class Divided:
    """A loader of the part of a rank, in an order drawn from the global generator."""

    def __init__(self, rank: int, world: int, collate: Collate) -> None:
        self._own = list(range(rank, SAMPLES, world))
        self._collate = collate

    def __iter__(self) -> Any:
        for at in range(0, len(self._own), BATCH):
            yield self._collate(self._own[at : at + BATCH])


def as_texts(batch: list[int]) -> object:
    return [str(one) for one in batch]


def as_numbers(batch: list[int]) -> object:
    return batch


def train(
    tmp_path: Path,
    start: str,
    rank: int,
    world: int,
    *,
    steps: int,
    collate: Collate,
    in_state: bool,
) -> dict[str, Any]:
    """Run some steps from where the directory is; return the samples, the numbers drawn, and the warnings."""
    random.seed(100 + rank)
    state: dict[str, object] = {"n": 0, **({"random": GlobalRandom()} if in_state else {})}
    coordinator = None
    if world > 1:
        coordinator = SharedDirectory(tmp_path / start, rank=rank, world=world)
    used: list[int] = []
    drawn: list[float] = []
    manager = CheckpointManager(
        tmp_path / "runs",
        CheckpointConfig(save_checkpoint_steps=1, remove_redundancy=world > 1),
        ranks=Ranks(coordinator),
        prefix="net",
    )
    with manager:
        found = manager.resume(state)
        step = found.step
        for batch in manager.batches(Divided(rank, world, collate)):
            assert isinstance(batch, list)
            used += [int(one) for one in batch]
            drawn.append(random.random())
            step += 1
            manager.step_end(step, state)
            if step == steps:
                break
    return {"used": used, "drawn": drawn, "inside": found.is_inside_epoch}


def job(tmp_path: Path, start: str, world: int, **options: Any) -> list[dict[str, Any]]:
    acts = [
        lambda rank=rank: train(tmp_path, start, rank, world, **options) for rank in range(world)
    ]
    return run_forked(acts)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("in_state", [False, True], ids=["", "generators in the state"])
@pytest.mark.parametrize("collate", [as_numbers, as_texts])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (1, 1), (2, 3)])
def test_pass_of_another_division_begins_anew_with_numbers_of_each_rank(
    tmp_path: Path, before: int, after: int, collate: Collate, in_state: bool
) -> None:
    options: dict[str, Any] = {"collate": collate, "in_state": in_state}
    first = job(tmp_path, "first", before, steps=2, **options)
    done = Counter(one for each in first for one in each["used"])
    then = job(tmp_path, "then", after, steps=1000, **options)
    again = Counter(one for each in then for one in each["used"])
    assert all(each["inside"] for each in then)
    if before == after:
        assert done + again == Counter(range(SAMPLES))
    else:
        assert again == Counter(range(SAMPLES))
    firsts = [each["drawn"][0] for each in then]
    assert len(set(firsts)) == after


def test_file_of_one_process_that_a_rank_reads_says_that_its_pass_begins_anew(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"steps": 2, "collate": as_texts, "in_state": False}
    train(tmp_path, "first", 0, 1, **options)

    def warned(rank: int) -> object:
        import logging

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckptmgr").addHandler(handler)
        train(tmp_path, "then", rank, 2, **{**options, "steps": 3})
        return [line for line in lines if "begin their pass anew" in line]

    for lines in run_forked([lambda: warned(0), lambda: warned(1)]):
        assert isinstance(lines, list)
        assert len(lines) == 1
