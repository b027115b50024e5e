# SPDX-License-Identifier: Apache-2.0
"""Encrypting the files of many ranks anew: one commit, old files untouched until then, nothing left for old keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    SaveFailed,
    StoreFull,
    StoreLocked,
    UnsafeWrite,
)
from ckptmgr.crypto.container.unlock import unlock
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.formats.source import BytesSource
from ckptmgr.maintenance.rekey import (
    Action,
    open_for_rekeying,
    plan_reencryption,
    reencrypt_checkpoint,
    rekey_checkpoint,
)
from ckptmgr.maintenance.rekey_change import KeyChange
from ckptmgr.store.shards import swap_shards
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses
from tests.maintenance.test_repair_sealed import SAFETENSORS, SIGNER, WEIGHTS, ZSTD, damage, saved
from tests.parallel.ranks import START
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, Order, every_crash
from tests.support.damage import put
from tests.support.rekeying import NEW, openers, opens, ring

OLD = api.Key(KEY)
BOTH = (ring(OLD), ring(NEW))
ANEW = KeyChange(keys=BOTH[0], add=(BOTH[1],), is_exclusive=True)
FORMS = pytest.mark.parametrize(
    "config", [{"crc_check": True}, SAFETENSORS, ZSTD], ids=["ckpt", "container", "compressed"]
)


def only(fs: api.FileSystem) -> Checkpoint:
    """Return the one checkpoint; leftovers of its files are none."""
    unfinished = (api.State.LEFTOVER, api.State.WRITING)
    (found,) = [one for one in api.listed(RUNS, fs=fs) if one.state not in unfinished]
    assert found.state is api.State.OK, found
    return found


def files_of_ranks(disk: ModelDisk) -> set[str]:
    return {name for name in disk.list(RUNS) if "-of-" in name}


def reencrypt(
    disk: ModelDisk,
    change: KeyChange = ANEW,
    *,
    at_s: float = START + 1e6,
    fs: api.FileSystem | None = None,
    **options: Any,
) -> Action:
    found = fs or disk
    store = open_for_rekeying(RUNS, change, fs=found, processes=ModelProcesses(disk), **options)
    return reencrypt_checkpoint(store, only(disk), change, clock=lambda: at_s).action


def weights(disk: ModelDisk, key: api.Key) -> np.ndarray:
    store = api.place(RUNS, fs=disk, keys=key)
    manifest = store.read_manifest(only(disk).name)
    assert manifest is not None
    with ShardedCheckpoint(store, manifest, options=api.reading(keys=key)) as files:
        return files.read({"w": None}, rank=0)["w"]


@FORMS
def test_set_is_encrypted_anew(config: dict[str, Any]) -> None:
    disk = saved(enc_key=KEY, **config)
    before = only(disk)
    old = {name: disk.read_bytes(RUNS / name) for name in before.shards}
    assert reencrypt(disk) is Action.REENCRYPT
    after = only(disk)
    assert openers(after, BOTH, fs=disk) == [1]
    assert files_of_ranks(disk) == set(after.shards)
    assert not set(after.shards) & set(old)
    assert (after.step, after.sequence, after.run_id) == (
        before.step,
        before.sequence,
        before.run_id,
    )
    assert {disk.status(RUNS / name).mode for name in after.shards} == {0o400}  # type: ignore[union-attr]
    np.testing.assert_array_equal(weights(disk, NEW), WEIGHTS)
    assert reencrypt(disk) is Action.NOTHING


@pytest.mark.parametrize("config", [SAFETENSORS, ZSTD], ids=["container", "compressed"])
def test_each_file_gets_a_data_key_of_its_own(config: dict[str, Any]) -> None:
    disk = saved(enc_key=KEY, **config)

    def data_keys(key: api.Key) -> set[bytes]:
        contents = [BytesSource(disk.read_bytes(RUNS / name)) for name in only(disk).shards]
        return {unlock(one, ring(key).identities).data_key.raw for one in contents}

    before = data_keys(OLD)
    reencrypt(disk)
    after = data_keys(NEW)
    assert len(before | after) == 4


def test_plan_changes_nothing() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    before = disk.state()
    store = open_for_rekeying(RUNS, ANEW, fs=disk, processes=ModelProcesses(disk))
    planned = plan_reencryption(store, only(disk), ANEW)
    assert (planned.action, planned.before) == (Action.REENCRYPT, (f"key {OLD.key_id}",))
    assert disk.state() == before


@pytest.mark.slow
@pytest.mark.parametrize(("config", "order"), [(SAFETENSORS, Order.WEAK), (ZSTD, Order.JOURNALED)])
def test_power_cut_leaves_the_old_set_or_the_new_one(config: dict[str, Any], order: Order) -> None:
    disk = saved(enc_key=KEY, weights=WEIGHTS[:20], **config)
    before = set(only(disk).shards)
    seen = set()
    for crash in every_crash(disk, reencrypt, order=order, tears=1):
        found = only(crash.disk)
        is_new = set(found.shards) != before
        seen.add(is_new)
        assert openers(found, BOTH, fs=crash.disk) == [int(is_new)], crash
        assert is_new or not crash.is_finished, crash
        assert is_new or before <= files_of_ranks(crash.disk), crash
        again = crash.disk.restart()
        reencrypt(again, at_s=START + 2e6)
        assert opens(only(again), BOTH[1], fs=again), crash
        assert files_of_ranks(again) == set(only(again).shards), crash
        assert not [name for name in again.list(RUNS) if name.endswith(".tmp")], crash
        assert reencrypt(again, at_s=START + 2e6) is Action.NOTHING, crash
    assert seen == {False, True}


def test_old_files_that_were_left_are_work_that_is_not_done() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    old = {name: disk.read_bytes(RUNS / name) for name in only(disk).shards}
    reencrypt(disk)
    for name, content in old.items():
        put(disk, RUNS / name, content)
    assert reencrypt(disk) is Action.CLEAN_UP
    assert files_of_ranks(disk) == set(only(disk).shards)


def test_files_that_may_belong_to_a_checkpoint_in_the_trash_are_left_alone() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    old = {name: disk.read_bytes(RUNS / name) for name in only(disk).shards}
    reencrypt(disk)
    batch = RUNS / TRASH_NAME / "20261121T120000.000000Z"
    disk.make_directory(batch, mode=0o700)
    put(disk, batch / api.manifest_name(only(disk).name), b"{}")
    for name, content in old.items():
        put(disk, RUNS / name, content)
    assert reencrypt(disk) is Action.NOTHING
    assert set(old) <= files_of_ranks(disk)


def test_old_files_are_removed_on_the_word_of_a_proven_manifest_only() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    old = {name: disk.read_bytes(RUNS / name) for name in only(disk).shards}
    private, public = generate_pair("x25519")
    change = KeyChange(keys=BOTH[0], add=(ring(public),), is_exclusive=True)
    reencrypt(disk, change)
    for name, content in old.items():
        put(disk, RUNS / name, content)
    assert reencrypt(disk, change) is Action.NOTHING
    assert set(old) <= files_of_ranks(disk)
    with_private = KeyChange(keys=ring(private), add=(ring(private),), is_exclusive=True)
    assert reencrypt(disk, with_private) is Action.REENCRYPT
    assert files_of_ranks(disk) == set(only(disk).shards)


def test_set_whose_manifest_vanished_is_not_found() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    found = only(disk)
    disk.unlink(RUNS / api.manifest_name(found.name))
    store = open_for_rekeying(
        RUNS, ANEW, fs=disk, processes=ModelProcesses(disk), trust=api.Trust(allow_unencrypted=True)
    )
    with pytest.raises(CheckpointNotFound, match="no manifest"):
        reencrypt_checkpoint(store, found, ANEW)
    assert files_of_ranks(disk) == set(found.shards)


def test_swap_without_its_new_files_is_refused() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    store = api.place(
        RUNS, fs=disk, keys=OLD, allow_unencrypted=True, processes=ModelProcesses(disk)
    )
    manifest = store.read_manifest(only(disk).name)
    assert manifest is not None
    names = [one.name.replace("-of-2.", "-of-2.f") for one in manifest.shards]
    entries = [replace(one, name=name) for one, name in zip(manifest.shards, names, strict=True)]
    absent = replace(manifest, file=entries[0], shards=tuple(entries))
    with pytest.raises(SaveFailed, match="is missing"):
        swap_shards(store, manifest, absent)
    assert set(only(disk).shards) == files_of_ranks(disk)


def test_files_that_may_still_be_committed_are_left_alone() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    reencrypt(disk, at_s=START + 1e6)
    (name, *_) = only(disk).shards
    other = name.replace("0-of-2", "1-of-2")[:-22] + "ffff" + name[-18:]
    put(disk, RUNS / other, b"")
    assert reencrypt(disk, at_s=START + 1e6 + 1) is Action.NOTHING
    assert other in files_of_ranks(disk)


def test_set_that_was_only_rekeyed_is_not_taken_as_done() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    rotation = KeyChange(keys=BOTH[0], add=(BOTH[1],), remove=(BOTH[0],))
    store = open_for_rekeying(RUNS, rotation, fs=disk, processes=ModelProcesses(disk))
    rekey_checkpoint(store, only(disk), rotation)
    with pytest.raises(KeyProblem, match="another key"):
        reencrypt(disk)
    again = KeyChange(keys=BOTH[1], add=(BOTH[1],), is_exclusive=True)
    assert reencrypt(disk, again) is Action.REENCRYPT


@pytest.mark.slow
def test_set_is_encrypted_for_a_public_key() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    private, public = generate_pair("x25519")
    change = KeyChange(keys=BOTH[0], add=(ring(public), ring("horse")), is_exclusive=True)
    assert reencrypt(disk, change) is Action.REENCRYPT
    assert openers(only(disk), [BOTH[0], ring(private), ring("horse")], fs=disk) == [1, 2]
    to_public = KeyChange(keys=ring("horse"), add=(ring(public),), is_exclusive=True)
    assert reencrypt(disk, to_public) is Action.REENCRYPT
    assert openers(only(disk), [BOTH[0], ring(private), ring("horse")], fs=disk) == [1]
    assert reencrypt(disk, to_public) is Action.NOTHING


def test_signed_set_is_signed_again() -> None:
    disk = saved(enc_key=KEY, signing_key=SIGNER, **SAFETENSORS)
    with pytest.raises(KeyProblem, match="signed"):
        reencrypt(disk)
    assert reencrypt(disk, trust=api.Trust(signing_key=SIGNER)) is Action.REENCRYPT
    trusting = api.place(
        RUNS,
        fs=disk,
        keys=NEW,
        trusted_keys=(SIGNER.public_key,),
        allow_unencrypted=True,
    )
    manifest = trusting.read_manifest(only(disk).name)
    assert manifest is not None
    assert manifest.signed_by == SIGNER.public_key.key_id


@FORMS
def test_damaged_file_stops_it_and_leaves_no_new_one(config: dict[str, Any]) -> None:
    disk = saved(enc_key=KEY, **config)
    before = set(only(disk).shards)
    damage(disk, only(disk).shards[1], 0.5)
    with pytest.raises(CorruptCheckpoint):
        reencrypt(disk)
    assert files_of_ranks(disk) == before == set(only(disk).shards)


def test_full_disk_at_the_manifest_leaves_no_new_file() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    before = set(only(disk).shards)
    failing = FailingDisk(disk, operation="create", call=3)
    with pytest.raises(OSError, match=r"(?i)no space|injected|input.output error"):
        reencrypt(disk, fs=failing)
    assert files_of_ranks(disk) == before == set(only(disk).shards)


def test_disk_without_room_for_all_of_them_is_refused() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    before = disk.list(RUNS)

    class Full(FailingDisk):
        def free_bytes(self, path: object) -> int | None:
            return 20_000_000

    with pytest.raises(StoreFull):
        reencrypt(disk, fs=Full(disk))
    assert set(disk.list(RUNS)) - {f".{SERIES}.lease"} == set(before) - {f".{SERIES}.lease"}


def test_set_that_somebody_is_writing_is_refused() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    store = api.place(RUNS, fs=disk, processes=ModelProcesses(disk))
    with store.lease(SERIES), pytest.raises(StoreLocked):
        reencrypt(disk)


def test_set_with_a_plain_file_in_it_is_refused() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    put(
        disk,
        RUNS / only(disk).shards[1],
        b"\x08\0\0\0\0\0\0\0{}      ".ljust(
            len(disk.read_bytes(RUNS / only(disk).shards[1])), b"\0"
        ),
    )
    with pytest.raises(UnsafeWrite, match="plain and of encrypted"):
        reencrypt(disk)


def test_plain_set_is_left_alone() -> None:
    disk = saved(**SAFETENSORS)
    store = api.place(RUNS, fs=disk, processes=ModelProcesses(disk))
    assert reencrypt_checkpoint(store, only(disk), ANEW).action is Action.PLAIN
