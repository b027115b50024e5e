# SPDX-License-Identifier: Apache-2.0
"""PEM files of public and private keys: X25519, ML-KEM-768 with X25519 (both in one file), and RSA.

Private keys are PKCS #8 without a passphrase, public keys SubjectPublicKeyInfo, as written by
`openssl genpkey` and `openssl pkey`. A file with a private key encrypts and opens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ..errors import KeySourceError, needs_newer
from ..slots import Identity, Recipient
from ..slots.public import (
    hybrid_identity,
    hybrid_recipient,
    rsa_identity,
    rsa_recipient,
    x25519_identity,
    x25519_recipient,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.mlkem import (
        MLKEM768PrivateKey,
        MLKEM768PublicKey,
    )

    _PrivateKey = X25519PrivateKey | MLKEM768PrivateKey | RSAPrivateKey
    _PublicKey = X25519PublicKey | MLKEM768PublicKey | RSAPublicKey

KEY_TYPES = ("x25519", "mlkem768-x25519")
"""The types of `generate_pair`."""

_BEGIN = b"-----BEGIN "
_BLOCK = re.compile(rb"-----BEGIN [A-Z0-9 ]+-----.*?-----END [A-Z0-9 ]+-----", re.DOTALL)
_HINT = "ckptmgr keygen --type x25519 makes a pair; the public key is in FILE.pub"


def is_pem(content: bytes) -> bool:
    """Return whether a content is the file of a public or private key."""
    return content.lstrip().startswith(_BEGIN)


def is_public_pem(content: bytes) -> bool:
    """Return whether a content is the file of a public key, which is no secret."""
    return is_pem(content) and b"PRIVATE" not in content


def parse_pem(content: bytes) -> tuple[Recipient, Identity | None]:
    """Return the recipient and the identity of a file; a public key has no identity.

    Raises:
        KeySourceError: It holds no such key. The message never shows its content.
        KeyLengthError: An RSA key is too short or too long.
    """
    blocks = _BLOCK.findall(content)
    if is_public_pem(content):
        return _recipient([_public(block) for block in blocks]), None
    keys = [_private(block) for block in blocks]
    identity = _identity(keys)
    return _recipient([key.public_key() for key in keys]), identity


def generate_pair(key_type: str) -> tuple[bytes, bytes]:
    """Return a new private key and its public key, each as the content of its file.

    Raises:
        KeySourceError: The installed cryptography cannot make such a key.
    """
    keys: list[_PrivateKey] = [X25519PrivateKey.generate()]
    if key_type == "mlkem768-x25519":
        mlkem = _mlkem()
        if mlkem is None:
            raise needs_newer("ML-KEM keys", 48)
        keys.insert(0, mlkem.MLKEM768PrivateKey.generate())
    private = b"".join(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        for key in keys
    )
    return private, b"".join(_public_pem(key.public_key()) for key in keys)


def _public_pem(key: _PublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _private(block: bytes) -> _PrivateKey:
    try:
        key = serialization.load_pem_private_key(block, password=None)
    except UnsupportedAlgorithm:
        raise _is_of_another_kind() from None
    except (ValueError, TypeError):
        raise KeySourceError(
            "the file holds no private key in PEM, or one with a passphrase", hint=_hint()
        ) from None
    if isinstance(key, X25519PrivateKey | RSAPrivateKey) or _is_mlkem_private(key):
        return key
    raise _is_of_another_kind()


def _public(block: bytes) -> _PublicKey:
    try:
        key = serialization.load_pem_public_key(block)
    except UnsupportedAlgorithm:
        raise _is_of_another_kind() from None
    except ValueError:
        raise KeySourceError("the file holds no public key in PEM", hint=_hint()) from None
    if isinstance(key, X25519PublicKey | RSAPublicKey) or _is_mlkem_public(key):
        return key
    raise _is_of_another_kind()


def _mlkem() -> ModuleType | None:
    """Return the module of ML-KEM, or None with cryptography before 48."""
    try:
        return import_module("cryptography.hazmat.primitives.asymmetric.mlkem")
    except ImportError:
        return None


def _is_mlkem_private(key: object) -> TypeGuard[MLKEM768PrivateKey]:
    mlkem = _mlkem()
    return mlkem is not None and isinstance(key, mlkem.MLKEM768PrivateKey)


def _is_mlkem_public(key: object) -> TypeGuard[MLKEM768PublicKey]:
    mlkem = _mlkem()
    return mlkem is not None and isinstance(key, mlkem.MLKEM768PublicKey)


def _recipient(keys: Sequence[_PublicKey]) -> Recipient:
    match keys:
        case [X25519PublicKey() as x25519]:
            return x25519_recipient(x25519)
        case [first, X25519PublicKey() as x25519] if _is_mlkem_public(first):
            return hybrid_recipient(first, x25519)
        case [RSAPublicKey() as rsa]:
            return rsa_recipient(rsa)
    raise _is_of_another_kind()


def _identity(keys: Sequence[_PrivateKey]) -> Identity:
    match keys:
        case [X25519PrivateKey() as x25519]:
            return x25519_identity(x25519)
        case [first, X25519PrivateKey() as x25519] if _is_mlkem_private(first):
            return hybrid_identity(first, x25519)
        case [RSAPrivateKey() as rsa]:
            return rsa_identity(rsa)
    raise _is_of_another_kind()


def _hint() -> str:
    return _HINT if _mlkem() is not None else f"{_HINT}; ML-KEM keys need cryptography 48 or newer"


def _is_of_another_kind() -> KeySourceError:
    return KeySourceError(
        "the key is of a kind that does not encrypt here",
        hint=f"X25519, ML-KEM-768 followed by X25519, or RSA; {_hint()}",
    )
