# SPDX-License-Identifier: Apache-2.0
"""The seal: mistakes of a holder of the key, and changes without the key."""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib

import pytest

from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.errors import DecryptionError, TamperedError, UnsupportedSuiteError
from ckptmgr.crypto.mindspore.seal import (
    Seal,
    claimed_size,
    decode_seal,
    encode_seal,
    seal_plaintext_size,
    seal_record_size,
)

from .sealing import KEY, MODES, OTHER_KEY

FILE_ID = bytes(range(16))


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one output block, written out."""
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")


def body_of(
    *,
    version: int = 1,
    code: int = 0,
    flags: int = 0,
    block: int = 64,
    count: int = 2,
    size: int = 100,
    rest: bytes = b"d" * 64,
) -> bytes:
    """Return an AES-GCM seal with an honest MAC over whatever it says, made without the code under test."""
    content = struct.pack("<BBH16sQQQ", version, code, flags, FILE_ID, block, count, size) + rest
    secret = hkdf_sha256(KEY.raw, FILE_ID, b"ckptmgr/v1/sealed/AES-GCM")
    body = content + hmac.digest(secret, content, hashlib.sha256)
    length = len(body)
    varint = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
    return bytes.fromhex("dab408") + varint + body


def test_seal_is_the_documented_bytes() -> None:
    seal = Seal(file_id=FILE_ID, block_size=64, plaintext_size=100, digests=b"d" * 64)
    assert encode_seal(mode_of("AES-GCM"), KEY, seal=seal) == body_of()


def test_seal_with_crc_is_the_documented_bytes() -> None:
    seal = Seal(file_id=FILE_ID, block_size=64, plaintext_size=100, digests=b"d" * 64, crc=7)
    field = body_of(flags=1, rest=b"d" * 64 + b"\x07\0\0\0")
    trailer = b"crc_num" + zlib.crc32(field, 7).to_bytes(10, "big")
    assert encode_seal(mode_of("AES-GCM"), KEY, seal=seal) == field + trailer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crc", [None, 0, 0xFFFFFFFF])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 600])
def test_seal_comes_back_and_has_the_size_foretold(mode: str, crc: int | None, count: int) -> None:
    suite = mode_of(mode)
    seal = Seal(
        file_id=FILE_ID,
        block_size=16,
        plaintext_size=16 * count,
        digests=b"d" * 32 * count,
        crc=crc,
    )
    plaintext = encode_seal(suite, KEY, seal=seal)
    assert decode_seal(suite, KEY, plaintext=plaintext) == seal
    assert len(plaintext) == seal_plaintext_size(count, has_crc=crc is not None)
    assert claimed_size(plaintext[:32]) == len(plaintext)


def test_seal_of_another_mode_has_another_mac() -> None:
    seal = Seal(file_id=FILE_ID, block_size=64, plaintext_size=100, digests=b"d" * 64)
    plaintext = encode_seal(mode_of("AES-CBC"), KEY, seal=seal)
    with pytest.raises(DecryptionError, match="the seal does not open"):
        decode_seal(mode_of("AES-GCM"), KEY, plaintext=plaintext)


def test_seal_under_another_key_does_not_open() -> None:
    with pytest.raises(DecryptionError, match="the seal does not open"):
        decode_seal(mode_of("AES-GCM"), OTHER_KEY, plaintext=body_of())


@pytest.mark.parametrize("fields", [{"version": 0}, {"version": 2}, {"flags": 2}, {"flags": 3}])
def test_seal_of_a_newer_version_is_unsupported(fields: dict[str, int]) -> None:
    with pytest.raises(UnsupportedSuiteError, match="the seal is of version") as caught:
        decode_seal(mode_of("AES-GCM"), KEY, plaintext=body_of(**fields))  # type: ignore[arg-type]
    assert caught.value.hint == "a newer ckptmgr wrote this file"


@pytest.mark.parametrize(
    "fields",
    [
        {"code": 1},
        {"block": 0},
        {"block": 16},
        {"block": 100},
        {"count": 3},
        {"count": 2**64 - 1},
        {"size": 0},
        {"size": 129},
        {"size": 2**64 - 1},
        {"flags": 1},
    ],
    ids=str,
)
def test_seal_that_contradicts_itself_is_tampered(fields: dict[str, int]) -> None:
    with pytest.raises(TamperedError, match="contradicts itself"):
        decode_seal(mode_of("AES-GCM"), KEY, plaintext=body_of(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plaintext",
    [
        b"",
        bytes.fromhex("dab408"),
        bytes.fromhex("dab40800"),
        bytes.fromhex("dab408ffffffffff"),
        bytes.fromhex("dab408ffffffffffffffffffffffff"),
        bytes.fromhex("dab40820") + bytes(32),
        body_of()[:-1],
        body_of() + b"\0",
        body_of().replace(b"\xda\xb4\x08", b"\xda\xb4\x09", 1),
        bytes.fromhex("dab408") + b"\x8c\x81\x00" + body_of()[5:],
    ],
    ids=str,
)
def test_seal_of_wrong_form_does_not_open(plaintext: bytes) -> None:
    with pytest.raises(DecryptionError, match="the seal does not open"):
        decode_seal(mode_of("AES-GCM"), KEY, plaintext=plaintext)


def test_seal_with_a_changed_crc_trailer_does_not_open() -> None:
    seal = Seal(file_id=FILE_ID, block_size=64, plaintext_size=100, digests=b"d" * 64, crc=7)
    plaintext = bytearray(encode_seal(mode_of("AES-GCM"), KEY, seal=seal))
    plaintext[-1] ^= 1
    with pytest.raises(DecryptionError, match="the seal does not open"):
        decode_seal(mode_of("AES-GCM"), KEY, plaintext=bytes(plaintext))


def test_claimed_size_of_anything_else_is_none() -> None:
    assert claimed_size(b"\x0a\x16" + bytes(30)) is None


@pytest.mark.parametrize("mode", MODES)
def test_seal_for_too_many_blocks_is_refused(mode: str) -> None:
    assert seal_record_size(mode_of(mode), 2_000_000, has_crc=True) < 64 * 2**20
    with pytest.raises(ValueError, match="2100000 blocks are too many for one seal"):
        seal_record_size(mode_of(mode), 2_100_000, has_crc=False)
