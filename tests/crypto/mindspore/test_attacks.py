# SPDX-License-Identifier: Apache-2.0
"""Attacks by a writer of the file without a key. MindSpore accepts most of them; we accept none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckptmgr.crypto.errors import (
    CryptoError,
    DecryptionError,
    TamperedError,
    TruncatedCiphertextError,
    UnsealedError,
)
from ckptmgr.crypto.keys.key import Key

from .sealing import BLOCK, MODES, OTHER_KEY, seal, split, unseal

PLAINTEXT = os.urandom(4 * BLOCK)
TWO_KEYS = Path(__file__).parents[2] / "vectors/gcm_two_keys.json"

Attack = Callable[[list[bytes], list[bytes]], list[bytes]]

# a: the records of the file; b: those of another file of the same shape and key.
ATTACKS: dict[str, tuple[Attack, type[CryptoError]]] = {
    "swap blocks 0 and 1": (lambda a, b: [a[1], a[0], *a[2:]], TamperedError),
    "last block first": (lambda a, b: [a[3], *a[:3], a[4]], TamperedError),
    "swap blocks 1 and 2": (lambda a, b: [a[0], a[2], a[1], *a[3:]], TamperedError),
    "duplicate block 1": (lambda a, b: [a[0], a[1], a[1], *a[3:]], TamperedError),
    "insert a copy of block 1": (lambda a, b: [*a[:2], *a[1:]], TamperedError),
    "splice block 1 of another file": (lambda a, b: [a[0], b[1], *a[2:]], TamperedError),
    "splice the last block of another file": (lambda a, b: [*a[:3], b[3], a[4]], TamperedError),
    "seal of another file": (lambda a, b: [*a[:4], b[4]], TamperedError),
    "blocks of another file": (lambda a, b: [*b[:4], a[4]], TamperedError),
    "drop the first block": (lambda a, b: a[1:], TamperedError),
    "drop a middle block": (lambda a, b: [*a[:2], *a[3:]], TamperedError),
    "drop the last block": (lambda a, b: [*a[:3], a[4]], TamperedError),
    "drop all blocks": (lambda a, b: a[4:], TamperedError),
    "drop the seal": (lambda a, b: a[:4], UnsealedError),
    "drop the seal and a block": (lambda a, b: a[:3], UnsealedError),
    "seal first": (lambda a, b: [a[4], *a[:4]], UnsealedError),
    "seal twice": (lambda a, b: [*a, a[4]], TamperedError),
    "two seals": (lambda a, b: [*a, b[4]], TamperedError),
    "concatenate with another file": (lambda a, b: a + b, TamperedError),
    "concatenate with itself": (lambda a, b: a + a, TamperedError),
    "a block behind the seal": (lambda a, b: [*a, b[0]], UnsealedError),
    "a CRC trailer behind the seal": (lambda a, b: [*a, b"crc_num" + bytes(10)], TamperedError),
    "a CRC trailer instead of the seal": (
        lambda a, b: [*a[:4], b"crc_num" + bytes(10)],
        UnsealedError,
    ),
    "empty the file": (lambda a, b: [], TruncatedCiphertextError),
    "a byte behind the seal": (lambda a, b: [*a, b"\0"], TruncatedCiphertextError),
    "three bytes behind the seal": (lambda a, b: [*a, bytes(3)], TruncatedCiphertextError),
    "64 bytes behind the seal": (lambda a, b: [*a, bytes(64)], TamperedError),
    "four bytes behind the seal": (lambda a, b: [*a, bytes(4)], TamperedError),
    "a magic behind the seal": (lambda a, b: [*a, a[0][:4]], TruncatedCiphertextError),
    "a head behind the seal": (lambda a, b: [*a, a[0][:-BLOCK]], TruncatedCiphertextError),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_on_the_records_has_its_own_error(mode: str, attack: str) -> None:
    manipulate, expected = ATTACKS[attack]
    a, b = (split(seal(data, mode), mode) for data in (PLAINTEXT, os.urandom(4 * BLOCK)))
    with pytest.raises(expected) as caught:
        unseal(b"".join(manipulate(a, b)), mode)
    assert type(caught.value) is expected


@pytest.mark.parametrize("mode", MODES)
def test_attack_that_moves_bytes_between_blocks_is_tampered(mode: str) -> None:
    # Honest blocks and digests of a file cut at 32 bytes, under the seal of one cut at 64.
    small = split(seal(PLAINTEXT[:64], mode, block_bytes=32), mode)
    large = split(seal(PLAINTEXT[:65], mode, block_bytes=64), mode)
    with pytest.raises(TamperedError, match="block 0 is not as long as the seal says") as caught:
        unseal(b"".join([*small[:2], large[2]]), mode)
    assert caught.value.offset == 0


@pytest.mark.parametrize("mode", MODES)
def test_attack_with_the_seal_of_another_key_does_not_open(mode: str) -> None:
    a = split(seal(PLAINTEXT, mode), mode)
    b = split(seal(PLAINTEXT, mode, key=OTHER_KEY), mode)
    with pytest.raises(DecryptionError, match="the seal does not open"):
        unseal(b"".join([*a[:4], b[4]]), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True])
def test_truncation_anywhere_is_refused(mode: str, has_crc: bool) -> None:
    file = seal(PLAINTEXT[:100], mode, has_crc=has_crc)
    edges, at = set(), 0
    for record in split(file, mode):
        edges.add(at)
        at += len(record)
    for cut in range(len(file)):
        expected = UnsealedError if cut in edges - {0} else TruncatedCiphertextError
        with pytest.raises(expected):
            unseal(file[:cut], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True])
def test_extension_by_any_of_the_own_bytes_is_refused(mode: str, has_crc: bool) -> None:
    file = seal(PLAINTEXT[:100], mode, has_crc=has_crc)
    for size in range(1, len(file)):
        with pytest.raises(CryptoError):
            unseal(file + file[:size], mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True])
@pytest.mark.parametrize("size", [0, 100])
def test_flip_of_every_single_bit_is_refused(mode: str, has_crc: bool, size: int) -> None:
    file = bytearray(seal(PLAINTEXT[:size], mode, has_crc=has_crc))
    for bit in range(8 * len(file)):
        file[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CryptoError):
            unseal(bytes(file), mode)
        file[bit // 8] ^= 1 << bit % 8
    assert unseal(bytes(file), mode)[:size] == PLAINTEXT[:size]


@pytest.mark.parametrize("mode", MODES)
def test_flip_in_a_block_names_the_block_and_its_offset(mode: str) -> None:
    records = split(seal(PLAINTEXT, mode), mode)
    changed = bytearray(records[2])
    changed[-1] ^= 1
    with pytest.raises(TamperedError, match="block 2") as caught:
        unseal(b"".join([*records[:2], changed, *records[3:]]), mode)
    assert caught.value.offset == len(records[0] + records[1])


def test_flip_in_the_unused_iv_bytes_of_the_seal_is_tampered() -> None:
    records = split(seal(PLAINTEXT, "AES-GCM"), "AES-GCM")
    for position in range(40, 44):
        changed = bytearray(records[4])
        changed[position] ^= 1
        with pytest.raises(TamperedError, match="unused bytes of the seal's IV"):
            unseal(b"".join([*records[:4], changed]), "AES-GCM")


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_damage_of_a_cbc_seal_has_one_message_whether_padding_or_mac_fails(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    seal_bytes = len(split(file, mode)[-1])
    messages = set()
    for position in range(len(file) - seal_bytes + 32, len(file)):
        changed = bytearray(file)
        changed[position] ^= 0x10
        with pytest.raises(DecryptionError) as caught:
            unseal(bytes(changed), mode)
        messages.add((type(caught.value), str(caught.value)))
    assert messages == {
        (DecryptionError, "the seal does not open: the key is wrong, or the file was changed")
    }


@pytest.mark.parametrize("mode", MODES)
def test_sealed_file_with_a_damaged_seal_is_not_sealed_even_when_unsealed_is_allowed(
    mode: str,
) -> None:
    file = bytearray(seal(PLAINTEXT, mode))
    file[-20] ^= 1
    with pytest.raises(CryptoError):
        unseal(bytes(file), mode, allow_unsealed=True)


def test_block_that_two_keys_accept_opens_for_the_one_that_sealed_it_only() -> None:
    # AES-GCM does not commit to its key. The seal does: its key and its MAC are made by HMAC.
    vector = json.loads(TWO_KEYS.read_bytes())
    nonce, ciphertext, tag = (
        bytes.fromhex(vector[name]) for name in ("nonce", "ciphertext", "tag")
    )
    first, second = (bytes.fromhex(key) for key in vector["keys"])
    plain = [AESGCM(key).decrypt(nonce, ciphertext + tag, None) for key in (first, second)]
    assert plain[0] != plain[1]
    file = seal(plain[0], "AES-GCM", key=Key(first), random=lambda size: nonce.ljust(size, b"\0"))
    block = split(file, "AES-GCM")[0]
    assert block.endswith(ciphertext)
    assert unseal(file, "AES-GCM", key=Key(first)) == plain[0]
    with pytest.raises(DecryptionError, match="the seal does not open"):
        unseal(file, "AES-GCM", key=Key(second))
    for key in (first, second):
        with pytest.raises(UnsealedError):
            unseal(block, "AES-GCM", key=Key(key))
