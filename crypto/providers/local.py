# SPDX-License-Identifier: Apache-2.0
"""A key of the user as the key service: for machines without one, and for tests.

The blob is AES key wrap (RFC 3394) under a key derived from that key and the context, 8 bytes
longer than the wrapped key.

>>> from ..keys.key import Key
>>> own = LocalProvider(Key(bytes(32)))
>>> blob = own.wrap(bytes(16), {"run": "7f"})
>>> len(blob), own.unwrap(blob, {"run": "7f"}) == bytes(16)
(24, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from ..errors import KeySourceError
from ..keys.key import Key, derive
from ..keys.sources import load_key
from .provider import ProviderRefusedError, check_key_size, check_unwrapped, context_bytes

_INFO = "ckptmgr/v1/wrap/local/"


@dataclass(frozen=True, slots=True)
class LocalProvider:
    """Wraps with the key-encryption key `key`.

    Source: RFC 3394 (AES key wrap), RFC 5869 (HKDF).
    """

    key: Key

    @property
    def name(self) -> str:
        """`local`."""
        return "local"

    @property
    def key_id(self) -> str:
        """The id of the key-encryption key."""
        return self.key.key_id

    def wrap(self, key: bytes, context: Mapping[str, str]) -> bytes:
        """Return the wrapped key; raises as `KeyProvider.wrap`."""
        check_key_size(key)
        return aes_key_wrap(self._wrapping_key(context), key)

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> bytes:
        """Return the key inside `blob`; raises as `KeyProvider.unwrap`."""
        try:
            key = aes_key_unwrap(self._wrapping_key(context), blob)
        except (InvalidUnwrap, ValueError):
            raise ProviderRefusedError(
                f"key {self.key_id} does not unwrap this blob",
                hint="another key or another context wrapped it, or it was changed",
            ) from None
        return check_unwrapped(key, provider=self.name)

    def _wrapping_key(self, context: Mapping[str, str]) -> bytes:
        return derive(self.key, _INFO + context_bytes(context).decode("ascii"))


def open_local(source: str) -> LocalProvider:
    """Return the provider for the key of `source`: `local:file:kek.key`, `local:env:KEK`.

    Raises:
        KeySourceError: The source gives no key, or is a wrapped one, which this service would have
            to unwrap.
    """
    if source.startswith("wrapped:"):
        raise KeySourceError(
            "the key of the service local: cannot be a wrapped one: unwrapping it would need the service",
            hint="use a plain key, such as local:file:kek.key",
        )
    return LocalProvider(load_key(source))
