# SPDX-License-Identifier: Apache-2.0
"""Encrypted and compressed files of many ranks that are damaged: rewritten from content that the manifest proves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    KeyProblem,
    UnsupportedCheckpoint,
)
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.maintenance.repair import repair_checkpoint
from ckptmgr.maintenance.repair_source import RepairResult
from ckptmgr.store.shards import RankFiles
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses
from tests.parallel.ranks import START, Clock
from tests.parallel.test_sharded_state import job
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, Order, every_crash
from tests.support.damage import put
from tests.support.runs import manager_on

SIGNER = api.SigningKey(bytes(range(32)))
OPTIONS = api.reading(keys=api.Key(KEY))
WEIGHTS = np.random.default_rng(7).standard_normal((30_000, 100)).astype(np.float32)
SAFETENSORS: dict[str, Any] = {"format": "safetensors"}
ZSTD: dict[str, Any] = {"format": "safetensors", "compression": "zstd"}


def saved(
    *,
    keep_redundancy: int = 2,
    steps: int = 1,
    own_count: int = 0,
    weights: np.ndarray = WEIGHTS,
    **config: Any,
) -> ModelDisk:
    """Save with two ranks; each has a file of three segments, unless the weights are others."""
    disk = ModelDisk()
    disk.make_directory(RUNS, mode=0o700)

    def save(ours: CheckpointManager, rank: int) -> None:
        for step in range(1, steps + 1):
            own = {"own": np.full(own_count, rank * step, np.float64)} if own_count else {}
            ours.save(step, {"w": weights * step, "scale": np.float32(2.5), **own})

    job(disk, 2, save, options={"keep_redundancy": keep_redundancy}, **config)
    disk.settle()
    return disk


def store_on(disk: ModelDisk, key: bytes | None = KEY) -> api.Place:
    return api.place(
        RUNS,
        fs=disk,
        keys=None if key is None else api.Key(key),
        allow_unencrypted=not (key is not None),
        processes=ModelProcesses(disk),
    )


def first_of(store: api.Place) -> Checkpoint:
    return min(store.scan(), key=lambda found: found.step)


def damage(disk: ModelDisk, name: str, at: float) -> None:
    content = bytearray(disk.read_bytes(RUNS / name))
    content[int(len(content) * at)] ^= 0xFF
    put(disk, RUNS / name, bytes(content))


def repaired(disk: ModelDisk, key: bytes | None = KEY) -> list[RepairResult]:
    store = store_on(disk, key)
    options = OPTIONS if key is not None else api.reading()
    return repair_checkpoint(store, first_of(store), options=options, clock=lambda: START + 1e6)


def tensor(disk: ModelDisk, name: str, key: bytes | None = KEY, *, rank: int = 0) -> np.ndarray:
    store = store_on(disk, key)
    manifest = store.read_manifest(first_of(store).name)
    assert manifest is not None
    options = OPTIONS if key is not None else api.reading()
    with ShardedCheckpoint(store, manifest, options=options) as files:
        return files.read({name: None}, rank=rank)[name]


@pytest.mark.parametrize(
    ("config", "key"),
    [({"crc_check": True}, KEY), (SAFETENSORS, KEY), (ZSTD, KEY), (ZSTD, None)],
    ids=["ckpt", "container", "compressed container", "compressed"],
)
def test_damaged_file_is_written_anew(config: dict[str, Any], key: bytes | None) -> None:
    disk = saved(enc_key=key, **config)
    before = first_of(store_on(disk, key))
    damage(disk, before.shards[1], 0.5)
    (done,) = repaired(disk, key)
    assert (done.name, done.problem) == (before.shards[1], None)
    assert done.sources
    store = store_on(disk, key)
    (after,) = store.scan()
    assert after.state is api.State.OK
    assert after.shards[0] == before.shards[0]
    assert after.shards[1] != before.shards[1]
    assert not any(name == before.shards[1] for name in disk.list(RUNS))
    options = OPTIONS if key is not None else api.reading()
    assert api.verify(store, after, options=options).status is api.Status.OK
    np.testing.assert_array_equal(tensor(disk, "w", key), WEIGHTS)
    assert repaired(disk, key) == []


def test_own_values_are_taken_from_ranges_that_match_their_digests() -> None:
    disk = saved(enc_key=KEY, own_count=1 << 20, **SAFETENSORS)
    damage(disk, first_of(store_on(disk)).shards[1], 0.95)
    (done,) = repaired(disk)
    assert done.problem is None
    np.testing.assert_array_equal(tensor(disk, "w"), WEIGHTS)
    np.testing.assert_array_equal(tensor(disk, "own", rank=1), np.ones(1 << 20))


@pytest.mark.slow
def test_power_cut_leaves_the_old_set_or_the_healed_one() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    before = first_of(store_on(disk))
    damage(disk, before.shards[1], 0.5)
    disk.settle()
    for crash in every_crash(disk, repaired, order=Order.WEAK, tears=1):
        later = api.place(
            RUNS,
            clock=lambda: START + 2e6,
            fs=crash.disk,
            keys=api.Key(KEY),
            allow_unencrypted=True,
            processes=ModelProcesses(crash.disk),
        )
        with later.lease(SERIES):
            RankFiles(later).recover(SERIES)
        (found,) = later.scan()
        assert found.state is api.State.OK, crash
        assert {n for n in crash.disk.list(RUNS) if "-of-" in n} == set(found.shards), crash
        is_healed = found.shards != before.shards
        status = api.verify(store_on(crash.disk), found, options=OPTIONS).status
        assert status is (api.Status.OK if is_healed else api.Status.DAMAGED), crash
        assert is_healed or not crash.is_finished, crash


def test_file_of_another_step_put_in_its_place_lends_it_nothing() -> None:
    disk = saved(enc_key=KEY, steps=2, **SAFETENSORS)
    first, second = sorted(store_on(disk).scan(), key=lambda found: found.step)
    put(disk, RUNS / first.shards[1], disk.read_bytes(RUNS / second.shards[1]))
    (done,) = repaired(disk)
    assert done.problem is None
    np.testing.assert_array_equal(tensor(disk, "w"), WEIGHTS)


def test_own_values_of_a_file_put_in_its_place_are_not_believed() -> None:
    disk = saved(enc_key=KEY, steps=2, own_count=100, **SAFETENSORS)
    first, second = sorted(store_on(disk).scan(), key=lambda found: found.step)
    put(disk, RUNS / first.shards[1], disk.read_bytes(RUNS / second.shards[1]))
    (done,) = repaired(disk)
    assert done.problem is not None
    assert first_of(store_on(disk)).shards == first.shards


def test_plain_file_put_in_its_place_is_not_healed_into_a_plain_one() -> None:
    disk, other = saved(enc_key=KEY, **SAFETENSORS), saved(**SAFETENSORS)
    before = first_of(store_on(disk))
    (plain,) = store_on(other, None).scan()
    content = other.read_bytes(RUNS / plain.shards[1])
    room = len(disk.read_bytes(RUNS / before.shards[1])) - len(content)
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * room
    put(
        disk,
        RUNS / before.shards[1],
        (end - 8 + room).to_bytes(8, "little") + header + content[end:],
    )
    store, options = (
        store_on(disk),
        replace(OPTIONS, trust=replace(OPTIONS.trust, allow_unencrypted=True)),
    )
    (done,) = repair_checkpoint(store, before, options=options)
    assert done.problem == "another kind of file is in its place"
    assert first_of(store).shards == before.shards


def test_set_for_more_keys_than_are_given_keeps_its_files(tmp_path: Path) -> None:
    public = tmp_path / "alice.pem.pub"
    public.write_bytes(generate_pair("x25519")[1])
    public.chmod(0o644)
    disk = saved(enc_key=KEY, enc_recipients=[f"file:{public}"], **SAFETENSORS)
    before = first_of(store_on(disk))
    damage(disk, before.shards[1], 0.5)
    (done,) = repaired(disk)
    assert "for key" in str(done.problem)
    assert "X25519" in str(done.problem)
    assert first_of(store_on(disk)).shards == before.shards
    both = KeyRing(
        [KeyMaterial.of_key(api.Key(KEY)), KeyMaterial(KeyKind.PEM, public.read_bytes())]
    )
    (done,) = repair_checkpoint(store_on(disk), before, options=api.reading(keys=both))
    assert done.problem is None


def test_set_that_takes_one_key_is_not_healed_with_two() -> None:
    disk = saved(enc_key=KEY)
    before = first_of(store_on(disk))
    damage(disk, before.shards[1], 0.5)
    both = KeyRing([KeyMaterial.of_key(api.Key(one)) for one in (bytes(16), KEY)])
    (done,) = repair_checkpoint(store_on(disk), before, options=api.reading(keys=both))
    assert "takes one key and nothing else" in str(done.problem)
    assert first_of(store_on(disk)).shards == before.shards


def test_signed_set_needs_the_signing_key() -> None:
    disk = saved(enc_key=KEY, signing_key=SIGNER, **SAFETENSORS)
    damage(disk, first_of(store_on(disk)).shards[1], 0.5)
    with pytest.raises(KeyProblem, match="signed") as caught:
        repaired(disk)
    assert "--signing-key" in str(caught.value.hint)
    with_signer = api.place(RUNS, fs=disk, keys=api.Key(KEY), signing_key=SIGNER)
    (done,) = repair_checkpoint(with_signer, first_of(with_signer), options=OPTIONS)
    assert done.problem is None
    trusting = api.place(
        RUNS,
        fs=disk,
        keys=api.Key(KEY),
        trusted_keys=(SIGNER.public_key,),
        allow_unencrypted=True,
    )
    manifest = trusting.read_manifest(first_of(trusting).name)
    assert manifest is not None
    assert manifest.signed_by is not None


def test_tensor_without_a_copy_stays_lost() -> None:
    disk = saved(enc_key=KEY, keep_redundancy=1, **SAFETENSORS)
    before = first_of(store_on(disk))
    damage(disk, before.shards[1], 0.5)
    (done,) = repaired(disk)
    assert done.problem is not None
    assert first_of(store_on(disk)).shards == before.shards


@pytest.mark.parametrize("config", [{}, SAFETENSORS], ids=["ckpt", "container"])
def test_description_that_is_damaged_stays_lost(config: dict[str, Any]) -> None:
    disk = saved(enc_key=KEY, **config)
    before = first_of(store_on(disk))
    damage(disk, before.shards[1], 0.01)
    (done,) = repaired(disk)
    assert done.problem is not None
    assert first_of(store_on(disk)).shards == before.shards


def test_file_that_is_gone_stays_lost() -> None:
    disk = saved(enc_key=KEY)
    before = first_of(store_on(disk))
    disk.unlink(RUNS / before.shards[1])
    assert [(one.name, one.problem) for one in repaired(disk)] == [(before.shards[1], "it is gone")]


def test_encrypted_files_without_the_key_are_refused() -> None:
    disk = saved(enc_key=KEY)
    store = store_on(disk, None)
    damage(disk, first_of(store).shards[1], 0.5)
    with pytest.raises(KeyProblem, match="are encrypted"):
        repair_checkpoint(store, first_of(store))


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "plain"])
def test_set_that_a_later_one_names_is_healed_with_a_key_only(key: bytes | None) -> None:
    disk = saved(enc_key=key, steps=2, **ZSTD)
    assert repaired(disk, key) == []
    damage(disk, first_of(store_on(disk, key)).shards[1], 0.5)
    if key is None:
        with pytest.raises(UnsupportedCheckpoint, match="a later checkpoint names it"):
            repaired(disk, key)
        return
    (done,) = repaired(disk, key)
    assert done.problem is None
    with manager_on(
        RUNS,
        CheckpointConfig(enc_key=KEY, keep="all", **ZSTD),
        fs=disk,
        processes=ModelProcesses(disk),
        clock=Clock(),
        prefix=SERIES,
    ) as ours:
        assert ours.resume().checkpoint is not None


def padded(content: bytes, size_bytes: int) -> bytes:
    return content[:size_bytes].ljust(size_bytes, b"\0")


@pytest.mark.parametrize(
    ("config", "key"), [(SAFETENSORS, KEY), (ZSTD, None)], ids=["sealed", "zstd"]
)
def test_file_of_another_rank_put_in_its_place_is_not_taken_for_it(
    config: dict[str, Any], key: bytes | None
) -> None:
    disk = saved(keep_redundancy=1, enc_key=key, **config)
    shards = first_of(store_on(disk, key)).shards
    put(disk, RUNS / shards[1], disk.read_bytes(RUNS / shards[0]))
    (done,) = repaired(disk, key)
    assert done.problem is not None
    assert first_of(store_on(disk, key)).shards == shards


def test_file_whose_header_is_gone_is_not_called_whole() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    name = first_of(store_on(disk)).shards[1]
    put(disk, RUNS / name, bytes(8192) + disk.read_bytes(RUNS / name)[8192:])
    (done,) = repaired(disk)
    assert done.name == name
    assert done.problem is not None
    assert "begins like a file of the kind 'unknown'" in done.problem


def test_full_disk_at_the_manifest_leaves_no_new_file() -> None:
    disk = saved(enc_key=KEY, **SAFETENSORS)
    before = first_of(store_on(disk)).shards
    damage(disk, before[1], 0.5)
    failing = FailingDisk(disk, operation="create", call=2)
    store = api.place(RUNS, fs=failing, keys=api.Key(KEY), processes=ModelProcesses(disk))
    with pytest.raises(OSError, match=r"(?i)no space|injected|input.output error"):
        repair_checkpoint(store, first_of(store), options=OPTIONS, clock=lambda: START + 1e6)
    assert first_of(store_on(disk)).shards == before
    assert {name for name in disk.list(RUNS) if "-of-" in name} == set(before)
