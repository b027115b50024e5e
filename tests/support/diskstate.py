# SPDX-License-Identifier: Apache-2.0
"""States that a power cut may leave of a file and of a directory tree: the values behind `tests.crashmodel`.

* `FileContent`: durable bytes plus the writes since the last sync, each of which may survive, vanish or tear.
* `Namespace`: durable directory entries plus the changes since, of which an `Order` says which sets may survive.

Both are immutable, so that hundreds of disks share them.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

ROOT = 1
MAX_SUBSETS = 64

Entries = Mapping[int, Mapping[str, int]]
"""Directory inode to name to inode."""


class Order(enum.Enum):
    """Which directory changes may survive without the others.

    JOURNALED: any prefix of the changes of the whole disk, in order (ext4, xfs). Such a file system also commits older
    changes when a file is synced; that only removes prefixes, so that these states are a superset of its own. A
    `sync_directory` commits as little as any of them does: up to the last change of that directory.

    WEAK: any subset; only `sync_directory` of that very directory makes a change durable. The rest of the
    promises: a rename is atomic inside one directory, and a file renamed across directories never loses its old name
    before it has the new one (it may have both).

    Each disk that JOURNALED leaves, WEAK leaves too (test_crashmodel checks it), so a test that a promise holds tries
    WEAK alone. JOURNALED is for tests that must find a broken promise, and where WEAK takes too long.
    """

    JOURNALED = "journaled"
    WEAK = "weak"


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """The bytes of one file; `writes` are those since the last sync, as offset and data."""

    durable: bytes = b""
    writes: tuple[tuple[int, bytes], ...] = ()
    size_bytes: int = 0
    written_at: int = 0

    @cached_property
    def visible(self) -> bytes:
        """The view of a reader while the power is on."""
        return _written(self.durable, self.writes).ljust(self.size_bytes, b"\0")

    def written(self, offset: int, data: bytes) -> FileContent:
        """Return the content after one more write."""
        size = max(self.size_bytes, offset + len(data))
        return replace(self, writes=(*self.writes, (offset, data)), size_bytes=size)

    def reserved(self, size_bytes: int) -> FileContent:
        """Return the content with at least this size, filled up with zeros."""
        return self.written(max(self.size_bytes, size_bytes), b"")

    def synced(self) -> FileContent:
        """Return the content with all writes durable."""
        return self._settled(self.visible) if self.writes else self

    def after_power_cut(self, tears: int) -> tuple[FileContent, ...]:
        """Return the distinct contents that a power cut may leave; the first has the least.

        Nothing of the unsynced writes, all of them, the new size with zeros (xfs), and for each tear one prefix of the
        written bytes and one piece of them missing from the whole (zeros in a new file).
        """
        if not self.writes:
            return (self,)
        total = sum(len(data) for _, data in self.writes)
        torn = [self._without(total * i // (tears + 1), total) for i in range(1, tears + 1)]
        holes = (self._without(total * i // tears, total * (i + 1) // tears) for i in range(tears))
        padded = [content.ljust(self.size_bytes, b"\0") for content in (self.durable, *holes)]
        distinct = dict.fromkeys((self.durable, self.visible, *padded, *torn))
        return tuple(self._settled(content) for content in distinct)

    def _settled(self, content: bytes) -> FileContent:
        return replace(self, durable=content, writes=(), size_bytes=len(content))

    def _without(self, start: int, end: int) -> bytes:
        """Return the content when bytes `start` to `end` of all that was written are lost."""
        kept = []
        for offset, data in self.writes:
            kept.append((offset, data[: max(0, start)]))
            skipped = max(0, end)
            kept.append((offset + skipped, data[skipped:]))
            start, end = start - len(data), end - len(data)
        return _written(self.durable, tuple(kept))


def _written(content: bytes, writes: tuple[tuple[int, bytes], ...]) -> bytes:
    result = bytearray(content)
    for offset, data in writes:
        if data:
            result.extend(bytes(max(0, offset - len(result))))
            result[offset : offset + len(data)] = data
    return bytes(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One atomic change of directory entries.

    Attributes:
        sequence: Position in the journal; the two halves of a rename across directories share it.
        directory: The directory whose sync makes it durable in WEAK order.
        entries: Directory, name and new inode (None: the name goes).
        is_removal: The half of a rename that may only survive together with the other half.
    """

    sequence: int
    directory: int
    entries: tuple[tuple[int, str, int | None], ...]
    is_removal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The directory tree, as seen and as durable.

    Attributes:
        visible: The entries while the power is on.
        base: The entries before the first pending change.
        pending: Changes that are not durable in at least one order, oldest first.
        synced: Directory to the newest sequence its last sync covered.
        journaled: Newest sequence that is durable in JOURNALED order.
        sequence: Newest sequence in use.
    """

    visible: Entries
    base: Entries
    pending: tuple[Change, ...] = ()
    synced: Mapping[int, int]
    journaled: int = 0
    sequence: int = 0

    @classmethod
    def durable(cls, entries: Entries) -> Namespace:
        """Return a tree in which everything is durable."""
        return cls(visible=entries, base=entries, synced={})

    def changed(self, *changes: Change) -> Namespace:
        """Return the tree after one operation, given as one change or as the two halves of a rename."""
        return replace(
            self,
            visible=_applied(self.visible, changes),
            pending=self.pending + changes,
            sequence=self.sequence + 1,
        )

    def directory_synced(self, directory: int) -> Namespace:
        """Return the tree after a sync of one directory."""
        touching = [
            change.sequence
            for change in self.pending
            if any(place == directory for place, _, _ in change.entries)
        ]
        after = replace(
            self,
            synced={**self.synced, directory: self.sequence},
            journaled=max([self.journaled, *touching]),
        )
        return after._without_settled()

    def after_power_cut(self, order: Order) -> Iterator[Entries]:
        """Yield the entries a power cut may leave; the first has the least, some may be equal."""
        for chosen in self._prefixes() if order is Order.JOURNALED else self._subsets():
            yield _applied(self.base, chosen)

    def _prefixes(self) -> Iterator[tuple[Change, ...]]:
        ends = {self.journaled, *(c.sequence for c in self.pending if c.sequence > self.journaled)}
        for end in sorted(ends):
            yield tuple(change for change in self.pending if change.sequence <= end)

    def _subsets(self) -> Iterator[tuple[Change, ...]]:
        durable = {change for change in self.pending if self._is_synced(change)}
        free = [change for change in self.pending if change not in durable]
        for subset in _sampled_subsets(free):
            chosen = durable.union(subset)
            moved = {change.sequence for change in chosen if change.is_removal}
            yield tuple(c for c in self.pending if c in chosen or c.sequence in moved)

    def _is_synced(self, change: Change) -> bool:
        return change.sequence <= self.synced.get(change.directory, 0)

    def _without_settled(self) -> Namespace:
        settled = tuple(
            itertools.takewhile(
                lambda change: change.sequence <= self.journaled and self._is_synced(change),
                self.pending,
            )
        )
        base = _applied(self.base, settled)
        return replace(self, base=base, pending=self.pending[len(settled) :])


def _applied(entries: Entries, changes: tuple[Change, ...]) -> Entries:
    result = dict(entries)
    for change in changes:
        for directory, name, inode in change.entries:
            names = dict(result.get(directory, {}))
            names.pop(name, None)
            if inode is not None:
                names[name] = inode
            result[directory] = names
    return result


def _sampled_subsets(items: list[Change]) -> Iterator[tuple[Change, ...]]:
    """Yield every subset, or above MAX_SUBSETS the telling ones and a fixed sample of the others."""
    if 2 ** len(items) <= MAX_SUBSETS:
        for count in range(len(items) + 1):
            yield from itertools.combinations(items, count)
        return
    for index in range(len(items)):
        yield tuple(items[:index])
        yield (items[index],)
        yield tuple(items[:index] + items[index + 1 :])
    yield tuple(items)
    sample = random.Random(len(items))
    for _ in range(MAX_SUBSETS):
        yield tuple(item for item in items if sample.random() < 0.5)
