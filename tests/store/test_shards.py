# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks: their names, their manifest, and how a directory lists and loses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import Checkpoint, CorruptCheckpoint, UnsafePrune, UnsupportedCheckpoint
from ckptmgr.core.shard_names import (
    is_set_name,
    new_attempt_id,
    parse_shard_name,
    set_stem,
    shard_name,
)
from ckptmgr.files.load.inspection import inspect_file
from ckptmgr.maintenance.prune import undo
from ckptmgr.policy.rules import Last, RetentionPolicy
from ckptmgr.store.trash import DirectoryTrash
from tests.faults.training import RUNS, ModelProcesses, disk_with
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash
from tests.support.damage import flip_bit, put, truncate
from tests.support.manifests import SAVED_AT, manifest
from tests.support.pruning import carry_out, propose
from tests.support.shard_sets import ATTEMPT, CONTENTS, SET, disk_with_shards, shard, sharded

PATH = RUNS / api.manifest_name(SET)


def store_on(disk: ModelDisk) -> api.Place:
    return api.place(RUNS, fs=disk, processes=ModelProcesses(disk))


def only(store: api.Place) -> Checkpoint:
    (found,) = store.scan()
    return found


def test_shard_name_says_who_wrote_it_and_until_when_it_counts() -> None:
    parsed = parse_shard_name(shard(1))
    assert parsed is not None
    assert (parsed.rank, parsed.world, parsed.attempt_id) == (1, 2, ATTEMPT)
    assert (parsed.set_name, parsed.series) == (SET, "net")
    assert parsed.expires_at == 0x67D2F1A4


@pytest.mark.parametrize(
    "name",
    ["net-1.ckpt", "net-1.0-of-2.ckpt", "net-1.00-of-2.67d2f1a41f0c9a2e.ckpt", "net-1.shards"],
)
def test_other_names_are_no_shards(name: str) -> None:
    assert parse_shard_name(name) is None


@pytest.mark.parametrize(
    ("stem", "series"), [("net-3_40", "net"), ("net-40-r2", "net"), ("odd name", "odd name")]
)
def test_series_of_a_shard_is_that_of_its_checkpoint(stem: str, series: str) -> None:
    parsed = parse_shard_name(shard(0, stem=stem))
    assert parsed is not None
    assert parsed.series == series
    assert set_stem(parsed.set_name) == stem


def test_name_of_an_encrypted_safetensors_shard_is_understood() -> None:
    options = api.SaveOptions(format="safetensors", key=api.Key(bytes(16)))
    plain = shard_name("n-1", 0, world=2, attempt_id="0" * 16, format="safetensors")
    name = shard_name("n-1", 0, world=2, attempt_id="0" * 16, format=options.extension)
    assert name == f"{plain}.ckpe"
    assert parse_shard_name(name) == parse_shard_name(plain)


def test_attempts_differ_and_tell_when_they_expire() -> None:
    ids = {new_attempt_id(1_700_000_000.9) for _ in range(50)}
    assert len(ids) == 50
    names = [shard_name("n-1", 0, world=1, attempt_id=one, format="safetensors") for one in ids]
    expiries = [None if (p := parse_shard_name(name)) is None else p.expires_at for name in names]
    assert set(expiries) == {1_700_000_000}


def test_manifest_of_shards_reads_back_as_it_was_written() -> None:
    assert api.decode_manifest(api.encode_manifest(sharded()), path=PATH) == sharded()


def test_manifest_of_one_file_keeps_the_first_version_of_the_schema() -> None:
    assert json.loads(api.encode_manifest(manifest()))["schema"] == "ckptmgr.manifest/1"
    assert json.loads(api.encode_manifest(sharded()))["schema"] == "ckptmgr.manifest/2"


def test_file_of_one_rank_has_a_manifest_of_its_own() -> None:
    alone = sharded().of_shard(1)
    assert alone.name == shard(1)
    assert alone.file.digest.size_bytes == len(CONTENTS[1])
    assert alone.shards == ()


def drop_last(document: dict[str, Any]) -> None:
    document["files"].pop()


def drop_all(document: dict[str, Any]) -> None:
    document["files"].clear()


def swap(document: dict[str, Any]) -> None:
    document["files"].reverse()


def other_step(document: dict[str, Any]) -> None:
    document["files"][1]["name"] = shard(1, stem="net-2")


def no_shard(document: dict[str, Any]) -> None:
    document["files"][0]["name"] = "net-1.ckpt"


def first_version(document: dict[str, Any]) -> None:
    document["schema"] = "ckptmgr.manifest/1"


@pytest.mark.parametrize("change", [drop_last, drop_all, swap, other_step, no_shard, first_version])
def test_manifest_that_does_not_name_every_rank_once_is_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    document = json.loads(api.encode_manifest(sharded()))
    change(document)
    with pytest.raises(CorruptCheckpoint, match="not a valid manifest"):
        api.decode_manifest(json.dumps(document).encode(), path=PATH)


def test_manifest_of_shards_belongs_to_their_common_name() -> None:
    with pytest.raises(CorruptCheckpoint, match=r"is the manifest of 'net-1\.shards'"):
        api.decode_manifest(
            api.encode_manifest(sharded()), path=Path("/runs/net-2.shards.manifest.json")
        )


def test_one_file_cannot_have_the_name_of_a_set() -> None:
    file = replace(manifest().file, name=SET)
    with pytest.raises(UnsupportedCheckpoint, match="is not one data file"):
        api.encode_manifest(replace(manifest(), file=file))


def test_shards_are_listed_as_one_checkpoint() -> None:
    found = only(store_on(disk_with_shards()))
    assert (found.name, found.state, found.step) == (SET, api.State.OK, 1)
    assert found.shards == (shard(0), shard(1))
    assert found.size_bytes == sum(map(len, CONTENTS))


def test_missing_shard_makes_the_checkpoint_corrupt() -> None:
    disk = disk_with_shards()
    disk.unlink(RUNS / shard(1))
    found = only(store_on(disk))
    assert (found.state, found.problem) == (api.State.CORRUPT, f"{shard(1)} is missing")


def test_short_shard_makes_the_checkpoint_corrupt() -> None:
    disk = disk_with_shards()
    truncate(disk, shard(0), 3)
    found = only(store_on(disk))
    assert found.state is api.State.CORRUPT
    assert found.problem == f"{shard(0)} has 3 bytes, but the manifest says 9"


def test_folder_in_place_of_a_shard_makes_the_checkpoint_corrupt() -> None:
    disk = disk_with_shards()
    disk.unlink(RUNS / shard(0))
    disk.make_directory(RUNS / shard(0), mode=0o700)
    found = only(store_on(disk))
    assert found.problem is not None
    assert "is a link or no regular file" in found.problem


def test_shards_without_manifest_are_leftovers_of_their_series() -> None:
    disk = disk_with_shards()
    disk.unlink(PATH)
    found = store_on(disk).scan()
    assert {c.name for c in found} == {shard(0), shard(1)}
    assert {(c.state, c.series) for c in found} == {(api.State.LEFTOVER, "net")}


def test_shard_of_another_attempt_is_a_leftover_beside_the_checkpoint() -> None:
    disk = disk_with_shards()
    loser = shard(0, attempt_id="0" * 16)
    put(disk, RUNS / loser, b"x")
    states = {c.name: c.state for c in store_on(disk).scan()}
    assert states == {SET: api.State.OK, loser: api.State.LEFTOVER}


def test_shards_of_an_unreadable_manifest_are_not_called_leftovers() -> None:
    disk = disk_with_shards()
    disk.unlink(PATH)
    put(disk, PATH, b"{}")
    found = only(store_on(disk))
    assert (found.name, found.state) == (SET, api.State.CORRUPT)
    assert (found.series, found.step) == ("net", 1)


def test_unreadable_manifest_of_shards_is_in_the_series_that_its_name_says() -> None:
    disk = disk_with_shards()
    names = {"net-3_40.shards": ("net", 0), "net-7-2.shards": ("net-7", 2), "x.shards": ("x", 0)}
    for name in names:
        put(disk, RUNS / api.manifest_name(name), b"{")
    found = {c.name: (c.series, c.step) for c in store_on(disk).scan() if c.name != SET}
    assert found == names


def test_figures_of_shards_are_looked_at_one_by_one() -> None:
    store = store_on(disk_with_shards())
    with pytest.raises(UnsupportedCheckpoint, match=r"saved by 2 ranks(.|\n)*net-1\.0-of-2"):
        inspect_file(store, only(store), options=api.reading(), has_stats=True)


def test_recovery_leaves_sharded_checkpoints_alone() -> None:
    disk = disk_with_shards()
    assert store_on(disk).recover("net") == []
    assert only(store_on(disk)).state is api.State.OK


def test_removed_shards_are_one_checkpoint_or_none_after_every_power_cut() -> None:
    def check(crash: Crash) -> None:
        found = [c for c in store_on(crash.disk).scan() if c.name != "net-1.ckpt"]
        assert {c.state for c in found} in ({api.State.OK}, {api.State.LEFTOVER}, set()), crash

    disk = disk_with(10.0)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    put(disk, PATH, api.encode_manifest(sharded()))
    disk.settle()
    for crash in every_crash(disk, remove_set, order=Order.WEAK):
        check(crash)
    assert not remove_set(disk)
    assert only(store_on(disk)).name == "net-1.ckpt"


def remove_set(disk: ModelDisk) -> list[Exception]:
    store = store_on(disk)
    return store.remove([c for c in store.scan() if c.name == SET])


def test_prune_and_undo_take_and_give_back_all_files() -> None:
    disk = disk_with(10.0)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    (run_id,) = {c.run_id for c in store_on(disk).scan() if c.run_id}
    put(disk, PATH, api.encode_manifest(replace(sharded(), sequence=0, pins=(), run_id=run_id)))
    before = set(disk.list(RUNS))
    store = store_on(disk)
    (checkpoint,) = [c for c in store.scan() if c.name == SET]
    outcome = carry_out(store, propose(store, RetentionPolicy((Last(1),)), now=SAVED_AT))
    assert outcome.removed == [checkpoint]
    assert outcome.batch is not None
    assert set(disk.list(outcome.batch)) == {shard(0), shard(1), PATH.name}
    assert only(store).name == "net-1.ckpt"
    assert undo(store).restored == (checkpoint,)
    assert set(disk.list(RUNS)) >= before
    assert checkpoint in store.scan()


def test_trashed_shards_are_one_checkpoint_or_none_after_every_power_cut() -> None:
    def throw(disk: ModelDisk) -> None:
        store = store_on(disk)
        found = [c for c in store.scan() if c.name == SET]
        DirectoryTrash(store).throw_away(found, DirectoryTrash(store).new_batch_path(SAVED_AT))

    disk = disk_with(10.0)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    put(disk, PATH, api.encode_manifest(sharded()))
    for crash in every_crash(disk, throw, order=Order.WEAK, tears=1):
        found = [c for c in store_on(crash.disk).scan() if c.name != "net-1.ckpt"]
        assert {c.state for c in found} in ({api.State.OK}, {api.State.LEFTOVER}, set()), crash


def test_last_good_checkpoint_is_not_removed_when_it_is_sharded() -> None:
    disk = disk_with_shards()
    with pytest.raises(UnsafePrune):
        remove_set(disk)


def test_verify_names_every_damaged_shard() -> None:
    disk = disk_with_shards()
    for rank in range(2):
        flip_bit(disk, shard(rank), 0)
    answer = api.verify(store_on(disk), only(store_on(disk)))
    assert answer.status is api.Status.DAMAGED
    assert [problem.split(": ")[0] for problem in answer.problems] == [shard(0), shard(1)]
    assert all("do not match the digest" in problem for problem in answer.problems)
    assert answer.hint is not None


def test_verify_tells_the_worst_of_all_shards() -> None:
    disk = disk_with_shards()
    checkpoint = only(store_on(disk))
    disk.unlink(RUNS / shard(0))
    flip_bit(disk, shard(1), 0)
    answer = api.verify(store_on(disk), checkpoint)
    assert answer.status is api.Status.DAMAGED
    missing, damaged = answer.problems
    assert missing.startswith(f"{shard(0)}: [Errno 2]")
    assert damaged.startswith(f"{shard(1)}: the bytes 0..")
    assert answer.hint is not None
    assert "use an older checkpoint" in answer.hint


def test_set_names_end_in_shards() -> None:
    assert is_set_name(SET)
    assert not is_set_name("net-1.ckpt")
