# SPDX-License-Identifier: Apache-2.0
"""Key slots for public keys: the writer of a file needs no secret, only a private key opens it.

| slot | body | bytes |
|---|---|---|
| X25519 | HPKE base mode, DHKEM(X25519), HKDF-SHA256, AES-256-GCM | 80 |
| ML-KEM-768 with X25519 | HPKE base mode with the hybrid KEM, the same otherwise | 1168 |
| RSA | OAEP with SHA-256, keys of 3072 to 8192 bits | those of the modulus |

The `info` of HPKE and the label of OAEP are a prefix, the immutable bytes of the file and the slot
head. The key id is the first eight bytes of SHA-256 over the public key: raw for X25519, ML-KEM
then X25519 for the hybrid, DER for RSA.

Source: RFC 9180 (HPKE), draft-ietf-hpke-pq (hybrid KEM), RFC 8017 section 7.1 (OAEP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ..errors import KeyLengthError
from ..keys.key import Key
from . import (
    DATA_KEY_BYTES,
    KEY_ID_BYTES,
    Slot,
    SlotType,
    check_body_size,
    damaged_slot,
    slot_head,
)

_TAG_BYTES = 16
_HPKE_PREFIX = b"ckptmgr/v1/hpke"
_RSA_PREFIX = b"ckptmgr/v1/rsa"
_RSA_BITS = range(3072, 8193)
_X25519 = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_X25519_BODY_BYTES = 32 + DATA_KEY_BYTES + _TAG_BYTES
_HYBRID = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_HYBRID_BODY_BYTES = 1120 + DATA_KEY_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True)
class X25519Recipient:
    """An X25519 public key."""

    key: X25519PublicKey

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for the private key."""
        return _wrap(
            SlotType.X25519,
            _x25519_id(self.key),
            lambda info: _X25519.encrypt(data_key.raw, self.key, info=info),
            bound=bound,
            body_size=_X25519_BODY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class X25519Identity:
    """An X25519 private key; never shown."""

    key: X25519PrivateKey = field(repr=False)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for another key's slot; raises as `Identity.unwrap`."""
        return _unwrap(
            slot,
            SlotType.X25519,
            _x25519_id(self.key.public_key()),
            lambda info: _X25519.decrypt(slot.body, self.key, info=info),
            bound=bound,
            body_size=_X25519_BODY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class HybridRecipient:
    """An ML-KEM-768 and an X25519 public key: safe while either is, post-quantum."""

    mlkem: MLKEM768PublicKey
    x25519: X25519PublicKey

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for the private keys."""
        public = MLKEM768X25519PublicKey(self.mlkem, self.x25519)
        return _wrap(
            SlotType.MLKEM768_X25519,
            _hybrid_id(self.mlkem, self.x25519),
            lambda info: _HYBRID.encrypt(data_key.raw, public, info=info),
            bound=bound,
            body_size=_HYBRID_BODY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class HybridIdentity:
    """The private keys of a `HybridRecipient`; never shown."""

    mlkem: MLKEM768PrivateKey = field(repr=False)
    x25519: X25519PrivateKey = field(repr=False)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for another key's slot; raises as `Identity.unwrap`."""
        private = MLKEM768X25519PrivateKey(self.mlkem, self.x25519)
        return _unwrap(
            slot,
            SlotType.MLKEM768_X25519,
            _hybrid_id(self.mlkem.public_key(), self.x25519.public_key()),
            lambda info: _HYBRID.decrypt(slot.body, private, info=info),
            bound=bound,
            body_size=_HYBRID_BODY_BYTES,
        )


@dataclass(frozen=True, slots=True)
class RsaRecipient:
    """An RSA public key of 3072 to 8192 bits, as of a hardware module."""

    key: RSAPublicKey

    def __post_init__(self) -> None:
        _check_rsa(self.key.key_size)

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for the private key."""
        return _wrap(
            SlotType.RSA_OAEP,
            _rsa_id(self.key),
            lambda label: self.key.encrypt(data_key.raw, _oaep(label)),
            bound=bound,
            body_size=(self.key.key_size + 7) // 8,
        )


@dataclass(frozen=True, slots=True)
class RsaIdentity:
    """An RSA private key of 3072 to 8192 bits; never shown."""

    key: RSAPrivateKey = field(repr=False)

    def __post_init__(self) -> None:
        _check_rsa(self.key.key_size)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for another key's slot; raises as `Identity.unwrap`."""
        return _unwrap(
            slot,
            SlotType.RSA_OAEP,
            _rsa_id(self.key.public_key()),
            lambda label: self.key.decrypt(slot.body, _oaep(label)),
            bound=bound,
            body_size=(self.key.key_size + 7) // 8,
        )


def _wrap(
    slot_type: SlotType,
    key_id: bytes,
    encrypt: Callable[[bytes], bytes],
    *,
    bound: bytes,
    body_size: int,
) -> Slot:
    """Return the slot whose body `encrypt` makes; it gets the bytes that the slot is bound to."""
    body = encrypt(_binding(slot_type, key_id, bound=bound, body_size=body_size))
    return Slot(type=slot_type, key_id=key_id, body=body)


def _unwrap(
    slot: Slot,
    slot_type: SlotType,
    key_id: bytes,
    decrypt: Callable[[bytes], bytes],
    *,
    bound: bytes,
    body_size: int,
) -> bytes | None:
    if slot.type != slot_type or slot.key_id != key_id:
        return None
    check_body_size(slot, body_size)
    try:
        return decrypt(_binding(slot_type, key_id, bound=bound, body_size=body_size))
    except (InvalidTag, ValueError):
        raise damaged_slot(slot) from None


def _binding(slot_type: SlotType, key_id: bytes, *, bound: bytes, body_size: int) -> bytes:
    prefix = _RSA_PREFIX if slot_type is SlotType.RSA_OAEP else _HPKE_PREFIX
    return prefix + bound + slot_head(slot_type, key_id, body_size=body_size)


def _x25519_id(key: X25519PublicKey) -> bytes:
    return _id_of(key.public_bytes_raw())


def _hybrid_id(mlkem: MLKEM768PublicKey, x25519: X25519PublicKey) -> bytes:
    return _id_of(mlkem.public_bytes_raw() + x25519.public_bytes_raw())


def _rsa_id(key: RSAPublicKey) -> bytes:
    return _id_of(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _id_of(public: bytes) -> bytes:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize()[:KEY_ID_BYTES]


def _check_rsa(bits: int) -> None:
    if bits not in _RSA_BITS:
        raise KeyLengthError(f"an RSA key has 3072 to 8192 bits here, not {bits}")


def _oaep(label: bytes) -> padding.OAEP:
    return padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), label)
