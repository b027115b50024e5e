# SPDX-License-Identifier: Apache-2.0
"""Key slots for symmetric secrets: a key, or a passphrase stretched by scrypt or argon2id.

```
raw       salt(32) || wrapped(48)
scrypt    log2_n(1) r(1) p(1) 0(1) || salt(32) || wrapped(48)
argon2id  memory_kib(4) passes(1) lanes(1) 0(2) || salt(32) || wrapped(48)
wrapped   AES-256-GCM(wrapping key, nonce of zeros, data key, AAD = bound || slot head ||
parameters)
```
A wrapping key is used once, because its salt is random. Costs have limits, so that a hostile header
asks for at most 1 GiB.
"""

from __future__ import annotations

import os
import struct
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id as _Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt as _Scrypt

from ..ciphers import Random
from ..errors import DecryptionError, KeySourceError, UnsupportedSuiteError
from ..keys.key import Key
from . import DATA_KEY_BYTES, NO_KEY_ID, Slot, SlotType, check_body_size, damaged_slot, slot_head
from .stretching import StretchedKeys

_SALT_BYTES = 32
_WRAPPED_BYTES = DATA_KEY_BYTES + 16
_NONCE = bytes(12)
_RAW_INFO = b"ckptmgr/v1/wrap/raw"
_SCRYPT = struct.Struct("<BBBB")
_ARGON2ID = struct.Struct("<IBBH")
_SCRYPT_R, _SCRYPT_P = 8, 1
_SCRYPT_LOG2_N = range(14, 21)
_ARGON2ID_MAX_MEMORY_KIB = 2**20
_ARGON2ID_COUNTS = range(1, 17)


@dataclass(frozen=True, slots=True)
class RawKey:
    """A key of 16, 24 or 32 bytes as recipient and identity."""

    key: Key
    random: Random = field(default=os.urandom, repr=False)

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for this key."""
        salt = self.random(_SALT_BYTES)
        head = slot_head(SlotType.RAW, self._key_id, body_size=_SALT_BYTES + _WRAPPED_BYTES)
        wrapped = _wrap(self._wrapping_key(salt, bound), data_key, aad=bound + head)
        return Slot(type=SlotType.RAW, key_id=self._key_id, body=salt + wrapped)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for another key's slot; raises as `Identity.unwrap`."""
        if slot.type != SlotType.RAW or slot.key_id != self._key_id:
            return None
        check_body_size(slot, _SALT_BYTES + _WRAPPED_BYTES)
        salt, wrapped = slot.body[:_SALT_BYTES], slot.body[_SALT_BYTES:]
        head = slot_head(slot.type, slot.key_id, body_size=len(slot.body))
        data_key = _unwrap(self._wrapping_key(salt, bound), wrapped, aad=bound + head)
        if data_key is None:
            raise damaged_slot(slot)
        return data_key

    @property
    def _key_id(self) -> bytes:
        return bytes.fromhex(self.key.key_id)

    def _wrapping_key(self, salt: bytes, bound: bytes) -> bytes:
        kdf = HKDF(
            algorithm=hashes.SHA512(), length=DATA_KEY_BYTES, salt=salt, info=_RAW_INFO + bound
        )
        return kdf.derive(self.key.raw)


class PassphraseCost(Protocol):
    """A way to stretch a passphrase, and its encoding in a slot."""

    @property
    def slot_type(self) -> SlotType: ...  # noqa: D102

    @property
    def stretching_kib(self) -> int: ...  # noqa: D102

    def pack(self) -> bytes:
        """Return the parameters as stored in a slot."""
        ...

    def stretch(self, passphrase: bytes, *, salt: bytes) -> bytes:
        """Return 32 bytes, slowly."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrypt:
    """scrypt with r = 8 and p = 1; the default takes 128 MiB and about a second.

    `log2_n` is 14 to 20.

    Raises:
        UnsupportedSuiteError: Out of range.

    Source: RFC 7914.
    """

    log2_n: int = 17

    def __post_init__(self) -> None:
        if self.log2_n not in _SCRYPT_LOG2_N:
            raise UnsupportedSuiteError(
                f"scrypt with N = 2^{self.log2_n} is outside 2^14 to 2^20",
                hint="too little is unsafe, too much is a trap",
            )

    @property
    def slot_type(self) -> SlotType:
        """Type 2."""
        return SlotType.SCRYPT

    @property
    def stretching_kib(self) -> int:
        """KiB of memory, times the two passes over them."""
        return 2 << self.log2_n

    def pack(self) -> bytes:
        """Return the four bytes of a slot."""
        return _SCRYPT.pack(self.log2_n, _SCRYPT_R, _SCRYPT_P, 0)

    def stretch(self, passphrase: bytes, *, salt: bytes) -> bytes:
        """Return 32 bytes."""
        kdf = _Scrypt(
            salt=salt, length=DATA_KEY_BYTES, n=1 << self.log2_n, r=_SCRYPT_R, p=_SCRYPT_P
        )
        return kdf.derive(passphrase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argon2id:
    """argon2id; the default takes 64 MiB and a fraction of a second.

    `memory_kib` is at least 8 per lane and at most 1 GiB, `passes` and `lanes` are 1 to 16.

    Raises:
        UnsupportedSuiteError: Out of range.

    Source: RFC 9106.
    """

    memory_kib: int = 64 * 1024
    passes: int = 3
    lanes: int = 4

    def __post_init__(self) -> None:
        is_counted = self.passes in _ARGON2ID_COUNTS and self.lanes in _ARGON2ID_COUNTS
        if not is_counted or not 8 * self.lanes <= self.memory_kib <= _ARGON2ID_MAX_MEMORY_KIB:
            raise UnsupportedSuiteError(
                f"argon2id with {self.memory_kib} KiB, {self.passes} passes and {self.lanes} lanes"
                " is outside 1 GiB, 16 and 16"
            )

    @property
    def slot_type(self) -> SlotType:
        """Type 3."""
        return SlotType.ARGON2ID

    @property
    def stretching_kib(self) -> int:
        """KiB of memory, times the passes over them."""
        return self.memory_kib * self.passes

    def pack(self) -> bytes:
        """Return the eight bytes of a slot."""
        return _ARGON2ID.pack(self.memory_kib, self.passes, self.lanes, 0)

    def stretch(self, passphrase: bytes, *, salt: bytes) -> bytes:
        """Return 32 bytes."""
        kdf = _Argon2id(
            salt=salt,
            length=DATA_KEY_BYTES,
            iterations=self.passes,
            lanes=self.lanes,
            memory_cost=self.memory_kib,
        )
        return kdf.derive(passphrase)


@dataclass(frozen=True, slots=True, repr=False)
class Passphrase:
    """A passphrase as recipient and identity.

    `text` is composed (NFC), so that the encoding of accents does not matter. `cost` is that of new
    slots.

    Raises:
        KeySourceError: It is empty, or no text.
    """

    text: str
    cost: PassphraseCost = field(default_factory=Argon2id)
    random: Random = os.urandom
    stretched_keys: StretchedKeys = field(default_factory=StretchedKeys, compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise KeySourceError("an empty passphrase protects nothing")
        if not self.text.isascii() and any(unicodedata.category(c) == "Cs" for c in self.text):
            raise KeySourceError("the passphrase is no text: it holds half a character")

    def __repr__(self) -> str:
        return "Passphrase(not shown)"

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        """Return a slot for this passphrase."""
        costs, salt = self.cost.pack(), self.random(_SALT_BYTES)
        body_size = len(costs) + _SALT_BYTES + _WRAPPED_BYTES
        head = slot_head(self.cost.slot_type, NO_KEY_ID, body_size=body_size)
        wrapping_key = self.stretch(self.cost, salt)
        wrapped = _wrap(wrapping_key, data_key, aad=bound + head + costs)
        return Slot(type=self.cost.slot_type, key_id=NO_KEY_ID, body=costs + salt + wrapped)

    def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
        """Return the data key, or None for other kinds of slot; raises as `Identity.unwrap`."""
        cost = passphrase_cost(slot)
        if cost is None:
            return None
        costs = cost.pack()
        salt = slot.body[len(costs) : len(costs) + _SALT_BYTES]
        head = slot_head(slot.type, slot.key_id, body_size=len(slot.body))
        wrapped = slot.body[len(costs) + _SALT_BYTES :]
        return self.unwrap_with(
            cost, salt, lambda key: _unwrap(key, wrapped, aad=bound + head + costs)
        )

    def unwrap_with(
        self, cost: PassphraseCost, salt: bytes, unwrap: Callable[[bytes], bytes | None]
    ) -> bytes:
        """Return the content of a slot; `unwrap` opens it with the passphrase as stretched.

        Raises:
            DecryptionError: It does not open.
            StretchingError: Other slots used up the budget.
            UnsupportedSuiteError: There is too little memory for it.
        """
        place = cost, salt
        key = self.stretched_keys.for_slot(
            place, lambda: self.stretch(cost, salt), kib=cost.stretching_kib
        )
        content = unwrap(key)
        if content is None:
            raise DecryptionError("the passphrase is wrong, or the key slot is damaged")
        self.stretched_keys.confirm(place)
        return content

    def stretch(self, cost: PassphraseCost, salt: bytes) -> bytes:
        """Return the 32-byte key of the passphrase, slowly.

        Raises UnsupportedSuiteError if there is too little memory for it.
        """
        passphrase = unicodedata.normalize("NFC", self.text).encode("utf-8")
        try:
            return cost.stretch(passphrase, salt=salt)
        except MemoryError:
            raise UnsupportedSuiteError(
                "stretching the passphrase takes more memory than there is",
                hint="use a larger machine, or another key of the file",
            ) from None


def passphrase_cost(slot: Slot) -> PassphraseCost | None:
    """Return the cost of a passphrase slot, or None for other kinds of slot.

    Raises:
        UnsupportedSuiteError: It asks for more than is accepted.
        TamperedError: It is cut off.
    """
    parse = _COSTS.get(slot.type)
    return None if parse is None else parse(slot)


def _scrypt_of(slot: Slot) -> PassphraseCost:
    check_body_size(slot, _SCRYPT.size + _SALT_BYTES + _WRAPPED_BYTES)
    log2_n, r, p, zero = _SCRYPT.unpack_from(slot.body)
    if (r, p, zero) != (_SCRYPT_R, _SCRYPT_P, 0):
        raise UnsupportedSuiteError(f"scrypt with r = {r} and p = {p} is not used here")
    return Scrypt(log2_n=log2_n)


def _argon2id_of(slot: Slot) -> PassphraseCost:
    check_body_size(slot, _ARGON2ID.size + _SALT_BYTES + _WRAPPED_BYTES)
    return argon2id_parameters(slot)


def argon2id_parameters(slot: Slot) -> Argon2id:
    """Return the cost in the first eight bytes of the body of a slot."""
    memory_kib, passes, lanes, zero = _ARGON2ID.unpack_from(slot.body)
    if zero:
        raise UnsupportedSuiteError("the argon2id slot sets bits that this version does not know")
    return Argon2id(memory_kib=memory_kib, passes=passes, lanes=lanes)


_COSTS: dict[int, Callable[[Slot], PassphraseCost]] = {
    SlotType.SCRYPT: _scrypt_of,
    SlotType.ARGON2ID: _argon2id_of,
}


def _wrap(wrapping_key: bytes, data_key: Key, *, aad: bytes) -> bytes:
    return AESGCM(wrapping_key).encrypt(_NONCE, data_key.raw, aad)


def _unwrap(wrapping_key: bytes, wrapped: bytes, *, aad: bytes) -> bytes | None:
    try:
        return AESGCM(wrapping_key).decrypt(_NONCE, wrapped, aad)
    except InvalidTag:
        return None
