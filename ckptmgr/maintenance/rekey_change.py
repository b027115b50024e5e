# SPDX-License-Identifier: Apache-2.0
"""Plan of a change of keys: its effect on a container's header, or on an encrypted `.ckpt`.

A container has slots, which are rewritten. A `.ckpt` has one key, so that another key means
re-encryption. A file that is re-encrypted for another reason keeps its recipients.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsafeWrite
from ckptmgr.core.model import Checkpoint
from ckptmgr.crypto.container.header import HeaderCopy
from ckptmgr.crypto.container.rekey import HeaderWrite, rewrite_header
from ckptmgr.crypto.container.unlock import CopyState, find_copies, unlock
from ckptmgr.crypto.errors import CryptoError, DecryptionError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import KeyRing, Keys, ring_of, unwrap_first
from ckptmgr.crypto.mindspore.blocks import open_blocks, sniff_mode
from ckptmgr.crypto.slots import Identity, Recipient, Slot
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.store.manifest.keys import is_for

Removal = KeyRing | str
"""A key to remove: the key, passphrase or public key itself, or the id of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """Keys to add and to remove.

    Attributes:
        keys: Open the files now.
        add: Open them afterwards, too; each ring is one key, passphrase or public key.
        remove: No longer open them.
        remove_ids: The same, by the id of a key.
        is_exclusive: Whether only the keys in `add` open them afterwards.

    Raises:
        UnsafeWrite: A key is to be added and removed.
    """

    keys: KeyRing
    add: tuple[KeyRing, ...] = ()
    remove: tuple[KeyRing, ...] = ()
    remove_ids: tuple[str, ...] = ()
    is_exclusive: bool = False

    def __post_init__(self) -> None:
        removed = {key_id for ring in self.remove for key_id in ring.key_ids}
        both = [one for ring in self.add for one in ring.key_ids]
        if any(one in removed or one in self.remove_ids for one in both):
            raise UnsafeWrite("a key is to be added and to be removed", hint="name it once")

    @property
    def all_keys(self) -> KeyRing:
        """All keys that open files before, during or after the change."""
        return KeyRing.joined((self.keys, *self.add))

    @property
    def added(self) -> KeyRing:
        """All keys in `add`, as one ring."""
        return KeyRing.joined(self.add)

    @property
    def is_repair(self) -> bool:
        """Whether no key changes, and only damaged header copies are rewritten."""
        return not (self.add or self.remove or self.remove_ids)

    @property
    def removals(self) -> tuple[Removal, ...]:
        """All keys to remove."""
        return (*self.remove, *self.remove_ids)

    @property
    def removes_all_keys(self) -> bool:
        """Whether every key that opens files now is to be removed."""
        ids = {*self.remove_ids, *(key_id for ring in self.remove for key_id in ring.key_ids)}
        secrets = {one for ring in self.remove for one in ring.own}
        return all(one in secrets or KeyRing([one]).key_id in ids for one in self.keys.own)

    def removals_among(self, slots: Sequence[Slot], *, bound: bytes) -> frozenset[Removal]:
        """Return the keys to remove that have a slot among these."""
        rings = {ring for ring in self.remove if any(ring.opens(s, bound=bound) for s in slots)}
        ids = {one for one in self.remove_ids if any(is_for(slot, (one,)) for slot in slots)}
        return frozenset((*rings, *ids))

    def removes(self, slot: Slot, *, bound: bytes) -> bool:
        """Return whether a slot is for a key that shall no longer open the file."""
        if self.is_exclusive:
            return not any(ring.opens(slot, bound=bound) for ring in self.add)
        return is_for(slot, self.remove_ids) or any(
            ring.opens(slot, bound=bound) for ring in self.remove
        )

    def missing(self, slots: Sequence[Slot], *, bound: bytes) -> list[Recipient]:
        """Return the recipients to add that have no slot among these yet."""
        return [
            recipient
            for ring in self.add
            if not any(ring.opens(slot, bound=bound) for slot in slots)
            for recipient in ring.recipients
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Plan for one file.

    Attributes:
        before: Labels of the keys that open it now.
        after: Labels of those that open it afterwards.
        writes: The new header copies of a container, in order; none when it is done.
        is_proven: Whether it was opened. A file that was changed already may open only for others.
        removals: The keys to remove that have a slot in it, in any header copy.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    writes: tuple[HeaderWrite, ...] = field(default=(), repr=False)
    needs_reencryption: bool = False
    is_proven: bool = True
    removals: frozenset[Removal] = frozenset()


def plan_header(raw: Source, change: KeyChange, *, path: str) -> FilePlan:
    """Return the plan for the header of a container.

    A key in `add` opens files that were changed already, and changes none by itself.

    Raises:
        UnsafeWrite: No key would open it any more, or its header is too small.
        CryptoError: It does not open, or is damaged.
    """
    identities: Sequence[Identity] = change.all_keys.identities
    try:
        unlocked = unlock(raw, identities)
    except DecryptionError as error:
        return _plan_if_done(raw, change, error)
    header = unlocked.header
    bound = header.fixed.pack()
    removed = [slot for slot in header.slots if change.removes(slot, bound=bound)]
    kept = [slot for slot in header.slots if slot not in removed]
    added = change.missing(kept, bound=bound)
    before = _labels(header.slots)
    is_whole = all(state is CopyState.CURRENT for state in unlocked.states)
    removals = _removals_in(raw, change)
    if is_whole and not added and not removed:
        return FilePlan(before=before, after=before, removals=removals)
    if (added or removed) and not _opens(change.keys, header.slots, bound=bound):
        # The new keys may finish a change that was interrupted, but not begin one.
        raise DecryptionError(
            "the file is encrypted for another key", hint=f"it opens with: {', '.join(before)}"
        )
    try:
        writes = rewrite_header(unlocked, add=added, remove=removed.__contains__)
    except ValueError as error:
        raise UnsafeWrite(
            f"the keys cannot be changed like this: {error}",
            path=path,
            hint="at least one must be left; for many more, use ckptmgr reencrypt",
        ) from error
    new = tuple(label for ring in change.add for label in ring.labels if label not in before)
    after = tuple(slot.label for slot in kept) + (new if added else ())
    return FilePlan(before=before, after=after, writes=writes, removals=removals)


def plan_container(raw: Source, change: KeyChange) -> FilePlan:
    """Return the plan for re-encrypting a container; one that only the new keys open is done.

    Raises:
        CryptoError: It does not open, is damaged, or only its keys were changed before.
    """
    try:
        before = _labels(unlock(raw, change.keys.identities).header.slots)
    except DecryptionError as error:
        done = _plan_if_done(raw, change, error)
        try:
            unlock(raw, change.added.identities)
        except DecryptionError:
            return done
        return replace(done, is_proven=True)
    return FilePlan(before=before, after=change.added.labels, needs_reencryption=True)


def has_first_keys(raw: Source) -> bool:
    """Return whether the keys of a container are those that it was encrypted for."""
    return all(copy.header.generation == 1 for copy in find_copies(raw))


def _plan_if_done(raw: Source, change: KeyChange, error: DecryptionError) -> FilePlan:
    """Return the plan for a container that opens for others only, as after the change.

    Raises:
        DecryptionError: Its slots do not look like that; it is the given error, with a hint.
    """
    copies = [copy.header for copy in find_copies(raw)]
    if not all(_looks_done(copy, change) for copy in copies):
        raise _with_hint(copies[0], change, error)
    labels = _labels(copies[0].slots)
    return FilePlan(before=labels, after=labels, is_proven=False)


def _with_hint(header: HeaderCopy, change: KeyChange, error: DecryptionError) -> DecryptionError:
    """Return the error of a file that was perhaps rekeyed to the keys of its re-encryption."""
    bound = header.fixed.pack()
    if not change.is_exclusive or all(change.removes(slot, bound=bound) for slot in header.slots):
        return error
    opens = ", ".join(_labels(header.slots))
    return DecryptionError(
        error.message,
        offset=error.offset,
        hint=f"it opens with: {opens}; where only its keys were changed, give one of these as an old key, too (CLI: --key)",
    )


def _removals_in(raw: Source, change: KeyChange) -> frozenset[Removal]:
    """Return the keys to remove with a slot in any header copy; the copies may differ."""
    found: frozenset[Removal] = frozenset()
    for copy in find_copies(raw):
        found |= change.removals_among(copy.header.slots, bound=copy.header.fixed.pack())
    return found


def _looks_done(header: HeaderCopy, change: KeyChange) -> bool:
    """Return whether the slots of a header that does not open look as after the change."""
    if not change.add and not change.removes_all_keys:
        return False  # these keys would still open it
    if change.is_exclusive and header.generation > 1:
        return False  # its keys were changed, and the data key is the one that was there before
    bound = header.fixed.pack()
    is_free = not any(change.removes(slot, bound=bound) for slot in header.slots)
    return is_free and not change.missing(header.slots, bound=bound)


def _opens(keys: KeyRing, slots: Sequence[Slot], *, bound: bytes) -> bool:
    return unwrap_first(slots, keys.identities, bound=bound) is not None


def _labels(slots: Sequence[Slot]) -> tuple[str, ...]:
    return tuple(slot.label for slot in slots)


class Action(enum.Enum):
    """Kind of change that is made to a checkpoint."""

    NOTHING = "nothing"
    """It has these keys already."""
    PLAIN = "plain"
    """It is not encrypted; nothing is done."""
    HEADER = "header"
    """Its headers, or the authentication of its manifest, are rewritten."""
    REENCRYPT = "re-encrypt"
    """It is re-encrypted."""
    CLEAN_UP = "clean up"
    """It was re-encrypted, and files that the old keys open were left beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RekeyPlan:
    """Plan for one checkpoint, or the change that was made; other fields as of `FilePlan`."""

    checkpoint: Checkpoint
    action: Action
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    removals: frozenset[Removal] = frozenset()

    @property
    def is_pending(self) -> bool:
        """Whether there is something to do."""
        return self.action not in (Action.NOTHING, Action.PLAIN)


_HEAD_BYTES = 16


def plan_blocks(raw: Source, change: KeyChange, *, path: str) -> FilePlan:
    """Return the plan for an encrypted `.ckpt`.

    Raises:
        UnsafeWrite: It would have no key or several, or a key that MindSpore does not take.
        CryptoError: It does not open, or is not sealed.
    """
    mode = str(sniff_mode(read_bytes(raw, 0, min(_HEAD_BYTES, raw.size))))
    added = [key for ring in change.add for key in ring.raw_keys]
    key = _opener(raw, mode, keys=(*change.keys.raw_keys, *added))
    before = (f"key {key.key_id}",)
    rings = (ring for ring in change.remove if key.key_id in ring.key_ids)
    ids = (one for one in change.remove_ids if one == key.key_id)
    removals: frozenset[Removal] = frozenset((*rings, *ids))
    # A new key that is also an old one asks for re-encryption under another data key.
    is_same_key_again = change.is_exclusive and key in change.keys.raw_keys
    is_done = key in added and len(change.add) == 1 and not is_same_key_again
    if is_done or change.is_repair:
        return FilePlan(before=before, after=before)
    is_removed = change.is_exclusive or bool(removals)
    if not is_removed and not change.add:
        return FilePlan(before=before, after=before)
    if not is_removed or len(change.add) != 1 or len(added) != 1:
        raise UnsafeWrite(
            "an encrypted .ckpt has exactly one key, which MindSpore takes",
            path=path,
            hint=f"--add one key, the one that opens it now ({key.key_id}) or another in its place"
            if key in added
            else f"add one key and remove the present one: --add SOURCE --remove {key.key_id}",
        )
    after = (f"key {added[0].key_id}",)
    return FilePlan(before=before, after=after, needs_reencryption=True, removals=removals)


def _opener(raw: Source, mode: str, *, keys: Sequence[Key]) -> Key:
    """Return the key that opens a file."""
    failures: list[CryptoError] = []
    for key in keys:
        try:
            open_blocks(raw, key, mode)
        except CryptoError as error:
            failures.append(error)
        else:
            return key
    # The first key is the one that should open it.
    raise failures[0]


def check_same_recipients(header: HeaderCopy, keys: Keys, *, path: Path | str) -> None:
    """Raise UnsafeWrite unless a container is encrypted for exactly these keys."""
    ring = ring_of(keys)
    with translated_errors(str(path)):
        is_same = ring.is_exactly_for(header.slots, bound=header.fixed.pack())
    if not is_same:
        raise UnsafeWrite(
            f"is encrypted for {', '.join(slot.label for slot in header.slots)}; given: {', '.join(ring.labels)}",
            path=path,
            hint="give all of these and nobody else (CLI: --key for each); the public key of a pair will do",
        )
