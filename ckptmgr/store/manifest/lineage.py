# SPDX-License-Identifier: Apache-2.0
"""How the checkpoints of a series hang together: each names the one that was newest before it, by its id.

An id is a hash of what a checkpoint is, the id of the one before included. So it vouches for all of the past that is still
there: a file that was replaced by an older one of the same name is not the one that its successor names.

What the chain cannot tell, because it happens every day: checkpoints that retention removed, a run that went on from an older
one, a name that was written again later. And nothing here tells that the newest ones were taken away, or that the whole
directory was put back: somebody must say what was there (`Expected`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptmgr.core.model import Checkpoint, Link, State

_MIN_ID_DIGITS = 16


def link_to_newest(present: Iterable[Checkpoint], series: str) -> Link | None:
    """Return what the next checkpoint of a series says about the one before it."""
    known = [c for c in present if c.series == series and c.state is State.OK and c.sequence > 0]
    newest = max(known, key=lambda c: c.order, default=None)
    if newest is None or newest.id is None or newest.run_id is None:
        return None
    return Link(name=newest.name, sequence=newest.sequence, run_id=newest.run_id, id=newest.id)


def replaced_by_older(checkpoint: Checkpoint, present: Sequence[Checkpoint]) -> str | None:
    """Return why a checkpoint is not the one that a later one was saved after, or None."""
    return _contradicted(checkpoint, _sayings(present))


def foreign_predecessor(checkpoint: Checkpoint, present: Iterable[Checkpoint]) -> str | None:
    """Return why a checkpoint was not saved after the one that lies before it here, or None.

    Then one of the two is from elsewhere: the one before was replaced, or this one is of another run with the same key.
    """
    link = checkpoint.previous
    known = (c for c in present if link and c.name == link.name and c.is_attested)
    for before in known:
        if link and before.name != checkpoint.name and _is_replaced(before, link, checkpoint):
            return (
                f"it was saved after a {link.name} of commit {link.sequence}, id {link.id[:16]}, "
                f"and the one here is of commit {before.sequence}, id {(before.id or '')[:16]}"
            )
    return None


_Saying = tuple[Checkpoint, Link]


def _sayings(present: Iterable[Checkpoint]) -> dict[str, list[_Saying]]:
    """Return who says what had a name before them, by that name; looked through from the newest commit on."""
    said: dict[str, list[_Saying]] = {}
    by_age = sorted(present, key=lambda c: c.sequence, reverse=True)
    for _, commit in itertools.groupby(by_age, key=lambda c: c.sequence):
        # What is said under another key, or by nobody who is trusted, counts for nothing.
        new = [(c, c.previous) for c in commit if c.previous and c.is_attested]
        for later, link in new:
            said.setdefault(link.name, []).append((later, link))
        for later, link in [saying for saying in new if _contradicted(saying[0], said)]:
            said[link.name].remove((later, link))
    return said


def _contradicted(checkpoint: Checkpoint, said: dict[str, list[_Saying]]) -> str | None:
    for later, link in said.get(checkpoint.name, ()):
        if later.name != checkpoint.name and _is_replaced(checkpoint, link, later):
            return (
                f"{later.name} was saved after another file of this name (commit {link.sequence}, id {link.id[:16]}); "
                f"this one is of commit {checkpoint.sequence}, id {(checkpoint.id or '')[:16]}"
            )
    return None


def _is_replaced(checkpoint: Checkpoint, link: Link, later: Checkpoint) -> bool:
    if checkpoint.id in (None, link.id) or checkpoint.sequence > later.sequence:
        return False  # the very one; or the name was used again later
    # Whoever has the key may encrypt a file anew: it is still the same save.
    is_same_save = (checkpoint.sequence, checkpoint.run_id) == (link.sequence, link.run_id)
    return not (is_same_save and checkpoint.cipher is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What somebody knows to have been saved."""

    step: int | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        if self.id is not None and not _is_id(self.id):
            raise ValueError(
                f"an id has 64 hex digits, of which at least {_MIN_ID_DIGITS} are needed"
            )

    def missing(self, present: Sequence[Checkpoint]) -> list[str]:
        """Return what is not there, one sentence each.

        A checkpoint that was removed since counts as there as long as the one that was saved next is.
        """
        newest = max((c.step for c in present), default=None)
        found = "no checkpoint is here" if newest is None else f"the last one is of step {newest}"
        missing = []
        if self.step is not None and (newest is None or newest < self.step):
            missing.append(f"step {self.step} was reached, but {found}")
        if self.id is not None and not any(map(self._is_or_follows, present)):
            missing.append(f"checkpoint {self.id[:16]} is not here, nor the one saved after it")
        return missing

    def _is_or_follows(self, checkpoint: Checkpoint) -> bool:
        wanted = (self.id or "").lower()
        link = checkpoint.previous
        known = (checkpoint.id or "", "" if link is None else link.id)
        return any(one.startswith(wanted) for one in known)


def _is_id(text: str) -> bool:
    return _MIN_ID_DIGITS <= len(text) <= 64 and not set(text.lower()) - set("0123456789abcdef")
