# SPDX-License-Identifier: Apache-2.0
"""Key slots: the data key of a container, wrapped once for every recipient.

```
slot   type(1) || 0(1) || body_len(2) || key_id(8) || body
```
A `Recipient` makes a slot, an `Identity` opens its own slots. Each is one method, so a key service
needs one small class; slot type 7 is reserved for that. Every slot is bound to the immutable bytes
of its file and to its own head, so it is useless in another file.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import TamperedError
from ..keys.key import Key

KEY_ID_BYTES = 8
DATA_KEY_BYTES = 32
MAX_SLOTS = 16
NO_KEY_ID = bytes(KEY_ID_BYTES)

_HEAD = struct.Struct(f"<BBH{KEY_ID_BYTES}s")
_MAX_BODY_BYTES = 2**16 - 1


class SlotType(enum.IntEnum):
    """How the data key is wrapped."""

    RAW = 1
    SCRYPT = 2
    ARGON2ID = 3
    X25519 = 4
    MLKEM768_X25519 = 5
    RSA_OAEP = 6
    KEY_SERVICE = 7
    RUN_PASSPHRASE = 8


_LABELS: dict[int, str] = {
    SlotType.RAW: "key",
    SlotType.SCRYPT: "passphrase (scrypt)",
    SlotType.ARGON2ID: "passphrase (argon2id)",
    SlotType.X25519: "X25519",
    SlotType.MLKEM768_X25519: "ML-KEM-768 with X25519",
    SlotType.RSA_OAEP: "RSA",
    SlotType.KEY_SERVICE: "key service",
    SlotType.RUN_PASSPHRASE: "passphrase (argon2id, of a run)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One wrapped data key.

    `type` is a `SlotType`, or a number of a newer version; `key_id` has eight bytes, zeros for a
    passphrase.

    Raises:
        ValueError: A field does not fit.
    """

    type: int
    key_id: bytes
    body: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.type < 256 or len(self.key_id) != KEY_ID_BYTES:
            raise ValueError(f"no slot has type {self.type} and {len(self.key_id)} bytes of key id")
        if len(self.body) > _MAX_BODY_BYTES:
            raise ValueError(f"a slot body of {len(self.body)} bytes is too long")

    @property
    def label(self) -> str:
        """The key that opens it, for people: `key 0011223344556677`, `passphrase (scrypt)`."""
        name = _LABELS.get(self.type, f"type {self.type}")
        return name if self.key_id == NO_KEY_ID else f"{name} {self.key_id.hex()}"

    @property
    def size(self) -> int:
        """Bytes in a header."""
        return _HEAD.size + len(self.body)

    def pack(self) -> bytes:
        """Return its bytes."""
        return slot_head(self.type, self.key_id, body_size=len(self.body)) + self.body


class Recipient(Protocol):
    """A key that files are encrypted for."""

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot with `data_key` (32 bytes), which opens only beside the bytes `bound`."""
        ...


class Identity(Protocol):
    """A key that opens files."""

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key in `slot`, or None if the slot is for another identity.

        Raises:
            TamperedError: It is for this identity and does not open.
            DecryptionError: It does not open: the passphrase is wrong or the slot damaged, one
                cannot say which.
            UnsupportedSuiteError: Its parameters are outside the accepted limits.
        """
        ...


def slot_head(slot_type: int, key_id: bytes, *, body_size: int) -> bytes:
    """Return the first twelve bytes of a slot."""
    return _HEAD.pack(slot_type, 0, body_size, key_id)


def check_body_size(slot: Slot, size: int) -> None:
    """Raise TamperedError unless the body of a slot has `size` bytes."""
    if len(slot.body) != size:
        raise TamperedError(f"the {slot.label} slot has {len(slot.body)} bytes, not {size}")


def damaged_slot(slot: Slot) -> TamperedError:
    """Return the error of a damaged slot whose key is known to be right."""
    return TamperedError(
        f"the key fits the {slot.label} slot, but the slot is damaged",
        hint="open the file with another of its keys, then rewrite its header",
    )


def parse_slots(data: bytes, *, count: int, offset: int) -> tuple[Slot, ...]:
    """Return the `count` slots that fill `data` exactly, or raise TamperedError.

    `offset` is their position in the file.
    """
    if not 1 <= count <= MAX_SLOTS:
        # Every passphrase slot may ask for a GiB and some seconds before its header can be
        # authenticated.
        raise TamperedError(f"{count} key slots are announced, not 1 to {MAX_SLOTS}", offset=offset)
    slots = tuple(_slots(data, offset))
    if len(slots) != count:
        raise TamperedError(f"{len(slots)} key slots where {count} are announced", offset=offset)
    return slots


def _slots(data: bytes, offset: int) -> Iterator[Slot]:
    at = 0
    while at < len(data):
        body = at + _HEAD.size
        if body > len(data):
            raise TamperedError("a key slot is cut off", offset=offset + at)
        slot_type, zero, body_size, key_id = _HEAD.unpack_from(data, at)
        if zero or body + body_size > len(data):
            raise TamperedError("a key slot is inconsistent", offset=offset + at)
        yield Slot(type=slot_type, key_id=key_id, body=data[body : body + body_size])
        at = body + body_size


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """Return the bytes of all slots, or raise ValueError unless they are 1 to 16."""
    if not 1 <= len(slots) <= MAX_SLOTS:
        raise ValueError(f"a container has 1 to {MAX_SLOTS} key slots, not {len(slots)}")
    return b"".join(slot.pack() for slot in slots)
