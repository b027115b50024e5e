# SPDX-License-Identifier: Apache-2.0
"""Errors of the format layer.

```
FormatError (ValueError)      the bytes violate the format
├── TruncatedError            the bytes end too early
├── ChecksumError             a stored checksum does not match
└── UnsupportedError          well-formed, but of a kind this version cannot handle
```

Every error names the byte offset in the plaintext and, when known, the tensor. The caller adds the
file name.
"""

from __future__ import annotations


class FormatError(ValueError):
    """Bytes that the format does not allow.

    `message` is a lower-case sentence without the place; `offset` counts bytes of the decrypted
    file.
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
    """Bytes that end before the structure they promise is complete."""


class ChecksumError(FormatError):
    """Content that does not match its stored checksum."""


class UnsupportedError(FormatError):
    """A well-formed structure that this version cannot read or write."""
