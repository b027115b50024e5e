# SPDX-License-Identifier: Apache-2.0
"""The interface of a key service, and the context that every wrapped key is bound to.

A provider holds a key that it never shows (the key-encryption key) and uses it to wrap and unwrap
the keys of runs. The context is a few words, such as the run of a key; it is not secret (services
log it), and a wrapped key opens only together with the same words.

>>> context_bytes({"run": "7f", "purpose": "run-key"})
b'{"purpose":"run-key","run":"7f"}'

Errors of key services:

```
KeySourceError
└── ProviderError                 the service gave no key, for another reason than these
    ├── ProviderRefusedError      it answered no: no permission, unknown or disabled key, wrong
    context, changed blob
    ├── ProviderUnavailableError  it did not answer: not installed, not reachable, overloaded, too
    slow
    └── ProviderAnswerError       it answered something that is not an answer
```
A service does not say whether the context is wrong or the blob was changed, so neither do we.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ..errors import KeySourceError
from ..keys.key import KEY_SIZES


class ProviderError(KeySourceError):
    """A key service gave no key."""


class ProviderRefusedError(ProviderError):
    """A key service refused; asking again changes nothing."""


class ProviderUnavailableError(ProviderError):
    """A key service could not be asked; asking later may work."""


class ProviderAnswerError(ProviderError):
    """An answer does not have the agreed form."""


MAX_BLOB_BYTES = 16 * 1024
MAX_CONTEXT_BYTES = 8192
"""The longest encryption context that AWS KMS takes; others take more."""


class KeyProvider(Protocol):
    """A service that wraps keys. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """The kind of service, as in its address: `aws-kms`, `exec`."""
        ...

    @property
    def key_id(self) -> str:
        """The name of the key-encryption key inside the service; not secret."""
        ...

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        """Return a blob that only the service can turn back into `key`, given the same context.

        Args:
            key: 16, 24 or 32 secret bytes.
            context: The words that the blob is bound to; not secret.

        Raises:
            ProviderError: The service gave no blob; the subclass says why. The message never shows
                the key.
        """
        ...

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        """Return the key inside `blob`.

        Raises:
            ProviderError: The service gave no key; the subclass says why.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedKey:
    """A key of 32 secret bytes that a service made, and its wrapped form for `unwrap`."""

    key: bytes = field(repr=False)
    blob: bytes = field(repr=False)


@runtime_checkable
class KeyGenerator(Protocol):
    """A provider that makes keys itself, from the randomness of its hardware."""

    def generate(self, context: Mapping[str, str]) -> GeneratedKey:
        """Return a new key with its blob; raises as `KeyProvider.wrap`."""
        ...


def context_bytes(context: Mapping[str, str]) -> bytes:
    """Return the canonical form of a context: JSON with sorted names, without spaces, in ASCII.

    Raises:
        KeySourceError: It holds something other than text, or is longer than 8 KiB.
    """
    words: Iterable[object] = itertools.chain.from_iterable(context.items())
    for word in words:
        if not isinstance(word, str):
            raise KeySourceError("the context of a wrapped key maps text to text, and nothing else")
    canonical = json.dumps(dict(context), sort_keys=True, separators=(",", ":")).encode("ascii")
    if len(canonical) > MAX_CONTEXT_BYTES:
        raise KeySourceError(
            f"the context of a wrapped key has {len(canonical)} bytes, more than {MAX_CONTEXT_BYTES}"
        )
    return canonical


def check_key_size(key: bytes) -> None:
    """Raise KeySourceError unless `key` has a valid length."""
    if len(key) not in KEY_SIZES:
        raise KeySourceError(f"only keys of 16, 24 or 32 bytes are wrapped, not of {len(key)}")


def check_unwrapped(key: bytes, *, provider: str) -> bytes:
    """Return `key`, or raise ProviderAnswerError if it has no valid length."""
    if len(key) not in KEY_SIZES:
        raise ProviderAnswerError(
            f"{provider} unwrapped {len(key)} bytes, and a key has 16, 24 or 32",
            hint="the blob wraps something else",
        )
    return key


def check_blob(blob: bytes, *, provider: str) -> bytes:
    """Return `blob`, or raise ProviderAnswerError if it is empty or too long."""
    if not 1 <= len(blob) <= MAX_BLOB_BYTES:
        raise ProviderAnswerError(
            f"{provider} gave a blob of {len(blob)} bytes; 1 to {MAX_BLOB_BYTES} are taken"
        )
    return blob
