# SPDX-License-Identifier: Apache-2.0
"""Predecessor links: each checkpoint of a series names the newest one before it, by its id.

An id is a hash over the checkpoint and the id of its predecessor. So it proves all earlier
checkpoints that still exist: a file that was replaced by an older one of the same name does not
match the link.

The links cannot show normal changes: checkpoints that retention removed, a run that continued from
an older one, a name that was written again later. Nor can they show that the newest checkpoints
were removed, or that an old copy of the whole directory was restored: for that the user states the
required checkpoints (`Expected`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptmgr.core.model import Checkpoint, Link, State

_MIN_ID_DIGITS = 16


def link_to_newest(present: Iterable[Checkpoint], series: str) -> Link | None:
    """Return the predecessor link of the next checkpoint of a series."""
    known = [c for c in present if c.series == series and c.state is State.OK and c.sequence > 0]
    newest = max(known, key=lambda c: c.order, default=None)
    if newest is None or newest.id is None or newest.run_id is None:
        return None
    return Link(name=newest.name, sequence=newest.sequence, run_id=newest.run_id, id=newest.id)


class Lineage:
    """The links of the checkpoints of a directory; those of replaced checkpoints are ignored."""

    def __init__(self, present: Iterable[Checkpoint] = ()) -> None:
        self._links = _links_by_name(present)

    def why_replaced(self, checkpoint: Checkpoint) -> str | None:
        """Return why a checkpoint is not the one that a later one was saved after, or None.

        It must have been read after the checkpoints of the lineage, or be one of them.
        """
        return _replaced(checkpoint, self._links)


def foreign_predecessor(checkpoint: Checkpoint, present: Iterable[Checkpoint]) -> str | None:
    """Return why a checkpoint was not saved after its predecessor in this directory, or None.

    If not, the predecessor was replaced, or this checkpoint is of another run with the same key.
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


def _links_by_name(present: Iterable[Checkpoint]) -> dict[str, list[tuple[Checkpoint, Link]]]:
    """Return the valid links with their checkpoints, by the name of the predecessor; newest commits first."""
    links: dict[str, list[tuple[Checkpoint, Link]]] = {}
    by_age = sorted(present, key=lambda c: c.sequence, reverse=True)
    for _, commit in itertools.groupby(by_age, key=lambda c: c.sequence):
        # Links under another key, or of an untrusted signer, are ignored.
        new = [(c, c.previous) for c in commit if c.previous and c.is_attested]
        for later, link in new:
            links.setdefault(link.name, []).append((later, link))
        for later, link in [one for one in new if _replaced(one[0], links)]:
            links[link.name].remove((later, link))
    return links


def _replaced(
    checkpoint: Checkpoint, links: dict[str, list[tuple[Checkpoint, Link]]]
) -> str | None:
    for later, link in links.get(checkpoint.name, ()):
        if later.name != checkpoint.name and _is_replaced(checkpoint, link, later):
            return (
                f"{later.name} was saved after another file of this name (commit {link.sequence}, id {link.id[:16]}); "
                f"this one is of commit {checkpoint.sequence}, id {(checkpoint.id or '')[:16]}"
            )
    return None


def _is_replaced(checkpoint: Checkpoint, link: Link, later: Checkpoint) -> bool:
    if checkpoint.id in (None, link.id) or checkpoint.sequence > later.sequence:
        return False  # the same; or the name was used again later
    # A file that was encrypted again with the key is still the same save.
    is_same_save = (checkpoint.sequence, checkpoint.run_id) == (link.sequence, link.run_id)
    return not (is_same_save and checkpoint.cipher is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Evidence that must exist: a step that was reached, and an id or its first 16 digits or more."""

    step: int | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        if self.id is not None and not _is_id(self.id):
            raise ValueError(
                f"an id has 64 hex digits, of which at least {_MIN_ID_DIGITS} are needed"
            )

    def missing(self, present: Sequence[Checkpoint]) -> list[str]:
        """Return one sentence for each that is missing.

        A checkpoint that was removed counts as present while the one that was saved next exists.
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
