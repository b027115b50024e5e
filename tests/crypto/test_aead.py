# SPDX-License-Identifier: Apache-2.0
"""The authenticated ciphers against published answers, which are read from beside the repository where they are many."""

from __future__ import annotations

import os
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ckptmgr.crypto.aead import (
    A256CBC_HS512,
    AES_256_GCM,
    SM4_CBC_HMAC_SM3,
    SM4_GCM,
    Aead,
)
from ckptmgr.crypto.errors import DecryptionError

from .test_wycheproof import cases

ALL: dict[str, Aead] = {
    "AES-GCM": AES_256_GCM,
    "SM4-GCM": SM4_GCM,
    "AES-CBC": A256CBC_HS512,
    "SM4-CBC": SM4_CBC_HMAC_SM3,
}


def opened(aead: Aead, case: dict[str, Any]) -> bytes | None:
    """Return the plaintext of a valid case, None where it is refused."""
    key, iv, aad, ciphertext, tag, message = (
        bytes.fromhex(case[name]) for name in ("key", "iv", "aad", "ct", "tag", "msg")
    )
    # The length of the plaintext is always known here; in a case with bad padding it is not the one of the message.
    size = (
        len(message) if case["result"] == "valid" else max(0, aead.plaintext_room(len(ciphertext)))
    )
    plaintext = bytearray(size)
    try:
        aead.decrypt_into(
            key,
            iv=iv,
            aad=aad,
            tag=tag,
            ciphertext=memoryview(ciphertext),
            plaintext=memoryview(plaintext),
        )
    except DecryptionError:
        return None
    return bytes(plaintext)


@pytest.mark.parametrize(
    ("name", "aead", "least"),
    [
        ("aes_gcm_test.json", AES_256_GCM, 60),
        ("sm4_gcm_test.json", SM4_GCM, 60),
        ("a256cbc_hs512_test.json", A256CBC_HS512, 60),
    ],
)
def test_published_cases_are_answered_as_published(name: str, aead: Aead, least: int) -> None:
    tried = 0
    for case in cases(name):
        sizes = (case["keySize"], case["ivSize"], case["tagSize"])
        if sizes != (8 * aead.key_bytes, 8 * aead.iv_bytes, 8 * aead.tag_bytes):
            continue
        tried += 1
        expected = bytes.fromhex(case["msg"]) if case["result"] == "valid" else None
        assert opened(aead, case) == expected, case["tcId"]
    assert tried >= least


def test_sm4_gcm_gives_the_answer_of_rfc_8998() -> None:
    key = bytes.fromhex("0123456789abcdeffedcba9876543210")
    plaintext = bytes.fromhex(
        "aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbccccccccccccccccdddddddddddddddd"
        "eeeeeeeeeeeeeeeeffffffffffffffffeeeeeeeeeeeeeeeeaaaaaaaaaaaaaaaa"
    )
    ciphertext = bytearray(len(plaintext))
    tag = SM4_GCM.encrypt_into(
        key,
        iv=bytes.fromhex("00001234567800000000abcd"),
        aad=bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2"),
        plaintext=memoryview(plaintext),
        ciphertext=memoryview(ciphertext),
    )
    assert tag.hex() == "83de3541e4c2b58177e065a9bf7b62ec"
    assert ciphertext.hex() == (
        "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
        "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d"
    )


def test_sm4_cbc_is_encrypted_then_authenticated_with_hmac_sm3() -> None:
    mac_key, key, iv, aad = bytes(range(32)), bytes(range(16)), bytes(range(16)), b"position"
    ciphertext = bytearray(32)
    tag = SM4_CBC_HMAC_SM3.encrypt_into(
        mac_key + key,
        iv=iv,
        aad=aad,
        plaintext=memoryview(b"twenty bytes of data"),
        ciphertext=memoryview(ciphertext),
    )
    encryptor = Cipher(algorithms.SM4(key), modes.CBC(iv)).encryptor()
    assert ciphertext == encryptor.update(b"twenty bytes of data" + b"\x0c" * 12)
    mac = hmac.HMAC(mac_key, hashes.SM3())
    mac.update(aad + iv + ciphertext + (64).to_bytes(8, "big"))
    assert tag == mac.finalize()


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 64])
def test_plaintext_of_any_size_comes_back(mode: str, size: int) -> None:
    aead, plaintext = ALL[mode], os.urandom(size)
    key, iv = os.urandom(aead.key_bytes), os.urandom(aead.iv_bytes)
    ciphertext, clear = bytearray(aead.ciphertext_size(size)), bytearray(size)
    tag = aead.encrypt_into(
        key,
        iv=iv,
        aad=b"a",
        plaintext=memoryview(plaintext),
        ciphertext=memoryview(ciphertext),
    )
    aead.decrypt_into(
        key,
        iv=iv,
        aad=b"a",
        tag=tag,
        ciphertext=memoryview(ciphertext),
        plaintext=memoryview(clear),
    )
    assert (bytes(clear), len(tag)) == (plaintext, aead.tag_bytes)


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_cbc_with_a_right_mac_over_wrong_padding_fails_as_a_wrong_mac_does(mode: str) -> None:
    aead = ALL[mode]
    key, iv, ciphertext = os.urandom(aead.key_bytes), bytes(16), bytearray(32)
    tag = aead.encrypt_into(
        key, iv=iv, aad=b"", plaintext=memoryview(bytes(20)), ciphertext=memoryview(ciphertext)
    )
    messages = set()
    for size, mac in ((19, tag), (20, bytes(32))):
        clear = bytearray(b"\xff" * size)
        with pytest.raises(DecryptionError) as caught:
            aead.decrypt_into(
                key,
                iv=iv,
                aad=b"",
                tag=mac,
                ciphertext=memoryview(ciphertext),
                plaintext=memoryview(clear),
            )
        messages.add(str(caught.value))
        assert clear == bytes(size)
    assert len(messages) == 1
