# SPDX-License-Identifier: Apache-2.0
"""Ways around the rule that unproven checkpoints decide nothing: rollback, undo, the trash, selectors, signatures, names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Ranks,
    Snapshots,
    UnprovenCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from tests.cli.running import run, run_json
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import overwrite
from tests.support.surface import Loop, data_files
from tests.training.test_unproven import KEY, STRANGERS, Add, add_other_key, key_source, train

SIGNER = api.SigningKey(bytes(range(32)))
TRASH = ".ckptmgr-trash"
FAR = "99991231T235959.999999Z"


def manager(runs: Path, key: bytes = KEY, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(enc_key=key, keep="all", save_checkpoint_steps=10**6)
    return CheckpointManager(runs, config, prefix="net", **options)


def add(
    runs: Path, number: int, *, key: bytes | None = None, prefix: str = "net", **said: object
) -> None:
    """Add a checkpoint of another run whose manifest says something else; with a key it proves nothing any more."""
    elsewhere = runs.parent / f"{prefix}-{number}"
    train(elsewhere, range(number, number + 1), key=key, prefix=prefix)
    for path in elsewhere.glob(f"{prefix}-*"):
        shutil.copy(path, runs)
    if said:
        manifest = runs / api.manifest_name(f"{prefix}-{number}.ckpt")
        overwrite(manifest, json.dumps(json.loads(manifest.read_text()) | said).encode())


def test_rollback_takes_the_proven_checkpoint_that_is_newer_than_memory_beside_a_stranger(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    state = {"w": np.zeros(3)}
    with manager(runs, snapshots=Snapshots(10**6)) as ours:
        ours.snapshot(10, {"w": np.full(3, 10.0)})
        ours.save(20, {"w": np.full(3, 20.0)})
        add(runs, 1, sequence=1000)
        ours.step_end(25, {"w": np.full(3, 25.0)})
        found = ours.rollback(state)
    assert (found.step, state["w"][0]) == (20, 20)
    assert [one.checkpoint.name for one in found.skipped] == ["net-1.ckpt"]


@STRANGERS
def test_undo_brings_back_the_proven_batch_before_one_of_strangers(
    tmp_path: Path, add: Add
) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    source = key_source(tmp_path)
    assert run("prune", runs, "--keep", "last(1)", "--yes", "--key", source).exit_code == 0
    batch = runs / TRASH / "99980101T000000.000000Z"
    batch.mkdir(mode=0o700)
    add(batch)
    shown = run_json("prune", runs, "--undo", "--dry-run", "--key", source)
    assert [(Path(one["path"]).name, one["state"]) for one in shown["items"]] == [
        ("net-1.ckpt", "ok"),
        ("net-2.ckpt", "ok"),
    ]
    assert run("prune", runs, "--undo", "--key", source).exit_code == 0
    assert data_files(runs) == ["net-1.ckpt", "net-2.ckpt", "net-3.ckpt"]
    (left,) = run_json("prune", runs, "--undo", "--key", source)["items"]
    assert left["state"] in ("other-key", "unproven")


def test_undo_passes_over_a_later_batch_whose_names_are_taken(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    source = key_source(tmp_path)
    assert run("prune", runs, "--keep", "last(1)", "--yes", "--key", source).exit_code == 0
    batch = runs / TRASH / "99980101T000000.000000Z"
    batch.mkdir(mode=0o700)
    for path in runs.glob("net-3.*"):
        shutil.copy(path, batch)
    assert run("prune", runs, "--undo", "--key", source).exit_code == 0
    assert data_files(runs) == ["net-1.ckpt", "net-2.ckpt", "net-3.ckpt"]
    assert run("prune", runs, "--undo", "--key", source).exit_code == 3


def test_trash_folder_of_a_far_day_neither_fails_prune_nor_keeps_later_batches(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    (runs / TRASH / FAR).mkdir(parents=True)
    first = run_json("prune", runs, "--keep", "last(2)", "--yes")["summary"]
    assert first["trash"].endswith("20260302T100000.000000Z")
    result = run("prune", runs, "--keep", "last(2)", "--yes", now_s=4e9)
    assert "removed 1 from the trash for good" in result.output


@STRANGERS
def test_selectors_name_strangers_only_where_nothing_proven_is_meant(
    tmp_path: Path, add: Add
) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    source = key_source(tmp_path)
    assert run("pin", "2", "--dir", runs, "--key", source).exit_code == 0
    add(runs)
    step = 2 if add is add_other_key else 3
    for path in runs.glob("net-900.ckpt.*"):
        said = json.loads(path.read_text())
        said |= {"pins": [{"name": "x", "reason": ""}], "step": step, "series": "other"}
        overwrite(path, json.dumps(said).encode())
    for selector, expected in (("@pinned", 2), (str(step), step)):
        shown = run_json("inspect", selector, "--dir", runs, "--key", source)
        assert shown["summary"]["step"] == expected
    assert run("unpin", "2", "--dir", runs, "--key", source).exit_code == 0
    assert run("inspect", "@pinned", "--dir", runs, "--key", source).exit_code == 10


def test_proven_save_of_an_exception_is_found_by_its_step_beside_a_stranger(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with manager(runs) as ours:
        ours.save(3, {"w": np.full(3, 3)}, why="exception: ValueError")
    add(runs, 4, step=3, sequence=1000)
    with manager(runs) as ours:
        loaded = ours.load(3)
    assert isinstance(loaded, dict)
    assert loaded["w"][0] == 3
    shown = run_json("inspect", "3", "--dir", runs, "--key", key_source(tmp_path))
    assert shown["summary"]["state"] == "ok"


def test_plain_unsigned_file_needs_permission_to_be_unencrypted_with_trusted_keys(
    tmp_path: Path,
) -> None:
    train(tmp_path, range(1, 2), key=None)
    path, trusted = tmp_path / "net-1.ckpt", [SIGNER.public_key]
    with pytest.raises(UnprovenCheckpoint, match="allow_unencrypted=True"):
        load_checkpoint(path, trusted_keys=trusted, allow_unsealed=True)
    assert load_checkpoint(path, trusted_keys=trusted, allow_unencrypted=True)
    for allow in ("allow_unsealed", "allow_unencrypted"):
        options = {"trusted_keys": trusted, allow: True}
        with manager_on(tmp_path, prefix="net", **options) as ours:
            assert (ours.latest() is not None) == (allow == "allow_unencrypted")


def test_unsigned_stranger_displaces_no_signed_checkpoint_in_prune(tmp_path: Path) -> None:
    runs, public = tmp_path / "runs", tmp_path / "sign.pem.pub"
    config = CheckpointConfig(signing_key=SIGNER, keep="all")
    with CheckpointManager(runs, config, prefix="net") as ours:
        for step in (1, 2, 3):
            ours.save(step, {"w": np.full(3, step)})
    add(runs, 900, sequence=1000)
    public.write_bytes(SIGNER.public_key.to_pem())
    arguments = ("prune", runs, "--keep", "last(1)", "--yes", "--now", "--public-key", public)
    assert run_json(*arguments)["summary"]["unproven"] == {"unproven": 1}
    assert data_files(runs) == ["net-3.ckpt", "net-900.ckpt"]


def test_longest_number_in_a_name_makes_no_name_of_a_callback_too_long(tmp_path: Path) -> None:
    for digits in (9, 242):
        (tmp_path / f"net_{'9' * digits}-1_1.ckpt").write_bytes(b"x")
    for _ in range(2):
        callback = ModelCheckpoint("net", str(tmp_path), CheckpointConfig(enc_key=KEY))
        Loop(callbacks=(callback,), batch_num=10).run(1)
    prefixes = [name.partition("-")[0] for name in data_files(tmp_path)]
    assert [one for one in prefixes if "9" not in one] == ["net_1000000000", "net_1000000001"]


@pytest.mark.parametrize("name", ["net-3.ckpt", "net-3.safetensors.ckpe", "net-3.shards"])
@pytest.mark.parametrize("text", ["{", '{"schema":"ckptmgr.manifest/99"}', None])
def test_checkpoint_whose_manifest_cannot_be_read_is_listed_in_its_series(
    tmp_path: Path, name: str, text: str | None
) -> None:
    train(tmp_path, range(1, 3))
    if not name.endswith(".shards"):
        (tmp_path / name).write_bytes(b"x")
    manifest = tmp_path / f"{name}{api.MANIFEST_SUFFIX}"
    if text is None:
        manifest.mkdir()
    else:
        manifest.write_text(text)
    with manager(tmp_path) as ours:
        states = {c.name: (c.step, c.state) for c in ours.checkpoints()}
        found = ours.resume()
    assert states[name] == (3, api.State.CORRUPT)
    assert (found.step, [one.checkpoint.name for one in found.skipped]) == (2, [name])


def test_encrypting_a_file_proves_no_number_that_leaves_none_to_later_saves(tmp_path: Path) -> None:
    runs, plain = tmp_path / "runs", tmp_path / "plain"
    train(runs, range(1, 3))
    train(plain, range(5, 6), key=None)
    add(plain, 6, sequence=2**64 - 1)
    key = ("--key", key_source(tmp_path))
    refused = run("encrypt", plain / "net-6.ckpt", "-o", runs / "net-6.ckpt", *key)
    assert refused.exit_code != 0
    assert "would leave no number" in refused.output
    assert run("encrypt", plain / "net-5.ckpt", "-o", runs / "net-5.ckpt", *key).exit_code == 0
    with manager(runs) as ours:
        ours.save(7, {"w": np.zeros(3)})
        assert [c.step for c in ours.checkpoints()][-1] == 7


def test_error_of_a_resume_is_about_the_own_checkpoint_and_not_about_a_stranger(
    tmp_path: Path,
) -> None:
    runs, meeting = tmp_path / "runs", Meeting(2)
    config = CheckpointConfig(enc_key=KEY, keep="all")

    def save(rank: int) -> bool:
        seat = Seat(meeting, rank)
        with CheckpointManager(runs, config, ranks=Ranks(seat), prefix="net") as ours:
            return ours.save(1, {"w": np.full(3, rank)}) is not None

    for outcome in run_ranks(meeting, save):
        assert outcome.must()
    add(runs, 900, sequence=1000)
    with manager(runs) as ours, pytest.raises(UnsupportedCheckpoint, match="net-1"):
        ours.resume({"w": np.zeros(3)})
