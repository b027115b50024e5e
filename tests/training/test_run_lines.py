# SPDX-License-Identifier: Apache-2.0
"""Several runs in one directory: none makes another one lose its newest checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    ModelCheckpoint,
    Ranks,
    Resume,
    parse_policy,
)
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.cli.running import run, run_json
from tests.faults.training import ModelProcesses
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.pruning import carry_out, propose
from tests.support.runs import manager_on
from tests.support.surface import Loop

Start = Literal["forgets", "resumes", "new"]


def train(
    directory: Path, steps: Iterable[int], *, start: Start = "forgets", keep: str = "all"
) -> list[Checkpoint]:
    """Run one training process; return the checkpoints that it saved and left."""
    with CheckpointManager(directory, CheckpointConfig(keep=keep)) as manager:
        if start == "resumes":
            manager.resume({"step": 0})
        elif start == "new":
            manager.resume({"step": 0}, Resume(start="new"))
        before = {c.id for c in manager.checkpoints()}
        for step in steps:
            manager.save(step, {"step": step})
        return [c for c in manager.checkpoints() if c.id not in before]


def steps(directory: Path) -> list[int]:
    """Return the steps in a directory, oldest commit first."""
    return [c.step for c in CheckpointManager(directory).checkpoints()]


@pytest.fixture
def forgotten(tmp_path: Path) -> Path:
    """A run to step 1000, and one that forgot to resume it, to step 300."""
    train(tmp_path, range(800, 1001, 100))
    train(tmp_path, range(100, 301, 100))
    return tmp_path


def test_run_that_forgot_to_resume_warns_once_at_its_first_save_with_both_ways_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = train(tmp_path, [1000])
    with caplog.at_level(logging.WARNING):
        train(tmp_path, [100, 200, 300])
    (warning,) = (one.getMessage() for one in caplog.records)
    assert f"run {(first.run_id or '')[:8]} has reached step 1000 (ckpt-1000.ckpt)" in warning
    assert "this run was not resumed, and its first save is of step 100" in warning
    assert "call resume() before the first step; to begin beside it on purpose" in warning
    assert 'resume(state, Resume(start="new"))' in warning


@pytest.mark.parametrize(("start", "first"), [("resumes", 300), ("new", 100), ("forgets", 1100)])
def test_run_that_resumed_or_asked_to_begin_anew_or_goes_on_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start: Start, first: int
) -> None:
    train(tmp_path, [1000])
    with caplog.at_level(logging.WARNING):
        train(tmp_path, [first], start=start)
    assert not caplog.records


def test_latest_and_load_mean_the_run_that_was_forgotten(forgotten: Path) -> None:
    manager = CheckpointManager(forgotten)
    newest = manager.latest()
    assert newest is not None
    assert newest.step == 1000
    assert manager.load("latest") == {"step": 1000}


def test_latest_of_the_forgetful_run_itself_is_its_own(tmp_path: Path) -> None:
    train(tmp_path, [100, 1000])
    with CheckpointManager(tmp_path) as manager:
        manager.save(100, {"step": -100})
        newest = manager.latest()
        assert newest is not None
        assert (newest.step, newest.attempt) == (100, 1)
        assert manager.load(100) == {"step": -100}
    assert CheckpointManager(tmp_path).load(100) == {"step": 100}


def test_resume_takes_the_forgotten_run_and_names_the_other(
    forgotten: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), CheckpointManager(forgotten) as manager:
        found = manager.resume({"step": 0})
        manager.save(1100, {"step": 1100})
    assert (found.step, found.state) == (1000, {"step": 1000})
    assert found.doubt is not None
    assert "saved later, up to step 300 (ckpt-300.ckpt)" in found.doubt
    assert found.doubt in caplog.text
    assert CheckpointManager(forgotten).resume({"step": 0}).step == 1100


def test_forgetful_run_that_reaches_as_far_is_the_one_that_is_meant(forgotten: Path) -> None:
    train(forgotten, [100, 1200])
    assert CheckpointManager(forgotten).resume({"step": 0}).step == 1200


def test_run_that_asked_to_begin_anew_is_resumed_next_and_the_older_one_named(
    tmp_path: Path,
) -> None:
    train(tmp_path, [1000])
    train(tmp_path, [100], start="new")
    with CheckpointManager(tmp_path) as manager:
        found = manager.resume({"step": 0})
        assert found.step == 100
        assert "reaches step 1000 (ckpt-1000.ckpt)" in (found.doubt or "")


def test_run_that_found_nothing_to_resume_from_counts_as_asked(tmp_path: Path) -> None:
    (old,) = train(tmp_path, [1000])
    data = bytearray(old.path.read_bytes())
    data[len(data) // 2] ^= 255
    old.path.write_bytes(data)
    train(tmp_path, [100], start="resumes")
    newest = CheckpointManager(tmp_path).latest()
    assert newest is not None
    assert newest.step == 100


def test_beginning_anew_in_the_middle_of_a_run_begins_another_run(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="last(1)")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1000, {"step": 1000})
        manager.resume({"step": 0}, Resume(start="new"))
        manager.save(100, {"step": 100})
        manager.save(200, {"step": 200})
    assert steps(tmp_path) == [1000, 200]


def test_rollback_of_a_forgetful_run_does_not_restore_another_run(tmp_path: Path) -> None:
    train(tmp_path, [50, 1000])
    with CheckpointManager(tmp_path) as manager:
        manager.save(100, {"step": -100})
        manager.save(200, {"step": -200})
        assert manager.rollback(steps_back=60).state == {"step": -100}
        with pytest.raises(CheckpointNotFound):
            manager.rollback(steps_back=50)


def test_resumed_run_that_goes_back_on_purpose_stays_one_line(tmp_path: Path) -> None:
    train(tmp_path, [500, 600])
    with CheckpointManager(tmp_path, CheckpointConfig(keep="last(2)")) as manager:
        manager.resume({"step": 0})
        manager.rollback({"step": 0}, steps_back=100)
        manager.save(550, {"step": 550})
        manager.save(600, {"step": -600})
    assert steps(tmp_path) == [600, 550, 600]  # the one that it resumed from stays while it runs
    found = propose(api.place(tmp_path), parse_policy("last(2)"), now=datetime.now(UTC))
    assert [c.step for c in found.kept] == [600, 550]
    assert CheckpointManager(tmp_path).load("latest") == {"step": -600}


@pytest.mark.parametrize("start", ["forgets", "new"])
def test_prune_keeps_as_many_of_each_run(tmp_path: Path, start: Start) -> None:
    train(tmp_path, range(600, 1001, 100))
    train(tmp_path, range(100, 501, 100), start=start)
    result = run("prune", tmp_path, "--keep", "last(3)", "--yes", "--now")
    assert result.exit_code == 0, result.stderr
    assert steps(tmp_path) == [800, 900, 1000, 300, 400, 500]


def test_dry_run_shows_each_run_with_its_own_table(forgotten: Path) -> None:
    old, late = (c.run_id[:8] for c in CheckpointManager(forgotten).checkpoints()[2::3] if c.run_id)
    shown = run("prune", forgotten, "--keep", "last(1)", "--dry-run").stdout
    assert f"[ckpt; run {old}]  3 checkpoints" in shown
    assert f"[ckpt; run {late}]  3 checkpoints" in shown
    items = run_json("prune", forgotten, "--keep", "last(1)", "--dry-run")["items"]
    kept = [(one["step"], one["line"][:8]) for one in items if one["keep"]]
    assert sorted(kept) == [(300, late), (1000, old)]


def test_prune_by_series_counts_them_together_and_keeps_the_newest_of_each(
    forgotten: Path,
) -> None:
    old = CheckpointManager(forgotten).checkpoints()[0].run_id or ""
    arguments = ("prune", forgotten, "--keep", "last(2)", "--by-series")
    shown = run(*arguments, "--dry-run").stdout
    assert "RUN" in shown.splitlines()[3]
    assert f"newest of run {old[:8]}" in shown
    assert run_json(*arguments, "--dry-run")["summary"]["by_series"] is True
    assert run(*arguments, "--yes", "--now").exit_code == 0
    assert steps(forgotten) == [1000, 200, 300]


def test_prune_by_series_verifies_the_newest_of_each_run(forgotten: Path) -> None:
    newest = CheckpointManager(forgotten).checkpoints()[2]
    data = bytearray(newest.path.read_bytes())
    data[len(data) // 2] ^= 255
    newest.path.write_bytes(data)
    arguments = ("prune", forgotten, "--keep", "last(1)", "--by-series", "--yes", "--now")
    assert run(*arguments).exit_code == 0
    assert steps(forgotten) == [900, 1000, 300]


def test_by_series_is_refused_with_undo(forgotten: Path) -> None:
    result = run("prune", forgotten, "--undo", "--by-series")
    assert result.exit_code == 2
    assert "--by-series" in result.stderr


def test_ls_shows_the_runs_where_a_series_has_several(forgotten: Path) -> None:
    first, last = (CheckpointManager(forgotten).checkpoints()[i].run_id or "" for i in (0, -1))
    shown = run("ls", forgotten).stdout
    assert shown.splitlines()[0].split()[:2] == ["RUN", "STEP"]
    assert [line.split()[0] for line in shown.splitlines()[1:7]] == [first[:8]] * 3 + [last[:8]] * 3
    assert f"latest is step 1000 of run {first[:8]} (ckpt-1000.ckpt)" in shown
    lines = run_json("ls", forgotten)["summary"]["lines"]
    assert [(one["run"], one["step"], one["is_latest"]) for one in lines] == [
        (last, 300, False),
        (first, 1000, True),
    ]


def test_selectors_name_the_run_that_they_mean(tmp_path: Path) -> None:
    train(tmp_path, [100, 1000])
    train(tmp_path, [100, 200])
    latest = run("inspect", "latest", "--dir", tmp_path)
    assert "ckpt-1000.ckpt" in latest.stdout
    assert "saved later, up to step 200 (ckpt-200.ckpt)" in latest.stderr
    step = run("inspect", "100", "--dir", tmp_path)
    assert "ckpt-100.ckpt" in step.stdout
    assert "has ckpt-100-r1.ckpt" in step.stderr


def test_trash_of_a_run_stays_while_nothing_else_of_that_run_is_whole(tmp_path: Path) -> None:
    train(tmp_path, [900, 1000])
    train(tmp_path, [100])
    store, policy, now = api.place(tmp_path), parse_policy("last(1)"), datetime.now(UTC)
    carry_out(store, propose(store, policy, now=now))
    CheckpointManager(tmp_path).checkpoints()[0].path.write_bytes(b"cut")
    later = propose(store, policy, now=now + timedelta(days=9))
    assert (len(later.spared), later.expired) == (1, ())
    assert (tmp_path / TRASH_NAME).is_dir()


def test_data_that_went_missing_is_not_taken_for_removed_because_another_run_saved(
    tmp_path: Path,
) -> None:
    (old,) = train(tmp_path, [1000])
    data = old.path.read_bytes()
    old.path.unlink()
    train(tmp_path, [100])
    train(tmp_path, [200], start="new")
    old.path.write_bytes(data)
    assert 1000 in steps(tmp_path)
    found = next(c for c in CheckpointManager(tmp_path).checkpoints() if c.step == 1000)
    assert found.run_id == old.run_id


@pytest.fixture
def restarted(tmp_path: Path) -> Path:
    """Three runs of a callback, each resumed from the one before: net, net_1, net_2."""
    config = CheckpointConfig(save_checkpoint_steps=1, keep="all")
    for _ in range(3):
        callback = ModelCheckpoint("net", str(tmp_path), config)
        callback.resume()
        Loop(callbacks=(callback,), batch_num=10).run(2)
    return tmp_path


def test_restarts_of_a_callback_are_pruned_as_one_line(restarted: Path) -> None:
    arguments = ("prune", restarted, "--keep", "last(1)")
    shown = run(*arguments, "--dry-run").stdout
    assert shown.splitlines()[0].startswith(f"{restarted} [net, net_1, net_2; run ")
    assert shown.splitlines()[3].split()[:2] == ["SERIES", "STEP"]
    assert run(*arguments, "--yes").exit_code == 0
    assert [c.name for c in api.listed(restarted)] == ["net_2-1_2.ckpt"]
    assert run("prune", restarted, "--undo").exit_code == 0
    assert len(api.listed(restarted)) == 6


def test_restarts_of_a_callback_are_pruned_apart_by_series(restarted: Path) -> None:
    arguments = ("prune", restarted, "--keep", "last(1)", "--by-series", "--yes")
    assert run(*arguments).exit_code == 0
    left = sorted(c.name for c in api.listed(restarted))
    assert left == ["net-1_2.ckpt", "net_1-1_2.ckpt", "net_2-1_2.ckpt"]


def test_restarts_of_a_callback_are_listed_as_one_run(restarted: Path) -> None:
    shown = run("ls", restarted).stdout.splitlines()
    assert shown[0].split()[:3] == ["SERIES", "RUN", "STEP"]
    assert len({line.split()[1] for line in shown[1:7]}) == 1
    (line,) = run_json("ls", restarted)["summary"]["lines"]
    assert (line["series"], line["count"]) == (["net", "net_1", "net_2"], 6)


def test_callbacks_that_were_not_resumed_are_lines_of_their_own(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=1, keep="all")
    for steps_run in (3, 1):
        callback = ModelCheckpoint("net", str(tmp_path), config)
        Loop(callbacks=(callback,), batch_num=10).run(steps_run)
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    assert sorted(c.name for c in api.listed(tmp_path)) == ["net-1_3.ckpt", "net_1-1_1.ckpt"]
    resumed = ModelCheckpoint("net", str(tmp_path), config).resume()
    assert resumed is not None
    assert resumed.checkpoint.name == "net_1-1_1.ckpt"
    assert "reaches step 3 (net-1_3.ckpt)" in (resumed.doubt or "")


def test_ranks_warn_once_and_resume_the_forgotten_run_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train_ranks(steps: Iterable[int], *, resumes: bool = False) -> list[int]:
        def work(rank: int) -> int:
            with CheckpointManager(tmp_path, ranks=Ranks(Seat(meeting, rank))) as manager:
                found = manager.resume({"step": 0, "rank": rank}) if resumes else None
                for step in steps:
                    manager.save(step, {"step": step, "rank": rank})
                return 0 if found is None else found.step

        meeting = Meeting(2)
        return [one.must() for one in run_ranks(meeting, work)]

    train_ranks([900, 1000])
    with caplog.at_level(logging.WARNING):
        train_ranks([100])
    assert sum("was not resumed" in one.getMessage() for one in caplog.records) == 1
    assert train_ranks([1100], resumes=True) == [1000, 1000]
    assert train_ranks([], resumes=True) == [1100, 1100]


# How a run starts, its first step, its saves, and its policy.
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["forgets", "resumes", "new"]),
        st.integers(1, 12),
        st.integers(1, 3),
        st.sampled_from(["last(1)", "last(2)", "every(4) | last(1)"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=20)  # each runs up to five trainings on a disk in memory
@given(actions=ACTIONS, pruned_by=st.sampled_from(["last(1)", "last(2)"]))
def test_newest_of_each_line_stays_whatever_runs_meet_in_a_directory(
    actions: list[tuple[Start, int, int, str]], pruned_by: str
) -> None:
    disk, place = ModelDisk(), Path("/runs")
    heads: dict[str | None, tuple[str, int]] = {}  # run -> newest name and commit
    store = api.place(place, fs=disk, processes=ModelProcesses(disk))
    for start, first, saves, keep in actions:
        manager = manager_on(
            place, CheckpointConfig(keep=keep), fs=disk, processes=ModelProcesses(disk)
        )
        with manager:
            if start != "forgets":
                found = manager.resume(
                    None, Resume(start="newest" if start == "resumes" else "new")
                )
                if found.checkpoint is not None:
                    heads.pop(found.checkpoint.run_id)  # its line goes on in this run
            for step in range(first, first + saves):
                manager.save(step, {"step": step})
            newest = manager.latest()
            assert newest is not None
            heads[newest.run_id] = (newest.name, newest.sequence)
            trained = manager.plan()
        proposal = propose(store, parse_policy(keep), now=datetime.now(UTC))
        (own,) = (one.plan for one in proposal.plans if one.run_id == newest.run_id)
        assert {c.name for c in own.kept} <= {c.name for c in trained.kept}
        only_while_it_runs = {"protected"}
        for verdict in trained.verdicts:
            rules = {reason.rule for reason in verdict.reasons}
            if rules and rules != only_while_it_runs:
                assert verdict.checkpoint.name in {c.name for c in own.kept}
        present = {(c.name, c.sequence) for c in store.scan()}
        assert set(heads.values()) <= present
    carry_out(store, propose(store, parse_policy(pruned_by), now=datetime.now(UTC)))
    assert set(heads.values()) <= {(c.name, c.sequence) for c in store.scan()}
