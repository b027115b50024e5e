# SPDX-License-Identifier: Apache-2.0
"""Encrypting anew: what counts as done, and what stays as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    KeyProblem,
    SaveFailed,
    UnsafeWrite,
    load_checkpoint,
)
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.container.unlock import unlock
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.crypto.keys.ring import KeyRing
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.maintenance.recompress import recompress
from ckptmgr.maintenance.rekey import (
    Action,
    open_for_rekeying,
    plan_reencryption,
    reencrypt_checkpoint,
)
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.support import api
from tests.support.rekeying import NEW, OLD, OTHER, ROTATION, openers, rekey, ring, save_run
from tests.support.saved import flip, only

ANEW = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)


def reencrypt(directory: Path, change: KeyChange = ANEW) -> Action:
    store = open_for_rekeying(directory, change)
    return reencrypt_checkpoint(store, only(store), change).action


def frames(directory: Path, keys: KeyRing) -> bytes:
    """Return the content of a container, compressed as it is."""
    container = open_container(
        BytesSource(only(api.place(directory)).path.read_bytes()), keys.identities
    )
    return read_bytes(container, 0, container.size)


def data_key(directory: Path, keys: KeyRing) -> api.Key:
    content = only(api.place(directory)).path.read_bytes()
    return unlock(BytesSource(content), keys.identities).data_key


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM"])
@pytest.mark.parametrize("count", [3, 3_000_000])
def test_compressed_file_keeps_its_frames_and_gets_another_data_key(
    tmp_path: Path, mode: str, count: int
) -> None:
    values = np.random.default_rng(5).standard_normal(count).astype(np.float32)
    config = CheckpointConfig(
        enc_key=OLD.raw, enc_mode=mode, format="safetensors", compression="zstd"
    )
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, {"w": values})
    before, stored = data_key(tmp_path, ring(OLD)), frames(tmp_path, ring(OLD))
    assert reencrypt(tmp_path) is Action.REENCRYPT
    checkpoint = only(api.place(tmp_path))
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]
    assert data_key(tmp_path, ring(NEW)) != before
    assert frames(tmp_path, ring(NEW)) == stored
    loaded = load_checkpoint(checkpoint.path, dec_key=NEW.raw, dec_mode=mode)
    np.testing.assert_array_equal(loaded["w"], values)
    assert reencrypt(tmp_path) is Action.NOTHING


def test_compressed_file_that_was_cut_is_not_encrypted_anew(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1, compression="zstd")
    path = only(api.place(tmp_path)).path
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 16)
    before = path.read_bytes()
    with pytest.raises(CorruptCheckpoint):
        reencrypt(tmp_path)
    assert path.read_bytes() == before


def test_file_that_was_only_rekeyed_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    rekey(ROTATION, directory=tmp_path)
    before = data_key(tmp_path, ring(NEW))
    with pytest.raises(KeyProblem, match="another key") as caught:
        reencrypt(tmp_path)
    assert NEW.key_id in str(caught.value.hint)
    assert "--key" in str(caught.value.hint)
    again = KeyChange(keys=ring(NEW), add=(ring(NEW),), is_exclusive=True)
    assert reencrypt(tmp_path, again) is Action.REENCRYPT
    assert data_key(tmp_path, ring(NEW)) != before
    assert reencrypt(tmp_path) is Action.NOTHING


def test_file_that_was_rekeyed_to_a_public_key_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    public = ring(generate_pair("x25519")[1])
    rekey(KeyChange(keys=ring(OLD), add=(public,), remove=(ring(OLD),)), directory=tmp_path)
    with pytest.raises(KeyProblem, match="another key") as caught:
        reencrypt(tmp_path, KeyChange(keys=ring(OLD), add=(public,), is_exclusive=True))
    assert "where only its keys were changed" in str(caught.value.hint)


def manifest_key(directory: Path, keys: KeyRing) -> api.Key:
    found = api.place(directory, keys=keys, allow_unencrypted=True).read_manifest(
        only(api.place(directory)).name
    )
    assert found is not None
    assert found.auth is not None
    return found.auth.key


def test_file_that_was_rekeyed_and_then_compressed_has_no_manifest_key_that_the_old_keys_know(
    tmp_path: Path,
) -> None:
    save_run(directory=tmp_path, steps=1)
    private, public = generate_pair("x25519")
    rekey(KeyChange(keys=ring(OLD), add=(ring(public),)), directory=tmp_path)
    known = manifest_key(tmp_path, ring(OLD))
    rekey(KeyChange(keys=ring(OLD), remove=(ring(OLD),)), directory=tmp_path)
    assert manifest_key(tmp_path, ring(private)) == known
    store = api.place(tmp_path, keys=ring(private))
    recompress(store, only(store), level=3, options=api.reading(keys=ring(private)))
    change = KeyChange(keys=ring(OLD), add=(ring(public),), is_exclusive=True)
    assert reencrypt(tmp_path, change) is Action.NOTHING
    assert manifest_key(tmp_path, ring(private)) != known


def test_reencryption_that_was_cut_is_finished_before_a_key_is_removed(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    private, public = generate_pair("x25519")
    change = KeyChange(keys=ring(OLD), add=(ring(public),), is_exclusive=True)
    cut = open_for_rekeying(tmp_path, change, fs=_Cut())
    with pytest.raises(OSError, match="cut"):
        reencrypt_checkpoint(cut, only(cut), change)
    removal = KeyChange(keys=ring(private), remove=(ring(OLD),))
    with pytest.raises(
        UnsafeWrite, match="a reencrypt, or a rekey that added them, was interrupted"
    ) as caught:
        rekey(removal, directory=tmp_path)
    assert "do that again to finish it" in str(caught.value.hint)
    assert reencrypt(tmp_path, change) is Action.HEADER
    assert [one.action for one in rekey(removal, directory=tmp_path)] == [Action.NOTHING]
    assert openers(only(api.place(tmp_path)), [ring(OLD), ring(private)]) == [1]


class _Cut(api.OsFileSystem):
    """A disk on which no manifest is replaced once the data has its name."""

    is_swapped = False

    def replace(self, source: Path, target: Path) -> None:
        if self.is_swapped:
            raise OSError(errno.EIO, "cut")
        self.is_swapped = target.suffix != ".json"
        super().replace(source, target)


def test_file_that_opens_for_others_as_well_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    both = KeyChange(keys=ring(OLD), add=(ring(NEW), ring("horse")), is_exclusive=True)
    assert reencrypt(tmp_path, both) is Action.REENCRYPT
    assert reencrypt(tmp_path, both) is Action.NOTHING
    with pytest.raises(KeyProblem, match="another key"):
        reencrypt(tmp_path)
    assert openers(only(api.place(tmp_path)), [ring(NEW), ring("horse")]) == [0, 1]


def test_file_with_an_older_header_copy_for_the_old_key_is_encrypted_anew(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    path = only(api.place(tmp_path)).path
    head = path.read_bytes()[:4096]
    rekey(ROTATION, directory=tmp_path)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(head)  # as if the second write of the header had never come
    assert reencrypt(tmp_path) is Action.REENCRYPT
    assert openers(only(api.place(tmp_path)), [ring(OLD), ring(NEW)]) == [1]


def test_key_that_opens_nothing_hears_nothing_about_rekeying(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    change = KeyChange(keys=ring(OTHER), add=(ring(NEW),), is_exclusive=True)
    store = open_for_rekeying(tmp_path, change)
    with pytest.raises(KeyProblem) as caught:
        plan_reencryption(store, only(store), change)
    assert "keys were changed" not in str(caught.value.hint)


class ForgetfulDisk(api.OsFileSystem):
    """A disk that changes a file before it is read past the page cache."""

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        if is_uncached:
            flip(path, path.stat().st_size // 2)
        return super().open(path, is_uncached=is_uncached)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_disk_that_lost_the_new_file_keeps_the_old_one(tmp_path: Path, format: str) -> None:
    config = CheckpointConfig(enc_key=OLD.raw, format=format)
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, {"w": np.arange(5000.0)})
    before = only(api.place(tmp_path)).path.read_bytes()
    store = open_for_rekeying(tmp_path, ANEW, fs=ForgetfulDisk())
    with pytest.raises(SaveFailed, match="read back"):
        reencrypt_checkpoint(store, only(store), ANEW)
    assert only(api.place(tmp_path)).path.read_bytes() == before
