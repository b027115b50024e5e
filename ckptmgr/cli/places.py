# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a directory, or of all runs below it: ours, and those of other tools."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import note
from ckptmgr.cli.foreign import foreign_json, foreign_of, why_none
from ckptmgr.cli.plain import as_plain, is_shown_as_plain, showing_opener
from ckptmgr.cli.run_lines import run_by_name
from ckptmgr.cli.selectors import list_selected
from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.strict_json import Json
from ckptmgr.policy.lines import RunLine, lines_of
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    from ckptmgr.cli.key_options import GivenTrust
    from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
    from ckptmgr.maintenance.past_checks import PastCheck

_MOST_FOLDERS = 100_000
_MOST_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEntry:
    """A checkpoint of a listing; `foreign` if another tool wrote it, `run` the newest of its line.

    `past` is the result of an earlier `verify`.
    """

    checkpoint: Checkpoint
    directory: Path
    run: str | None = None
    foreign: ForeignCheckpoint | None = None
    past: PastCheck | None = None

    @property
    def state(self) -> str:
        """Its state, or the result of an earlier check, if that is worse."""
        one = self.checkpoint
        is_sound = one.is_countable or one.is_emergency or one.state is State.PLAIN
        if self.past is not None and self.past.is_bad and is_sound:
            return self.past.status
        return one.state.value

    def place(self, root: Path) -> str:
        """Return its directory as seen from another one."""
        return str(self.directory.relative_to(root))

    def shown_name(self, root: Path) -> str:
        """Return its name, with its directory if that is another one."""
        return self.checkpoint.name if self.directory == root else f"{self.place(root)}/{self.checkpoint.name}"  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedPlace:
    """A directory, its checkpoints, and the lines of runs that ours are of.

    `has_foreign`: whether another tool has any there, of whatever series.
    """

    store: Store
    found: Sequence[Checkpoint]
    others: Sequence[ForeignCheckpoint]
    lines: list[RunLine] = field(default_factory=list)
    has_foreign: bool = False
    checks: Mapping[str, PastCheck] = field(default_factory=dict)

    @property
    def paths(self) -> frozenset[Path]:
        """The paths of the checkpoints of other tools in it, which may be folders."""
        paths = frozenset(one.checkpoint.path for one in self.others)
        return paths - {self.store.directory} if len(paths) > 1 else paths

    @property
    def entries(self) -> list[ListedEntry]:
        """All checkpoints: ours first, each oldest first."""
        runs, directory = run_by_name(self.lines), self.store.directory
        own = [
            ListedEntry(
                checkpoint=one,
                directory=directory,
                run=runs[one.name],
                past=self.checks.get(one.name),
            )
            for one in self.found
        ]
        theirs = [
            ListedEntry(checkpoint=one.checkpoint, directory=directory, foreign=one)
            for one in self.others
        ]
        return own + theirs


def places_of(
    directory: Path,
    given_trust: GivenTrust,
    *,
    series: str | None,
    with_leftovers: bool,
    is_recursive: bool,
) -> tuple[list[ListedPlace], list[Exception]]:
    """Return the place of a directory, or with `is_recursive` those of all runs in it and below.

    Then follow the errors about single runs and folders below it, which are left out.

    Raises:
        CheckpointNotFound: There is no such directory, or no run; names the runs below it.
    """
    open_store = showing_opener(given_trust)

    def place_of(path: Path) -> ListedPlace:
        store = open_store(path)
        place = _place(store, series=series, with_leftovers=with_leftovers)
        if is_shown_as_plain(given_trust, store):
            place = replace(place, found=[as_plain(one) for one in place.found])
        return place

    own = place_of(directory)
    store = own.store
    if is_recursive:
        hint = "name the address of each run"
        options.refuse_without_effect("-r", store.can, "folders", hint=hint)
    if not (store.can.folders or own.entries):
        raise CheckpointNotFound(
            "no checkpoint is below this address",
            path=store.directory,
            hint="ckptmgr storage probe tells whether it can be reached",
        )
    if not is_recursive:
        if not (own.found or own.has_foreign or store.scan()):
            absence = why_none(store.fs, store.directory)
            if absence is not None:
                raise absence
        return [own], []
    from ckptmgr.maintenance.foreign.listing import runs_below

    unread: list[OSError] = []
    runs, is_all = runs_below(
        store.fs,
        store.directory,
        most_folders=_MOST_FOLDERS,
        most_depth=_MOST_DEPTH,
        unread=unread,
    )
    failures: list[Exception] = [*unread]
    if not is_all:
        note(f"only the first {_MOST_FOLDERS:,} folders were searched")
    below: list[ListedPlace] = []
    for run in runs:
        if own.paths.intersection([run.path, *run.path.parents]):
            continue
        try:
            below.append(place_of(run.path))
        except (CkptmgrError, OSError) as error:
            failures.append(error)
    places = [place for place in (own, *below) if place.found or place.others]
    if not (places or series or failures or store.scan()):
        raise CheckpointNotFound(
            "no checkpoint in this directory, nor in folders below it", path=store.directory
        )
    return places, failures


def _place(store: Store, *, series: str | None, with_leftovers: bool) -> ListedPlace:
    from ckptmgr.maintenance.past_checks import recall

    listed = list_selected(store, series=series, with_leftovers=with_leftovers)
    if with_leftovers:
        # Those of all series: data without a manifest is not known by what else has one.
        everything = listed if series is None else store.scan()
        left = store.leftovers(everything)
        listed = [*listed, *(one for one in left if series in (None, one.series))]
    foreign = foreign_of(store, with_hub=store.can.folders)
    found = [_sniffed(store, c) for c in listed if not foreign.has(c)]
    return ListedPlace(
        store=store,
        found=found,
        others=[one for one in foreign.checkpoints if series in (None, one.checkpoint.series)],
        lines=lines_of(found),
        has_foreign=bool(foreign.checkpoints),
        checks=recall(store, found),
    )


def _sniffed(store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Return a bare file with the cipher that its first bytes name; all others as they are."""
    if not checkpoint.is_bare:
        return checkpoint
    from ckptmgr.crypto.detect import cipher_of

    try:
        with contextlib.closing(store.fs.open(checkpoint.path)) as file:
            return replace(checkpoint, cipher=cipher_of(file))
    except (OSError, FormatError):
        return checkpoint


def checkpoint_of(entry: ListedEntry) -> Checkpoint:
    """Return the checkpoint of an entry."""
    return entry.checkpoint


def entry_json(entry: ListedEntry) -> dict[str, Json]:
    """Return the JSON fields of an entry."""
    if entry.foreign is not None:
        return {**foreign_json(entry.foreign), "line": None, "checked": None}
    past = entry.past
    return {
        **render.checkpoint_json(entry.checkpoint),
        "tool": None,
        "named_by": [],
        "line": entry.run,
        "checked": None
        if past is None
        else {
            "at": render.timestamp(past.at),
            "level": past.level,
            "status": past.status,
            "problem": past.problem,
        },
    }


def counted_directories(entries: Sequence[ListedEntry]) -> str:
    """Return e.g. `1 directory`, `3 directories`."""
    count = len({one.directory for one in entries})
    return "1 directory" if count == 1 else f"{count} directories"
