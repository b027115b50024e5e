# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other tools in commands: those that handle them, and refusals that name the tool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.cli import render
from ckptmgr.cli.exits import note
from ckptmgr.cli.options import absolute
from ckptmgr.core.errors import (
    CheckpointNotFound,
    CkptmgrError,
    CorruptCheckpoint,
    UnsafePrune,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.urls import is_url
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.core.place import Place
    from ckptmgr.io.filesystem import FileStatus, FileSystem
    from ckptmgr.maintenance.foreign.listing import ForeignListing, FoundRun
    from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
    from ckptmgr.maintenance.prune_plan import Planner, Spared
    from ckptmgr.store.store import Store

OpenStore = Callable[[Path], "Store"]
_MOST_NAMED = 5


def foreign_of(store: Store, *, with_hub: bool = False) -> ForeignListing:
    """Return the checkpoints of other tools in the directory of a store; see `list_foreign`."""
    from ckptmgr.maintenance.foreign.listing import list_foreign

    return list_foreign(store.fs, store.directory, with_hub=with_hub)


def without_foreign(store: Store, found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of a listing but those files that another tool wrote."""
    if all(not one.is_bare for one in found):
        return list(found)
    listing = foreign_of(store)
    if listing.is_itself:
        return []
    return [one for one in found if one.path not in listing.paths]


def foreign_json(one: ForeignCheckpoint) -> dict[str, Json]:
    """Return the JSON fields of a checkpoint of another tool: those of ours, and two more."""
    return {
        **render.checkpoint_json(one.checkpoint),
        "tool": one.checkpoint.format,
        "named_by": list(one.named_by),
    }


def tool_of(checkpoint: Checkpoint) -> str | None:
    """Return the other tool that wrote a checkpoint; None for one of ours."""
    from ckptmgr.maintenance.foreign.layouts import TITLES

    return checkpoint.format if checkpoint.format in TITLES else None


def place_to_prune(
    store: Store, found: Sequence[Checkpoint], entries: Mapping[str, FileStatus]
) -> tuple[Place, Callable[[Spared], Planner]]:
    """Return the place that `prune` is about: the store, or the checkpoints of other tools in it.

    The second value makes its planner.

    `found` is the listing of the store, and `entries` those of the directory.

    Raises:
        UnsafePrune: The directory is one checkpoint of another tool, or no key proves those in it.
        CkptmgrError: It holds no checkpoint itself, but folders below it do.
    """
    from ckptmgr.maintenance.prune_plan import RunPlanner

    if not store.can.folders:
        return store, partial(RunPlanner, store)
    from ckptmgr.maintenance.foreign.check import needs_proof
    from ckptmgr.maintenance.foreign.listing import list_foreign
    from ckptmgr.maintenance.foreign.place import ForeignPlace
    from ckptmgr.maintenance.foreign.planner import ForeignPlanner
    from ckptmgr.store.trash import DirectoryTrash

    listing = list_foreign(store.fs, store.directory, entries=entries)
    paths = listing.paths
    own = [one for one in found if one.path not in paths] if paths else found
    if listing.is_itself:
        raise UnsafePrune(
            f"is one checkpoint of {titles_of(listing)[0]}, not a directory of several",
            path=store.directory,
            hint=f"ckptmgr prune {store.directory.parent}",
        )
    if not listing.checkpoints:
        is_empty = not (own or DirectoryTrash(store).batches())
        absence = why_none(store.fs, store.directory) if is_empty else None
        if absence is not None:
            raise absence
        return store, partial(RunPlanner, store)
    tools = " and ".join(titles_of(listing))
    if any(not one.is_bare for one in own):
        count = render.counted(len(listing.checkpoints), "checkpoint")
        note(
            f"{count} of {tools} stay as they are: in a directory with checkpoints of ckptmgr, prune "
            "applies to those alone"
        )
        return store, partial(RunPlanner, store)
    if own:
        count = render.counted(len(own), "file")
        note(f"{count} without a manifest beside them stay: prune is about the other tool here")
    if needs_proof(store.trust):
        raise UnsafePrune(
            f"no key proves the checkpoints of {tools}, so none may go",
            path=store.directory,
            hint="leave the key out, or pass --allow-unencrypted if you trust who wrote them",
        )
    place = ForeignPlace(store, listing)
    return place, partial(ForeignPlanner, place)


def place_to_undo(store: Store) -> Place:
    """Return the place with the last batch in its trash: the store, or the other tools in it."""
    from ckptmgr.maintenance.foreign.place import ForeignPlace
    from ckptmgr.store.trash import DirectoryTrash

    theirs = ForeignPlace(store)
    ours, other = (
        max((one.thrown_at for one in trash.batches() if one.checkpoints), default=None)
        for trash in (DirectoryTrash(store), theirs.trash)
    )
    return theirs if other is not None and (ours is None or other > ours) else store


def why_none(fs: FileSystem, directory: Path) -> CkptmgrError | None:
    """Return the error for a directory without a checkpoint of ours; None if it has none at all.

    It names the tool whose checkpoints are there, or the folders below that hold some.
    """
    from ckptmgr.maintenance.foreign.listing import list_foreign, runs_below

    listing = list_foreign(fs, directory)
    if listing.checkpoints:
        return refusal(listing, directory)
    runs, is_all = runs_below(fs, directory)
    return _parent_of_runs(runs, directory, is_all=is_all) if runs else None


def why_not_here(path: Path) -> CkptmgrError | None:
    """Return the error about a path of another tool, or above runs; None for every other path.

    A file is of another tool if it is a checkpoint by itself, as those of Lightning are.
    """
    from ckptmgr.io.filesystem import OsFileSystem
    from ckptmgr.maintenance.foreign.listing import ForeignListing, list_foreign

    fs, place = OsFileSystem(), absolute(path)
    if place.is_dir():
        return why_none(fs, place)
    if not (place.suffix == ".ckpt" and place.is_file()):
        return None
    found = [
        one for one in list_foreign(fs, place.parent).checkpoints if one.checkpoint.path == place
    ]
    return (
        refusal(ForeignListing(checkpoints=tuple(found), is_itself=True), path) if found else None
    )


@contextmanager
def tool_named(source: Path) -> Iterator[None]:
    """Name the tool of a directory, or the runs below it, where a command finds nothing to work on.

    A directory with folders `rank_0`, `rank_1`, ... is of MindSpore, and its errors stay.
    """
    try:
        yield
    except (CheckpointNotFound, CorruptCheckpoint, UnsupportedCheckpoint, OSError) as error:
        absence = why_not_here(source)
        is_foreign = isinstance(absence, UnsupportedCheckpoint)
        if absence is None or any(source.glob("rank_[0-9]*")):
            raise
        if is_foreign or isinstance(error, CheckpointNotFound):
            raise absence from error
        raise


def check_directory(directory: Path, *, hint: str | None = None) -> None:
    """Raise CheckpointNotFound unless a path is a directory, or the refusal of a file of another tool."""
    if directory.is_dir():
        return
    absence = why_not_here(directory)
    if absence is not None:
        raise absence
    if not directory.exists():
        raise CheckpointNotFound("no such directory", path=directory, hint=hint)
    raise CheckpointNotFound(
        "not a directory",
        path=directory,
        hint="ckptmgr inspect shows what a file holds, verify checks it",
    )


def check_not_foreign(fs: FileSystem, directory: Path) -> None:
    """Raise UnsupportedCheckpoint if a directory has checkpoints of other tools alone."""
    from ckptmgr.maintenance.foreign.listing import list_foreign
    from ckptmgr.store.manifest.codec import SUFFIX

    listing = list_foreign(fs, directory)
    if listing.checkpoints and not any(name.endswith(SUFFIX) for name in fs.names(directory)):
        raise refusal(listing, directory)


def refusal(listing: ForeignListing, directory: Path) -> UnsupportedCheckpoint:
    """Return the error of a command that does not handle checkpoints of other tools."""
    titles = " and ".join(titles_of(listing))
    names = [one.checkpoint.name for one in listing.checkpoints]
    verb = "is a checkpoint" if listing.is_itself else "holds checkpoints"
    shown = "" if listing.is_itself else f" ({_listed(names)})"
    return UnsupportedCheckpoint(
        f"{verb} of {titles}{shown}, which this command does not handle",
        path=directory,
        hint=f"ckptmgr ls and verify handle them, and prune those of a whole directory; {titles} loads them",
    )


def titles_of(listing: ForeignListing) -> list[str]:
    """Return the names of the tools of a listing."""
    from ckptmgr.maintenance.foreign.layouts import TITLES

    return [TITLES[tool] for tool in listing.tools]


def _parent_of_runs(
    runs: Sequence[FoundRun], directory: Path, *, is_all: bool
) -> CheckpointNotFound:
    names = [_described(run, directory) for run in runs]
    more = "" if is_all else " at least"
    return CheckpointNotFound(
        f"no checkpoint in this directory itself, but{more} {render.counted(len(runs), 'run')} "
        f"in folders below it: {_listed(names)}",
        path=directory,
        hint=f"name one of them, as in ckptmgr ls {runs[0].path}; ckptmgr ls -r {directory} lists all",
    )


def _described(run: FoundRun, directory: Path) -> str:
    from ckptmgr.maintenance.foreign.layouts import TITLES

    tools = f" of {' and '.join(TITLES[tool] for tool in run.tools)}" if run.tools else ""
    return f"{run.path.relative_to(directory)} ({render.counted(run.count, 'checkpoint')}{tools})"


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def remarks(one: ForeignCheckpoint) -> list[str]:
    """Return the lines about a checkpoint below the table of `ls`."""
    checkpoint = one.checkpoint
    lines = []
    if checkpoint.state is State.INCOMPLETE:
        lines.append(f"{checkpoint.name}: {checkpoint.problem}")
    if not checkpoint.has_step:
        named = f"{' and '.join(one.named_by)}; " if one.named_by != (checkpoint.name,) else ""
        named = named if one.named_by else ""
        lines.append(f"{checkpoint.name}: {named}no step in its name, so prune never touches it")
    return lines


def select_foreign(
    selectors: Sequence[str], directory: Path, open_store: OpenStore, *, series: str | None
) -> tuple[list[tuple[Store, ForeignCheckpoint]], list[str]]:
    """Return the checkpoints of other tools that paths name, and the selectors that are left.

    A directory that also has checkpoints of ours is left, too.
    """
    found: dict[Path, tuple[Store, ForeignCheckpoint]] = {}
    left: list[str] = []
    for text in selectors or [str(directory)]:
        if is_url(text):  # only ours are in object stores
            left.append(text)
            continue
        path = absolute(Path(text)) if text else Path()
        is_folder = path.is_dir()
        store = open_store(path if is_folder else path.parent)
        try:
            listing = None
            if is_folder or path.suffix == ".ckpt":
                listing = foreign_of(store, with_hub=is_folder)
        except OSError:  # which the selection of ours meets and reports
            listing = None
        if text == "" or listing is None or not listing.checkpoints:
            left.append(text)
            continue
        chosen = [
            one
            for one in listing.checkpoints
            if series in (None, one.checkpoint.series)
            and (is_folder or one.checkpoint.path == path)
        ]
        for one in chosen:
            found[one.checkpoint.path] = (store, one)
        has_own = is_folder and any(
            not (one.is_bare and listing.has(one)) and one.path not in listing.paths
            for one in store.scan()
        )
        if not chosen or has_own:
            left.append(text)
    return list(found.values()), left
