# SPDX-License-Identifier: Apache-2.0
"""What a user may do who can add files to a sticky directory, but not remove those of others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.core.model import State
from ckptmgr.store.manifest.codec import encode, manifest_name
from ckptmgr.store.store import Store
from ckptmgr.training.resume import Resumption
from tests.cli.running import run
from tests.support.planted import describing, plant, plant_temp
from tests.support.saved import KEY
from tests.support.users import GROUP, USER, as_user

STRANGER = 12399
STATE = {"w": np.zeros(8, np.float32)}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a sticky directory of USER, in one that everybody can reach."""
    above = Path(tempfile.mkdtemp())
    try:
        above.chmod(0o755)
        directory = above / "shared"
        directory.mkdir()
        os.chown(directory, USER, GROUP)
        directory.chmod(0o1777)
        train(above / "imports", 1)
        run("prune", above / "imports", "--keep", "last(1)", "--yes")
        yield directory
    finally:
        shutil.rmtree(above)


def train(runs: Path, *steps: int, enc_key: bytes | None = None) -> Resumption:
    config = CheckpointConfig(keep="last(3)", enc_key=enc_key)
    with CheckpointManager(runs, config, prefix="net") as manager:
        found = manager.resume(dict(STATE))
        for step in steps:
            manager.save(step, STATE)
    return found


def user_trains(runs: Path, *steps: int) -> None:
    as_user(lambda: str(train(runs, *steps)))


def own_steps(runs: Path) -> list[int]:
    return sorted(one.step for one in Store(runs).scan() if one.state is State.OK)


def content_of(runs: Path, step: int) -> bytes:
    return (runs / f"net-{step}.ckpt").read_bytes()


def plant_copies(runs: Path, *steps: int, by: int = STRANGER) -> None:
    """Add copies of a checkpoint as later steps of its run."""
    content = (runs / "net-1.ckpt").read_bytes()
    for step in steps:
        plant(runs, f"net-{step}.ckpt", content, step=step, by=by)


def test_checkpoints_of_a_stranger_take_no_place_under_the_policy_of_a_run(shared: Path) -> None:
    user_trains(shared, 1, 2, 3)
    plant_copies(shared, 100, 101, 102)
    user_trains(shared, 200)
    assert own_steps(shared) == [2, 3, 200]


@pytest.mark.parametrize("who", ["owner", "root"])
def test_checkpoints_of_a_stranger_take_no_place_in_a_prune(shared: Path, who: str) -> None:
    user_trains(shared, 1, 2, 3)
    plant_copies(shared, 100, 101, 102)

    def prune() -> object:
        done = run("prune", shared, "--keep", "last(2)", "--yes", "--now")
        return [done.exit_code, done.stdout]

    answer: Any = as_user(prune) if who == "owner" else prune()
    code, printed = answer
    assert code == 0, printed
    assert own_steps(shared) == [2, 3]
    assert "3 checkpoints other-owner: no rule counts it" in printed
    assert {f"net-{step}.ckpt" for step in (100, 101, 102)} <= {p.name for p in shared.iterdir()}


def test_resume_passes_over_the_checkpoint_of_a_stranger_and_names_it(shared: Path) -> None:
    user_trains(shared, 1, 2)
    plant_copies(shared, 100)
    found = train(shared)
    assert found.step == 2
    assert [one.checkpoint.step for one in found.skipped] == [100]
    assert f"belongs to uid {STRANGER}" in found.skipped[0].reason
    assert found.doubt is None


def test_resume_takes_the_checkpoint_of_a_stranger_with_doubt_where_there_is_no_other(
    shared: Path,
) -> None:
    train(shared, 1)
    for path in shared.iterdir():
        os.chown(path, STRANGER, -1)
    found = train(shared)
    assert (found.step, found.skipped) == (1, ())
    assert found.doubt is not None
    assert f"belongs to uid {STRANGER}" in found.doubt


def test_listing_names_the_checkpoint_of_a_stranger(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    listed = run("ls", shared)
    assert "other-owner" in listed.stdout
    assert f"belongs to uid {STRANGER}" in listed.stdout


def test_latest_and_best_mean_no_checkpoint_of_a_stranger(shared: Path) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    assert "net-1.ckpt" in run("inspect", "latest", "--dir", shared).stdout
    with CheckpointManager(shared, CheckpointConfig(), prefix="net") as manager:
        newest = manager.latest()
        assert newest is not None
        assert newest.step == 1


def test_bare_file_of_a_stranger_decides_nothing(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    bare = shared / "net-9_1.ckpt"
    bare.write_bytes(content)
    os.chown(bare, STRANGER, -1)
    (found,) = [one for one in Store(shared).scan() if one.name == bare.name]
    assert (found.state, found.is_countable) == (State.OTHER_OWNER, False)


def test_manifest_of_a_stranger_that_nobody_may_read_keeps_no_run_from_its_own(
    shared: Path,
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    (shared / manifest_name("net-100.ckpt")).chmod(0o000)
    assert as_user(lambda: [train(shared).step]) == [1]


def test_temporary_manifest_of_a_stranger_removes_no_file_without_a_manifest(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    bare = shared / "lenet-1_1.ckpt"
    bare.write_bytes(content)
    os.chown(bare, USER, GROUP)
    os.chown(plant_temp(shared, bare.name, content), STRANGER, -1)
    user_trains(shared, 2)
    train(shared, 3)
    assert bare.read_bytes() == content


def test_checkpoint_under_the_key_counts_whoever_brought_it(shared: Path) -> None:
    train(shared, 1, 2, enc_key=KEY.raw)
    for path in shared.glob("net-2.*"):
        os.chown(path, STRANGER, -1)
    found = train(shared, enc_key=KEY.raw)
    assert (found.step, found.skipped, found.doubt) == (2, (), None)


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o1755, 0o700])
def test_other_user_counts_where_the_directory_is_not_sticky_and_shared(
    shared: Path, mode: int
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100)
    shared.chmod(mode)
    assert own_steps(shared) == [1, 100]


@pytest.mark.parametrize("owner", [0, USER])
def test_checkpoints_of_root_and_of_the_owner_of_a_sticky_directory_count(
    shared: Path, owner: int
) -> None:
    user_trains(shared, 1)
    plant_copies(shared, 100, by=owner)
    assert as_user(lambda: own_steps(shared)) == [1, 100]


def test_number_of_a_stranger_does_not_end_the_saves_of_a_run(shared: Path) -> None:
    user_trains(shared, 1)
    content = content_of(shared, 1)
    huge = replace(describing(shared, "net-100.ckpt", content), sequence=(1 << 64) - 1)
    path = shared / manifest_name("net-100.ckpt")
    path.write_bytes(encode(huge))
    (shared / "net-100.ckpt").write_bytes(content)
    for one in (path, shared / "net-100.ckpt"):
        os.chown(one, STRANGER, -1)
    user_trains(shared, 2)
    assert own_steps(shared) == [1, 2]


@pytest.mark.slow
def test_what_a_stranger_adds_removes_nothing_of_others(shared: Path) -> None:
    model = shared.parent / "model"
    model.mkdir()
    shutil.copystat(shared, model)
    os.chown(model, USER, GROUP)
    user_trains(model, 1, 2, 3)

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["net-{}.ckpt", "net-{}_1.ckpt", "lenet-{}.safetensors"]),
                st.sampled_from([0, 2, 3, 4, 99, 1 << 40]),
                st.sampled_from(["whole", "manifest alone", "data alone", "temporary"]),
            ),
            min_size=1,
            max_size=5,
        ),
        st.sampled_from(["run", "prune", "rm", "verify"]),
    )
    def holds(planted: list[tuple[str, int, str]], act: str) -> None:
        runs = Path(tempfile.mkdtemp(dir=shared.parent)) / "runs"
        runs.parent.chmod(0o755)
        shutil.copytree(model, runs)
        os.chown(runs, USER, GROUP)
        for path in runs.iterdir():
            os.chown(path, USER, GROUP)
        content = content_of(runs, 1)
        for pattern, step, part in planted:
            name = pattern.format(step)
            if (runs / name).exists() or (runs / manifest_name(name)).exists():
                continue
            if part == "temporary":
                os.chown(plant_temp(runs, name, content), STRANGER, -1)
                continue
            data, described = plant(runs, name, content, step=step, by=STRANGER)
            if part == "manifest alone":
                data.unlink()
            elif part == "data alone":
                described.unlink()
        if act == "run":
            user_trains(runs, 50)
        else:
            arguments: dict[str, list[str]] = {
                "prune": ["prune", str(runs), "--keep", "last(3)", "--yes", "--now"],
                "rm": ["rm", "99", "--dir", str(runs), "--yes", "--now", "--force"],
                "verify": ["verify", str(runs), "--quarantine", "--yes"],
            }
            as_user(lambda: run(*arguments[act]).exit_code)
        left = [1, 2, 3] if act != "run" else [2, 3, 50]
        owned = [path.name for path in runs.glob("net-*.ckpt") if path.stat().st_uid == USER]
        assert sorted(owned) == [f"net-{step}.ckpt" for step in left]
        assert own_steps(runs) == left

    holds()
