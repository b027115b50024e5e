# SPDX-License-Identifier: Apache-2.0
"""Ed25519 keys for signing: a private key that is never shown, and its public key.

Files are PEM as written by `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout`: PKCS #8
and SubjectPublicKeyInfo.

>>> key = SigningKey(bytes(32))
>>> key
SigningKey(id 139e3940e64b5491)
>>> key.public_key.has_signed(b"text", key.sign(b"text")), key.public_key.has_signed(b"Text", key.sign(b"text"))
(True, False)
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import KeyLengthError, KeySourceError
from ..secret_bytes import SecretBytes
from .sources import load_secret
from .trusted_files import MAX_SOURCE_BYTES, read_trusted_file

KEY_BYTES = 32
_KEY_ID_BYTES = 8


@dataclass(frozen=True, slots=True, repr=False)
class PublicKey:
    """An Ed25519 public key of 32 bytes.

    Raises:
        KeyLengthError: Any other length.

    Source: RFC 8032, 5.1.5.
    """

    raw: bytes

    def __post_init__(self) -> None:
        _check_length(self.raw)

    @property
    def key_id(self) -> str:
        """Sixteen hex digits that name the key: the start of the SHA-256 of its 32 bytes."""
        return _id_of(self.raw)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Return whether a signature of a message is by the private half of this key.

        Source: RFC 8032, 5.1.7.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def to_pem(self) -> bytes:
        """Return the content of its file."""
        return _public_pem(Ed25519PublicKey.from_public_bytes(self.raw))

    def __repr__(self) -> str:
        return f"PublicKey(id {self.key_id})"


@dataclass(frozen=True, slots=True, repr=False)
class SigningKey:
    """An Ed25519 private key of 32 secret bytes.

    Raises:
        KeyLengthError: Any other length. The message never shows the key.

    Source: RFC 8032, 5.1.5.
    """

    raw: bytes

    def __post_init__(self) -> None:
        _check_length(self.raw)
        object.__setattr__(self, "raw", SecretBytes(self.raw))

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @property
    def public_key(self) -> PublicKey:
        """The public half."""
        return PublicKey(self._private().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message.

        Source: RFC 8032, 5.1.6.
        """
        return self._private().sign(message)

    def to_pem(self) -> bytes:
        """Return the content of its file, which is secret."""
        return _private_pem(self._private())

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.raw)

    def __repr__(self) -> str:
        return f"SigningKey(id {self.public_key.key_id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A new private key and its public half, as file contents; `key_id` is 16 hex digits."""

    key_id: str
    private_pem: bytes = field(repr=False)
    public_pem: bytes


def generate_signing_pair(kind: str) -> KeyPair:
    """Return a new pair of keys.

    `ed25519` signs manifests, `p256` the bundles of OpenSSF, which name a public key by the SHA-256
    of its PEM text.
    """
    if kind == "ed25519":
        key = SigningKey.generate()
        public = key.public_key
        return KeyPair(key_id=public.key_id, private_pem=key.to_pem(), public_pem=public.to_pem())
    private = ec.generate_private_key(ec.SECP256R1())
    public_pem = _public_pem(private.public_key())
    return KeyPair(
        key_id=_id_of(public_pem), private_pem=_private_pem(private), public_pem=public_pem
    )


def _public_pem(key: Ed25519PublicKey | ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def load_signing_key(source: str) -> SigningKey:
    """Return the private key in the PEM text of a source (not `wrapped:`); files must be private.

    Raises:
        KeySourceError: The source is unknown or gives no such key. The message never shows its
            content.
    """
    text = load_secret(source).encode("utf-8")
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise KeySourceError(
            "the source gives no private key for signing, or one with a passphrase",
            hint="make one with: ckptmgr keygen --type ed25519 --out sign.pem",
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeySourceError(
            "the private key is not an Ed25519 key",
            hint="make one with: ckptmgr keygen --type ed25519 --out sign.pem",
        )
    return SigningKey(key.private_bytes_raw())


def load_public_key(path: str | os.PathLike[str]) -> PublicKey:
    """Return the public key in a PEM file.

    Raises:
        KeySourceError: There is no such file, others can change it, or it holds no Ed25519 public
            key.
    """
    content = bytes(
        read_trusted_file(
            path,
            kind="public key file",
            is_public=lambda _: True,
            way_out="put the key into a file",
        )
    )
    try:
        key = serialization.load_pem_public_key(content[:MAX_SOURCE_BYTES])
    except (ValueError, UnsupportedAlgorithm):
        what = "a private key" if b"PRIVATE KEY-----" in content else "no public key in PEM"
        raise KeySourceError(
            f"the public key file holds {what}",
            hint="ckptmgr keygen --type ed25519 writes the public key into FILE.pub",
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeySourceError("the public key is not an Ed25519 key")
    return PublicKey(key.public_bytes_raw())


def dsse_bytes(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes to be signed for a payload; a signature is valid for one payload type only.

    Source: DSSE v1.0.2, protocol.md, PAE (github.com/secure-systems-lab/dsse).
    """
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _id_of(public: bytes) -> str:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(public)
    return digest.finalize()[:_KEY_ID_BYTES].hex()


def _check_length(raw: bytes) -> None:
    if len(raw) != KEY_BYTES:
        raise KeyLengthError(f"an Ed25519 key has {KEY_BYTES} bytes, not {len(raw)}")
