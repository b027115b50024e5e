# SPDX-License-Identifier: Apache-2.0
"""Hold the names of checkpoints from the last check to their removal, so that new saves survive.

A writer of a single file holds the lease of its name alone, so the lease of a series does not
protect the names in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, UnsafePrune
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.leases import LEASE_SUFFIX, hold_lease


class HeldNames(NamedTuple):
    """The checkpoints that are unchanged and whose names are held, and the errors of the others."""

    checkpoints: list[Checkpoint]
    failures: list[Exception]


@contextmanager
def hold_name(fs: FileSystem, directory: Path, name: str) -> Iterator[None]:
    """Be the only writer of one file; no lease file remains.

    Raises:
        StoreLocked: Another process is writing it.
    """
    with fs.hold_directory(directory), hold_lease(fs, directory, name):
        yield


def leased_name(name: str) -> str | None:
    """Return the series or the file that a lease file is for, or None if it is no lease file."""
    leased = name.removeprefix(".").removesuffix(LEASE_SUFFIX)
    return leased if name == f".{leased}{LEASE_SUFFIX}" and leased else None


@contextmanager
def hold_unchanged(
    fs: FileSystem,
    directory: Path,
    checkpoints: Sequence[Checkpoint],
    look: Callable[[str], Checkpoint | None],
) -> Iterator[HeldNames]:
    """Hold the names of the checkpoints that are unchanged since their listing; skip removed ones.

    The leases of their series must be held. `look` returns the entry that is listed under a name
    now.
    """
    held = HeldNames([], [])
    with contextlib.ExitStack() as leases:
        for checkpoint in checkpoints:
            try:
                if checkpoint.name != checkpoint.series:
                    leases.enter_context(hold_name(fs, directory, checkpoint.name))
                if is_unchanged(checkpoint, look(checkpoint.name)):
                    held.checkpoints.append(checkpoint)
            except (CkptmgrError, OSError) as error:
                held.failures.append(error)
        yield held


def is_unchanged(listed: Checkpoint, now: Checkpoint | None) -> bool:
    """Return whether a checkpoint is unchanged since its listing; False if it was removed.

    Raises:
        UnsafePrune: Another checkpoint has its name.
    """
    if now is None or now.state is State.LEFTOVER:
        return False
    if not is_same(now, listed):
        raise UnsafePrune(
            "was saved again after it was decided that it goes, so it stays",
            path=listed.path,
            hint="the next prune or save looks at it anew",
        )
    return True


def check_as_listed(needed: Iterable[Checkpoint], now: Mapping[str, Checkpoint]) -> None:
    """Raise UnsafePrune unless the checkpoints because of which others go are still as they were listed.

    `now` are those that are listed now, by their names. Of a sharded one only the manifest is
    looked at: another save never has its name.
    """
    for one in needed:
        found = now.get(one.name)
        if found is None or not is_same(found, one) or not (one.shards or found.state is one.state):
            raise UnsafePrune(
                "was removed or saved again after it was decided that others go because it "
                "stays; they stay, too",
                path=one.path,
                hint="run prune again and look at the new plan",
            )


def is_same(one: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two listed checkpoints of one name are the same save."""
    return _identity(one) == _identity(other)


def _identity(checkpoint: Checkpoint) -> tuple[object, ...]:
    # Without state and step, which depend on other files and on the keys.
    return (checkpoint.id, checkpoint.saved_at, checkpoint.size_bytes, checkpoint.run_id)
