# SPDX-License-Identifier: Apache-2.0
"""The key slots of a container, opened by docs/container-format.md alone."""

from __future__ import annotations

import hashlib
import hmac
import struct
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

if TYPE_CHECKING:  # the oldest version that is tested has none
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey


@dataclass(frozen=True)
class Pair:
    """The private keys of a type 5 slot."""

    mlkem: MLKEM768PrivateKey
    x25519: X25519PrivateKey


Secret = bytes | str | X25519PrivateKey | Pair | RSAPrivateKey


def open_slot(slot: bytes, secret: Secret, fixed: bytes) -> bytes | None:
    """Return the data key, or None if the slot is for another secret."""
    try:
        return _opened(slot[0], slot[:12], slot[12:], secret, fixed)
    except InvalidTag:
        return None


def _opened(kind: int, head: bytes, body: bytes, secret: Secret, fixed: bytes) -> bytes | None:
    if isinstance(secret, bytes) and kind == 1:
        return _raw(head, body, secret, fixed)
    if isinstance(secret, str) and kind in (2, 3, 8):
        return _passphrase(kind, head, body, secret, fixed)
    if isinstance(secret, X25519PrivateKey) and kind == 4:
        return _x25519(head, body, secret, fixed)
    if isinstance(secret, Pair) and kind == 5:
        return _hybrid(head, body, secret, fixed)
    if isinstance(secret, RSAPrivateKey) and kind == 6:
        return _rsa(head, body, secret, fixed)
    return None


def hkdf(key: bytes, salt: bytes, info: bytes, length: int, name: str) -> bytes:
    """HKDF (RFC 5869); no salt is as many zeros as the hash has bytes."""
    salt = salt or bytes(hashlib.new(name).digest_size)
    return hkdf_expand(hmac.digest(salt, key, name), info, length, name)


def hkdf_expand(secret: bytes, info: bytes, length: int, name: str) -> bytes:
    block, output = b"", b""
    while len(output) < length:
        counter = bytes([len(output) // hashlib.new(name).digest_size + 1])
        block = hmac.digest(secret, block + info + counter, name)
        output += block
    return output[:length]


def key_id(key: bytes) -> bytes:
    return hkdf(key, b"", b"ckptmgr/v1/key-id", 8, "sha256")


def raw_head(key: bytes) -> bytes:
    return struct.pack("<BBH", 1, 0, 80) + key_id(key)


def raw_slot(key: bytes, salt: bytes, data_key: bytes, fixed: bytes) -> bytes:
    """Return a type 1 slot."""
    wrapping_key = hkdf(key, salt, b"ckptmgr/v1/wrap/raw" + fixed, 32, "sha512")
    head = raw_head(key)
    return head + salt + AESGCM(wrapping_key).encrypt(bytes(12), data_key, fixed + head)


def _raw(head: bytes, body: bytes, key: bytes, bound: bytes) -> bytes:
    if head != raw_head(key):
        raise InvalidTag
    salt, wrapped = body[:32], body[32:]
    wrapping_key = hkdf(key, salt, b"ckptmgr/v1/wrap/raw" + bound, 32, "sha512")
    return AESGCM(wrapping_key).decrypt(bytes(12), wrapped, bound + head)


def _passphrase(kind: int, head: bytes, body: bytes, text: str, fixed: bytes) -> bytes:
    secret = unicodedata.normalize("NFC", text).encode("utf-8")
    if kind == 2:
        log2_n, r, p, zero = body[:4]
        assert (r, p, zero) == (8, 1, 0)
        assert 14 <= log2_n <= 20
        key = hashlib.scrypt(
            secret, salt=body[4:36], n=1 << log2_n, r=8, p=1, dklen=32, maxmem=2**31 - 1
        )
        return AESGCM(key).decrypt(bytes(12), body[36:], fixed + head + body[:4])
    kib, passes, lanes, zero = struct.unpack_from("<IBBH", body)
    assert not zero
    assert 1 <= passes <= 16
    assert 1 <= lanes <= 16
    assert 8 * lanes <= kib <= 1 << 20
    key = Argon2id(
        salt=body[8:40], length=32, iterations=passes, lanes=lanes, memory_cost=kib
    ).derive(secret)
    if kind == 3:
        return AESGCM(key).decrypt(bytes(12), body[40:], fixed + head + body[:8])
    return _raw(raw_head(key), body[40:], key, fixed + head + body[:40])


def _public_id(public: bytes) -> bytes:
    return hashlib.sha256(public).digest()[:8]


def _x25519(head: bytes, body: bytes, private: X25519PrivateKey, fixed: bytes) -> bytes:
    public = private.public_key().public_bytes_raw()
    assert head[4:] == _public_id(public)
    enc, ciphertext = body[:32], body[32:]
    suite = b"KEM\x00\x20"
    shared = private.exchange(X25519PublicKey.from_public_bytes(enc))
    secret = _labeled_extract(suite, b"", b"eae_prk", shared)
    secret = _labeled_expand(suite, secret, b"shared_secret", enc + public, 32)
    return _hpke(0x0020, secret, ciphertext, b"ckptmgr/v1/hpke" + fixed + head)


def _hybrid(head: bytes, body: bytes, pair: Pair, fixed: bytes) -> bytes:
    x25519 = pair.x25519.public_key().public_bytes_raw()
    assert head[4:] == _public_id(pair.mlkem.public_key().public_bytes_raw() + x25519)
    enc, ciphertext = body[:1120], body[1120:]
    first = pair.mlkem.decapsulate(enc[:1088])
    second = pair.x25519.exchange(X25519PublicKey.from_public_bytes(enc[1088:]))
    joined = first + second + enc[1088:] + x25519 + rb"\.//^" + b"\\"
    secret = hashlib.sha3_256(joined).digest()
    return _hpke(0x647A, secret, ciphertext, b"ckptmgr/v1/hpke" + fixed + head)


def _hpke(kem: int, shared: bytes, ciphertext: bytes, info: bytes) -> bytes:
    """RFC 9180, base mode, HKDF-SHA256, AES-256-GCM, no AAD, the first message."""
    suite = b"HPKE" + struct.pack(">HHH", kem, 0x0001, 0x0002)
    context = b"\0" + _labeled_extract(suite, b"", b"psk_id_hash", b"")
    context += _labeled_extract(suite, b"", b"info_hash", info)
    secret = _labeled_extract(suite, shared, b"secret", b"")
    key = _labeled_expand(suite, secret, b"key", context, 32)
    nonce = _labeled_expand(suite, secret, b"base_nonce", context, 12)
    return AESGCM(key).decrypt(nonce, ciphertext, None)


def _labeled_extract(suite: bytes, salt: bytes, label: bytes, secret: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + secret, "sha256")


def _labeled_expand(suite: bytes, secret: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labeled = struct.pack(">H", length) + b"HPKE-v1" + suite + label + info
    return hkdf_expand(secret, labeled, length, "sha256")


def _rsa(head: bytes, body: bytes, private: RSAPrivateKey, fixed: bytes) -> bytes:
    public = private.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert head[4:] == _public_id(public)
    label = b"ckptmgr/v1/rsa" + fixed + head
    return private.decrypt(body, OAEP(MGF1(hashes.SHA256()), hashes.SHA256(), label))
