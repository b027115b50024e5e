# SPDX-License-Identifier: Apache-2.0
"""`PlaceUnderTest`: how a place of checkpoints is shown to the suite `ckptmgr.testing.places`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Literal, NoReturn, Protocol, Self

from ckptmgr.core.errors import CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.model import ORDER, UNFINISHED, Checkpoint
from ckptmgr.core.place import Place
from ckptmgr.maintenance.prune import carry_out, propose, undo
from ckptmgr.maintenance.prune_plan import Planner, RunPlanner
from ckptmgr.policy.text import parse_policy
from ckptmgr.store.manifest.codec import Manifest

Capability = Literal[
    "manifests", "overwrites", "locks", "lost-locks", "removes", "trash", "quarantine", "changes",
    "protects", "notes", "space",
]  # fmt: skip
"""Capabilities of a place besides listing, reading and pruning.

* `manifests`: a manifest stands beside the data; the order of checkpoints is that of commits.
* `overwrites`: a name that is published again is replaced.
* `locks`, `lost-locks`: one writer at a time; one that has lost its lock changes nothing.
* `removes`: named checkpoints can be removed for good.
* `trash`, `quarantine`: what a plan drops can be restored for a day; damaged ones are moved aside.
* `changes`: pins and tags can be changed after the save. `protects`: a single one can be protected.
* `notes`: small files beside the checkpoints. `space`: the free space is known.
"""


class PlaceUnderTest(Protocol):
    """Adapter of one place for the suite; operations that a place lacks raise, see `can`.

    Attributes:
        place: The place.
        can: Its capabilities.
        names: Texts of which one occurs in every error about the place, such as its address. The
            path of each checkpoint begins with the first one.
    """

    place: Place
    can: frozenset[Capability]
    names: tuple[str, ...]

    def again(self) -> Self:
        """Return the same place as another process opens it."""
        ...

    def watched(self, look: Callable[[], None]) -> Self:
        """Return the same place, which calls `look` before each single change."""
        del look
        return self

    def entries(self) -> Mapping[str, int]:
        """Return all that is stored, by name, in bytes; without locks."""
        ...

    def content(self, checkpoint: Checkpoint) -> bytes:
        """Return what a checkpoint holds, other bytes for each step.

        Raises:
            CorruptCheckpoint: It is not whole.
        """
        ...

    def publish(
        self, step: int, *, series: str = "net", metrics: Mapping[str, float] | None = None
    ) -> Checkpoint:
        """Save something under a name that depends on the step, a minute after the save before.

        A place whose files another tool writes makes them as that tool does.
        """
        ...

    def plant(self, name: str) -> None:
        """Put something else there under this name."""
        ...

    def plant_half_written(self, step: int) -> None:
        """Leave what a killed save of a step leaves."""
        ...

    def damage(self, checkpoint: Checkpoint) -> None:
        """Change the bytes of a checkpoint so that a check finds it."""
        ...

    def listed(self) -> Sequence[Checkpoint]:
        """Return all checkpoints, newest first, unfinished ones last."""
        ordered = sorted(self.place.scan(), key=ORDER, reverse=True)
        return sorted(ordered, key=lambda one: one.state in UNFINISHED)

    def look(self, name: str) -> Checkpoint | None:
        """Return the checkpoint that has a name, or None."""
        return self.place.look(name)

    def planner(self) -> Planner:
        """Return what plans a prune of the place; by default it reads the checkpoints to be kept."""
        return _ReadingPlanner(self.content)

    def plan(self, keep: str, now: datetime) -> Callable[[], Sequence[Exception]]:
        """Return what carries a retention policy out, as decided now; its errors are returned.

        Dropped ones go to the trash, if the place has one; those that have been there for a day go for good.
        """
        planner = self.planner()
        proposal = propose(self.place, parse_policy(keep), planner, now=now)
        return lambda: carry_out(self.place, proposal, planner).failures

    def lock(self) -> AbstractContextManager[None]:
        """Be the only one that changes the checkpoints of the series `net`."""
        return self.place.lease("net")

    def restore(self) -> Sequence[str]:
        """Restore the last that a plan dropped; return the names that are taken, which stay away."""
        return undo(self.place).taken

    def remove(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Exception]:
        """Remove checkpoints as listed, for good, in the block of `lock`; return the errors of those that stay."""
        return self.place.remove(checkpoints)

    def manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a name, or None."""
        del name
        return None

    def free_space(self) -> int | None:
        """Return the free space in bytes, or None where it is not known."""
        return None

    def lose_lock(self) -> None:
        """Take the lock away from its holder, as the removal of its file does."""
        self.refuse("a lock")

    def quarantine(self, checkpoint: Checkpoint) -> None:
        """Move a damaged checkpoint aside."""
        self.refuse("quarantine")

    def change(self, checkpoint: Checkpoint, change: Callable[[Manifest], Manifest]) -> None:
        """Change the manifest of a checkpoint."""
        self.refuse("a change after the save")

    def protect(self, checkpoint: Checkpoint) -> None:
        """Have every plan keep a checkpoint."""
        self.refuse("a pin")

    def read_note(self, name: str) -> bytes | None:
        """Return a small file of the run, or None."""
        self.refuse("a note")

    def write_note(self, name: str, data: bytes) -> None:
        """Replace a small file of the run."""
        self.refuse("a note")

    def append_note(self, name: str, data: bytes) -> None:
        """Append to a small file of the run."""
        self.refuse("a note")

    def refuse(self, what: str) -> NoReturn:
        """Refuse what the place cannot do."""
        raise UnsupportedCheckpoint(
            f"{what} has no effect in {self.place.can.name}", path=self.names[0]
        )


class _ReadingPlanner(RunPlanner):
    """Plans the lines of runs; a checkpoint is whole if it can be read."""

    def __init__(self, read: Callable[[Checkpoint], object]) -> None:
        Planner.__init__(self)
        self._read = read

    def problem_of(self, checkpoint: Checkpoint) -> str | None:
        try:
            self._read(checkpoint)
        except CorruptCheckpoint as error:
            return str(error)
        return None
