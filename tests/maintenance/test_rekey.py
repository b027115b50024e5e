# SPDX-License-Identifier: Apache-2.0
"""Changing who opens checkpoints: content that stays, repeated changes, refusals."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    KeyProblem,
    UnsafeWrite,
    UnsealedCheckpoint,
)
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.io.digest import digest_of
from ckptmgr.maintenance.recompress import recompress
from ckptmgr.maintenance.rekey import (
    Action,
    open_for_rekeying,
    plan_reencryption,
    plan_rekeying,
    reencrypt_checkpoint,
    rekey_checkpoint,
)
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.faults.training import RUNS
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import put
from tests.support.rekeying import (
    NEW,
    OLD,
    OTHER,
    ROTATION,
    openers,
    rekey,
    resumed_step,
    ring,
    save_run,
    save_set,
)
from tests.support.saved import flip, tree_of

HEAD = 2 * 4096
MODES = ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")


def payloads(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes()[HEAD:] for path in directory.glob("*.ckpe")}


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_rotation_changes_the_key_and_no_byte_of_the_payload(tmp_path: Path, mode: str) -> None:
    save_run(directory=tmp_path, mode=mode)
    before, names = payloads(tmp_path), listed(tmp_path)
    ids = [one.id for one in api.listed(tmp_path)]
    done = rekey(ROTATION, directory=tmp_path)
    assert [one.action for one in done] == [Action.HEADER] * 2
    assert done[0].before == (f"key {OLD.key_id}",)
    assert done[0].after == (f"key {NEW.key_id}",)
    assert payloads(tmp_path) == before
    assert listed(tmp_path) == names
    assert [one.id for one in api.listed(tmp_path)] == ids
    for checkpoint in api.listed(tmp_path):
        assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]
        assert checkpoint.key_id == NEW.key_id
    assert resumed_step(NEW, directory=tmp_path) == 2
    assert resumed_step(OLD, directory=tmp_path) is KeyProblem


def test_file_keeps_its_permissions(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    (path,) = tmp_path.glob("*.ckpe")
    rekey(ROTATION, directory=tmp_path)
    assert path.stat().st_mode & 0o777 == 0o400


def test_rotation_done_twice_changes_nothing_more(tmp_path: Path) -> None:
    save_run(directory=tmp_path)
    rekey(ROTATION, directory=tmp_path)
    before = {path: path.stat() for path in tmp_path.glob("net*")}
    assert [one.action for one in rekey(ROTATION, directory=tmp_path)] == [Action.NOTHING] * 2
    for path, status in before.items():
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (status.st_mtime_ns, status.st_ino)


def test_public_key_and_passphrase_are_added_and_removed(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    private, public = generate_pair("mlkem768-x25519")
    all_keys = [ring(OLD), ring("horse"), ring(private), ring(NEW)]
    rekey(KeyChange(keys=ring(OLD), add=(ring("horse"), ring(public))), directory=tmp_path)
    (checkpoint,) = api.listed(tmp_path)
    assert openers(checkpoint, all_keys) == [0, 1, 2]
    assert len(checkpoint.opened_by) == 3
    rekey(KeyChange(keys=ring("horse"), remove=(ring(OLD),)), directory=tmp_path)
    assert openers(checkpoint, all_keys) == [1, 2]
    rekey(
        KeyChange(keys=ring(private), add=(ring(NEW),), remove=(ring("horse"),)), directory=tmp_path
    )
    assert openers(checkpoint, all_keys) == [2, 3]
    rekey(KeyChange(keys=ring(NEW), remove_ids=ring(public).key_ids), directory=tmp_path)
    assert openers(checkpoint, all_keys) == [3]
    (checkpoint,) = api.listed(tmp_path)
    assert checkpoint.opened_by == (f"key {NEW.key_id}",)


def test_change_to_a_public_key_is_known_to_be_done_without_its_private_key(
    tmp_path: Path,
) -> None:
    save_run(directory=tmp_path)
    private, public = generate_pair("x25519")
    change = KeyChange(keys=ring(OLD), add=(ring(public),), remove=(ring(OLD),))
    rekey(change, directory=tmp_path)
    assert [one.action for one in rekey(change, directory=tmp_path)] == [Action.NOTHING] * 2
    for checkpoint in api.listed(tmp_path):
        assert openers(checkpoint, [ring(OLD), ring(private)]) == [1]


def test_plan_changes_nothing(tmp_path: Path) -> None:
    save_run(directory=tmp_path)
    before = tree_of(tmp_path)
    store = open_for_rekeying(tmp_path, ROTATION)
    planned = [plan_rekeying(store, one, ROTATION) for one in store.scan()]
    assert [one.action for one in planned] == [Action.HEADER] * 2
    assert tree_of(tmp_path) == before


def test_file_of_another_key_is_refused(tmp_path: Path) -> None:
    save_run(directory=tmp_path)
    change = KeyChange(keys=ring(OTHER), add=(ring(NEW),))
    store = open_for_rekeying(tmp_path, change)
    for checkpoint in store.scan():
        with pytest.raises(KeyProblem, match="another key"):
            plan_rekeying(store, checkpoint, change)


def test_key_that_is_added_does_not_begin_a_change(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    rekey(KeyChange(keys=ring(OLD), add=(ring(NEW),)), directory=tmp_path)
    change = KeyChange(keys=ring(OTHER), add=(ring(NEW),), remove=(ring(OLD),))
    with pytest.raises(KeyProblem, match="another key"):
        rekey(change, directory=tmp_path)
    (checkpoint,) = api.listed(tmp_path)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [0, 1]


@pytest.mark.parametrize("ids", [(), (OLD.key_id,)])
def test_last_key_is_not_removed(tmp_path: Path, ids: tuple[str, ...]) -> None:
    save_run(directory=tmp_path, steps=1)
    before = payloads(tmp_path)
    change = KeyChange(keys=ring(OLD), remove=() if ids else (ring(OLD),), remove_ids=ids)
    with pytest.raises(UnsafeWrite, match="keys cannot be changed like this"):
        rekey(change, directory=tmp_path)
    assert payloads(tmp_path) == before


@pytest.mark.parametrize("by_id", [False, True])
def test_key_that_is_added_and_removed_is_refused(by_id: bool) -> None:
    with pytest.raises(UnsafeWrite, match="added and to be removed"):
        KeyChange(
            keys=ring(OLD),
            add=(ring(NEW),),
            remove=() if by_id else (ring(NEW),),
            remove_ids=(NEW.key_id,) if by_id else (),
        )


def test_more_keys_than_a_header_holds_are_refused(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    pairs = tuple(ring(generate_pair("mlkem768-x25519")[1]) for _ in range(4))
    with pytest.raises(UnsafeWrite, match="do not fit") as caught:
        rekey(KeyChange(keys=ring(OLD), add=pairs), directory=tmp_path)
    assert "reencrypt" in str(caught.value.hint)


@pytest.mark.parametrize("offset", [0, 20, 100, 4095, 4096, 4100, 8191])
def test_repair_mends_a_damaged_header_copy_and_nothing_else(tmp_path: Path, offset: int) -> None:
    save_run(directory=tmp_path)
    first, second = sorted(tmp_path.glob("*.ckpe"))
    whole = first.read_bytes()[HEAD:], second.read_bytes()
    flip(first, offset)
    manifests = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    done = rekey(KeyChange(keys=ring(OLD)), directory=tmp_path)
    assert [one.action for one in done] == [Action.HEADER, Action.NOTHING]
    content = first.read_bytes()
    assert content[:4096] == content[4096:HEAD]
    assert (content[HEAD:], second.read_bytes()) == whole
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json")} == manifests
    assert resumed_step(OLD, directory=tmp_path) == 2


def test_plain_file_is_left_alone(tmp_path: Path) -> None:
    from tests.support.saved import save_run as save_plain

    save_plain(tmp_path, [1])
    store = api.place(tmp_path)
    (checkpoint,) = store.scan()
    assert plan_rekeying(store, checkpoint, ROTATION).action is Action.PLAIN


def test_file_without_manifest_is_rekeyed_by_its_header(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    (path,) = tmp_path.glob("*.ckpe")
    (tmp_path / api.manifest_name(path.name)).unlink()
    assert [one.action for one in rekey(ROTATION, directory=tmp_path)] == [Action.HEADER]
    (checkpoint,) = api.listed(tmp_path)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]


def test_manifest_without_authentication_does_not_get_one(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    store = api.place(tmp_path)
    (checkpoint,) = store.scan()
    manifest = store.read_manifest(checkpoint.name)
    assert manifest is not None
    store.update_manifest(manifest)
    with pytest.raises(UnsealedCheckpoint):
        rekey_checkpoint(open_for_rekeying(tmp_path, ROTATION), checkpoint, ROTATION)


def test_file_with_several_names_is_refused(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    (path,) = tmp_path.glob("*.ckpe")
    (tmp_path / "backup").hardlink_to(path)
    with pytest.raises(OSError, match="has other names"):
        rekey(ROTATION, directory=tmp_path)
    (tmp_path / "backup").unlink()
    rekey(ROTATION, directory=tmp_path)
    (checkpoint,) = api.listed(tmp_path)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]


class CopiedInto(api.OsFileSystem):
    """A disk on which another program puts another file in place when one is about to be changed."""

    def __init__(self, other: Path) -> None:
        super().__init__()
        self._other = other

    def change(self, path: Path) -> api.OutputFile:
        path.with_name("copy").write_bytes(self._other.read_bytes())
        path.with_name("copy").replace(path)
        return super().change(path)


def test_file_that_is_copied_in_place_meanwhile_does_not_get_the_header_of_the_one_before(
    tmp_path: Path,
) -> None:
    for name in ("here", "elsewhere"):
        save_run(directory=tmp_path / name, steps=1)
    (path,) = (tmp_path / "here").glob("*.ckpe")
    rekey(ROTATION, directory=path.parent, fs=CopiedInto(tmp_path / "elsewhere" / path.name))
    source = open_container(BytesSource(path.read_bytes()), ring(NEW).identities)
    assert read_bytes(source, 0, source.size)


@pytest.mark.parametrize("mode", MODES[:2])
def test_encrypted_ckpt_is_encrypted_anew(tmp_path: Path, mode: str) -> None:
    save_run(directory=tmp_path, form="ckpt", mode=mode)
    old = {path.name: path.read_bytes() for path in tmp_path.glob("*.ckpt")}
    names = listed(tmp_path)
    assert [one.action for one in rekey(ROTATION, directory=tmp_path)] == [Action.REENCRYPT] * 2
    assert listed(tmp_path) == names
    for checkpoint in api.listed(tmp_path):
        assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]
        assert checkpoint.path.read_bytes() != old[checkpoint.name]
    assert [one.action for one in rekey(ROTATION, directory=tmp_path)] == [Action.NOTHING] * 2


@pytest.mark.parametrize(
    "change",
    [
        KeyChange(keys=ring(OLD), add=(ring(NEW),)),
        KeyChange(keys=ring(OLD), add=(ring(NEW), ring(OTHER)), remove=(ring(OLD),)),
        KeyChange(keys=ring(OLD), add=(ring("horse"),), remove=(ring(OLD),)),
        KeyChange(keys=ring(OLD), remove_ids=(OLD.key_id,)),
    ],
)
def test_encrypted_ckpt_has_exactly_one_key(tmp_path: Path, change: KeyChange) -> None:
    save_run(directory=tmp_path, form="ckpt", steps=1)
    before = tree_of(tmp_path)
    with pytest.raises(UnsafeWrite, match="exactly one key") as caught:
        rekey(change, directory=tmp_path)
    assert f"--remove {OLD.key_id}" in str(caught.value.hint)
    after = tree_of(tmp_path)
    assert {name: after[name][0] for name in after} == {name: before[name][0] for name in before}


def test_encrypted_ckpt_that_the_change_does_not_name_is_left_alone(tmp_path: Path) -> None:
    save_run(directory=tmp_path, form="ckpt", steps=1)
    for change in (KeyChange(keys=ring(OLD)), KeyChange(keys=ring(OLD), remove=(ring(OTHER),))):
        assert [one.action for one in rekey(change, directory=tmp_path)] == [Action.NOTHING]


def signed_by(directory: Path, key: api.Key, signer: api.SigningKey) -> list[str | None]:
    """Return who signed the checkpoints, for somebody who trusts one signer."""
    store = api.place(directory, keys=key, trusted_keys=(signer.public_key,))
    manifests = [store.read_manifest(one.name) for one in store.scan()]
    return [None if one is None else one.signed_by for one in manifests]


def test_signatures_survive_a_rotation(tmp_path: Path) -> None:
    signer = api.SigningKey.generate()
    save_run(directory=tmp_path, signing_key=signer)
    rekey(ROTATION, directory=tmp_path)
    assert signed_by(tmp_path, NEW, signer) == [signer.public_key.key_id] * 2


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_file_that_is_signed_is_encrypted_anew_with_the_signing_key_only(
    tmp_path: Path, form: str
) -> None:
    signer = api.SigningKey.generate()
    save_run(directory=tmp_path, form=form, signing_key=signer, steps=1)
    change = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)
    (checkpoint,) = api.listed(tmp_path)
    with pytest.raises(KeyProblem, match="signed"):
        reencrypt_checkpoint(open_for_rekeying(tmp_path, change), checkpoint, change)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [0]
    store = open_for_rekeying(tmp_path, change, trust=api.Trust(signing_key=signer))
    reencrypt_checkpoint(store, checkpoint, change)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]
    assert signed_by(tmp_path, NEW, signer) == [signer.public_key.key_id]


def test_compressed_file_keeps_its_data_key_and_changes_its_keys(tmp_path: Path) -> None:
    config = CheckpointConfig(enc_key=OLD.raw, format="safetensors", compression="zstd")
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, {"w": np.arange(1000.0)})
    rekey(ROTATION, directory=tmp_path)
    (checkpoint,) = api.listed(tmp_path)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]


def test_plain_file_is_not_encrypted_anew(tmp_path: Path) -> None:
    from tests.support.saved import save_run as save_plain

    save_plain(tmp_path, [1])
    change = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)
    (checkpoint,) = api.listed(tmp_path)
    store = api.place(tmp_path)
    assert reencrypt_checkpoint(store, checkpoint, change).action is Action.PLAIN


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_file_without_manifest_gets_one_where_its_name_is_trusted(
    tmp_path: Path, form: str
) -> None:
    save_run(directory=tmp_path, form=form, steps=1)
    (path,) = (one.path for one in api.listed(tmp_path))
    (tmp_path / api.manifest_name(path.name)).unlink()
    change = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)
    (checkpoint,) = api.listed(tmp_path)
    with pytest.raises(UnsealedCheckpoint, match="nothing but its name"):
        reencrypt_checkpoint(open_for_rekeying(tmp_path, change), checkpoint, change)
    store = open_for_rekeying(tmp_path, change, trust=api.Trust(allow_unencrypted=True))
    reencrypt_checkpoint(store, checkpoint, change)
    (checkpoint,) = api.listed(tmp_path)
    assert checkpoint.state is api.State.OK
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]


def test_damaged_file_is_not_encrypted_anew(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    (path,) = tmp_path.glob("*.ckpe")
    flip(path, -5)
    before = path.read_bytes()
    change = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)
    (checkpoint,) = api.listed(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        reencrypt_checkpoint(open_for_rekeying(tmp_path, change), checkpoint, change)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_key_that_opens_nothing_mends_and_changes_nothing(tmp_path: Path, form: str) -> None:
    save_run(directory=tmp_path, form=form, steps=1)
    for change in (
        KeyChange(keys=ring(OTHER)),
        KeyChange(keys=ring(OTHER), add=(ring(NEW),), is_exclusive=True),
    ):
        store = open_for_rekeying(tmp_path, change)
        (checkpoint,) = store.scan()
        plan = plan_reencryption if change.is_exclusive else plan_rekeying
        with pytest.raises(KeyProblem):
            plan(store, checkpoint, change)


def test_set_of_files_of_different_kinds_is_refused() -> None:
    disk = ModelDisk()
    save_set(disk)
    store = open_for_rekeying(RUNS, ROTATION, fs=disk)
    (checkpoint,) = store.scan()
    put(disk, RUNS / checkpoint.shards[1], b"\x0a\x04plain, or so")
    with pytest.raises(UnsafeWrite, match="cannot be changed together"):
        plan_rekeying(store, checkpoint, ROTATION)


def test_file_whose_digests_cover_its_header_is_not_rekeyed_but_encrypted_anew(
    tmp_path: Path,
) -> None:
    save_run(directory=tmp_path, steps=1)
    store = api.place(tmp_path, keys=OLD, allow_unencrypted=True)
    (checkpoint,) = store.scan()
    manifest = store.read_manifest(checkpoint.name)
    assert manifest is not None
    digest = digest_of(BytesSource(checkpoint.path.read_bytes()))
    store.update_manifest(replace(manifest, file=replace(manifest.file, digest=digest)))
    with pytest.raises(UnsafeWrite, match="cover its header"):
        rekey(ROTATION, directory=tmp_path)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [0]
    change = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_exclusive=True)
    reencrypt_checkpoint(open_for_rekeying(tmp_path, change), checkpoint, change)
    assert openers(checkpoint, [ring(OLD), ring(NEW)]) == [1]


def test_passphrases_of_a_change_are_stretched_together() -> None:
    change = KeyChange(keys=ring("horse"), add=(ring(NEW), ring("battery")))
    all_keys = change.all_keys
    assert all_keys.identities[0] is change.keys.identities[0]
    assert all_keys.identities[2] is change.add[1].identities[0]
    assert change.added.recipients[1] is change.add[1].recipients[0]
    assert all_keys.labels == (*change.keys.labels, *change.added.labels)


def test_encrypting_anew_makes_a_new_key_for_the_manifest_too(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    private, public = generate_pair("x25519")
    rekey(KeyChange(keys=ring(OLD), add=(ring(public),)), directory=tmp_path)
    (checkpoint,) = api.listed(tmp_path)
    before = api.place(tmp_path, keys=ring(private), allow_unencrypted=True).read_manifest(
        checkpoint.name
    )
    change = KeyChange(keys=ring(OLD), add=(ring(public), ring(NEW)), is_exclusive=True)
    reencrypt_checkpoint(open_for_rekeying(tmp_path, change), checkpoint, change)
    after = api.place(tmp_path, keys=ring(private), allow_unencrypted=True).read_manifest(
        checkpoint.name
    )
    assert before is not None
    assert after is not None
    assert before.auth is not None
    assert after.auth is not None
    assert before.auth.key != after.auth.key
    assert openers(checkpoint, [ring(OLD), ring(private), ring(NEW)]) == [1, 2]


class _Dying(api.OsFileSystem):
    """A disk of a process that dies when it gives the new data its name."""

    is_dead = False

    def replace(self, source: Path, target: Path) -> None:
        self.is_dead = self.is_dead or not target.name.endswith(".json")
        self._live()
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)

    def _live(self) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "dead")


def test_rotation_after_an_interrupted_overwrite_holds_when_the_next_run_cleans_up(
    tmp_path: Path,
) -> None:
    save_run(directory=tmp_path, steps=1)
    dying = api.place(tmp_path, fs=_Dying(), keys=ring(OLD))
    (checkpoint,) = dying.scan()
    with pytest.raises(OSError, match="dead"):
        recompress(dying, checkpoint, level=3, options=api.reading(keys=ring(OLD)))
    assert b'"replaces"' in (tmp_path / api.manifest_name(checkpoint.name)).read_bytes()

    rekey(ROTATION, directory=tmp_path)
    config = CheckpointConfig(keep="all", enc_key=NEW.raw, format="safetensors")
    with CheckpointManager(tmp_path, config, prefix=checkpoint.series) as manager:
        assert manager.resume().step == checkpoint.step
