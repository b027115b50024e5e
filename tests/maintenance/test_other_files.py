# SPDX-License-Identifier: Apache-2.0
"""Files that are no checkpoints, in containers: the same bytes come back, and nobody takes them for a checkpoint."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    Checkpoint,
    CheckpointNotFound,
    CkptmgrError,
    KeyProblem,
    StoreFull,
    StoreLocked,
    UnsafeWrite,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    open_checkpoint,
)
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.files.load.inspection import inspect_file
from ckptmgr.maintenance import convert
from ckptmgr.maintenance.convert_source import open_plaintext
from ckptmgr.maintenance.rekey import (
    Action,
    open_for_rekeying,
    reencrypt_checkpoint,
    rekey_checkpoint,
)
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.faults.scenarios import first_broken
from tests.faults.training import RUNS, ModelProcesses
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash
from tests.support.damage import put
from tests.support.failingdisk import every_failure
from tests.support.rekeying import ring
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, only, overwrite, save_run

READING = api.reading(keys=KEY)
MODES = ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")
TEXT = b'{"version": "1.0", "added_tokens": []}'
SEGMENT = 4 * 2**20


def put_file(directory: Path, content: bytes = TEXT, *, name: str = "tokenizer.json") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_bytes(content)
    return path


def encrypt(source: Path, *, key: Keys = KEY, mode: str = "AES-GCM") -> Checkpoint:
    target = source.with_name(f"{source.name}.ckpe")
    return convert.encrypt_file(source, target, key=key, mode=mode).target


def verify(
    file: Checkpoint, level: api.Level = api.Level.FULL, *, key: Keys | None = KEY
) -> api.Verification:
    store = api.place(file.path.parent, keys=key, allow_unencrypted=True)
    return api.verify(store, file, level=level, keys=key)


def decrypted(file: Path, *, key: Keys = KEY) -> bytes:
    target = file.with_name("decrypted")
    convert.decrypt_file(file, target, options=api.reading(keys=key), force=True)
    return target.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_file_comes_back_byte_for_byte_and_is_listed_nowhere(tmp_path: Path, mode: str) -> None:
    file = encrypt(put_file(tmp_path), mode=mode)
    assert (file.name, file.format, file.cipher) == ("tokenizer.json.ckpe", OPAQUE, mode)
    assert file.key_id == KEY.key_id
    assert TEXT not in file.path.read_bytes()
    assert decrypted(file.path) == TEXT
    assert api.listed(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer.json.ckpe",
        "decrypted",
    }


@settings(max_examples=12)
@given(size=st.sampled_from([0, 1, 2, SEGMENT - 33, SEGMENT - 32, SEGMENT, 2 * SEGMENT + 7]))
def test_file_of_any_size_comes_back_from_file_and_pipe(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    source = put_file(tmp_path_factory.mktemp("sizes"), np.arange(size, dtype=np.uint8).tobytes())
    piped = source.with_name("piped.bin.ckpe")
    piped.write_bytes(b"".join(map(bytes, convert.encrypted_chunks(source, key=KEY))))
    for path in (encrypt(source).path, piped):
        assert decrypted(path) == source.read_bytes()
        with open_plaintext(path, READING) as (plaintext, _):
            assert b"".join(map(bytes, plaintext.chunks())) == source.read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"\n# begins like a .ckpt", bytes([2] + [0] * 7) + b"{}", b"PK\x03\x04 torch.save", b"\x8fCK"],
)
def test_name_decides_not_what_the_bytes_look_like(tmp_path: Path, content: bytes) -> None:
    file = encrypt(put_file(tmp_path, content, name="optimizer.pt"))
    assert file.format == OPAQUE
    assert decrypted(file.path) == content


def test_damaged_checkpoint_is_not_taken_for_another_file(tmp_path: Path) -> None:
    source = put_file(tmp_path, b"no safetensors", name="net.safetensors")
    with pytest.raises(CkptmgrError, match=r"net\.safetensors"):
        encrypt(source)
    with pytest.raises(CkptmgrError, match=r"net\.safetensors"):
        list(convert.encrypted_chunks(source, key=KEY))
    assert list(tmp_path.iterdir()) == [source]


def test_link_is_called_what_its_own_name_says(tmp_path: Path) -> None:
    blob = put_file(tmp_path, (GOLDEN_FILES / "st_async.safetensors").read_bytes(), name="1f3a")
    link = tmp_path / "net.safetensors"
    link.symlink_to(blob)
    assert encrypt(link).format == "safetensors"


def test_output_is_private(tmp_path: Path) -> None:
    source = put_file(tmp_path)
    source.chmod(0o644)
    file = encrypt(source)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    decrypted(file.path)
    assert stat.S_IMODE((tmp_path / "decrypted").stat().st_mode) == 0o600


def test_encrypted_file_is_not_encrypted_again(tmp_path: Path) -> None:
    file = encrypt(put_file(tmp_path))
    with pytest.raises(UnsupportedCheckpoint, match="encrypted already"):
        encrypt(file.path.rename(tmp_path / "tokenizer.json2"))


@pytest.mark.parametrize("name", ["x.json", "x.ckpt", "x.safetensors"])
def test_target_without_the_ending_of_containers_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CkptmgrError):
        convert.encrypt_file(put_file(tmp_path), tmp_path / name, key=KEY)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors", "x.safetensors.ckpz"])
def test_file_is_not_decrypted_under_the_name_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    file = encrypt(put_file(tmp_path))
    with pytest.raises(UnsafeWrite, match="name of a checkpoint"):
        convert.decrypt_file(file.path, tmp_path / name, options=READING)
    assert not (tmp_path / name).exists()


def test_checkpoint_of_any_name_is_not_replaced(tmp_path: Path) -> None:
    (sealed,) = save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    odd = tmp_path / "weights.bin"
    convert.decrypt_file(sealed, odd, options=READING)
    before = odd.read_bytes()
    file = encrypt(put_file(tmp_path / "other"))
    with pytest.raises(UnsafeWrite, match="name of a checkpoint"):
        convert.decrypt_file(file.path, odd, options=READING, force=True)
    assert odd.read_bytes() == before


def test_existing_target_needs_force(tmp_path: Path) -> None:
    file = encrypt(put_file(tmp_path))
    with pytest.raises(UnsafeWrite, match="exists"):
        encrypt(tmp_path / "tokenizer.json")
    with pytest.raises(UnsafeWrite, match="exists"):
        convert.decrypt_file(file.path, tmp_path / "tokenizer.json", options=READING)


def test_target_that_is_being_written_is_locked(tmp_path: Path) -> None:
    source = put_file(tmp_path)
    with api.place(tmp_path).lease("tokenizer.json.ckpe"), pytest.raises(StoreLocked):
        encrypt(source)


def test_missing_input_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        encrypt(tmp_path / "nothing.json")


@pytest.mark.parametrize("name", ["x.json.ckpe", "x.ckpt.ckpe", "x.safetensors.ckpe"])
def test_loading_says_that_it_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    path = encrypt(put_file(tmp_path)).path.rename(tmp_path / name)
    with pytest.raises(UnsupportedCheckpoint, match="no checkpoint") as caught:
        open_checkpoint(path, dec_key=KEY.raw)
    assert caught.value.hint is not None
    assert "ckptmgr decrypt" in caught.value.hint
    if not name.startswith("x.json"):
        with pytest.raises(UnsupportedCheckpoint, match="no checkpoint"):
            load_checkpoint(path, dec_key=KEY.raw, format=name.split(".")[1])


@pytest.mark.parametrize("level", api.Level)
def test_verify_checks_every_block_and_needs_the_key(tmp_path: Path, level: api.Level) -> None:
    file = encrypt(put_file(tmp_path, bytes(2 * SEGMENT)))
    answer = verify(file, level)
    checked = ("header",) if level is api.Level.QUICK else ("header", "cipher blocks")
    assert (answer.status, answer.checked, answer.unchecked) == (api.Status.OK, checked, ())
    blind = verify(file, level, key=None)
    assert blind.status is (api.Status.OK if level is api.Level.QUICK else api.Status.PARTIAL)
    assert "no key was given" in blind.unchecked[0]
    assert verify(file, level, key=OTHER_KEY).status is api.Status.WRONG_KEY


@pytest.mark.parametrize("offset", [12288 - 40, 12288 + 100, 12288 + SEGMENT + 5, -1])
def test_damage_is_found_and_gives_no_file(tmp_path: Path, offset: int) -> None:
    file = encrypt(put_file(tmp_path, bytes(2 * SEGMENT)))
    flip(file.path, offset)
    assert verify(file).status is api.Status.DAMAGED
    with pytest.raises(CkptmgrError):
        decrypted(file.path)
    assert not (tmp_path / "decrypted").exists()


def test_contents_are_called_what_they_are(tmp_path: Path) -> None:
    file = encrypt(put_file(tmp_path))
    store = api.place(tmp_path, keys=KEY, allow_unencrypted=True)
    blind = inspect_file(store, file, options=api.reading())
    assert (blind.plain, blind.checkpoint.format, blind.cipher) == (None, OPAQUE, "AES-GCM")
    assert blind.checkpoint.opened_by == (f"key {KEY.key_id}",)
    seen = inspect_file(store, file, options=READING, has_stats=True)
    assert seen.plain is not None
    assert (seen.plain.format, seen.plain.size_bytes, seen.plain.tensors) == (OPAQUE, len(TEXT), ())


def test_keys_can_be_changed(tmp_path: Path) -> None:
    file = encrypt(put_file(tmp_path))
    change = KeyChange(keys=ring(KEY), add=(ring(OTHER_KEY),), remove=(ring(KEY),))
    store = open_for_rekeying(tmp_path, change)
    payload = file.path.read_bytes()[8192:]
    rekey_checkpoint(store, file, change)
    assert file.path.read_bytes()[8192:] == payload
    assert decrypted(file.path, key=OTHER_KEY) == TEXT
    with pytest.raises(KeyProblem):
        decrypted(file.path)


def test_file_is_encrypted_anew_without_a_manifest(tmp_path: Path) -> None:
    file = encrypt(put_file(tmp_path))
    before = file.path.read_bytes()
    change = KeyChange(keys=ring(KEY), add=(ring(OTHER_KEY),), is_exclusive=True)
    store = open_for_rekeying(tmp_path, change)
    assert store.trust.is_strict
    assert reencrypt_checkpoint(store, file, change).action is Action.REENCRYPT
    assert decrypted(file.path, key=OTHER_KEY) == TEXT
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.path.read_bytes()[16:32] != before[16:32]  # another file id
    assert store.scan() == []
    assert reencrypt_checkpoint(store, file, change).action is Action.NOTHING


def test_header_that_only_claims_to_be_of_another_file_lends_no_proof(tmp_path: Path) -> None:
    (plain,) = save_run(tmp_path / "plain", [10], options=api.SaveOptions())
    path = convert.encrypt_file(plain, tmp_path / "net-1_10.ckpt.ckpe", key=KEY).target.path
    (tmp_path / api.manifest_name(path.name)).unlink()
    data = bytearray(path.read_bytes())
    data[40], data[64] = Content.OPAQUE, 9  # copy A: another content, and the newest generation
    overwrite(path, bytes(data))
    change = KeyChange(keys=ring(KEY), add=(ring(OTHER_KEY),), is_exclusive=True)
    store = open_for_rekeying(tmp_path, change)
    with pytest.raises(UnsealedCheckpoint, match="has no manifest"):
        reencrypt_checkpoint(store, only(store), change)


def place(disk: api.FileSystem, content: bytes, model: ModelDisk) -> None:
    store = api.place(RUNS, fs=disk, processes=ModelProcesses(model))
    with store.publisher.new_file(
        "x.bin.ckpe", series="x.bin.ckpe", size_bytes=len(content), mode=0o600, is_rank_file=True
    ) as new:
        with new.writing() as file:
            file.write_at(0, content)
        new.give_name()


def disk_with_file() -> ModelDisk:
    disk = ModelDisk()
    disk.make_directory(RUNS, mode=0o700)
    put(disk, RUNS / "x.bin.ckpe", b"old")
    return disk


def test_placed_file_is_old_or_new_after_every_power_cut() -> None:
    def run(disk: ModelDisk) -> None:
        place(disk, b"new content", disk)
        disk.acknowledge("new")

    def check(crash: Crash) -> None:
        found = crash.disk.read_bytes(RUNS / "x.bin.ckpe")
        assert found == b"new content" or (found == b"old" and not crash.disk.acknowledged)

    assert first_broken(every_crash(disk_with_file(), run, order=Order.WEAK), check) is None


def test_placing_that_fails_leaves_the_old_file_or_the_new_one_and_nothing_else() -> None:
    count = 0
    for failure in every_failure(disk_with_file(), lambda disk: place(disk, b"new", ModelDisk())):
        if failure.operation == "hold_directory":
            assert failure.raised is None, failure  # a call that only reads is tried again
        else:
            assert isinstance(failure.raised, OSError), failure
        assert failure.disk.read_bytes(RUNS / "x.bin.ckpe") in (b"old", b"new"), failure
        if failure.operation != "unlink":
            assert set(failure.disk.list(RUNS)) == {"x.bin.ckpe"}, failure
        count += 1
    assert count > 5


def test_placing_on_a_full_disk_changes_nothing() -> None:
    disk = disk_with_file()
    disk.available_bytes = 10
    with pytest.raises(StoreFull) as caught:
        place(disk, b"new", disk)
    assert caught.value.errno == errno.ENOSPC
    assert disk.read_bytes(RUNS / "x.bin.ckpe") == b"old"
