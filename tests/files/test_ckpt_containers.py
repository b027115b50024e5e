# SPDX-License-Identifier: Apache-2.0
"""A `.ckpt` in a container: for keys and modes that MindSpore's own records cannot carry."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnsafeWrite,
    load_checkpoint,
    open_checkpoint,
)
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.files.load.inspection import inspect_file
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.plaintext import check_kind
from ckptmgr.files.load.values import read_values
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.maintenance import convert
from ckptmgr.maintenance.rekey import open_for_rekeying, reencrypt_checkpoint, rekey_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.support import api
from tests.support.rekeying import ring
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, only, overwrite, save_run

READING = api.reading(keys=KEY)
MODES = ("AES-GCM", "AES-CBC", "SM4-CBC", "SM4-GCM")
KEY_RINGS: dict[str, Keys] = {
    "key": KEY,
    "passphrase": ring("correct horse"),
    "two": ring(KEY, OTHER_KEY),
}


def container(
    tmp_path: Path, *, key: Keys = KEY, mode: str = "AES-GCM", has_crc: bool = True
) -> Checkpoint:
    """Return the container of a small `.ckpt`, alone in its directory."""
    (plain,) = save_run(tmp_path / "plain", [10], options=api.SaveOptions(has_crc=has_crc))
    (tmp_path / "runs").mkdir()
    target = tmp_path / "runs" / f"{plain.name}.ckpe"
    return convert.encrypt_file(plain, target, key=key, mode=mode).target


def plain_file(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "plain").glob("*.ckpt")
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True], ids=["no crc", "crc"])
def test_container_loads_verifies_and_gives_the_same_file(
    tmp_path: Path, mode: str, has_crc: bool
) -> None:
    file = container(tmp_path, mode=mode, has_crc=has_crc)
    assert (file.name, file.format, file.cipher) == ("net-1_10.ckpt.ckpe", "ckpt", mode)
    store = api.place(file.path.parent, keys=KEY)
    listed = only(store)
    assert (listed.series, listed.step, listed.format) == ("net", 10, "ckpt")
    values = load_checkpoint(file.path, dec_key=KEY.raw, dec_mode=mode, crc_check=has_crc)
    assert values["net"] == "lenet"
    for level in api.Level:
        answer = api.verify(store, listed, level=level, options=READING)
        assert (answer.status, answer.unchecked) == (api.Status.OK, ())
        assert ("CRC32" in answer.checked) == (has_crc and level is not api.Level.QUICK)
    out = convert.decrypt_file(file.path, tmp_path / "out.ckpt", options=READING).target
    assert out.path.read_bytes() == plain_file(tmp_path).read_bytes()


@pytest.mark.parametrize("keys", KEY_RINGS.values(), ids=KEY_RINGS)
def test_container_opens_with_all_its_keys(tmp_path: Path, keys: Keys) -> None:
    file = container(tmp_path, key=keys)
    store = api.place(file.path.parent, keys=keys)
    answer = api.verify(store, only(store), keys=keys)
    assert answer.status is api.Status.OK


@pytest.mark.parametrize("name", ["ckpt_all_dtypes.ckpt", "slices_sync_crc.ckpt"])
def test_golden_file_reads_the_same_inside(tmp_path: Path, name: str) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / name, tmp_path / "x.ckpt"))
    path = convert.encrypt_file(source, tmp_path / "x.ckpt.ckpe", key=KEY).target.path
    with open_checkpoint(source) as plain, open_checkpoint(path, dec_key=KEY.raw) as inside:
        assert inside.format == "ckpt"
        assert inside.is_verified
        assert inside.names() == plain.names()
        for one in plain.names():
            assert np.asarray(inside.read(one)).tobytes() == np.asarray(plain.read(one)).tobytes()


class Counting:
    """A source that counts the bytes that are read of it."""

    def __init__(self, data: bytes) -> None:
        self.size, self.read_bytes = len(data), 0
        self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_bytes += buffer.nbytes
        buffer[:] = self._data[offset : offset + buffer.nbytes]


def test_one_tensor_costs_its_own_segments_and_those_of_the_descriptions(tmp_path: Path) -> None:
    content = [
        tensor_from_array(name, np.full(6 << 20, number, np.float32))
        for number, name in enumerate("abc")
    ]
    (plain,) = save_run(tmp_path, [10], content=content)
    path = convert.encrypt_file(plain, tmp_path / "x.ckpt.ckpe", key=KEY).target.path
    raw = Counting(path.read_bytes())
    opened = open_source(raw, path=str(path), options=READING)
    values = read_values(opened, choose=lambda name: name == "b")
    assert set(np.asarray(values["b"]).tolist()) == {1.0}
    # Three descriptions, each in a segment of 4 MiB, and 24 MiB of 72 in seven more at most.
    assert raw.read_bytes < (3 + 7) * (4 << 20) + 65536


@pytest.mark.parametrize("offset", [60, -1], ids=["content", "crc"])
def test_damaged_input_is_never_sealed(tmp_path: Path, offset: int) -> None:
    (source,) = save_run(tmp_path, [10], options=api.SaveOptions(has_crc=True))
    (tmp_path / api.manifest_name(source.name)).unlink()
    flip(source, offset)
    before = set(tmp_path.iterdir())
    with pytest.raises(CorruptCheckpoint):
        convert.encrypt_file(source, tmp_path / "x.ckpt.ckpe", key=KEY)
    with pytest.raises(CorruptCheckpoint):
        list(convert.encrypted_chunks(source, key=KEY, mode="SM4-GCM"))
    assert set(tmp_path.iterdir()) == before


def test_damage_that_only_the_digests_find_is_never_sealed(tmp_path: Path) -> None:
    (source,) = save_run(tmp_path, [10])
    flip(source, 60)
    with pytest.raises(ChecksumMismatch):
        convert.encrypt_file(source, tmp_path / "x.ckpt.ckpe", key=KEY)
    assert not (tmp_path / "x.ckpt.ckpe").exists()


@pytest.mark.parametrize(
    ("name", "keys", "mode", "expected"),
    [
        ("net.ckpt", KEY, "AES-GCM", "net.ckpt"),
        ("net.ckpt", KEY, "SM4-GCM", "net.ckpt.ckpe"),
        ("net.ckpt", KEY_RINGS["passphrase"], "AES-GCM", "net.ckpt.ckpe"),
        ("net.ckpt", KEY_RINGS["two"], "AES-CBC", "net.ckpt.ckpe"),
        ("net.safetensors", KEY, "AES-GCM", "net.safetensors.ckpe"),
        ("net.safetensors.ckpz", KEY, "AES-GCM", "net.safetensors.ckpe"),
        ("tokenizer.json", KEY, "AES-GCM", "tokenizer.json.ckpe"),
    ],
)
def test_name_of_an_encrypted_file_follows_from_what_it_takes(
    name: str, keys: Keys, mode: str, expected: str
) -> None:
    assert convert.encrypted_name(name, key=keys, mode=mode) == expected


@pytest.mark.parametrize(("keys", "mode"), [("passphrase", "AES-GCM"), ("key", "SM4-GCM")])
def test_pipe_is_a_container_where_nothing_else_will_do(
    tmp_path: Path, keys: str, mode: str
) -> None:
    (plain,) = save_run(tmp_path, [10])
    piped = tmp_path / "piped.ckpt.ckpe"
    chunks = convert.encrypted_chunks(plain, key=KEY_RINGS[keys], mode=mode)
    piped.write_bytes(b"".join(map(bytes, chunks)))
    options = api.reading(keys=KEY_RINGS[keys])
    out = convert.decrypt_file(piped, tmp_path / "out.ckpt", options=options).target.path
    assert out.read_bytes() == plain.read_bytes()


def test_passphrase_needs_the_name_of_a_container(tmp_path: Path) -> None:
    (plain,) = save_run(tmp_path, [10])
    with pytest.raises(KeyProblem, match="takes one key") as caught:
        convert.encrypt_file(plain, tmp_path / "x.ckpt", key=KEY_RINGS["passphrase"])
    assert caught.value.hint is not None
    assert ".ckpe" in caught.value.hint


def test_safetensors_in_another_name_than_a_container_is_refused(tmp_path: Path) -> None:
    source = Path(shutil.copy(GOLDEN_FILES / "st_async.safetensors", tmp_path / "x.safetensors"))
    with pytest.raises(UnsafeWrite, match=r"must end in \.ckpe"):
        convert.encrypt_file(source, tmp_path / "x.ckpt", key=KEY)


@pytest.mark.parametrize("level", api.Level)
def test_record_file_in_place_of_a_container_is_damage(tmp_path: Path, level: api.Level) -> None:
    file = container(tmp_path)
    sealed = convert.encrypt_file(plain_file(tmp_path), tmp_path / "s.ckpt", key=KEY).target
    data = sealed.path.read_bytes()
    overwrite(file.path, data.ljust(file.size_bytes, b"\0")[: file.size_bytes])
    store = api.place(file.path.parent, keys=KEY, allow_unencrypted=True)
    assert api.verify(store, only(store), level=level, options=READING).status is (
        api.Status.DAMAGED
    )
    with pytest.raises(TamperedCheckpoint, match="mindspore-encrypted"):
        load_checkpoint(file.path, dec_key=KEY.raw)


def test_container_in_place_of_a_record_file_is_damage(tmp_path: Path) -> None:
    container(tmp_path)
    path = convert.encrypt_file(plain_file(tmp_path), tmp_path / "s.ckpt", key=KEY).target.path
    records = api.place(tmp_path, keys=KEY, allow_unencrypted=True).read_manifest(path.name)
    check_kind(Kind.MINDSPORE_ENCRYPTED, records, path=str(path))
    with pytest.raises(TamperedCheckpoint, match="ckptmgr-container"):
        check_kind(Kind.CKPTMGR_CONTAINER, records, path=str(path))


def test_contents_are_shown_without_a_manifest(tmp_path: Path) -> None:
    file = container(tmp_path, mode="AES-CBC")
    (file.path.parent / api.manifest_name(file.name)).unlink()
    store = api.place(file.path.parent, keys=KEY, allow_unencrypted=True)
    blind = inspect_file(store, only(store), options=api.reading())
    assert (blind.plain, blind.checkpoint.format, blind.cipher) == (None, "ckpt", "AES-CBC")
    seen = inspect_file(store, only(store), options=READING, has_stats=True)
    assert seen.plain is not None
    assert [one.spec.name for one in seen.plain.tensors] == ["fc.weight", "epoch_num"]


def test_keys_change_in_the_header_or_anew(tmp_path: Path) -> None:
    file = container(tmp_path)
    directory = file.path.parent
    payload = file.path.read_bytes()[8192:]
    change = KeyChange(keys=ring(KEY), add=(ring(OTHER_KEY),), remove=(ring(KEY),))
    store = open_for_rekeying(directory, change)
    rekey_checkpoint(store, only(store), change)
    assert file.path.read_bytes()[8192:] == payload
    assert load_checkpoint(file.path, dec_key=OTHER_KEY.raw)["net"] == "lenet"
    back = KeyChange(keys=ring(OTHER_KEY), add=(ring(KEY),), is_exclusive=True)
    store = open_for_rekeying(directory, back)
    reencrypt_checkpoint(store, only(store), back)
    assert file.path.read_bytes()[8192:] != payload
    found = only(api.place(directory, keys=KEY))
    assert (found.format, found.cipher) == ("ckpt", "AES-GCM")
    assert load_checkpoint(file.path, dec_key=KEY.raw)["net"] == "lenet"


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_golden_container_loads_for_ever(tmp_path: Path, format: str) -> None:
    golden = GOLDEN_FILES.parent / "containers" / f"all_dtypes.{format}.ckpe"
    path = Path(shutil.copy(golden, tmp_path))
    inside = {"ckpt": "ckpt_all_dtypes.ckpt", "safetensors": "st_all_dtypes.safetensors"}[format]
    expected = load_checkpoint(GOLDEN_FILES / inside, format=format)
    values = load_checkpoint(path, dec_key=KEY.raw, format=format)
    assert {name: np.asarray(value).tobytes() for name, value in values.items()} == {
        name: np.asarray(value).tobytes() for name, value in expected.items()
    }
