# SPDX-License-Identifier: Apache-2.0
"""Errors of the crypto layer.

```
CryptoError (Exception)
├── DecryptionError            wrong key, or changed bytes (not distinguished where that would be an
oracle)
├── TamperedError              the key is right, and the bytes were changed, reordered or spliced
├── TruncatedCiphertextError   the ciphertext ends too early
├── UnsealedError              the file is not authenticated as a whole: the seal is missing
├── UnsupportedSuiteError      a mode or layout this version does not know
│   └── StretchingError        its key slots ask for more work than is accepted
├── KeyLengthError (also ValueError)    a key of the wrong length for the mode
└── KeySourceError             a key could not be obtained from its source
```
"""

from __future__ import annotations


class CryptoError(Exception):
    """A failure of the crypto layer.

    `message` is a lower-case sentence without key material; `offset` counts bytes of the encrypted
    file; `hint` says what to do next.
    """

    def __init__(self, message: str, *, offset: int | None = None, hint: str | None = None) -> None:
        self.message = message
        self.offset = offset
        self.hint = hint
        super().__init__(message if offset is None else f"{message} (offset {offset})")


class DecryptionError(CryptoError):
    """A wrong key or changed bytes, without saying which."""


def wrong_key_or_changed() -> DecryptionError:
    """Return the one error of a tag, MAC or padding that does not match: more is an oracle."""
    return DecryptionError("the key is wrong, or the bytes were changed")


class TamperedError(CryptoError):
    """Changed, reordered, dropped or spliced bytes under a key that is known to be right."""


class TruncatedCiphertextError(CryptoError):
    """Ciphertext that ends before the structure it promises is complete."""


class UnsealedError(CryptoError):
    """A file whose order, count and end are not authenticated."""


class UnsupportedSuiteError(CryptoError):
    """A cipher mode or layout that this version does not know."""


class StretchingError(UnsupportedSuiteError):
    """A key slot that was not tried: stretching a passphrase for it would exceed the budget."""


class KeyLengthError(CryptoError, ValueError):
    """A key whose length does not fit the cipher mode."""


class KeySourceError(CryptoError):
    """A key that could not be obtained from its source."""


def needs_newer(feature: str, version: int) -> KeySourceError:
    """Return the error for keys of a kind that the installed version of cryptography lacks."""
    import cryptography

    return KeySourceError(
        f"{feature} need cryptography {version} or newer, but {cryptography.__version__} is "
        "installed",
        hint=f"pip install 'cryptography>={version}', or use a secret key: ckptmgr keygen",
    )
