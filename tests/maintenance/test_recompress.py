# SPDX-License-Identifier: Apache-2.0
"""Compressing checkpoints in place, and expanding them: nothing inside changes, and every interruption can be finished."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    KeyProblem,
    SaveFailed,
    StoreLocked,
    Trust,
    UnsafeWrite,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.maintenance.recompress import RecompressOutcome, RecompressResult, recompress
from ckptmgr.store.manifest.lineage import Lineage
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.saved import flip, overwrite, save_run

KEY = api.Key(bytes(range(32)))
VALUES: dict[str, np.ndarray] = {
    "w": (np.random.default_rng(0).standard_normal((300, 1000)) * 0.02).astype(np.float32),
    "m": np.zeros(20_000, np.float32),
}


def save_two(
    directory: Path, *, key: api.Key | None = None, compression: str | None = None
) -> None:
    config = CheckpointConfig(
        format="safetensors", enc_key=None if key is None else key.raw, compression=compression
    )
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.save(1, VALUES, metrics={"loss": 0.5})
        manager.save(2, VALUES)
        manager.pin(1, "paper")


def change(
    directory: Path, step: int, *, level: int | None = 1, key: api.Key | KeyRing | None = None
) -> RecompressResult:
    store = api.place(directory, trust=Trust(keys=key, allow_unencrypted=not (key is not None)))
    return recompress(
        store, of_step(store, step), level=level, options=api.reading(trust=Trust(keys=key))
    )


def of_step(store: api.Place, step: int) -> Checkpoint:
    (found,) = (
        c
        for c in store.scan()
        if c.step == step and c.state in (api.State.OK, api.State.UNVERIFIED)
    )
    return found


def assert_whole(directory: Path, *, key: api.Key | None = None) -> None:
    store = api.place(directory, trust=Trust(keys=key, allow_unencrypted=True))
    found = store.scan()
    options = api.reading(trust=Trust(keys=key))
    answers = [api.verify(store, one, options=options, lineage=Lineage(found)) for one in found]
    assert {answer.status for answer in answers} == {api.Status.OK}
    for answer in answers:
        raw = None if key is None else key.raw
        values = load_checkpoint(answer.checkpoint.path, dec_key=raw)
        np.testing.assert_array_equal(values["w"], VALUES["w"])


@pytest.mark.parametrize("key", [None, KEY])
def test_compressed_in_place_and_back_everything_is_as_before(
    tmp_path: Path, key: api.Key | None
) -> None:
    save_two(tmp_path, key=key)
    before = of_step(api.place(tmp_path, trust=Trust(keys=key, allow_unencrypted=True)), 1)
    plain = before.path.read_bytes()
    done = change(tmp_path, 1, key=key)
    assert done.outcome is RecompressOutcome.COMPRESSED
    assert done.target.size_bytes < before.size_bytes * 0.95
    assert done.by_dtype["float32"].raw_bytes == sum(value.nbytes for value in VALUES.values())
    assert (key is None) == (not before.path.exists())
    same = ("step", "metrics", "pins", "sequence", "run_id", "saved_at", "series", "cipher")
    for name in same:
        assert getattr(done.target, name) == getattr(before, name)
    assert_whole(tmp_path, key=key)

    back = change(tmp_path, 1, level=None, key=key)
    assert (back.outcome, back.target.name) == (RecompressOutcome.EXPANDED, before.name)
    assert key is not None or before.path.read_bytes() == plain
    assert_whole(tmp_path, key=key)


@pytest.mark.parametrize("level", [1, None])
def test_what_is_as_it_shall_be_stays(tmp_path: Path, level: int | None) -> None:
    save_two(tmp_path, compression="zstd" if level else None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("net*")}
    done = change(tmp_path, 2, level=level)
    assert (done.outcome, done.target) == (RecompressOutcome.NOTHING, done.source)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("net*")} == before


def test_file_without_manifest_is_compressed_too(tmp_path: Path) -> None:
    path = save_checkpoint(VALUES, tmp_path / "net-1_10", format="safetensors", crc_check=True).path
    (tmp_path / api.manifest_name(path.name)).unlink()
    assert change(tmp_path, 10).outcome is RecompressOutcome.COMPRESSED
    assert_whole(tmp_path)


def test_damage_is_never_compressed(tmp_path: Path) -> None:
    path = save_checkpoint(VALUES, tmp_path / "net-1_10", format="safetensors", crc_check=True).path
    (tmp_path / api.manifest_name(path.name)).unlink()
    flip(path, 5000)
    with pytest.raises(CorruptCheckpoint, match="CRC32"):
        change(tmp_path, 10)
    assert [one.name for one in tmp_path.iterdir() if "ckpz" in one.name] == []


def test_damage_below_a_manifest_is_never_compressed(tmp_path: Path) -> None:
    save_two(tmp_path)
    path = of_step(api.place(tmp_path), 1).path
    flip(path, 5000)
    with pytest.raises(CorruptCheckpoint, match="do not match the digest"):
        change(tmp_path, 1)
    assert path.exists()
    assert not path.with_name(f"{path.name}.ckpz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY])
def test_failure_at_any_call_leaves_a_whole_checkpoint_and_can_be_finished(
    fast_path: Path, key: api.Key | None
) -> None:
    counts = FailingDisk(api.place(fast_path).fs, call=None)
    prepared = fast_path / "prepared"
    save_two(prepared, key=key)
    shutil.copytree(prepared, fast_path / "first")
    store = api.place(fast_path / "first", fs=counts, trust=Trust(keys=key, allow_unencrypted=True))
    recompress(store, of_step(store, 1), level=1, options=api.reading(trust=Trust(keys=key)))
    for call in range(1, len(counts.calls) + 1, 4):
        directory = fast_path / f"at {call}"
        shutil.copytree(prepared, directory)
        disk = FailingDisk(api.place(directory).fs, call=call)
        store = api.place(directory, fs=disk, trust=Trust(keys=key, allow_unencrypted=True))
        source = of_step(api.place(directory, trust=Trust(keys=key, allow_unencrypted=True)), 1)
        with contextlib.suppress(OSError, CorruptCheckpoint, KeyProblem, SaveFailed):
            recompress(store, source, level=1, options=api.reading(trust=Trust(keys=key)))
        assert_steps(directory, key)
        for checkpoint in api.listed(directory, trust=Trust(keys=key, allow_unencrypted=True)):
            if checkpoint.step == 1 and checkpoint.state is api.State.OK:
                again = api.place(directory, trust=Trust(keys=key, allow_unencrypted=True))
                recompress(again, checkpoint, level=1, options=api.reading(trust=Trust(keys=key)))
        assert_steps(directory, key)
        (left,) = (
            c
            for c in api.listed(directory, trust=Trust(keys=key, allow_unencrypted=True))
            if c.step == 1 and c.state is api.State.OK
        )
        assert left.size_bytes < 1_200_000


def assert_steps(directory: Path, key: api.Key | None) -> None:
    store = api.place(directory, trust=Trust(keys=key, allow_unencrypted=True))
    found = [c for c in store.scan() if c.state is api.State.OK]
    assert {c.step for c in found} == {1, 2}
    options = api.reading(trust=Trust(keys=key))
    for answer in (
        api.verify(store, one, options=options, lineage=Lineage(found)) for one in found
    ):
        assert answer.status is api.Status.OK


def test_interrupted_conversion_is_finished(tmp_path: Path) -> None:
    save_two(tmp_path)
    store = api.place(tmp_path)
    source = of_step(store, 1)
    kept = {path: path.read_bytes() for path in tmp_path.glob("net-1.safetensors*")}
    change(tmp_path, 1)
    for path, content in kept.items():
        path.write_bytes(content)
    done = recompress(store, source, level=1, options=api.reading())
    assert done.outcome is RecompressOutcome.FINISHED
    assert not source.path.exists()
    assert_whole(tmp_path)


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A directory in which a conversion of step 1 was interrupted before the old file went."""
    save_two(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.glob("net-1.safetensors*")}
    change(tmp_path, 1)
    for path, content in kept.items():
        path.write_bytes(content)
    return tmp_path


def named(store: api.Place, name: str) -> Checkpoint:
    (found,) = (c for c in store.scan() if c.name == name)
    return found


def test_pins_that_were_set_after_an_interruption_stay(interrupted: Path) -> None:
    store = api.place(interrupted)
    source = named(store, "net-1.safetensors")
    store.change_pins(source, lambda pins: (*pins, api.Pin(name="later", reason="figure 3")))
    target = named(store, "net-1.safetensors.ckpz")
    store.change_pins(target, lambda pins: (*pins, api.Pin(name="other", reason="")))
    done = recompress(store, source, level=1, options=api.reading())
    assert done.outcome is RecompressOutcome.FINISHED
    assert [pin.name for pin in done.target.pins] == ["paper", "other", "later"]
    assert_whole(interrupted)


def test_copy_without_a_manifest_gets_the_one_of_the_old_file(interrupted: Path) -> None:
    store = api.place(interrupted)
    (interrupted / api.manifest_name("net-1.safetensors.ckpz")).unlink()
    done = recompress(store, named(store, "net-1.safetensors"), level=1, options=api.reading())
    assert (done.target.metrics, done.target.pins[0].name) == ({"loss": 0.5}, "paper")
    assert_whole(interrupted)


def test_another_save_of_the_same_content_is_not_taken_for_the_copy(interrupted: Path) -> None:
    store = api.place(interrupted)
    copy = store.read_manifest("net-1.safetensors.ckpz")
    assert copy is not None
    store.update_manifest(replace(copy, why="exception: KeyboardInterrupt"))
    source = named(store, "net-1.safetensors")
    with pytest.raises(UnsafeWrite, match="something else"):
        recompress(store, source, level=1, options=api.reading())
    assert source.path.exists()


def test_emergency_save_that_is_alone_is_converted(tmp_path: Path) -> None:
    save_checkpoint(VALUES, tmp_path / "net-1", format="safetensors")
    store = api.place(tmp_path)
    manifest = store.read_manifest("net-1.safetensors")
    assert manifest is not None
    store.update_manifest(replace(manifest, why="exception: KeyboardInterrupt"))
    (source,) = store.scan()
    assert not source.is_countable
    assert (
        recompress(store, source, level=1, options=api.reading()).outcome
        is RecompressOutcome.COMPRESSED
    )
    assert [c.path.suffix for c in store.scan()] == [".ckpz"]
    assert_whole(tmp_path)


def test_another_file_of_the_name_is_not_replaced(tmp_path: Path) -> None:
    save_two(tmp_path)
    save_checkpoint({"w": np.ones(5)}, tmp_path / "net-1", format="safetensors", compression="zstd")
    store = api.place(tmp_path)
    source = next(c for c in store.scan() if c.name == "net-1.safetensors")
    with pytest.raises(UnsafeWrite, match="something else"):
        recompress(store, source, level=1, options=api.reading())
    assert source.path.exists()


def test_ckpt_is_refused(tmp_path: Path) -> None:
    save_checkpoint(VALUES, tmp_path / "net-1_10.ckpt")
    with pytest.raises(UnsupportedCheckpoint, match="MindSpore"):
        change(tmp_path, 0)


def test_file_of_a_live_run_is_left_alone(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, VALUES)
        with pytest.raises(StoreLocked):
            change(tmp_path, 1)


def test_signature_that_an_interrupted_overwrite_has_kept_is_not_lost(tmp_path: Path) -> None:
    signer = api.SigningKey(bytes(range(32)))
    config = CheckpointConfig(format="safetensors", signing_key=signer)
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, VALUES)
    path = of_step(api.place(tmp_path), 1).path
    signed = api.manifest_of(path)
    before = signed.read_bytes()
    old = replace(api.decode_manifest(before, path=signed), preserved=before.decode())
    overwrite(signed, api.encode_manifest(replace(old, step=2, preserved=None, replaces=old)))
    store = api.place(tmp_path, trust=Trust(trusted_keys=(signer.public_key,)))
    options = api.reading(trust=Trust(trusted_keys=(signer.public_key,)))
    with pytest.raises(KeyProblem, match="the manifest is signed"):
        recompress(store, of_step(store, 1), level=1, options=options)
    assert signed.read_bytes() == before


def test_key_is_needed_for_an_encrypted_file(tmp_path: Path) -> None:
    save_two(tmp_path, key=KEY)
    store = api.place(tmp_path)
    source = next(c for c in store.scan() if c.name == "net-1.safetensors.ckpe")
    with pytest.raises(KeyProblem, match="a key is needed"):
        recompress(store, source, level=1, options=api.reading())


def test_file_for_several_keys_needs_them_all(tmp_path: Path) -> None:
    ring = KeyRing([KeyMaterial.of_key(KEY)], [KeyMaterial.of_key(api.Key(bytes(32)))])
    content = [tensor_from_array("w", VALUES["w"])]
    (path,) = save_run(
        tmp_path, [1], options=api.SaveOptions(format="safetensors", key=ring), content=content
    )
    stranger = KeyRing([*ring.own, *ring.also_for, KeyMaterial(KeyKind.PHRASE, b"horse")])
    for keys in (KEY, stranger):
        with pytest.raises(UnsafeWrite, match=f"for key {KEY.key_id}, key .*; given: key"):
            change(tmp_path, 1, key=keys)
    assert path.exists()
    done = change(tmp_path, 1, key=ring)
    assert done.target.name == "net-1_1.safetensors.ckpe"
    values = load_checkpoint(done.target.path, dec_key=bytes(32))
    np.testing.assert_array_equal(values["w"], VALUES["w"])


def test_checkpoint_of_many_ranks_is_refused(tmp_path: Path) -> None:
    save_two(tmp_path)
    store = api.place(tmp_path)
    sharded = replace(of_step(store, 1), shards=("a", "b"))
    with pytest.raises(UnsupportedCheckpoint, match="several ranks"):
        recompress(store, sharded, level=1, options=api.reading())


def test_disk_that_returns_other_bytes_keeps_the_old_file(tmp_path: Path) -> None:
    save_two(tmp_path)
    disk = LyingDisk()
    store = api.place(tmp_path, fs=disk)
    with pytest.raises(SaveFailed, match="read back"):
        recompress(store, of_step(store, 1), level=1, options=api.reading())
    assert_whole(tmp_path)


class LyingDisk(api.OsFileSystem):
    """Reads past the page cache differ from the written bytes."""

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        if is_uncached:
            flip(path, 5000)
        return super().open(path, is_uncached=is_uncached)
