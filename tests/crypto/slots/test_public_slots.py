# SPDX-License-Identifier: Apache-2.0
"""Key slots for public keys."""

from __future__ import annotations

import functools

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ckptmgr.crypto.errors import KeyLengthError, TamperedError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import Identity, Recipient, Slot, SlotType
from ckptmgr.crypto.slots.public import (
    hybrid_identity,
    hybrid_recipient,
    rsa_identity,
    rsa_recipient,
    x25519_identity,
    x25519_recipient,
)
from tests.crypto.container.containers import ME, seal, unseal

_mlkem = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.mlkem")

DATA_KEY = Key(bytes(range(32)))
BOUND = bytes(64)
KINDS = {
    "x25519": (SlotType.X25519, 80),
    "hybrid": (SlotType.MLKEM768_X25519, 1168),
    "rsa": (SlotType.RSA_OAEP, 384),
}


@functools.cache
def rsa_key(bits: int) -> RSAPrivateKey:
    return generate_private_key(65537, bits)


def x25519_key(number: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes([number]) * 32)


@functools.cache
def pair(kind: str, number: int = 1) -> tuple[Recipient, Identity]:
    x25519 = x25519_key(number)
    if kind == "x25519":
        return x25519_recipient(x25519.public_key()), x25519_identity(x25519)
    if kind == "hybrid":
        mlkem = _mlkem.MLKEM768PrivateKey.from_seed_bytes(bytes([number]) * 64)
        recipient = hybrid_recipient(mlkem.public_key(), x25519.public_key())
        return recipient, hybrid_identity(mlkem, x25519)
    private = rsa_key(3072) if number == 1 else rsa_key(3080)
    return rsa_recipient(private.public_key()), rsa_identity(private)


@pytest.mark.parametrize("kind", KINDS)
def test_slot_of_a_public_key_opens_for_the_private_one(kind: str) -> None:
    recipient, identity = pair(kind)
    slot = recipient.wrap(DATA_KEY, bound=BOUND)
    assert (slot.type, len(slot.body)) == KINDS[kind]
    assert identity.unwrap(slot, bound=BOUND) == DATA_KEY.raw


@pytest.mark.parametrize("kind", KINDS)
def test_slot_of_another_public_key_is_not_tried(kind: str) -> None:
    slot = pair(kind, 2)[0].wrap(DATA_KEY, bound=BOUND)
    assert pair(kind)[1].unwrap(slot, bound=BOUND) is None
    assert pair(kind)[1].unwrap(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND) is None


@pytest.mark.parametrize("kind", KINDS)
def test_slot_bound_to_another_file_is_damaged(kind: str) -> None:
    recipient, identity = pair(kind)
    slot = recipient.wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(TamperedError, match="but the slot is damaged"):
        identity.unwrap(slot, bound=b"\1" * 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, 31, 32, 40, 79, -1])
def test_slot_with_a_flipped_bit_is_damaged(kind: str, position: int) -> None:
    recipient, identity = pair(kind)
    slot = recipient.wrap(DATA_KEY, bound=BOUND)
    body = bytearray(slot.body)
    body[position] ^= 1
    with pytest.raises(TamperedError):
        identity.unwrap(Slot(type=slot.type, key_id=slot.key_id, body=bytes(body)), bound=BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0, 1, 255])
def test_slot_of_one_byte_repeated_is_damaged(kind: str, byte: int) -> None:
    # All zeros is a point of small order, which X25519 must refuse.
    recipient, identity = pair(kind)
    slot = recipient.wrap(DATA_KEY, bound=BOUND)
    body = bytes([byte]) * len(slot.body)
    with pytest.raises(TamperedError):
        identity.unwrap(Slot(type=slot.type, key_id=slot.key_id, body=body), bound=BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 31, 79, 2000])
def test_slot_of_wrong_length_is_damaged(kind: str, size: int) -> None:
    recipient, identity = pair(kind)
    slot = recipient.wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(TamperedError, match=f"{size} bytes, not"):
        identity.unwrap(Slot(type=slot.type, key_id=slot.key_id, body=bytes(size)), bound=BOUND)


def test_container_for_many_public_keys_opens_for_each() -> None:
    pairs = [pair(kind, number) for kind in KINDS for number in (1, 2)]
    file = seal(b"weights", recipients=[recipient for recipient, _ in pairs])
    for _, identity in pairs:
        assert unseal(file, identity) == b"weights"


def test_rsa_key_that_is_too_short_is_refused() -> None:
    short = rsa_key(2048)
    with pytest.raises(KeyLengthError, match="not 2048"):
        rsa_recipient(short.public_key())
    with pytest.raises(KeyLengthError, match="not 2048"):
        rsa_identity(short)


@pytest.mark.parametrize("kind", KINDS)
def test_private_keys_are_never_shown(kind: str) -> None:
    assert repr(pair(kind)[1]) == "PrivateKeyIdentity(not shown)"
