# SPDX-License-Identifier: Apache-2.0
"""A passphrase for all files of a run: stretched once, not once for every file.

```
body   memory_kib(4) passes(1) lanes(1) 0(2) || salt(32) || file salt(32) || wrapped(48)
```
The stretched passphrase is a key like any other: the last two fields are those of a raw key slot
for it, bound in addition to the head of this slot and to everything before the file salt. All slots
of one object share the first salt, so writer and reader stretch once for a run. The file salt makes
every wrapping key unique.
"""

from __future__ import annotations

import os
import threading

from ..ciphers import Random
from ..errors import TamperedError
from ..slots import NO_KEY_ID, Slot, SlotType, check_body_size, slot_head
from ..slots.secret import Argon2id, Passphrase, RawKey, argon2id_parameters
from .key import Key

_SALT_BYTES = 32
_COST_BYTES = 8
_PREFIX_BYTES = _COST_BYTES + _SALT_BYTES
_RAW_BODY_BYTES = 32 + 48


class RunPassphrase:
    """A passphrase as recipient and identity for many files. Safe to use from several threads.

    It also opens the slots of a plain `Passphrase`.

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

    def __repr__(self) -> str:
        return "RunPassphrase(not shown)"

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for this passphrase; only the first one is slow."""
        with self._lock:
            if self._salt is None:
                self._salt = self._random(_SALT_BYTES)
            salt = self._salt
        phrase, cost = self._passphrase, self._cost
        stretched = Key(
            phrase.stretched_keys.for_new_slot((cost, salt), lambda: phrase.stretch(cost, salt))
        )
        prefix = cost.pack() + salt
        inner = RawKey(stretched, self._random).wrap(data_key, bound=_bound(bound, prefix))
        return Slot(type=SlotType.RUN_PASSPHRASE, key_id=NO_KEY_ID, body=prefix + inner.body)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for other kinds of slot; raises as `Identity.unwrap`."""
        if slot.type != SlotType.RUN_PASSPHRASE:
            return self._passphrase.unwrap(slot, bound=bound)
        check_body_size(slot, _PREFIX_BYTES + _RAW_BODY_BYTES)
        prefix, raw_body = slot.body[:_PREFIX_BYTES], slot.body[_PREFIX_BYTES:]

        def unwrap_inner(stretched: bytes) -> bytes | None:
            key = Key(stretched)
            inner = Slot(type=SlotType.RAW, key_id=bytes.fromhex(key.key_id), body=raw_body)
            try:
                return RawKey(key).unwrap(inner, bound=_bound(bound, prefix))
            except TamperedError:
                return None

        return self._passphrase.unwrap_with(
            argon2id_parameters(slot), prefix[_COST_BYTES:], unwrap_inner
        )


def _bound(bound: bytes, prefix: bytes) -> bytes:
    size = _PREFIX_BYTES + _RAW_BODY_BYTES
    return bound + slot_head(SlotType.RUN_PASSPHRASE, NO_KEY_ID, body_size=size) + prefix
