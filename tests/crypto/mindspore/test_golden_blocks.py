# SPDX-License-Identifier: Apache-2.0
"""Files of the real MindSpore, whole and broken: its silent errors are found and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptmgr.crypto.errors import (
    CryptoError,
    DecryptionError,
    TamperedError,
    TruncatedCiphertextError,
    UnsealedError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.mindspore.blocks import sniff_mode

from .sealing import KEY, unseal

FILES = Path(__file__).parents[2] / "golden" / "files"
SIMPLE = {
    "gcm128.ckpt": 16,
    "gcm192.ckpt": 24,
    "cbc128.ckpt": 16,
    "cbc256.ckpt": 32,
    "sm4.ckpt": 16,
}


def read(name: str, *, key: Key = KEY, allow_unsealed: bool = True) -> bytes:
    data = (FILES / name).read_bytes()
    mode = {"gcm": "AES-GCM", "cbc": "AES-CBC", "sm4": "SM4-CBC"}[Path(name).name[:3]]
    return unseal(data, mode, key=key, allow_unsealed=allow_unsealed)


@pytest.mark.parametrize("name", SIMPLE)
def test_golden_file_decrypts_to_the_tensors_that_were_saved(name: str) -> None:
    plaintext = read(name, key=Key(bytes(range(SIMPLE[name]))))
    manifest = json.loads((FILES / "manifest.json").read_text())
    entry = next(entry for entry in manifest["files"] if entry["file"] == name)
    contents = [
        bytes.fromhex(value["raw_hex"]) for value in entry["expected"] if "raw_hex" in value
    ]
    assert contents
    assert all(content in plaintext for content in contents)


def test_golden_file_of_all_types_decrypts_to_its_plain_twin() -> None:
    plain = (FILES / "ckpt_all_dtypes.ckpt").read_bytes()
    assert read("gcm_all_dtypes.ckpt", key=Key(bytes(range(0x20, 0x40)))) == plain


@pytest.mark.parametrize(("name", "size"), [("gcm", 16), ("cbc", 24)])
def test_golden_files_of_several_blocks_decrypt_to_their_plain_twin(name: str, size: int) -> None:
    data = (FILES / f"slices_{name}_blocks.ckpt").read_bytes()
    mode = sniff_mode(data[:4])
    assert mode is not None
    plaintext = unseal(data, mode, key=Key(bytes(range(size))), allow_unsealed=True)
    assert plaintext == (FILES / "slices_sync.ckpt").read_bytes()


def test_golden_files_with_full_padding_hold_the_same_plaintext() -> None:
    assert read("sm4_pad16.ckpt") == read("gcm_pad16.ckpt")


def test_golden_file_that_mindspore_cannot_load_is_rescued() -> None:
    data = (FILES / "enc_and_crc_UNLOADABLE.ckpt").read_bytes()
    rescued = unseal(data, "AES-GCM", allow_unsealed=True)
    assert rescued == unseal(data[:-17], "AES-GCM", allow_unsealed=True)
    assert b"Float32" in rescued


@pytest.mark.parametrize(
    "name", [*SIMPLE, "sm4_pad16.ckpt", "gcm_pad16.ckpt", "broken/gcm_blocks_intact.ckpt"]
)
def test_golden_file_without_seal_is_refused_unless_allowed(name: str) -> None:
    key = Key(bytes(range(SIMPLE.get(name, 16))))
    with pytest.raises(UnsealedError):
        read(name, key=key, allow_unsealed=False)


BROKEN: dict[str, type[CryptoError]] = {
    "gcm_flip_ct": DecryptionError,
    "gcm_flip_iv": DecryptionError,
    "gcm_flip_last": DecryptionError,
    "gcm_flip_len": TamperedError,
    "gcm_flip_tag": DecryptionError,
    "gcm_junk_appended": TamperedError,
    "gcm_trunc": TruncatedCiphertextError,
    "gcm_trunc_half": TruncatedCiphertextError,
    "gcm_trunc_header": TruncatedCiphertextError,
    "cbc_flip_last": DecryptionError,
    # One flipped bit makes the magic of AES-CBC that of AES-GCM, and the rest is then the layout of 1.x.
    "cbc_flip_magic": UnsupportedSuiteError,
    "cbc_junk_appended": TamperedError,
    "cbc_magic_only": TruncatedCiphertextError,
    "cbc_trunc_half": TruncatedCiphertextError,
    "sm4_flip_last": DecryptionError,
    "sm4_flip_magic": DecryptionError,
    "sm4_magic_only": TruncatedCiphertextError,
    "sm4_trunc_header": TruncatedCiphertextError,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_has_its_own_error(name: str) -> None:
    with pytest.raises(BROKEN[name]) as caught:
        read(f"broken/{name}.ckpt")
    assert type(caught.value) is BROKEN[name]


@pytest.mark.parametrize("name", ["cbc_intact", "sm4_intact", "gcm_blocks_intact"])
def test_intact_file_among_the_broken_ones_opens(name: str) -> None:
    assert b"Float32" in read(f"broken/{name}.ckpt")


def rearranged() -> list[str]:
    return sorted(
        path.stem
        for path in (FILES / "broken").glob("*_blocks_*.ckpt")
        if path.stem != "gcm_blocks_intact"
    )


@pytest.mark.parametrize("name", rearranged())
def test_broken_file_with_rearranged_blocks_is_refused_for_having_no_seal(name: str) -> None:
    with pytest.raises(UnsealedError):
        read(f"broken/{name}.ckpt", allow_unsealed=False)


def test_broken_files_with_rearranged_blocks_are_all_tried() -> None:
    assert len(rearranged()) == 13


def test_broken_file_with_a_changed_unused_iv_byte_opens_when_unsealed_is_allowed() -> None:
    assert b"Float32" in read("broken/gcm_flip_iv_last.ckpt")


@pytest.mark.parametrize("name", ["empty_file", "one_byte"])
def test_broken_file_of_no_bytes_is_truncated(name: str) -> None:
    data = (FILES / "broken" / f"{name}.ckpt").read_bytes()
    with pytest.raises(TruncatedCiphertextError):
        unseal(data, "AES-GCM", allow_unsealed=True)


@pytest.mark.parametrize("name", ["zeros", "text", "zero_appended"])
def test_broken_file_that_is_plain_is_not_encrypted(name: str) -> None:
    data = (FILES / "broken" / f"{name}.ckpt").read_bytes()
    with pytest.raises(DecryptionError, match="not an encrypted MindSpore checkpoint"):
        unseal(data, "AES-GCM", allow_unsealed=True)
