# SPDX-License-Identifier: Apache-2.0
"""A second implementation of the AES-GCM container for one raw key, written from docs/container-format.md alone."""

from __future__ import annotations

import hashlib
import hmac
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def expand(key: bytes, info: bytes, length: int, name: str = "sha384") -> bytes:
    """HKDF-Expand (RFC 5869)."""
    block, output = b"", b""
    for counter in range(1, 3):
        block = hmac.digest(key, block + info + bytes([counter]), name)
        output += block
    return output[:length]


def wrapping_key(user_key: bytes, salt: bytes, fixed: bytes) -> bytes:
    """HKDF-SHA-512."""
    secret = hmac.digest(salt, user_key, "sha512")
    return expand(secret, b"ckptmgr/v1/wrap/raw" + fixed, 32, "sha512")


def key_id(user_key: bytes) -> bytes:
    """HKDF-SHA-256 without a salt."""
    return expand(hmac.digest(bytes(32), user_key, "sha256"), b"ckptmgr/v1/key-id", 8, "sha256")


def floe_encrypt(key: bytes, aad: bytes, plaintext: bytes, iv: bytes, segment_bytes: int) -> bytes:
    """FLOE-256, with made-up segment nonces."""
    prefix = struct.pack(">BBII", 0, 0, segment_bytes, 32) + iv
    message_key = expand(key, prefix + b"MESSAGE_KEY:" + aad, 48)
    output = prefix + expand(key, prefix + b"HEADER_TAG:" + aad, 32)
    segment_key = expand(message_key, prefix + b"DEK:" + bytes(8) + aad, 32)
    full = segment_bytes - 32
    count = max(1, -(-len(plaintext) // full))
    for index in range(count):
        is_final = index == count - 1
        nonce = hashlib.sha256(iv + index.to_bytes(8, "big")).digest()[:12]
        body = AESGCM(segment_key).encrypt(
            nonce,
            plaintext[index * full : (index + 1) * full],
            struct.pack(">QB", index, is_final),
        )
        output += struct.pack(">I", len(body) + 16 if is_final else 0xFFFFFFFF) + nonce + body
    return output


def floe_decrypt(key: bytes, aad: bytes, message: bytes, segment_bytes: int) -> bytes:
    """FLOE-256."""
    prefix, tag, body = message[:42], message[42:74], message[74:]
    assert prefix[:10] == struct.pack(">BBII", 0, 0, segment_bytes, 32)
    assert tag == expand(key, prefix + b"HEADER_TAG:" + aad, 32)
    message_key = expand(key, prefix + b"MESSAGE_KEY:" + aad, 48)
    segment_key = expand(message_key, prefix + b"DEK:" + bytes(8) + aad, 32)
    output = b""
    for index, at in enumerate(range(0, len(body), segment_bytes)):
        segment = body[at : at + segment_bytes]
        is_final = at + segment_bytes >= len(body)
        assert segment[:4] == struct.pack(">I", len(segment) if is_final else 0xFFFFFFFF)
        associated = struct.pack(">QB", index, is_final)
        output += AESGCM(segment_key).decrypt(segment[4:16], segment[16:], associated)
    return output


def seal(plaintext: bytes, user_key: bytes, *, segment_bytes: int, seed: bytes) -> bytes:
    """Return a container of opaque bytes."""
    data_key, file_id, salt, iv = (
        hashlib.sha256(seed + bytes([number])).digest() for number in range(4)
    )
    fixed = struct.pack(
        "<8sBBHI16sQHHI16x", b"\x8fCKPE\r\n\x1a", 1, 12, 0x10, 0, file_id[:16], len(plaintext), 3, 0,
        segment_bytes,
    )  # fmt: skip
    head = struct.pack("<BBH8s", 1, 0, 80, key_id(user_key))
    wrapped = AESGCM(wrapping_key(user_key, salt, fixed)).encrypt(bytes(12), data_key, fixed + head)
    slot = head + salt + wrapped
    copy = (fixed + struct.pack("<QHHI", 1, 1, 0, len(slot)) + slot).ljust(4064, b"\0")
    copy += hmac.digest(expand(data_key, b"ckptmgr/v1/header-mac" + fixed, 32), copy, "sha256")
    payload = floe_encrypt(data_key, fixed, plaintext, iv, segment_bytes)
    return (copy + copy).ljust(12288 - 74, b"\0") + payload


def unseal(file: bytes, user_key: bytes) -> bytes:
    """Return the plaintext of a container whose first slot is for this key."""
    fixed, slot = file[:64], file[80:172]
    assert fixed[:14] == b"\x8fCKPE\r\n\x1a\x01\x0c\x10\0\0\0"
    assert slot[:12] == struct.pack("<BBH8s", 1, 0, 80, key_id(user_key))
    wrapping = AESGCM(wrapping_key(user_key, slot[12:44], fixed))
    data_key = wrapping.decrypt(bytes(12), slot[44:], fixed + slot[:12])
    mac_key = expand(data_key, b"ckptmgr/v1/header-mac" + fixed, 32)
    assert file[4064:4096] == hmac.digest(mac_key, file[:4064], "sha256")
    (size,), (segment_bytes,) = struct.unpack("<Q", fixed[32:40]), struct.unpack("<I", fixed[44:48])
    plaintext = floe_decrypt(data_key, fixed, file[12288 - 74 :], segment_bytes)
    assert len(plaintext) == size
    return plaintext
