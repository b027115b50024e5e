# SPDX-License-Identifier: Apache-2.0
"""The key of a run: one call of a key service for a run, not one for a save.

A `RunKey` makes a random key, has it wrapped once and returns both for every save, so that an
outage of the service stops no training step. `RunKeyReader` has each blob unwrapped once. Optional
limits on age and on the number of files are what AWS calls a caching policy: at a limit the next
save calls the service again, and fails if that does not answer.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..ciphers import Random
from ..errors import KeySourceError
from ..keys.key import Key
from .provider import KeyGenerator, KeyProvider, check_blob, check_unwrapped, context_bytes

_RUN_KEY_BYTES = 32
_MAX_CACHED_KEYS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """How long one key may serve.

    Attributes:
        max_age_s: Seconds since it was wrapped, or None for no limit.
        max_files: The number of files it may encrypt.

    Raises:
        KeySourceError: A limit that allows nothing.
    """

    max_age_s: float | None = None
    max_files: int = 2**32

    def __post_init__(self) -> None:
        if self.max_files < 1 or (self.max_age_s is not None and not self.max_age_s > 0):
            raise KeySourceError("a key must be allowed to serve for some time and for one file")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedKey:
    """A key, and the values to store so that the service can unwrap it again.

    Attributes:
        key: The secret; never stored.
        provider: The kind of service that wrapped it.
        provider_key_id: The name of the key-encryption key there.
        context: The words that the blob is bound to.
        blob: The wrapped key.
    """

    key: Key
    provider: str
    provider_key_id: str
    context: Mapping[str, str]
    blob: bytes = field(repr=False)


class RunKey:
    """The key of one run, wrapped when it is first needed. Safe to use from several threads.

    Args:
        provider: The service.
        context: The words that the key is bound to, such as the run; not secret.
        limits: When it is replaced.
        size_bytes: 16, 24 or 32; a service that makes keys itself makes those of 32.
        clock: Seconds that never go back.
        random: Returns that many unpredictable bytes.
    """

    def __init__(
        self,
        provider: KeyProvider,
        context: Mapping[str, str],
        *,
        limits: KeyLimits | None = None,
        size_bytes: int = _RUN_KEY_BYTES,
        clock: Callable[[], float] = time.monotonic,
        random: Random = os.urandom,
    ) -> None:
        context_bytes(context)
        self._provider = provider
        self._context = MappingProxyType(dict(context))
        self._limits = limits or KeyLimits()
        self._size_bytes = size_bytes
        self._clock = clock
        self._random = random
        self._lock = threading.Lock()
        self._current: WrappedKey | None = None
        self._wrapped_at_s = 0.0
        self._files = 0

    def take(self) -> WrappedKey:
        """Return the key for one more file; calls the service for the first one, and at a limit.

        Raises:
            ProviderError: The service had to be called and gave nothing. The next call tries again.
        """
        with self._lock:
            if self._current is None or self._is_spent():
                self._current = self._new_key()
                self._wrapped_at_s = self._clock()
                self._files = 0
            self._files += 1
            return self._current

    def _is_spent(self) -> bool:
        limits = self._limits
        age_s = self._clock() - self._wrapped_at_s
        is_old = limits.max_age_s is not None and age_s >= limits.max_age_s
        return is_old or self._files >= limits.max_files

    def _new_key(self) -> WrappedKey:
        provider = self._provider
        if isinstance(provider, KeyGenerator) and self._size_bytes == _RUN_KEY_BYTES:
            generated = provider.generate(self._context)
            raw, blob = check_unwrapped(generated.key, provider=provider.name), generated.blob
        else:
            raw = self._random(self._size_bytes)
            blob = provider.wrap(raw, self._context)
        return WrappedKey(
            key=Key(raw),
            provider=provider.name,
            provider_key_id=provider.key_id,
            context=self._context,
            blob=check_blob(blob, provider=provider.name),
        )


class RunKeyReader:
    """Unwraps the keys of runs, each once. Safe to use from several threads.

    Only `provider` is called, whatever a file states about the service that wrapped its key.
    """

    def __init__(self, provider: KeyProvider) -> None:
        self._provider = provider
        self._lock = threading.Lock()
        self._keys: OrderedDict[tuple[bytes, bytes], Key] = OrderedDict()

    def unwrap(self, blob: bytes, context: Mapping[str, str]) -> Key:
        """Return the key inside `blob`.

        Raises:
            ProviderError: The service gave no key. Failures are not cached.
        """
        name = (blob, context_bytes(context))
        with self._lock:
            key = self._keys.get(name)
            if key is None:
                raw = self._provider.unwrap(blob, context)
                key = self._keys[name] = Key(check_unwrapped(raw, provider=self._provider.name))
            self._keys.move_to_end(name)
            if len(self._keys) > _MAX_CACHED_KEYS:
                self._keys.popitem(last=False)
            return key
