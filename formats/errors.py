# SPDX-License-Identifier: Apache-2.0
"""Errors of the format layer.

```
FormatError (ValueError)      the bytes are not what the format demands
├── TruncatedError            the bytes end too early
├── ChecksumError             a stored checksum does not match
└── UnsupportedError          well-formed, but of a kind this version cannot handle
```

Every error knows *where*: the byte offset in the plaintext of the file and, when known, the tensor. The caller adds the
file name.
"""

from __future__ import annotations


class FormatError(ValueError):
    """Report bytes that the format does not allow.

    Args:
        message: What is wrong, as a lower-case sentence without the place.
        offset: Byte offset in the (decrypted) file, or None when no single place is to blame.
        tensor: Name of the tensor the place belongs to, or None.
    """

    def __init__(
        self, message: str, *, offset: int | None = None, tensor: str | None = None
    ) -> None:
        self.message = message
        self.offset = offset
        self.tensor = tensor
        place = []
        if offset is not None:
            place.append(f"offset {offset}")
        if tensor is not None:
            place.append(f"tensor {tensor!r}")
        super().__init__(f"{message} ({', '.join(place)})" if place else message)


class TruncatedError(FormatError):
    """Report bytes that end before the structure they promise is complete."""


class ChecksumError(FormatError):
    """Report content that does not match its stored checksum."""


class UnsupportedError(FormatError):
    """Report a well-formed structure that this version cannot read or write."""
