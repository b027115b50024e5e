# SPDX-License-Identifier: Apache-2.0
"""Encrypted safetensors files: saved, listed, loaded, verified, converted, and refused for each defect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save_file

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsafeWrite,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.core.names import parse_name, parse_step_name, restart_prefix
from ckptmgr.files.load.container import open_container_file
from ckptmgr.files.load.inspection import inspect_file
from ckptmgr.formats.source import BytesSource
from ckptmgr.maintenance import convert
from ckptmgr.maintenance.convert_source import open_plaintext
from tests.support import api
from tests.support.saved import flip, only, overwrite

KEY = bytes(range(16))
OTHER_KEY = bytes(32)
READING = api.reading(keys=api.Key(KEY))
MODES = ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")
VALUES: dict[str, np.ndarray] = {"w": np.arange(5000, dtype=np.float32), "b": np.array(3, np.int64)}


def save(directory: Path, *, mode: str = "AES-GCM", crc: bool = False) -> Path:
    target = directory / "net-1_10.safetensors"
    saved = save_checkpoint(
        VALUES, target, format="safetensors", enc_key=KEY, enc_mode=mode, crc_check=crc
    )
    return saved.path


def verify(
    path: Path, level: api.Level = api.Level.FULL, *, key: bytes | None = KEY
) -> api.Verification:
    secret = None if key is None else api.Key(key)
    store = api.place(path.parent, keys=secret, allow_unencrypted=True)
    return api.verify(store, only(store), level=level, keys=secret)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crc", [False, True])
def test_saved_file_is_listed_loaded_and_verified(tmp_path: Path, mode: str, crc: bool) -> None:
    path = save(tmp_path, mode=mode, crc=crc)
    assert path.name == "net-1_10.safetensors.ckpe"
    listed = only(api.place(tmp_path, keys=api.Key(KEY), allow_unencrypted=True))
    assert (listed.path, listed.format, listed.cipher) == (path, "safetensors", mode)
    assert (listed.series, listed.epoch) == ("net", 1)
    values = load_checkpoint(path, dec_key=KEY, dec_mode=mode, crc_check=crc)
    assert {name: np.asarray(value).tolist() for name, value in values.items()} == {
        name: value.tolist() for name, value in VALUES.items()
    }
    answer = verify(path, api.Level.DEEP)
    assert (answer.status, answer.unchecked) == (api.Status.OK, ())
    assert {"header", "cipher blocks", "every tensor"} <= set(answer.checked)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("x", "x.safetensors.ckpe"),
        ("x.safetensors", "x.safetensors.ckpe"),
        ("x.safetensors.ckpe", "x.safetensors.ckpe"),
    ],
)
def test_name_ends_in_ckpe_behind_the_format(tmp_path: Path, given: str, name: str) -> None:
    saved = save_checkpoint(VALUES, tmp_path / given, format="safetensors", enc_key=KEY)
    assert saved.path.name == name
    assert saved.series == "x"


def test_names_are_understood_and_count_for_a_restart() -> None:
    parsed = parse_name("net-3_40.safetensors.ckpe")
    assert parsed is not None
    assert parsed[:3] == ("net", 3, 40)
    assert parsed.format == "safetensors"
    numbered = parse_step_name("net-40-r2.safetensors.ckpe")
    assert numbered is not None
    assert tuple(numbered) == ("net", 40, 2)
    assert restart_prefix("net", ["net-3_40.safetensors.ckpe"]) == "net_1"


def test_file_without_manifest_is_listed_by_its_name(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / api.manifest_name(path.name)).unlink()
    path.rename(tmp_path / "best.safetensors.ckpe")
    listed = only(api.place(tmp_path))
    assert (listed.series, listed.format) == ("best", "safetensors")


def test_manager_saves_and_resumes(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors", enc_key=KEY, enc_mode="SM4-GCM")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"w": np.full(4, 1.0)})
        manager.save(2, {"w": np.full(4, 2.0)})
    names = sorted(path.name for path in tmp_path.glob("*.ckpe"))
    assert names == ["ckpt-1.safetensors.ckpe", "ckpt-2.safetensors.ckpe"]
    with CheckpointManager(tmp_path, config) as manager:
        resumption = manager.resume({"w": np.zeros(4)})
    assert resumption.step == 2
    assert resumption.state["w"].tolist() == [2.0] * 4  # type: ignore[index]


def test_loading_without_a_key_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(KeyProblem, match=r"encrypted \(SM4-CBC\); a key is needed"):
        load_checkpoint(save(tmp_path, mode="SM4-CBC"))


def test_loading_with_another_key_is_a_key_problem(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / api.manifest_name(path.name)).unlink()
    with pytest.raises(KeyProblem, match="encrypted for another key"):
        load_checkpoint(path, dec_key=OTHER_KEY)


def test_loading_in_another_mode_names_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(KeyProblem, match="the file says SM4-GCM, not AES-GCM") as caught:
        load_checkpoint(save(tmp_path, mode="SM4-GCM"), dec_key=KEY)
    assert caught.value.hint == "open it with mode SM4-GCM"


@pytest.mark.parametrize("offset", [12288 - 30, 13000, -1])
def test_damage_is_found_with_and_without_manifest(tmp_path: Path, offset: int) -> None:
    path = save(tmp_path)
    flip(path, offset)
    assert verify(path).status is api.Status.DAMAGED
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(path, dec_key=KEY)
    (tmp_path / api.manifest_name(path.name)).unlink()
    assert verify(path).status is api.Status.DAMAGED
    with pytest.raises(TamperedCheckpoint):
        load_checkpoint(path, dec_key=KEY)


def test_cut_file_without_manifest_is_truncated(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / api.manifest_name(path.name)).unlink()
    overwrite(path, path.read_bytes()[:-1])
    with pytest.raises(TruncatedCheckpoint, match="1 bytes too early"):
        load_checkpoint(path, dec_key=KEY)


def test_another_file_of_the_same_key_under_the_manifest_is_found(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / "other").mkdir()
    overwrite(path, save(tmp_path / "other").read_bytes())
    with pytest.raises(ChecksumMismatch):
        load_checkpoint(path, dec_key=KEY)


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("offset", [0, 7, 20, 40, 63, 64, 100, 4000, 4095])
@pytest.mark.parametrize("copy", ["A", "B"])
def test_damaged_header_copy_is_named_and_the_other_one_opens_the_file(
    tmp_path: Path, copy: str, offset: int, has_manifest: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path)
    if not has_manifest:
        (tmp_path / api.manifest_name(path.name)).unlink()
    flip(path, offset + (4096 if copy == "B" else 0))
    answer = verify(path)
    assert answer.status is (api.Status.OK if has_manifest else api.Status.UNPROVEN)
    (said,) = answer.unchecked
    assert said == f"header copy {copy}: damaged; the other one opens, ckptmgr rekey mends it"
    caplog.clear()
    assert load_checkpoint(path, dec_key=KEY)["b"] == 3
    assert f"header copy {copy} is damaged, the other one was used" in caplog.text
    assert any("header copies" in said for said in verify(path, key=None).unchecked)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_file_with_both_header_copies_damaged_is_damaged(
    tmp_path: Path, has_manifest: bool
) -> None:
    path = save(tmp_path)
    if not has_manifest:
        (tmp_path / api.manifest_name(path.name)).unlink()
    flip(path, 4090)
    flip(path, 4096 + 4090)
    assert verify(path).status is api.Status.DAMAGED
    with pytest.raises(TamperedCheckpoint):
        load_checkpoint(path, dec_key=KEY)


@pytest.mark.parametrize(
    ("level", "status"), [(api.Level.QUICK, api.Status.OK), (api.Level.FULL, api.Status.PARTIAL)]
)
def test_verification_without_the_key_says_what_it_could_not_check(
    tmp_path: Path, level: api.Level, status: api.Status
) -> None:
    path = save(tmp_path)
    answer = verify(path, level, key=None)
    assert answer.status is status
    assert answer.unchecked == ("header and contents: encrypted (AES-GCM), and no key was given",)


def test_contents_are_listed_with_the_key_and_the_cipher_without(tmp_path: Path) -> None:
    save(tmp_path, mode="SM4-CBC")
    store = api.place(tmp_path, keys=api.Key(KEY), allow_unencrypted=True)
    known = inspect_file(store, only(store), options=READING)
    assert known.plain is not None
    assert [one.spec.name for one in known.plain.tensors] == ["b", "w"]
    assert known.plain.is_sealed
    store = api.place(tmp_path)
    unknown = inspect_file(store, only(store), options=api.reading())
    assert (unknown.cipher, unknown.plain) == ("SM4-CBC", None)


@pytest.mark.parametrize("mode", MODES)
def test_decrypted_file_is_one_that_everybody_reads(tmp_path: Path, mode: str) -> None:
    done = convert.decrypt_file(
        save(tmp_path, mode=mode), tmp_path / "plain.safetensors", options=READING
    )
    values = load_safetensors(done.target.path.read_bytes())
    assert {name: value.tolist() for name, value in values.items()} == {
        name: value.tolist() for name, value in VALUES.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 3, 6_000_000])
def test_encrypting_and_decrypting_gives_the_same_bytes(
    tmp_path: Path, mode: str, size: int
) -> None:
    plain, sealed = tmp_path / "x.safetensors", tmp_path / "x.safetensors.ckpe"
    save_file({"w": np.arange(size, dtype=np.uint8)}, plain)
    done = convert.encrypt_file(plain, sealed, key=api.Key(KEY), mode=mode)
    assert (done.target.format, done.target.cipher) == ("safetensors", mode)
    with open_plaintext(sealed, READING) as (plaintext, _):
        assert b"".join(map(bytes, plaintext.chunks())) == plain.read_bytes()
    piped = b"".join(map(bytes, convert.encrypted_chunks(plain, key=api.Key(KEY), mode=mode)))
    (tmp_path / "piped.safetensors.ckpe").write_bytes(piped)
    with open_plaintext(tmp_path / "piped.safetensors.ckpe", READING) as (plaintext, _):
        assert b"".join(map(bytes, plaintext.chunks())) == plain.read_bytes()


def test_encrypted_container_is_not_encrypted_again(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="encrypted already"):
        convert.encrypt_file(save(tmp_path), tmp_path / "twice.ckpe", key=api.Key(KEY))


def test_damaged_file_with_a_crc_is_not_sealed(tmp_path: Path) -> None:
    plain = tmp_path / "x.safetensors"
    save_checkpoint(VALUES, plain, format="safetensors", crc_check=True)
    (tmp_path / api.manifest_name(plain.name)).unlink()
    flip(plain, -1)
    with pytest.raises(ChecksumMismatch):
        convert.encrypt_file(plain, tmp_path / "x.safetensors.ckpe", key=api.Key(KEY))
    assert not (tmp_path / "x.safetensors.ckpe").exists()


def test_names_that_hide_what_a_file_is_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "x.safetensors"
    save_file({"w": np.zeros(3)}, plain)
    with pytest.raises(UnsafeWrite, match=r"must end in \.ckpe"):
        convert.encrypt_file(plain, tmp_path / "y.safetensors", key=api.Key(KEY))
    with pytest.raises(UnsafeWrite, match=r"must not end in \.ckpe"):
        convert.decrypt_file(save(tmp_path), tmp_path / "y.ckpe", options=READING)


@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("mode", MODES)
def test_key_of_any_length_fits_every_mode(tmp_path: Path, size: int, mode: str) -> None:
    key = bytes(range(size))
    path = save_checkpoint(
        VALUES, tmp_path / "x", format="safetensors", enc_key=key, enc_mode=mode
    ).path
    assert load_checkpoint(path, dec_key=key, dec_mode=mode)["b"] == 3


def test_unknown_mode_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(KeyProblem, match="AES-GCM, AES-CBC, SM4-CBC, SM4-GCM, but got AES-XTS"):
        save_checkpoint(
            VALUES, tmp_path / "x", format="safetensors", enc_key=KEY, enc_mode="AES-XTS"
        )


def test_file_that_differs_from_the_one_its_manifest_describes_is_refused(tmp_path: Path) -> None:
    a, b = (BytesSource(save(tmp_path).read_bytes()) for _ in range(2))
    with pytest.raises(ChecksumMismatch, match="changed while it was being read"):
        open_container_file(a, b, path="net", key=api.Key(KEY), mode=None)


@pytest.mark.parametrize("async_save", ["thread", "process"])
def test_saves_in_the_background_are_containers_too(tmp_path: Path, async_save: str) -> None:
    config = CheckpointConfig(format="safetensors", enc_key=KEY, async_save=async_save)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"w": np.full(4, 1.0)})
    path = tmp_path / "ckpt-1.safetensors.ckpe"
    assert verify(path).status is api.Status.OK
