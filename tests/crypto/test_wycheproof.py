# SPDX-License-Identifier: Apache-2.0
"""How we call the primitives, against the published cases of Project Wycheproof."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes

from ckptmgr.crypto.ciphers import AES_CBC, AES_GCM, CipherMode
from ckptmgr.crypto.errors import CryptoError, DecryptionError
from ckptmgr.crypto.keys.key import Key, derive

VECTORS = Path(__file__).parents[1] / "vectors" / "wycheproof"


def cases(name: str) -> Iterator[dict[str, Any]]:
    for group in json.loads((VECTORS / name).read_text())["testGroups"]:
        for case in group["tests"]:
            yield {**group, **case}


def open_case(mode: CipherMode, case: dict[str, Any], *, tag: bytes) -> bytes | None:
    """Return the plaintext of a case, or None when it is refused."""
    ciphertext, key = bytes.fromhex(case["ct"]), Key(bytes.fromhex(case["key"]))
    iv = bytes.fromhex(case["iv"]).ljust(16, b"\0")
    try:
        if len(ciphertext) == 0 or (not tag and len(ciphertext) % 16):
            raise DecryptionError("never reaches a cipher: record heads refuse such lengths")
        size = mode.plaintext_size(
            key, ciphertext_size=len(ciphertext), end=(iv + ciphertext)[-32:]
        )
        clear = bytearray(size)
        mode.decrypt_into(
            key, iv=iv, tag=tag, ciphertext=memoryview(ciphertext), plaintext=memoryview(clear)
        )
    except CryptoError:
        return None
    return bytes(clear)


def test_aes_gcm_cases_without_associated_data_are_answered_as_published() -> None:
    tried = 0
    for case in cases("aes_gcm_test.json"):
        if case["ivSize"] != 96 or case["aad"] or not case["msg"]:
            continue
        tried += 1
        expected = bytes.fromhex(case["msg"]) if case["result"] == "valid" else None
        assert open_case(AES_GCM, case, tag=bytes.fromhex(case["tag"])) == expected, case["tcId"]
    assert tried > 100


def test_aes_cbc_cases_are_answered_as_published() -> None:
    tried = 0
    for case in cases("aes_cbc_pkcs5_test.json"):
        tried += 1
        expected = bytes.fromhex(case["msg"]) if case["result"] == "valid" else None
        assert open_case(AES_CBC, case, tag=b"") == expected, case["tcId"]
    assert tried > 200


def test_hkdf_cases_with_our_key_sizes_are_answered_as_published() -> None:
    tried = 0
    for case in cases("hkdf_sha384_test.json"):
        secret, info = bytes.fromhex(case["ikm"]), bytes.fromhex(case["info"])
        if len(secret) not in (16, 24, 32) or not info.isascii() or case["result"] != "valid":
            continue
        tried += 1
        answer = derive(
            Key(secret),
            info.decode("ascii"),
            salt=bytes.fromhex(case["salt"]),
            length=case["size"],
            algorithm=hashes.SHA384(),
        )
        assert answer == bytes.fromhex(case["okm"]), case["tcId"]
    assert tried >= 10
