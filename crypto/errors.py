# SPDX-License-Identifier: Apache-2.0
"""Errors of the crypto layer.

```
CryptoError (Exception)
├── DecryptionError            wrong key, or the bytes were changed (never told apart where that would be an oracle)
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
    """Report a failure of the crypto layer.

    Args:
        message: What is wrong, as a lower-case sentence. Never contains key material.
        offset: Byte offset in the encrypted file, or None.
        hint: What to do next, or None.
    """

    def __init__(self, message: str, *, offset: int | None = None, hint: str | None = None) -> None:
        self.message = message
        self.offset = offset
        self.hint = hint
        super().__init__(message if offset is None else f"{message} (offset {offset})")


class DecryptionError(CryptoError):
    """Report a wrong key or changed bytes, without saying which."""


def wrong_key_or_changed() -> DecryptionError:
    """Return the one error of a tag, a MAC or padding that does not match: more would be an oracle."""
    return DecryptionError("the key is wrong, or the bytes were changed")


class TamperedError(CryptoError):
    """Report changed, reordered, dropped or spliced bytes under a key that is known to be right."""


class TruncatedCiphertextError(CryptoError):
    """Report ciphertext that ends before the structure it promises is complete."""


class UnsealedError(CryptoError):
    """Report a file whose order, count and end are not authenticated."""


class UnsupportedSuiteError(CryptoError):
    """Report a cipher mode or layout that this version does not know."""


class StretchingError(UnsupportedSuiteError):
    """Report a key slot that was not tried: stretching a passphrase for it would cost more than is accepted."""


class KeyLengthError(CryptoError, ValueError):
    """Report a key whose length does not fit the cipher mode."""


class KeySourceError(CryptoError):
    """Report a key that could not be obtained from its source."""
