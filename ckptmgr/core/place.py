# SPDX-License-Identifier: Apache-2.0
"""A place holds checkpoints: a local directory, a prefix of an object store, a directory of another tool.

Code asks for capabilities (`Place.can`), and never for the kind of place. `refusal_at` words every refusal. To add
a place:

1. Write a class with the methods of `Place`, and with those of `Trash` where things can come back.
2. Name in `can` the missing capabilities; commands and runs refuse the rest by name.
3. Run `ckptmgr.testing.places` on it.
4. Return it from `objects/places.py` `open_place`, or for a kind of content from `cli/foreign.py` `place_to_prune`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from ckptmgr.core.model import Checkpoint
from ckptmgr.core.urls import is_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a place.

    Attributes:
        name: The kind of place, for messages.
        locks: Two writers of a series are kept apart.
        trash: Removed checkpoints can come back.
        moves: Entries can be renamed within the place, such as into quarantine.
        folders: Other places may be below it.
        changes: The manifest of a committed checkpoint can be replaced: pins, tags, later metrics.
        bare: Data without a manifest has a name.
        modes: Files have permission bits.
        config: A `ckptmgr.toml` in it says what to keep.
        ranks: Many ranks can write one checkpoint.
        in_place: Files are written where they stay, and not into a folder before an upload.
    """

    name: str
    locks: bool = True
    trash: bool = True
    moves: bool = True
    folders: bool = True
    changes: bool = True
    bare: bool = True
    modes: bool = True
    config: bool = True
    ranks: bool = True
    in_place: bool = True


DIRECTORY = Capabilities(name="a directory")
OBJECT_STORE = Capabilities(
    name="an object store",
    locks=False,
    trash=False,
    moves=False,
    folders=False,
    changes=False,
    bare=False,
    modes=False,
    config=False,
    ranks=False,
    in_place=False,
)
OTHER_TOOL = Capabilities(
    name="a directory of another tool", moves=False, folders=False, changes=False, ranks=False
)


def capabilities_at(path: str | os.PathLike[str]) -> Capabilities:
    """Return the capabilities of the place of a path or an address, without a look at it."""
    return OBJECT_STORE if is_url(path) else DIRECTORY


_WHY = {
    "trash": "there is no trash",
    "moves": "nothing is moved",
    "folders": "there are no folders",
    "changes": "no copy here could repeat a change that was cut",
    "bare": "data without a manifest has no name",
    "modes": "the policy of the bucket says who may read it",
    "ranks": "many ranks write one checkpoint",
}


class Refusal(NamedTuple):
    """The message about an option without effect, and the way out."""

    message: str
    hint: str


def refusal_at(
    can: Capabilities, option: str, capability: str, *, hint: str = ""
) -> Refusal | None:
    """Return why an option has no effect at a place; None where the place has the capability.

    >>> refusal_at(OBJECT_STORE, "--undo", "trash", hint="look at the plan first").message
    '--undo has no effect in an object store, where there is no trash'
    """
    if getattr(can, capability):
        return None
    return Refusal(f"{option} has no effect in {can.name}, where {_WHY[capability]}", hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The checkpoints that were thrown away together.

    Attributes:
        path: The folder.
        thrown_at: When, UTC; from the name of the folder.
        checkpoints: Its checkpoints that can be restored, oldest first.
    """

    path: Path
    thrown_at: datetime
    checkpoints: tuple[Checkpoint, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that removing it frees."""
        return sum(checkpoint.size_bytes for checkpoint in self.checkpoints)


class Trash(Protocol):
    """Where dropped checkpoints wait, in batches, before they are removed for good."""

    def batches(self) -> Sequence[Batch]:
        """Return the batches, oldest first."""
        ...

    def new_batch_path(self, now: datetime) -> Path:
        """Return the path of a new batch, later than all others; nothing is created."""
        ...

    def throw_away(
        self, checkpoints: Sequence[Checkpoint], into: Path, *, needed: Sequence[Checkpoint] = ()
    ) -> Sequence[Exception]:
        """Move checkpoints into a batch, durably; return the errors of those that stay.

        The leases of their series must be held. `needed` are those because of which these go.
        """
        ...

    def restore(self, batch: Batch, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Move checkpoints of a batch back, durably; return the taken names, which stay in it."""
        ...

    def taken_names(self, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Return the names of checkpoints that the place has, or has again."""
        ...

    def can_restore(self, batch: Batch) -> bool:
        """Return whether something of a batch, which the keys prove if there are any, can come back."""
        ...

    def series_of(self, checkpoint: Checkpoint) -> str:
        """Return the series of a checkpoint in a batch, whose lease a restoration takes."""
        ...

    def discard(self, batch: Batch) -> None:
        """Remove a batch for good."""
        ...

    def tidy(self, folder: Path) -> None:
        """Remove the folder of a batch, and the trash, if they are empty."""
        ...


class Place(Protocol):
    """A place that holds checkpoints; `directory` is its path or address."""

    directory: Path
    can: Capabilities

    @property
    def trash(self) -> Trash | None:
        """The trash; None where there is none."""
        ...

    def scan(self) -> list[Checkpoint]:
        """Return every checkpoint, in no particular order; damage does not raise."""
        ...

    def look(self, name: str) -> Checkpoint | None:
        """Return the checkpoint that is listed under one name now, or None."""
        ...

    def lease(self, series: str) -> AbstractContextManager[None]:
        """Be the only writer of a series.

        Raises:
            StoreLocked: Another process is the writer.
            OSError: The place has no locks; see `Capabilities.locks`.
        """
        ...

    def finish_moves(self, series: str) -> Sequence[str]:
        """Finish moves into the trash that dead processes began; hold the lease."""
        ...

    def settle(self, series: str) -> Sequence[str]:
        """Finish whatever dead processes began; hold the lease. Return one sentence per action."""
        ...

    def check_not_all(
        self, checkpoints: Sequence[Checkpoint], present: Sequence[Checkpoint]
    ) -> None:
        """Raise UnsafePrune where no countable checkpoint of `present` would remain."""
        ...

    def check_needed(self, needed: Sequence[Checkpoint]) -> None:
        """Raise UnsafePrune unless these are still as they were listed."""
        ...

    def remove(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint] = (),
        present: Sequence[Checkpoint] | None = None,
    ) -> Sequence[Exception]:
        """Remove checkpoints for good, durably; return the errors of those that stay.

        The leases of their series must be held. `present` are the checkpoints of the place, where
        the caller has just listed them after a durable save.

        Raises:
            UnsafePrune: The last good one would go, or one of `needed` is not as it was listed.
        """
        ...

    def clean_up(self) -> Sequence[str]:
        """Remove what no checkpoint needs after a removal; return one sentence per action."""
        ...
