# SPDX-License-Identifier: Apache-2.0
"""What another member of a group can do in the directory of a run, by its `file_mode`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from tests.cli.running import run
from tests.support.users import GROUP, USER, as_user

MEMBER, STRANGER = 12346, 12347
OTHER_GROUP = 23457

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def project() -> Iterator[Path]:
    """Return a directory of the group, in one that everybody can reach."""
    above = Path(tempfile.mkdtemp())
    try:
        above.chmod(0o755)
        directory = above / "project"
        directory.mkdir()
        os.chown(directory, -1, GROUP)
        directory.chmod(0o2775)
        for command in (("ls",), ("verify",), ("prune", "--keep", "last(1)", "--yes")):
            run(command[0], train(above / "imports", file_mode=0o660), *command[1:])
        run("prune", above / "imports", "--undo")
        yield directory
    finally:
        shutil.rmtree(above)


def train(runs: Path, *, file_mode: int) -> Path:
    """Save three more steps."""
    state = {"w": np.zeros(3)}
    config = CheckpointConfig(file_mode=file_mode)
    with CheckpointManager(runs, config, prefix="net") as manager:
        start = manager.resume(state)
        for step in range(start.step + 1, start.step + 4):
            manager.save(step, state)
    return runs


def user_train(runs: Path) -> None:
    as_user(lambda: str(train(runs, file_mode=0o660)), group=GROUP)


def by(user: int, *arguments: str | Path, group: int = GROUP) -> tuple[int, str]:
    """Run a command as a user; return its exit code and output."""

    def act() -> list[object]:
        done = run(*arguments)
        return [done.exit_code, done.output]

    answer: Any = as_user(act, user=user, group=group)
    return answer[0], answer[1]


def test_member_of_a_group_that_may_read_lists_and_verifies_while_the_run_goes_on(
    project: Path,
) -> None:
    runs = project / "runs"
    with CheckpointManager(runs, CheckpointConfig(file_mode=0o440), prefix="net") as manager:
        manager.save(1, {"w": np.zeros(3)})
        manager.save(2, {"w": np.zeros(3)})
        code, listed = by(MEMBER, "ls", runs)
        assert (code, listed.count(" ok ")) == (0, 2), listed
        code, verified = by(MEMBER, "verify", runs)
        assert (code, verified.count("ok  ")) == (0, 2), verified
        pruned = by(MEMBER, "prune", runs, "--keep", "last(1)", "--yes")
        assert pruned[0] != 0, pruned
    again = by(MEMBER, "prune", runs, "--keep", "last(1)", "--yes")
    assert again[0] != 0, again
    assert "ermission" in again[1]
    assert len(list(runs.glob("*.ckpt"))) == 2


def test_users_outside_the_group_read_nothing(project: Path) -> None:
    train(project / "runs", file_mode=0o660)
    code, output = by(STRANGER, "ls", project / "runs", group=OTHER_GROUP)
    assert code != 0
    assert "is not readable" in output


def test_members_of_a_group_that_may_write_prune_undo_and_go_on(project: Path) -> None:
    runs = project / "runs"
    user_train(runs)
    assert by(MEMBER, "verify", runs)[0] == 0
    assert by(MEMBER, "prune", runs, "--keep", "last(1)", "--yes")[0] == 0
    assert len(list(runs.glob("*.ckpt"))) == 1
    user_train(runs)
    code, undone = by(MEMBER, "prune", runs, "--undo")
    assert (code, "2 checkpoints restored" in undone) == (0, True), undone
    assert by(MEMBER, "verify", runs)[0] == 0


def test_lease_that_a_dead_run_left_does_not_stop_another_member(project: Path) -> None:
    runs = project / "runs"
    user_train(runs)

    def die() -> None:
        manager = CheckpointManager(runs, CheckpointConfig(file_mode=0o660), prefix="net")
        manager.resume({"w": np.zeros(3)})
        os.kill(os.getpid(), 9)

    with pytest.raises(ValueError, match="Expecting value"):  # it answers nothing
        as_user(die)
    assert (runs / ".net.lease").exists()
    as_user(lambda: str(train(runs, file_mode=0o660)), user=MEMBER)
    assert len(list(runs.glob("*.ckpt"))) == 5
    code, refused = by(USER, "prune", runs, "--yes")  # the policy that the other member recorded
    assert code != 0
    assert "says what to keep, but belongs to another user" in refused
