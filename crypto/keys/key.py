# SPDX-License-Identifier: Apache-2.0
"""A symmetric key that is never shown, and values derived from it.

>>> key = Key(bytes(range(16)))
>>> key
Key(16 bytes, id b2685a452d114388)
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives import constant_time, hashes, hmac
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import KeyLengthError
from ..secret_bytes import SecretBytes

KEY_SIZES = (16, 24, 32)

_KEY_ID_BYTES = 8


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A symmetric key of 16, 24 or 32 secret bytes; KeyLengthError for any other length."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) not in KEY_SIZES:
            raise KeyLengthError(
                f"a key has 16, 24 or 32 bytes, not {len(self.raw)}",
                hint="hex and base64 text must be decoded first; load_key does that",
            )
        object.__setattr__(self, "raw", SecretBytes(self.raw))

    @property
    def key_id(self) -> str:
        """Sixteen hex digits that name the key and reveal nothing about it."""
        return derive(self, "ckptmgr/v1/key-id", length=_KEY_ID_BYTES).hex()

    def __repr__(self) -> str:
        return f"Key({len(self.raw)} bytes, id {self.key_id})"


def derive(
    key: Key,
    info: str,
    *,
    salt: bytes | None = None,
    length: int = 32,
    algorithm: hashes.HashAlgorithm | None = None,
) -> bytes:
    """Return `length` bytes that only the owner of `key` can compute, for the purpose `info`.

    Different purposes give unrelated bytes; `salt` makes them unique to one file; the hash is
    SHA-256 by default.

    Source: RFC 5869 (HKDF).
    """
    kdf = HKDF(
        algorithm=algorithm or hashes.SHA256(), length=length, salt=salt, info=info.encode("ascii")
    )
    return kdf.derive(key.raw)


def manifest_mac(key: Key, canonical: bytes) -> bytes:
    """Return the 32-byte HMAC-SHA-256 that authenticates the canonical bytes of a manifest.

    Source: RFC 2104 (HMAC), RFC 5869 (HKDF).
    """
    mac = hmac.HMAC(derive(key, "ckptmgr/v1/manifest"), hashes.SHA256())
    mac.update(canonical)
    return mac.finalize()


def is_manifest_mac(key: Key, canonical: bytes, *, mac: bytes) -> bool:
    """Compare `mac` with that of the manifest, in constant time."""
    return constant_time.bytes_eq(manifest_mac(key, canonical), mac)
