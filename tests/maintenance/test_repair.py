# SPDX-License-Identifier: Apache-2.0
"""Damaged files of many ranks: their reports, and their repair."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    Ranks,
    StoreLocked,
    UnsupportedCheckpoint,
)
from ckptmgr.maintenance.repair import repair_checkpoint
from ckptmgr.store.name_leases import hold_name
from tests.cli.running import run
from tests.faults.training import KEY
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.crashmodel import FailingDisk

WEIGHTS = np.arange(30_000, dtype=np.float32).reshape(300, 100)


def saved(
    directory: Path, *, keep_redundancy: int = 2, own: bool = False, **config: Any
) -> Checkpoint:
    """Save with four ranks; return the checkpoint."""
    meeting = Meeting(4)
    removes = config.pop("remove_redundancy", True)

    def save(rank: int) -> None:
        state = {"w": WEIGHTS, "scale": np.float64(2.5)}
        with CheckpointManager(
            directory,
            CheckpointConfig(remove_redundancy=removes, **config),
            ranks=Ranks(Seat(meeting, rank), keep_redundancy=keep_redundancy if removes else 1),
            prefix="net",
        ) as ours:
            ours.save(1, {**state, "own": np.full(5000, rank)} if own else state)

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    (found,) = api.listed(directory)
    return found


def damage(path: Path, at: float, length: int = 1) -> bytes:
    """Change bytes of a file; return its former content."""
    good = path.read_bytes()
    bad = bytearray(good)
    place = int(len(bad) * at)
    for offset in range(place, place + length):
        bad[offset] ^= 0xFF
    path.chmod(0o600)
    path.write_bytes(bad)
    return good


@pytest.mark.parametrize(
    ("format", "crc"), [("ckpt", False), ("ckpt", True), ("safetensors", False)]
)
def test_damaged_content_is_repaired_byte_by_byte(format: str, crc: bool, tmp_path: Path) -> None:
    found = saved(tmp_path, format=format, crc_check=crc)
    path = tmp_path / found.shards[2]
    good = damage(path, 0.3, 400)
    before = api.verify(api.place(tmp_path), found)
    assert before.status is api.Status.DAMAGED
    assert before.hint is not None
    assert f"ckptmgr repair {found.path} repairs {found.shards[2]} from " in before.hint
    (done,) = repair_checkpoint(api.place(tmp_path), found)
    assert (done.name, done.problem, done.bad_bytes) == (found.shards[2], None, len(good))
    assert done.sources
    assert found.shards[2] not in done.sources
    assert path.read_bytes() == good
    assert api.verify(api.place(tmp_path), found).status is api.Status.OK
    assert repair_checkpoint(api.place(tmp_path), found) == []


def test_quick_look_does_not_search_for_cures(tmp_path: Path) -> None:
    found = saved(tmp_path)
    path = tmp_path / found.shards[1]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-8])
    answer = api.verify(api.place(tmp_path), found, level=api.Level.QUICK)
    assert "repair" not in (answer.hint or "")


def test_end_that_was_cut_off_is_repaired(tmp_path: Path) -> None:
    found = saved(tmp_path)
    path = tmp_path / found.shards[1]
    good = path.read_bytes()
    for bad in (good[:-3000], good + b"more"):
        path.chmod(0o600)
        path.write_bytes(bad)
        (broken,) = api.listed(tmp_path)
        assert broken.state is api.State.CORRUPT
        (done,) = repair_checkpoint(api.place(tmp_path), broken)
        assert done.problem is None
        assert path.read_bytes() == good


def test_two_files_heal_each_other_where_the_copies_are_elsewhere(tmp_path: Path) -> None:
    found = saved(tmp_path, keep_redundancy=4)
    goods = {name: damage(tmp_path / name, 0.6) for name in found.shards[1:3]}
    assert [one.problem for one in repair_checkpoint(api.place(tmp_path), found)] == [None, None]
    assert {name: (tmp_path / name).read_bytes() for name in goods} == goods


def test_states_saved_whole_heal_each_other(tmp_path: Path) -> None:
    found = saved(tmp_path, remove_redundancy=False)
    good = damage(tmp_path / found.shards[3], 0.5)
    (done,) = repair_checkpoint(api.place(tmp_path), found)
    assert done.problem is None
    assert (tmp_path / found.shards[3]).read_bytes() == good


@pytest.mark.parametrize(
    ("options", "at", "problem"),
    [
        ({"keep_redundancy": 1}, 0.5, "what is damaged is in no other file"),
        ({"own": True}, 0.99, "what is damaged is in no other file"),
        ({}, 0.0, ""),
    ],
    ids=["no copy", "own values", "description"],
)
def test_what_nobody_else_has_stays_damaged_and_is_named(
    options: dict[str, Any], at: float, problem: str, tmp_path: Path
) -> None:
    found = saved(tmp_path, **options)
    path = tmp_path / found.shards[2]
    damage(path, at, 8)
    bad = path.read_bytes()
    (done,) = repair_checkpoint(api.place(tmp_path), found)
    assert done.problem is not None
    assert problem in done.problem
    assert path.read_bytes() == bad
    hint = api.verify(api.place(tmp_path), found).hint
    assert hint is not None
    assert "repair" not in hint


def test_file_that_is_gone_is_named(tmp_path: Path) -> None:
    found = saved(tmp_path)
    (tmp_path / found.shards[0]).unlink()
    (done,) = repair_checkpoint(api.place(tmp_path), found)
    assert (done.name, done.problem) == (found.shards[0], "it is gone")


def test_single_files_and_missing_manifests_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, prefix="one") as ours:
        ours.save(1, {"w": WEIGHTS})
    (single,) = api.listed(tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match="single file"):
        repair_checkpoint(api.place(tmp_path), single)
    (tmp_path / f"{single.name}.manifest.json").unlink()
    with pytest.raises(CheckpointNotFound):
        repair_checkpoint(api.place(tmp_path), single)


@pytest.mark.parametrize("operation", ["reserve", "sync", "replace"])
def test_disk_that_fails_leaves_the_damaged_file(operation: str, tmp_path: Path) -> None:
    found = saved(tmp_path)
    path = tmp_path / found.shards[2]
    damage(path, 0.5)
    bad, names = path.read_bytes(), sorted(one.name for one in tmp_path.iterdir())
    disk = FailingDisk(api.OsFileSystem(), operation=operation, call=1, error=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        repair_checkpoint(api.place(tmp_path, fs=disk), found)
    assert path.read_bytes() == bad
    assert set(names) >= {one.name for one in tmp_path.iterdir() if "lock" not in one.name}


def test_command_heals_and_says_what_is_left(tmp_path: Path) -> None:
    found = saved(tmp_path)
    assert run("repair", found.path).stdout == f"{found.name}: all files are as they were saved\n"
    good = damage(tmp_path / found.shards[2], 0.5)
    result = run("repair", found.path)
    assert (result.exit_code, f"repaired {found.shards[2]} from " in result.stdout) == (0, True)
    assert (tmp_path / found.shards[2]).read_bytes() == good
    damage(tmp_path / found.shards[2], 0.5)
    damage(tmp_path / found.shards[1], 0.0, 8)
    result = run("repair", found.path)
    assert result.exit_code == 3
    assert f"not repaired: {found.shards[1]}: " in result.stdout
    result = run("repair", found.path, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [(one["name"], one["repaired"]) for one in document["items"]] == [
        (found.shards[1], False)
    ]
    assert run("repair", found.path, "-q").stdout == f"{tmp_path / found.shards[1]}\n"


def test_command_heals_encrypted_files_with_their_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    found = saved(tmp_path / "runs", enc_key=KEY)
    path = tmp_path / "runs" / found.shards[2]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes() + b"more")
    assert run("repair", found.path).exit_code != 0
    result = run("repair", found.path, "--key", f"file:{key}")
    assert (result.exit_code, f"repaired {path.name} from " in result.stdout) == (0, True)
    assert not path.exists()
    assert run("verify", found.path, "--key", f"file:{key}").exit_code == 0


def test_repair_is_refused_while_somebody_holds_the_name(tmp_path: Path) -> None:
    found = saved(tmp_path)
    with hold_name(api.OsFileSystem(), tmp_path, found.name), pytest.raises(StoreLocked):
        repair_checkpoint(api.place(tmp_path), found)
