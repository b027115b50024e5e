# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C after every call of the system in a save, and at random steps: the old checkpoint or the new one, and no rest."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, load_checkpoint, save_checkpoint
from tests.faults.pressed import pressed, was_interrupted
from tests.support import api

NAME = "net-1_1.ckpt"
MORE_POINTS = 30

# Whatever Python was doing: it says so of a generator, or of a listing, that nobody closes any more.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("plain_ctrl_c"),
]


def state(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(5000, value, np.float32)}


def save(directory: Path, value: float) -> None:
    save_checkpoint(state(value), directory / NAME)


def points_of(run: Callable[[], object], *, seed: int) -> list[int]:
    """Return the points after calls of the system, and some others."""
    with pressed() as presses:
        run()
    others = random.Random(seed).sample(range(1, presses.points + 1), MORE_POINTS)
    return sorted({*presses.system, *others})


def assert_whole(directory: Path, allowed: set[frozenset[str]]) -> None:
    """Assert that nothing lies in a directory but whole checkpoints with their manifests, and the lease of the series."""
    names = {path.name for path in directory.iterdir()} - {".net.lease"}
    data = frozenset(name for name in names if name.endswith(".ckpt"))
    assert names == data | {api.manifest_name(name) for name in data}
    assert data in allowed
    store = api.place(directory)
    answers = [api.verify(store, checkpoint) for checkpoint in store.scan()]
    assert [answer.status for answer in answers] == [api.Status.OK] * len(data)


@pytest.mark.slow
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_save_checkpoint_that_is_interrupted_leaves_the_old_file_or_the_new_one(
    fast_path: Path, is_overwrite: bool
) -> None:
    prepared = fast_path / "prepared"
    prepared.mkdir()
    if is_overwrite:
        save(prepared, 1.0)
    shutil.copytree(prepared, fast_path / "counted")
    outcomes = set()
    allowed = {frozenset({NAME})} if is_overwrite else {frozenset({NAME}), frozenset()}
    for at in points_of(lambda: save(fast_path / "counted", 2.0), seed=1):
        directory = fast_path / str(at)
        shutil.copytree(prepared, directory)
        was_interrupted(lambda: save(directory, 2.0), at=at)  # noqa: B023 - called at once
        assert_whole(directory, allowed)
        found = (directory / NAME).exists()
        outcomes.add(float(load_checkpoint(directory / NAME)["w"][0]) if found else None)
        save(directory, 3.0)
        assert_whole(directory, {frozenset({NAME})})
    assert outcomes == {1.0 if is_overwrite else None, 2.0}


@pytest.mark.slow
def test_managed_save_that_is_interrupted_leaves_whole_checkpoints_and_the_next_one_works(
    fast_path: Path,
) -> None:
    config = CheckpointConfig(keep="last(1)")

    def train(directory: Path, steps: range) -> None:
        with CheckpointManager(directory, config, prefix="net") as manager:
            for step in steps:
                manager.save(step, state(step))

    prepared = fast_path / "prepared"
    train(prepared, range(1, 2))
    shutil.copytree(prepared, fast_path / "counted")
    one, two, three = (f"net-{step}.ckpt" for step in (1, 2, 3))
    outcomes = set()
    for at in points_of(lambda: train(fast_path / "counted", range(2, 3)), seed=2):
        directory = fast_path / str(at)
        shutil.copytree(prepared, directory)
        was_interrupted(lambda: train(directory, range(2, 3)), at=at)  # noqa: B023 - called at once
        assert_whole(directory, {frozenset({one}), frozenset({one, two})})
        outcomes.add((directory / two).exists())
        train(directory, range(3, 4))
        assert (directory / three).exists()
    assert outcomes == {True, False}
