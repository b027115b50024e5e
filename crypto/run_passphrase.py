# SPDX-License-Identifier: Apache-2.0
"""A passphrase that opens the files of a run: stretched once, not once for every file.

```
body   memory_kib(4) passes(1) lanes(1) 0(2) || salt(32) || file salt(32) || wrapped(48)
```
The stretched passphrase is a key like any other: the last two fields are those of a raw key slot for it, bound in addition
to the head of this slot and to everything before the file salt. All slots that one object makes share the first salt, so a
run pays for one stretching, and so does whoever reads it. Never do they share a wrapping key, because of the file salt.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from .ciphers import Random
from .errors import DecryptionError, TamperedError, UnsupportedSuiteError
from .key import Key
from .slots import NO_KEY_ID, Identity, Slot, SlotType, check_body_size, slot_head
from .wrapping import (
    Argon2id,
    Passphrase,
    PassphraseCost,
    RawKey,
    argon2id_parameters,
    passphrase_cost,
)

_SALT_BYTES = 32
_COST_BYTES = 8
_PREFIX_BYTES = _COST_BYTES + _SALT_BYTES
_RAW_BODY_BYTES = 32 + 48
_MAX_CACHED_KEYS = 16
MOST_STRETCHING_KIB = 16 << 20
"""KiB of memory, times the passes over them: as much as the dearest slot may cost, or 80 of the usual ones."""


class RunPassphrase:
    """Something people remember: recipient and identity, for many files. Safe to use from several threads.

    It also opens what a plain `Passphrase` wrapped.

    Args:
        passphrase: The text.
        cost: How new slots stretch it.
        random: Returns that many unpredictable bytes.

    Source: RFC 9106 (argon2id), RFC 5869 (HKDF).
    """

    def __init__(
        self, passphrase: Passphrase, *, cost: Argon2id | None = None, random: Random = os.urandom
    ) -> None:
        self._passphrase = passphrase
        self._cost = cost or Argon2id()
        self._random = random
        self._lock = threading.Lock()
        self._salt: bytes | None = None
        self._stretched: OrderedDict[bytes, Key] = OrderedDict()

    def __repr__(self) -> str:
        return "RunPassphrase(not shown)"

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for this passphrase; only the first one is slow."""
        with self._lock:
            if self._salt is None:
                self._salt = self._random(_SALT_BYTES)
        prefix = self._cost.pack() + self._salt
        stretched = self._key_of(self._cost, prefix)
        inner = RawKey(stretched, self._random).wrap(data_key, bound=_bound(bound, prefix))
        return Slot(type=SlotType.RUN_PASSPHRASE, key_id=NO_KEY_ID, body=prefix + inner.body)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None when the slot is for no passphrase; raises as `Identity.unwrap`."""
        if slot.type != SlotType.RUN_PASSPHRASE:
            return self._passphrase.unwrap(slot, bound=bound)
        check_body_size(slot, _PREFIX_BYTES + _RAW_BODY_BYTES)
        prefix, raw_body = slot.body[:_PREFIX_BYTES], slot.body[_PREFIX_BYTES:]
        stretched = self._key_of(argon2id_parameters(slot), prefix)
        inner = Slot(type=SlotType.RAW, key_id=bytes.fromhex(stretched.key_id), body=raw_body)
        try:
            return RawKey(stretched).unwrap(inner, bound=_bound(bound, prefix))
        except TamperedError:
            raise DecryptionError("the passphrase is wrong, or the key slot is damaged") from None

    def _key_of(self, cost: PassphraseCost, prefix: bytes) -> Key:
        with self._lock:  # whoever comes second waits instead of stretching it as well
            key = self._stretched.get(prefix)
            if key is None:
                key = Key(self._passphrase.stretched(cost, prefix[_COST_BYTES:]))
                self._stretched[prefix] = key
            self._stretched.move_to_end(prefix)
            if len(self._stretched) > _MAX_CACHED_KEYS:
                self._stretched.popitem(last=False)
            return key


class Stretching:
    """What one header or manifest may still ask for: whoever made it wants to be let in, or to keep readers busy."""

    def __init__(self) -> None:
        self._left_kib = MOST_STRETCHING_KIB

    def unwrap(self, slot: Slot, identity: Identity, *, bound: bytes) -> bytes | None:
        """Return what is in a slot, as `Identity.unwrap` does.

        Raises:
            UnsupportedSuiteError: More was asked for than is accepted, or is by this slot.
            CryptoError: What the identity raises.
        """
        kib = _stretching_kib(slot, identity)
        if kib > self._left_kib:
            raise UnsupportedSuiteError(
                "the key slots ask for more stretching of passphrases than is accepted",
                hint="were they made to keep you busy? Otherwise use another key that opens them",
            )
        self._left_kib -= kib
        return identity.unwrap(slot, bound=bound)


def _stretching_kib(slot: Slot, identity: Identity) -> int:
    """Return what trying a slot costs: KiB of memory, times the passes over them; 0 for who has no passphrase.

    Raises:
        CryptoError: The slot asks for more than is accepted, or is cut off.
    """
    if not isinstance(identity, Passphrase | RunPassphrase):
        return 0
    if slot.type == SlotType.RUN_PASSPHRASE:
        check_body_size(slot, _PREFIX_BYTES + _RAW_BODY_BYTES)
        return argon2id_parameters(slot).stretching_kib
    cost = passphrase_cost(slot)
    return 0 if cost is None else cost.stretching_kib


def _bound(bound: bytes, prefix: bytes) -> bytes:
    size = _PREFIX_BYTES + _RAW_BODY_BYTES
    return bound + slot_head(SlotType.RUN_PASSPHRASE, NO_KEY_ID, body_size=size) + prefix
