# SPDX-License-Identifier: Apache-2.0
"""`Resume(at=...)`: a run goes back to a chosen checkpoint, and the later ones stay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    ModelCheckpoint,
    Ranks,
    Resume,
    UnprovenCheckpoint,
)
from tests.parallel.ranks import WORLD, Meeting, Seat, run_ranks
from tests.support import api
from tests.support.saved import overwrite

LOSSES = {10: 0.5, 20: 0.1, 30: 0.3, 40: 0.4}


def manager_of(directory: Path, every: int = 10, keep: str = "all") -> CheckpointManager:
    return CheckpointManager(directory, CheckpointConfig(every, keep=keep), prefix="net")


def train(
    directory: Path, last: int, resume: Resume | None = None, *, keep: str = "all"
) -> tuple[int, list[int]]:
    """Train to a step; return where the run began, and the steps that it saved."""
    state = {"n": np.zeros(1)}
    with manager_of(directory, keep=keep) as manager:
        start = manager.resume(state, resume)
        assert start.step == state["n"][0]
        saved = []
        for step in range(max(1, start.next_step), last + 1):
            state["n"][:] = step
            if manager.step_end(step, state, metrics={"loss": LOSSES.get(step, 9.0)}):
                saved.append(step)
    return start.step, saved


def steps(directory: Path) -> list[int]:
    return [one.step for one in manager_of(directory).checkpoints()]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run to step 40."""
    train(tmp_path, 40)
    return tmp_path


@pytest.mark.parametrize("at", ["best:loss:min", 20, "20", "net-20.ckpt", "11..29"])
def test_run_goes_back_to_the_chosen_checkpoint_and_the_later_ones_stay(
    runs: Path, at: int | str
) -> None:
    # The first step is saved, so that a run that stops now is found.
    assert train(runs, 35, Resume(at=at)) == (20, [21, 30])
    assert steps(runs) == [10, 20, 30, 40, 21, 30, 35]


def test_next_run_goes_on_where_the_one_that_went_back_was(runs: Path) -> None:
    train(runs, 23, Resume(at=20))
    assert train(runs, 31) == (23, [30])


def test_run_that_went_back_counts_its_checkpoints_alone(runs: Path) -> None:
    train(runs, 35, Resume(at="best:loss:min"), keep="last(1)")
    assert steps(runs) == [10, 20, 30, 40, 35]
    train(runs, 51, keep="last(1)")
    assert steps(runs) == [10, 20, 30, 40, 35, 51]  # a resumed one stays


@pytest.mark.parametrize("at", ["latest", 40])
def test_newest_checkpoint_that_is_chosen_is_continued(runs: Path, at: int | str) -> None:
    train(runs, 45, Resume(at=at), keep="last(2)")
    assert steps(runs) == [40, 41, 45]


def test_chosen_checkpoint_of_an_older_run_is_continued_in_its_line(runs: Path) -> None:
    train(runs, 12, Resume(start="new"))
    train(runs, 45, Resume(at=40), keep="last(1)")
    assert steps(runs) == [40, 10, 12, 45]
    assert train(runs, 46) == (45, [])


def test_run_goes_back_in_its_middle(tmp_path: Path) -> None:
    state = {"n": 0}
    with manager_of(tmp_path) as manager:
        for step in range(1, 31):
            manager.step_end(step, {"n": step})
        assert manager.resume(state, Resume(at=10)).step == 10
        assert manager.step_end(11, {"n": 11}) is not None
        newest = manager.latest()
        assert newest is not None
        assert newest.step == 11
    assert steps(tmp_path) == [10, 20, 30, 11]


def test_rollback_of_a_run_that_went_back_finds_none_of_the_later_ones(runs: Path) -> None:
    with manager_of(runs, every=100) as manager:
        state = {"n": np.zeros(1)}
        manager.resume(state, Resume(at=10))
        manager.note_step(35, state)
        assert manager.rollback(state, steps_back=5).step == 10


def test_damaged_chosen_checkpoint_is_an_error_and_nothing_stands_in_for_it(runs: Path) -> None:
    overwrite(runs / "net-20.ckpt", (runs / "net-30.ckpt").read_bytes())
    state = {"n": np.zeros(1)}
    with manager_of(runs) as manager, pytest.raises(CorruptCheckpoint, match=r"net-20\.ckpt"):
        manager.resume(state, Resume(at=20))
    assert state["n"][0] == 0


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        (25, CheckpointNotFound, "no checkpoint 25 in series 'net'"),
        ("..30", CheckpointNotFound, "names 3 checkpoints"),
        ("best:loss", ValueError, "write best:loss:min"),
    ],
)
def test_what_names_no_checkpoint_begins_no_run(
    runs: Path, at: int | str, error: type[Exception], words: str
) -> None:
    with manager_of(runs) as manager, pytest.raises(error, match=words):
        manager.resume({"n": np.zeros(1)}, Resume(at=at))


def test_chosen_file_without_a_manifest_is_refused(runs: Path) -> None:
    (runs / "net-20.ckpt.manifest.json").unlink()
    with manager_of(runs) as manager, pytest.raises((UnprovenCheckpoint, CheckpointNotFound)):
        manager.resume({"n": np.zeros(1)}, Resume(at="net-20.ckpt"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": 1.5}, TypeError, "at must be a step, a name or a selector"),
        ({"at": True}, TypeError, "at must be"),
        ({"at": 20, "start": "new"}, ValueError, "^at has no effect with start='new'"),
        ({"at": 20, "allow_bare": True}, ValueError, "^allow_bare has no effect with at="),
    ],
)
def test_contradicting_options_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Resume(**options)


def test_callback_of_mindspore_refuses_the_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^at has no effect in a callback"):
        ModelCheckpoint("net", str(tmp_path)).resume(Resume(at=20))


def test_ranks_go_back_together(tmp_path: Path) -> None:
    def work(last: int, resume: Resume | None) -> list[Sequence[int]]:
        meeting = Meeting()

        def one(rank: int) -> list[int]:
            config = CheckpointConfig(10, keep="all")
            with CheckpointManager(tmp_path, config, ranks=Ranks(Seat(meeting, rank))) as manager:
                state = {"n": rank}
                start = manager.resume(state, resume)
                span = range(max(1, start.next_step), last + 1)
                saved = [step for step in span if manager.step_end(step, state) is not None]
            return [start.step, *saved]

        return [one.must() for one in run_ranks(meeting, one)]

    work(30, None)
    assert work(21, Resume(at=10)) == [[10, 11, 20]] * WORLD
    assert work(22, None) == [[21]] * WORLD
    assert sorted(one.step for one in api.listed(tmp_path)) == [10, 11, 20, 20, 21, 22, 30]
