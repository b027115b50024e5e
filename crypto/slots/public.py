# SPDX-License-Identifier: Apache-2.0
"""Key slots for public keys: the writer of a file needs no secret, only a private key opens it.

| slot | body | bytes |
|---|---|---|
| X25519 | HPKE base mode, DHKEM(X25519), HKDF-SHA256, AES-256-GCM | 80 |
| ML-KEM-768 with X25519 | HPKE base mode with the hybrid KEM, the same otherwise | 1168 |
| RSA | OAEP with SHA-256, keys of 3072 to 8192 bits | those of the modulus |

HPKE needs cryptography 47, ML-KEM 48; both are imported on use, and everything else works with the
older versions that `pyproject.toml` allows.

The `info` of HPKE and the label of OAEP are a prefix, the immutable bytes of the file and the slot
head. The key id is the first eight bytes of SHA-256 over the public key: raw for X25519, ML-KEM
then X25519 for the hybrid, DER for RSA.

Source: RFC 9180 (HPKE), draft-ietf-hpke-pq (hybrid KEM), RFC 8017 section 7.1 (OAEP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ..errors import KeyLengthError, needs_newer
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

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.mlkem import (
        MLKEM768PrivateKey,
        MLKEM768PublicKey,
    )
    from cryptography.hazmat.primitives.hpke import Suite

_TAG_BYTES = 16
_HPKE_PREFIX = b"ckptmgr/v1/hpke"
_RSA_PREFIX = b"ckptmgr/v1/rsa"
_RSA_BITS = range(3072, 8193)
_X25519_BODY_BYTES = 32 + DATA_KEY_BYTES + _TAG_BYTES
_HYBRID_BODY_BYTES = 1120 + DATA_KEY_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True)
class PublicKeyRecipient:
    """A public key; `encrypt` takes the data key and the bytes that the slot is bound to."""

    slot_type: SlotType
    key_id: bytes
    body_size: int
    encrypt: Callable[[bytes, bytes], bytes] = field(repr=False)

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for the private key."""
        binding = _binding(self.slot_type, self.key_id, bound=bound, body_size=self.body_size)
        body = self.encrypt(data_key.raw, binding)
        return Slot(type=self.slot_type, key_id=self.key_id, body=body)


@dataclass(frozen=True, slots=True, repr=False)
class PrivateKeyIdentity:
    """A private key; `decrypt` takes the body and the bytes that the slot is bound to."""

    slot_type: SlotType
    key_id: bytes
    body_size: int
    decrypt: Callable[[bytes, bytes], bytes]

    def __repr__(self) -> str:
        return "PrivateKeyIdentity(not shown)"

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for another key's slot; raises as `Identity.unwrap`."""
        if slot.type != self.slot_type or slot.key_id != self.key_id:
            return None
        check_body_size(slot, self.body_size)
        try:
            return self.decrypt(
                slot.body,
                _binding(self.slot_type, self.key_id, bound=bound, body_size=self.body_size),
            )
        except (InvalidTag, ValueError):
            raise damaged_slot(slot) from None


def x25519_recipient(key: X25519PublicKey) -> PublicKeyRecipient:
    """Return the recipient of an X25519 key.

    Raises:
        KeySourceError: The installed cryptography has no HPKE.
    """
    suite = _suite(SlotType.X25519)
    return PublicKeyRecipient(
        SlotType.X25519,
        _x25519_id(key),
        _X25519_BODY_BYTES,
        lambda data_key, info: suite.encrypt(data_key, key, info=info),
    )


def x25519_identity(key: X25519PrivateKey) -> PrivateKeyIdentity:
    """Return the identity of an X25519 key; raises as `x25519_recipient`."""
    suite = _suite(SlotType.X25519)
    return PrivateKeyIdentity(
        SlotType.X25519,
        _x25519_id(key.public_key()),
        _X25519_BODY_BYTES,
        lambda body, info: suite.decrypt(body, key, info=info),
    )


def hybrid_recipient(mlkem: MLKEM768PublicKey, x25519: X25519PublicKey) -> PublicKeyRecipient:
    """Return the recipient of two keys: safe while either is, also against quantum computers.

    Raises:
        KeySourceError: The installed cryptography has no HPKE with ML-KEM.
    """
    suite = _suite(SlotType.MLKEM768_X25519)
    from cryptography.hazmat.primitives.hpke import MLKEM768X25519PublicKey

    public = MLKEM768X25519PublicKey(mlkem, x25519)
    return PublicKeyRecipient(
        SlotType.MLKEM768_X25519,
        _hybrid_id(mlkem, x25519),
        _HYBRID_BODY_BYTES,
        lambda data_key, info: suite.encrypt(data_key, public, info=info),
    )


def hybrid_identity(mlkem: MLKEM768PrivateKey, x25519: X25519PrivateKey) -> PrivateKeyIdentity:
    """Return the identity of the private keys of a `hybrid_recipient`; raises as it."""
    suite = _suite(SlotType.MLKEM768_X25519)
    from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey

    private = MLKEM768X25519PrivateKey(mlkem, x25519)
    return PrivateKeyIdentity(
        SlotType.MLKEM768_X25519,
        _hybrid_id(mlkem.public_key(), x25519.public_key()),
        _HYBRID_BODY_BYTES,
        lambda body, info: suite.decrypt(body, private, info=info),
    )


def rsa_recipient(key: RSAPublicKey) -> PublicKeyRecipient:
    """Return the recipient of an RSA key, as of a hardware module.

    Raises:
        KeyLengthError: It has fewer than 3072 or more than 8192 bits.
    """
    return PublicKeyRecipient(
        SlotType.RSA_OAEP,
        _rsa_id(key),
        _rsa_bytes(key.key_size),
        lambda data_key, label: key.encrypt(data_key, _oaep(label)),
    )


def rsa_identity(key: RSAPrivateKey) -> PrivateKeyIdentity:
    """Return the identity of an RSA key; raises as `rsa_recipient`."""
    return PrivateKeyIdentity(
        SlotType.RSA_OAEP,
        _rsa_id(key.public_key()),
        _rsa_bytes(key.key_size),
        lambda body, label: key.decrypt(body, _oaep(label)),
    )


def _suite(slot_type: SlotType) -> Suite:
    """Return the HPKE suite of a slot type."""
    try:
        from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

        kem = KEM.X25519 if slot_type is SlotType.X25519 else KEM.MLKEM768_X25519
    except (ImportError, AttributeError):
        needed = ("X25519 keys", 47) if slot_type is SlotType.X25519 else ("ML-KEM keys", 48)
        raise needs_newer(*needed) from None
    return Suite(kem, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


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


def _rsa_bytes(bits: int) -> int:
    if bits not in _RSA_BITS:
        raise KeyLengthError(f"an RSA key has 3072 to 8192 bits here, not {bits}")
    return (bits + 7) // 8


def _oaep(label: bytes) -> padding.OAEP:
    return padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), label)
