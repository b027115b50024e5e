# SPDX-License-Identifier: Apache-2.0
"""The key that authenticates a manifest: the user's own, or one in slots for its readers.

```
"auth": {"algorithm": "HMAC-SHA-256", "key_id": ID, "mac": HEX}                              a single key
"auth": {"algorithm": "HMAC-SHA-256", "key_id": ID, "mac": HEX, "slots": [HEX, ...]}         everything else
```
Slots are those of containers (docs/container-format.md, section 3) with the key of the manifest, 32
random bytes, in place of the data key, and the bytes `ckptmgr/v1/manifest-key` in place of I. A
writer makes one such key for all its manifests.

Anyone with a public key can make such a manifest: only keys and passphrases prove the writer.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from threading import Lock
from typing import Any

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CorruptCheckpoint, KeyProblem, TamperedCheckpoint
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import KeyRing, Keys, ring_of, unwrap_first
from ckptmgr.crypto.slots import (
    DATA_KEY_BYTES,
    MAX_SLOTS,
    NO_KEY_ID,
    Recipient,
    Slot,
    parse_slots,
)

BOUND = b"ckptmgr/v1/manifest-key"
_KEY_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class ManifestKey:
    """The key that authenticates a manifest, and its slots; no slots if the readers have the key itself."""

    key: Key
    slots: tuple[Slot, ...] = ()

    @property
    def own_slots(self) -> tuple[Slot, ...]:
        """Slots for the key itself."""
        return tuple(one.wrap(self.key, bound=BOUND) for one in ring_of(self.key).recipients)

    def rewrapped(
        self, *, add: Sequence[Recipient], remove: Callable[[Slot], bool], own: Sequence[Key]
    ) -> ManifestKey:
        """Return the key with slots added for recipients, then without those that `remove` selects.

        If one slot is left and its key is among `own`, that key authenticates by itself.

        Raises:
            ValueError: No slot would be left, or more than sixteen.
        """
        key, slots = self.key, self.slots
        if not slots:
            key = Key(token_bytes(DATA_KEY_BYTES))
            slots = tuple(one.wrap(key, bound=BOUND) for one in ring_of(self.key).recipients)
        slots = tuple(slot for slot in slots if not remove(slot))
        slots += tuple(one.wrap(key, bound=BOUND) for one in add)
        if not 1 <= len(slots) <= MAX_SLOTS:
            raise ValueError(f"{len(slots)} keys would check the manifest, not 1 to {MAX_SLOTS}")
        if len(slots) == 1:
            (last,) = slots
            sole = next((one for one in own if ring_of(one).opens(last, bound=BOUND)), None)
            if sole is not None:
                return ManifestKey(sole)
        return ManifestKey(key, slots)

    def to_document(self) -> dict[str, Any]:
        """Return the members of `auth` that name the key."""
        slots = [slot.pack().hex() for slot in self.slots]
        return {"key_id": self.key.key_id, **({"slots": slots} if slots else {})}


def manifest_key_of(keys: Keys) -> ManifestKey:
    """Return the manifest key of a writer; always the same for the same ring."""
    if isinstance(keys, Key):
        return ManifestKey(keys)
    if keys.sole_key is not None:
        return ManifestKey(keys.sole_key)
    with _lock:
        found = _made.get(keys)
        if found is None:
            key = Key(token_bytes(DATA_KEY_BYTES))
            slots = tuple(one.wrap(key, bound=BOUND) for one in keys.recipients)
            found = _made[keys] = ManifestKey(key, slots)
        return found


_made: weakref.WeakKeyDictionary[KeyRing, ManifestKey] = weakref.WeakKeyDictionary()
_lock = Lock()


def opened_manifest_key(auth: Mapping[str, object], keys: Keys, *, path: str) -> ManifestKey:
    """Return the key of a manifest, opened with these keys.

    Raises:
        CorruptCheckpoint: The slots cannot be parsed.
        KeyProblem: It is under another key.
        TamperedCheckpoint: The slots are of another manifest.
        UnsupportedCheckpoint: A passphrase was not tried, because other slots already cost too
            much.
    """
    slots, key_id = _slots(auth, path), auth.get("key_id")
    ring = ring_of(keys)
    if not slots:
        key = next((key for key in ring.raw_keys if key.key_id == key_id), None)
        if key is None:
            raise KeyProblem(
                f"the manifest is authenticated under key {key_id}, the given key is {_named(keys)}",
                path=path,
            )
        return ManifestKey(key)
    with translated_errors(path):
        content = unwrap_first(slots, ring.identities, bound=BOUND)
    if content is None or len(content) != DATA_KEY_BYTES:
        raise KeyProblem(
            f"the manifest is authenticated for another key than {_named(keys)}",
            path=path,
            hint=f"it opens with: {', '.join(slot.label for slot in slots)}",
        )
    if Key(content).key_id != key_id:
        raise TamperedCheckpoint(
            "the manifest was changed: its key is that of another one", path=path
        )
    return ManifestKey(Key(content), slots)


def openers(auth: object, *, path: str) -> tuple[str, ...]:
    """Return labels of the keys that check a manifest, such as `key 0011223344556677`; unproven.

    Raises:
        CorruptCheckpoint: The slots cannot be parsed.
    """
    if not isinstance(auth, dict):
        return ()
    slots, key_id = _slots(auth, path), auth.get("key_id")
    if slots:
        return tuple(slot.label for slot in slots)
    is_id = isinstance(key_id, str) and _KEY_ID.fullmatch(key_id) is not None
    return (f"key {key_id}",) if is_id else ()


def id_of_opener(openers: Sequence[str]) -> str | None:
    """Return the first key id among these labels, or None."""
    words = (label.rpartition(" ")[2] for label in openers)
    return next((word for word in words if _KEY_ID.fullmatch(word)), None)


def is_for(slot: Slot, key_ids: Sequence[str]) -> bool:
    """Return whether a slot is for one of these keys."""
    return slot.key_id != NO_KEY_ID and slot.key_id.hex() in key_ids


def _slots(auth: Mapping[str, object], path: str) -> tuple[Slot, ...]:
    packed = auth.get("slots", [])
    if not isinstance(packed, list) or len(packed) > MAX_SLOTS:
        raise CorruptCheckpoint("unknown key slots in the manifest", path=path)
    try:
        parsed = [parse_slots(bytes.fromhex(one), count=1, offset=0) for one in packed]
    except (CryptoError, TypeError, ValueError) as error:
        raise CorruptCheckpoint("unknown key slots in the manifest", path=path) from error
    return tuple(slot for (slot,) in parsed)


def _named(keys: Keys) -> str:
    return str(keys.key_id) if isinstance(keys, Key) else ", ".join(keys.labels)
