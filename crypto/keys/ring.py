# SPDX-License-Identifier: Apache-2.0
"""Key rings: the recipients of written files and the identities that open files.

A single `Key` is both, so it is accepted wherever `Keys` are. Everything else is a `KeyRing`.

>>> ring = KeyRing([KeyMaterial.of_key(Key(bytes(16)))])
>>> ring.labels, ring.can_open
(('key fcaf80b25b219f3f',), True)
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import CryptoError, KeySourceError, StretchingError
from ..secret_bytes import SecretBytes
from ..slots import DATA_KEY_BYTES, NO_KEY_ID, Identity, Recipient, Slot, SlotType
from ..slots.secret import Passphrase, RawKey
from .key import Key
from .run_passphrase import RunPassphrase


class KeyKind(enum.Enum):
    """Kinds of key material."""

    KEY = "key"
    PHRASE = "passphrase"
    PEM = "pem"
    """The file of a public or private key."""


@dataclass(frozen=True, slots=True, repr=False)
class KeyMaterial:
    """The content of a key source: a key, a passphrase in UTF-8, or a PEM file. Never shown."""

    kind: KeyKind
    content: bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", SecretBytes(self.content))

    @classmethod
    def of_key(cls, key: Key) -> KeyMaterial:
        """Return a key as material."""
        return cls(KeyKind.KEY, key.raw)

    def __repr__(self) -> str:
        return f"KeyMaterial({self.kind.value}, not shown)"

    def parties(self) -> tuple[Recipient, Identity | None]:
        """Return the recipient and the identity of this material; a public key has no identity.

        Raises:
            KeySourceError: It is no key or passphrase.
        """
        if self.kind is KeyKind.PEM:
            from .pem import parse_pem  # slow to import, and rare

            return parse_pem(self.content)
        if self.kind is KeyKind.KEY:
            key = RawKey(Key(self.content))
            return key, key
        try:
            phrase = RunPassphrase(Passphrase(self.content.decode("utf-8")))
        except UnicodeDecodeError:
            raise KeySourceError("the passphrase is no text") from None
        return phrase, phrase


class KeyRing:
    """Several keys, of any kind. Safe to use from several threads; equal only to itself.

    `own` encrypt, and open where they include private keys. `also_for` are further recipients,
    whose private keys are not used.

    Raises:
        KeySourceError: There is no recipient, or something is no key.
    """

    def __init__(self, own: Sequence[KeyMaterial], also_for: Sequence[KeyMaterial] = ()) -> None:
        if not own and not also_for:
            raise KeySourceError("nobody would be able to open it")
        parties = [material.parties() for material in own]
        others = [material.parties()[0] for material in also_for]
        self.own, self.also_for = tuple(own), tuple(also_for)
        self.recipients: tuple[Recipient, ...] = (*(one for one, _ in parties), *others)
        self.identities: tuple[Identity, ...] = tuple(two for _, two in parties if two is not None)
        self._lock = threading.Lock()
        self._labelled: tuple[Slot, ...] | None = None

    @classmethod
    def joined(cls, rings: Sequence[KeyRing]) -> KeyRing:
        """Return several rings as one; it shares their stretched passphrases."""
        ring = cls(
            [one for ring in rings for one in ring.own],
            [one for ring in rings for one in ring.also_for],
        )
        ring.recipients = tuple(one for ring in rings for one in ring.recipients)
        ring.identities = tuple(one for ring in rings for one in ring.identities)
        return ring

    def __repr__(self) -> str:
        return f"KeyRing({len(self.recipients)} recipients, {len(self.identities)} identities)"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[KeyRing], tuple[Sequence[KeyMaterial], ...]]:
        return KeyRing, (self.own, self.also_for)

    @property
    def can_open(self) -> bool:
        """Whether anything can be opened; public keys only encrypt."""
        return bool(self.identities)

    @property
    def raw_keys(self) -> tuple[Key, ...]:
        """The symmetric keys that open."""
        return tuple(one.key for one in self.identities if isinstance(one, RawKey))

    @property
    def sole_key(self) -> Key | None:
        """The key, if the ring is one symmetric key."""
        (first, *others) = self.recipients
        return first.key if isinstance(first, RawKey) and not others else None

    @property
    def labels(self) -> tuple[str, ...]:
        """The recipients, for people."""
        return tuple(slot.label for slot in self._slots())

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the recipients' keys; a passphrase has none."""
        return tuple(slot.key_id.hex() for slot in self._slots() if slot.key_id != NO_KEY_ID)

    @property
    def key_id(self) -> str | None:
        """The first of the ids, or None."""
        return next(iter(self.key_ids), None)

    def opens(self, slot: Slot, *, bound: bytes) -> bool:
        """Return whether a slot is for a key of this ring."""
        if slot.key_id != NO_KEY_ID:
            return any(
                (slot.type, slot.key_id) == (mine.type, mine.key_id) for mine in self._slots()
            )
        return unwrap_slot(slot, self.identities, bound=bound) is not None

    def is_exactly_for(self, slots: Sequence[Slot], *, bound: bytes) -> bool:
        """Return whether the slots are for all recipients of this ring, and for no others."""
        parties = zip(self.recipients, self._slots(), strict=True)
        return all(self.opens(slot, bound=bound) for slot in slots) and all(
            any(_is_of(slot, *party, bound=bound) for slot in slots) for party in parties
        )

    def _slots(self) -> tuple[Slot, ...]:
        """Return slots without a data key, for their heads."""
        with self._lock:
            if self._labelled is None:
                self._labelled = tuple(_empty_slot(one) for one in self.recipients)
            return self._labelled


def _empty_slot(recipient: Recipient) -> Slot:
    if isinstance(recipient, RunPassphrase):  # `wrap` would stretch it
        return Slot(type=SlotType.RUN_PASSPHRASE, key_id=NO_KEY_ID, body=b"")
    return recipient.wrap(Key(bytes(DATA_KEY_BYTES)), bound=b"")


def _is_of(slot: Slot, recipient: Recipient, empty: Slot, *, bound: bytes) -> bool:
    if isinstance(recipient, RunPassphrase):
        return unwrap_slot(slot, [recipient], bound=bound) is not None
    return (slot.type, slot.key_id) == (empty.type, empty.key_id)


Keys = Key | KeyRing


def ring_of(keys: Keys) -> KeyRing:
    """Return a ring, made for a single key if need be."""
    return keys if isinstance(keys, KeyRing) else KeyRing([KeyMaterial.of_key(keys)])


def block_key(keys: Keys) -> Key:
    """Return the one symmetric key for a file that takes only that, such as MindSpore's.

    Raises:
        KeySourceError: There is none, or other keys besides.
    """
    ring = ring_of(keys)
    if ring.sole_key is None:
        raise one_key_error(len(ring.raw_keys))
    return ring.sole_key


def one_key_error(given: int) -> KeySourceError:
    """Return the error for a file that takes one symmetric key, if `given` of them are there."""
    if given:
        return KeySourceError(
            "this kind of file takes one key and nothing else, and more is given",
            hint="give one key; format='safetensors' makes files that take several",
        )
    return KeySourceError(
        "this kind of file takes a key, no passphrase and no public or private key",
        hint="give its key; format='safetensors' makes files that take all of them",
    )


def unwrap_slot(slot: Slot, identities: Sequence[Identity], *, bound: bytes) -> bytes | None:
    """Return the content of a slot, or None if no identity opens it; raises as `unwrap_first`."""
    return unwrap_first([slot], identities, bound=bound)


def unwrap_first(
    slots: Sequence[Slot], identities: Sequence[Identity], *, bound: bytes
) -> bytes | None:
    """Return the content of the first slot that opens for an identity, or None.

    Raises StretchingError if none opens and one was not tried, because others used up the budget.
    """
    untried = None
    for slot in slots:
        for identity in identities:
            try:
                content = identity.unwrap(slot, bound=bound)
            except StretchingError as error:
                untried = error
            except CryptoError:
                continue
            else:
                if content is not None:
                    return content
    if untried is not None:
        raise untried
    return None


def keys_to_document(keys: Keys) -> dict[str, list[list[str]]]:
    """Return keys as plain values, for another process of the same user; they are secret."""
    ring = ring_of(keys)
    return {"own": _to_lists(ring.own), "also_for": _to_lists(ring.also_for)}


def keys_from_document(document: dict[str, list[list[str]]] | None) -> Keys | None:
    """Return the keys of `keys_to_document`."""
    if document is None:
        return None
    ring = KeyRing(_from_lists(document["own"]), _from_lists(document["also_for"]))
    return ring if ring.sole_key is None else ring.sole_key


def _to_lists(materials: Sequence[KeyMaterial]) -> list[list[str]]:
    return [[material.kind.value, material.content.hex()] for material in materials]


def _from_lists(lists: list[list[str]]) -> list[KeyMaterial]:
    return [KeyMaterial(KeyKind(kind), bytes.fromhex(content)) for kind, content in lists]
