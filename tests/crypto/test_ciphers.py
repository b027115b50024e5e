# SPDX-License-Identifier: Apache-2.0
"""The three modes against published answers, and their behaviour at the edges of a block."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.ciphers import AES_CBC, AES_GCM, MODES, SM4_CBC, CipherMode, mode_of
from ckptmgr.crypto.errors import DecryptionError, KeyLengthError, UnsupportedSuiteError
from ckptmgr.crypto.keys.key import Key

_SM4_TEXT = "AAAAAAAABBBBBBBBCCCCCCCCDDDDDDDDEEEEEEEEFFFFFFFFAAAAAAAABBBBBBBB"
_NIST_TEXT = "6bc1bee22e409f96e93d7e117393172a"
_COUNTING = "000102030405060708090a0b0c0d0e0f"

CBC_ANSWERS = [
    pytest.param(
        SM4_CBC,
        "0123456789abcdeffedcba9876543210",
        "0" * 32,
        "0123456789abcdeffedcba9876543210",
        "681edf34d206965e86b3e94f536e4246",
        id="GB/T 32907 A.1",
    ),
    pytest.param(
        SM4_CBC,
        "0123456789ABCDEFFEDCBA9876543210",
        _COUNTING,
        _SM4_TEXT,
        "78EBB11CC40B0A48312AAEB2040244CB4CB7016951909226979B0D15DC6A8F6D",
        id="draft-ribose A.2.2.1",
    ),
    pytest.param(
        SM4_CBC,
        "FEDCBA98765432100123456789ABCDEF",
        _COUNTING,
        _SM4_TEXT,
        "0D3A6DDC2D21C698857215587B7BB59A91F2C147911A4144665E1FA1D40BAE38",
        id="draft-ribose A.2.2.2",
    ),
    pytest.param(
        AES_CBC,
        "2b7e151628aed2a6abf7158809cf4f3c",
        _COUNTING,
        _NIST_TEXT,
        "7649abac8119b246cee98e9b12e9197d",
        id="SP 800-38A F.2.1",
    ),
    pytest.param(
        AES_CBC,
        "8e73b0f7da0e6452c810f32b809079e562f8ead2522c6b7b",
        _COUNTING,
        _NIST_TEXT,
        "4f021db243bc633d7178183a9fa071e8",
        id="SP 800-38A F.2.3",
    ),
    pytest.param(
        AES_CBC,
        "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
        _COUNTING,
        _NIST_TEXT,
        "f58c4c04d6e5f1ba779eabfb5f7bfbd6",
        id="SP 800-38A F.2.5",
    ),
]

GCM_ANSWERS = [
    pytest.param(
        16, "0388dace60b6a392f328c2b971b2fe78", "ab6e47d42cec13bdf53a67b21257bddf", id="case 2"
    ),
    pytest.param(
        24, "98e7247c07f0fe411c267e4384b0f600", "2ff58d80033927ab8ef4d4587514f0fb", id="case 8"
    ),
    pytest.param(
        32, "cea7403d4d606b6e074ec5d3baf39d18", "d0d1c8a799996bf0265b98b5d48ab919", id="case 14"
    ),
]


def encrypt(mode: CipherMode, key: Key, *, iv: bytes, plaintext: bytes) -> tuple[bytes, bytes]:
    ciphertext = bytearray(mode.ciphertext_size(len(plaintext)))
    tag = mode.encrypt_into(
        key, iv=iv, plaintext=memoryview(plaintext), ciphertext=memoryview(ciphertext)
    )
    return bytes(ciphertext), tag


def decrypt(
    mode: CipherMode, key: Key, *, iv: bytes, tag: bytes, ciphertext: bytes, into: bytearray
) -> bytes:
    mode.decrypt_into(
        key, iv=iv, tag=tag, ciphertext=memoryview(ciphertext), plaintext=memoryview(into)
    )
    return bytes(into)


@pytest.mark.parametrize(("mode", "key", "iv", "plaintext", "answer"), CBC_ANSWERS)
def test_cbc_published_plaintext_gives_published_ciphertext_and_padding(
    mode: CipherMode, key: str, iv: str, plaintext: str, answer: str
) -> None:
    ciphertext, tag = encrypt(
        mode, Key(bytes.fromhex(key)), iv=bytes.fromhex(iv), plaintext=bytes.fromhex(plaintext)
    )
    assert ciphertext[:-16] == bytes.fromhex(answer)
    assert tag == b""


@pytest.mark.parametrize(("key_bytes", "ciphertext", "tag"), GCM_ANSWERS)
def test_gcm_zero_block_under_zero_key_gives_published_answer(
    key_bytes: int, ciphertext: str, tag: str
) -> None:
    answer = encrypt(AES_GCM, Key(bytes(key_bytes)), iv=bytes(16), plaintext=bytes(16))
    assert answer == (bytes.fromhex(ciphertext), bytes.fromhex(tag))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@given(plaintext=st.binary(max_size=100))
def test_modes_any_plaintext_comes_back(mode: CipherMode, plaintext: bytes) -> None:
    key, iv = Key(bytes(16)), mode.new_iv(os.urandom)
    ciphertext, tag = encrypt(mode, key, iv=iv, plaintext=plaintext)
    clear = bytearray(len(plaintext))
    assert decrypt(mode, key, iv=iv, tag=tag, ciphertext=ciphertext, into=clear) == plaintext
    end = (iv + ciphertext)[-32:]
    assert mode.plaintext_size(key, ciphertext_size=len(ciphertext), end=end) == len(plaintext)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
def test_decryption_under_wrong_key_raises_and_leaves_zeros(mode: CipherMode, size: int) -> None:
    iv = bytes(16)
    ciphertext, tag = encrypt(mode, Key(bytes(16)), iv=iv, plaintext=b"\xff" * size)
    clear = bytearray(b"\xee" * size)
    with pytest.raises(DecryptionError):
        decrypt(mode, Key(b"\x01" + bytes(15)), iv=iv, tag=tag, ciphertext=ciphertext, into=clear)
    assert clear == bytes(size)


@pytest.mark.parametrize("mode", [AES_CBC, SM4_CBC], ids=lambda mode: mode.name)
@pytest.mark.parametrize(
    "padded",
    [bytes(16), b"\x11" * 16, b"\xff" * 16, bytes(13) + b"\x02\x03\x03", bytes(14) + b"\x03\x03"],
    ids=["0", "17", "255", "first of three wrong", "one too few"],
)
def test_cbc_bad_padding_has_one_message_however_it_is_bad(mode: CipherMode, padded: bytes) -> None:
    key, iv = Key(bytes(16)), bytes(16)
    ciphertext = encrypt(mode, key, iv=iv, plaintext=padded)[0][:16]
    messages = set()
    with pytest.raises(DecryptionError) as caught:
        mode.plaintext_size(key, ciphertext_size=16, end=iv + ciphertext)
    messages.add(str(caught.value))
    for size in range(16):
        with pytest.raises(DecryptionError) as caught:
            decrypt(mode, key, iv=iv, tag=b"", ciphertext=ciphertext, into=bytearray(size))
        messages.add(str(caught.value))
    assert messages == {"the key is wrong, or the bytes were changed"}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_peek_shows_the_first_plaintext_bytes(mode: CipherMode) -> None:
    plaintext = bytes(range(64))
    ciphertext, _ = encrypt(mode, Key(bytes(16)), iv=bytes(16), plaintext=plaintext)
    first = mode.peek(Key(bytes(16)), iv=bytes(16), ciphertext=memoryview(ciphertext)[:32])
    assert first == plaintext[:32]


def test_gcm_iv_ends_in_four_zero_bytes() -> None:
    assert AES_GCM.new_iv(lambda size: b"\xff" * size) == b"\xff" * 12 + bytes(4)


@pytest.mark.parametrize("mode", [AES_CBC, SM4_CBC], ids=lambda mode: mode.name)
def test_cbc_iv_is_random_throughout(mode: CipherMode) -> None:
    assert mode.new_iv(lambda size: b"\xff" * size) == b"\xff" * 16


@pytest.mark.parametrize("size", [24, 32])
def test_sm4_longer_key_raises_key_length_error(size: int) -> None:
    with pytest.raises(KeyLengthError, match=f"SM4-CBC takes a key of 16 bytes, not {size}"):
        encrypt(SM4_CBC, Key(bytes(size)), iv=bytes(16), plaintext=b"x")


@pytest.mark.parametrize("name", ["aes-gcm", "SM4-GCM", "AES-CTR", "", "AES-GCM "])
def test_mode_of_unknown_name_names_the_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedSuiteError) as caught:
        mode_of(name)
    assert caught.value.hint == "use one of AES-GCM, AES-CBC, SM4-CBC"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_mode_of_known_name_returns_the_mode(mode: CipherMode) -> None:
    assert mode_of(mode.name) is mode
