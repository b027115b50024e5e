# SPDX-License-Identifier: Apache-2.0
"""Selectors on the command line: paths, directories, addresses, and those of `series/selectors.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.cli.exits import UsageProblem, note
from ckptmgr.cli.foreign import (
    check_directory,
    why_none,
    why_not_here,
    without_foreign,
)
from ckptmgr.cli.options import absolute, check_path, checked_address
from ckptmgr.cli.run_lines import run_by_name, shown_run
from ckptmgr.core.errors import CheckpointFileNotFound, CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import UNFINISHED, UNUSABLE, Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES, stem_of
from ckptmgr.core.shard_names import is_set_name
from ckptmgr.core.urls import is_url
from ckptmgr.policy.lines import about_others, lines_of
from ckptmgr.series.candidates import newest_first, why_nothing
from ckptmgr.series.selectors import FORMS, Selector, latest, parse_selector
from ckptmgr.store.manifest.codec import SUFFIX as MANIFEST_SUFFIX
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.real_files import real_file
from ckptmgr.store.reserved_names import is_bookkeeping_name
from ckptmgr.store.store import Store
from ckptmgr.store.trash import DirectoryTrash

OpenStore = Callable[[Path], Store]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Checkpoint and the store that holds it; of one in the trash also the store it was thrown out of."""

    store: Store
    checkpoint: Checkpoint
    thrown_out_of: Store | None = None


def select(
    texts: Sequence[str],
    directory: Path,
    open_store: OpenStore,
    *,
    series: str | None = None,
    takes_urls: bool = False,
    with_trash: bool = False,
    failures: list[Exception] | None = None,
) -> list[Selected]:
    """Return the checkpoints that selectors name, each once, in order; without a selector all.

    Selectors that are not paths refer to `directory`. With `takes_urls` one may be the address of a
    checkpoint in an object store, or of all below it; without, an address is refused. `with_trash`
    adds those in the trash of each whole directory. An error about one of several selectors is
    added to `failures`, where that is given, and the rest goes on.

    Raises:
        CheckpointNotFound: A selector names nothing.
        UsageProblem: A selector is not valid.
    """
    chosen: dict[Path, Selected] = {}
    for text in texts or [str(directory)]:
        if len(texts) > 1 and is_bookkeeping_name(Path(text).name):
            continue  # Python's glob("*") gives hidden files, too
        try:
            if takes_urls and is_url(text):
                found = _at_address(text, open_store, series)
            else:
                found = _select_one(text, directory, open_store, series, with_trash=with_trash)
        except (CkptmgrError, OSError) as error:
            if failures is None or len(texts) < 2:
                raise
            failures.append(error)
            continue
        for selected in found:
            chosen.setdefault(selected.checkpoint.path, selected)
    return list(chosen.values())


def select_one(
    text: str,
    directory: Path,
    open_store: OpenStore,
    *,
    series: str | None = None,
    takes_urls: bool = False,
) -> Selected:
    """Return the one checkpoint that a selector names; see `select`.

    Raises:
        CheckpointNotFound, UsageProblem: It names none, or several.
    """
    found = select([text], directory, open_store, series=series, takes_urls=takes_urls)
    if len(found) > 1:
        names = ", ".join(one.checkpoint.name for one in found[:5])
        more = ", ..." if len(found) > 5 else ""
        raise UsageProblem(
            f"{text!r} names {len(found)} checkpoints: {names}{more}",
            hint="name one by its path, or narrow it down with --series",
        )
    return found[0]


def root_of(selected: Sequence[Selected], directory: Path) -> Path:
    """Return the directory of the checkpoints, or where they are of several, that of `--dir`."""
    directories = {(one.thrown_out_of or one.store).directory for one in selected}
    return directories.pop() if len(directories) == 1 else absolute(directory)


def list_selected(
    store: Store, *, series: str | None = None, with_leftovers: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints of a directory, oldest first; unfinished ones only if asked for.

    Raises:
        CheckpointNotFound: There is no such directory.
    """
    if store.can.folders:
        check_directory(store.directory)
    found = store.scan_for(series)
    if not with_leftovers:
        found = [c for c in found if c.state not in UNFINISHED]
    if series is not None:
        found = [c for c in found if c.series == series]
    return sorted(found, key=lambda c: (c.order, c.saved_at, c.name))


def _select_one(
    text: str,
    directory: Path,
    open_store: OpenStore,
    series: str | None,
    *,
    with_trash: bool = False,
) -> list[Selected]:
    check_path(text)
    thrown: list[Selected] = []
    selector = _selector(text)
    if selector is not None:
        store = open_store(directory)
        found = _chosen(selector, without_foreign(store, list_selected(store, series=series)))
        place = store.directory
    else:
        path = Path(text)
        store = open_store(path if path.is_dir() else Path(os.path.realpath(path)).parent)
        is_folder = path.is_dir()
        listed = list_selected(store, series=series) if is_folder else []
        found = without_foreign(store, listed) if is_folder else [_file(store, path)]
        thrown = _in_trash(store, open_store, series) if is_folder and with_trash else []
        place = path
    if not (found or thrown):
        if not without_foreign(store, store.scan()):
            absence = why_none(store.fs, store.directory)
            if absence is not None:
                raise absence
        raise CheckpointNotFound(
            f"no checkpoint is {text!r}" if selector is not None else "no checkpoints here",
            path=place,
            hint=_where_to_look(store, place, series),
        )
    return [*(Selected(store=store, checkpoint=checkpoint) for checkpoint in found), *thrown]


def _in_trash(store: Store, open_store: OpenStore, series: str | None) -> list[Selected]:
    return [
        Selected(store=open_store(batch.path), checkpoint=one, thrown_out_of=store)
        for batch in DirectoryTrash(store).batches()
        for one in batch.checkpoints
        if series in (None, one.series)
    ]


def _at_address(text: str, open_store: OpenStore, series: str | None) -> list[Selected]:
    from ckptmgr.objects.paths import UrlPath

    address = UrlPath(checked_address(text).removesuffix(MANIFEST_SUFFIX))
    if not is_file_name(text):
        store = open_store(address)
        found = list_selected(store, series=series)
    else:
        store = open_store(address.parent)
        one = store.look(address.name)
        found = [] if one is None or series not in (None, one.series) else [one]
    if not found:
        raise CheckpointNotFound("no checkpoint is there", path=address)
    return [Selected(store=store, checkpoint=one) for one in found]


def is_run_address(text: str) -> bool:
    """Return whether a text is the address of all checkpoints below it, and not of one."""
    return is_url(text) and not is_file_name(text)


def is_file_name(text: str) -> bool:
    """Return whether a path or address ends in the name of one checkpoint."""
    name = text.removesuffix(MANIFEST_SUFFIX)
    return name.endswith(DATA_SUFFIXES) or is_set_name(name)


def _where_to_look(store: Store, place: Path, series: str | None) -> str:
    others = why_nothing(store.scan(), lambda one: one.series == series)
    if series is not None and others:
        return "; ".join(others)
    if store.scan():
        all_too = "" if list_selected(store) else "--all "
        return f"ckptmgr ls {all_too}{place} lists what is there"
    endings = ", ".join(DATA_SUFFIXES)
    return f"files that end in {endings} are looked for, not in the folders of a directory"


def _selector(text: str) -> Selector | None:
    try:
        return parse_selector(text)
    except ValueError as error:
        problem, _, way_out = str(error).partition(": ")
        raise UsageProblem(problem, hint=way_out) from None


def _chosen(selector: Selector, found: list[Checkpoint]) -> list[Checkpoint]:
    """Return the chosen checkpoints; note what a user may have meant instead."""
    chosen = selector.choose(found, frozenset())
    if selector.choose is latest:
        _note_newer(found, chosen)
    if selector.step is not None:
        _note_other_runs(found, selector.step, chosen)
    return chosen


def _note_newer(found: list[Checkpoint], chosen: list[Checkpoint]) -> None:
    for one in found:
        is_newer = one.is_unreadable or not chosen or one.order > chosen[0].order
        if one.state in UNUSABLE and is_newer:
            note(f"latest is not {one.name}: {one.problem}")
    others = about_others(chosen[0], lines_of(found)) if chosen else None
    if others is not None:
        note(f"latest: {others}")


def _note_other_runs(found: list[Checkpoint], step: int, chosen: list[Checkpoint]) -> None:
    runs, taken_of = run_by_name(lines_of(found)), {c.series: c for c in chosen}
    for one in reversed(newest_first(found)):
        if one.step != step or not one.is_countable:
            continue
        taken = taken_of[one.series]
        if runs[one.name] != runs[taken.name]:
            own, other = shown_run(runs[taken.name]), shown_run(runs[one.name])
            note(f"step {step} is {taken.name} of run {own}; run {other} has {one.name}")


def _file(store: Store, path: Path) -> Checkpoint:
    # A manifest stands for its checkpoint: a shell expands `runs/*` to both.
    real = Path(str(real_file(path)).removesuffix(MANIFEST_SUFFIX))
    # The listing comes first: no file has the name of a checkpoint of several ranks.
    found = store.scan() if store.directory.is_dir() else []
    known = next((c for c in found if c.path == real), None)
    if known is None and real.exists() and real.with_name(manifest_name(real.name)).exists():
        known = store.look(real.name)  # under a name that no listing has
    if known is not None:
        absence = why_not_here(real) if known.is_bare else None
        if absence is not None:
            raise absence
        return known
    if is_bookkeeping_name(real.name):
        raise CheckpointNotFound(
            "this is no checkpoint, but what a run notes beside them", path=path
        )
    if not real.exists():
        raise CheckpointFileNotFound("no such checkpoint", path=path, hint=f"give a path, {FORMS}")
    status = real.stat()
    return Checkpoint(
        path=real,
        series=stem_of(real.name),
        step=0,
        saved_at=datetime.fromtimestamp(status.st_mtime, UTC),
        size_bytes=status.st_size,
        state=State.UNVERIFIED,
        problem="no manifest: nothing vouches for this file",
    )
