# SPDX-License-Identifier: Apache-2.0
"""Programs that come and are killed in one directory: none loses what another one saved, or sees damage that is not there."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptmgr import CheckpointManager, load_checkpoint, save_checkpoint
from tests.faults import traffic
from tests.support import api

PROGRAMS = (traffic.train, traffic.prune, traffic.verify, traffic.overwrite)
KILLS = 12


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def run_traffic(directory: Path, notes: Path, rng: random.Random) -> None:
    """Let all programs run, and kill one of them now and then; another one takes its place.

    On a busy machine that goes on until something was saved and something overwritten.
    """
    running = [traffic.start(one, directory, notes, 1) for one in PROGRAMS]
    try:
        for turn in itertools.count(2):
            journal = lines(notes / "journal")
            if turn > KILLS + 1 and noted(journal, "saved") and noted(journal, "overwriting"):
                break
            time.sleep(rng.uniform(0.02, 0.2))  # the moment of the kill: nothing is waited for
            place = rng.randrange(len(PROGRAMS))
            os.kill(running[place], signal.SIGKILL)
            os.waitpid(running[place], 0)
            running[place] = traffic.start(PROGRAMS[place], directory, notes, turn)
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def name_of(step: str) -> str:
    return f"net-{step}.ckpt"


def noted(journal: Sequence[str], what: str) -> list[str]:
    """Return the texts of the lines of one kind, in their order."""
    return [line.partition(" ")[2] for line in journal if line.startswith(f"{what} ")]


def is_outdated(name: str, journal: Sequence[str]) -> bool:
    """Return whether a prune dropped a save because of two later ones of its series.

    These may be unacknowledged: their program was killed between the commit and its note. One that
    was overwritten before belongs to the series no longer.
    """
    began = max(
        at for at, line in enumerate(journal) if name == name_of(line.removeprefix("begun "))
    )
    later = {name_of(step) for step in noted(journal[began + 1 :], "begun")}
    for at, line in enumerate(journal):
        dropped, _, kept = line.removeprefix("dropping ").partition(" because of ")
        newer = later & set(kept.split(",")) - set(noted(journal[:at], "overwrote"))
        if name in dropped.split(",") and len(newer) >= 2:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_programs_that_share_a_directory_and_are_killed_lose_nothing(
    fast_path: Path, seed: int
) -> None:
    directory, notes = fast_path / "runs", fast_path / "notes"
    directory.mkdir()
    notes.mkdir()
    run_traffic(directory, notes, random.Random(seed))
    assert lines(notes / "failed") == []
    assert lines(notes / "damaged") == []
    journal = lines(notes / "journal")
    saved, overwritten = noted(journal, "saved"), set(noted(journal, "overwriting"))
    assert saved
    assert overwritten
    store = api.place(directory)
    whole = {c.name for c in store.scan() if api.verify(store, c).status is api.Status.OK}
    data = {path.name for path in directory.glob("*.ckpt")}
    assert data <= whole
    newest = name_of(saved[-1])
    assert newest in data | overwritten or is_outdated(newest, journal)
    for name in data:
        allowed = {float(name[len("net-") : -len(".ckpt")])}
        allowed |= {traffic.OVERWRITTEN} if name in overwritten else set()
        assert float(load_checkpoint(directory / name)["w"][0]) in allowed


@pytest.mark.slow
def test_next_save_of_anybody_collects_what_killed_programs_left(fast_path: Path) -> None:
    directory, notes = fast_path / "runs", fast_path / "notes"
    directory.mkdir()
    notes.mkdir()
    run_traffic(directory, notes, random.Random(3))
    save_checkpoint(traffic.state(0.0), directory / "net-0.ckpt")
    found = {path.name for path in directory.iterdir() if path.is_file()}
    data = {name for name in found if name.endswith(".ckpt")}
    manifests = {api.manifest_name(name) for name in data}
    alone = {c.name for c in api.listed(directory) if c.name not in data}
    assert found - {api.manifest_name(name) for name in alone} == data | manifests
    with CheckpointManager(directory, prefix="net") as manager:
        assert manager.resume().skipped == ()
