# SPDX-License-Identifier: Apache-2.0
"""Selectors of checkpoints: paths, directories, steps, `latest`, `best:loss:min`, `@pinned`."""

from __future__ import annotations

import fnmatch
import math
import os
import re
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
from ckptmgr.io.passing_errors import may_be_whole
from ckptmgr.policy.lines import about_others, lines_of
from ckptmgr.series.candidates import newest_first
from ckptmgr.store.manifest.codec import SUFFIX as MANIFEST_SUFFIX
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.real_files import real_file
from ckptmgr.store.reserved_names import is_bookkeeping_name
from ckptmgr.store.store import Store
from ckptmgr.store.trash import DirectoryTrash

OpenStore = Callable[[Path], Store]

_STEP = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{0,18})\.\.([0-9]{0,18})")
_FORMS = (
    "a path, a step, latest, best:METRIC:min, best:METRIC:max, @pinned, @tag:NAME or 1000..5000"
)
_TAG = "@tag:"


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
    choose = _chooser(text)
    if choose is not None:
        store = open_store(directory)
        found = choose(without_foreign(store, list_selected(store, series=series)))
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
            f"no checkpoint is {text!r}" if choose is not None else "no checkpoints here",
            path=place,
            hint=_where_to_look(store, place),
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


def _where_to_look(store: Store, place: Path) -> str:
    if store.scan():
        all_too = "" if list_selected(store) else "--all "
        return f"ckptmgr ls {all_too}{place} lists what is there"
    endings = ", ".join(DATA_SUFFIXES)
    return f"files that end in {endings} are looked for, not in the folders of a directory"


Choose = Callable[[list[Checkpoint]], list[Checkpoint]]


def _chooser(text: str) -> Choose | None:
    """Return the function of a selector that is not a path, or None."""
    if text == "latest":
        return _latest
    if text == "@pinned":
        return lambda found: [c for c in found if c.pins and not c.is_unproven]
    if text.startswith(_TAG) and len(text) > len(_TAG):
        name = text.removeprefix(_TAG)
        return lambda found: [
            c for c in found if fnmatch.filter(c.tags, name) and not c.is_unproven
        ]
    if text == "best" or text.startswith("best:"):
        return _best(text)
    if _STEP.fullmatch(text):
        return lambda found: _newest_attempts(found, int(text))
    match = _RANGE.fullmatch(text)
    if match is not None and any(match.groups()):
        low = int(match[1] or 0)
        high = int(match[2]) if match[2] else math.inf
        return lambda found: [c for c in found if low <= c.step <= high]
    return None


def _latest(found: list[Checkpoint]) -> list[Checkpoint]:
    """Return the newest usable checkpoint, if any; note newer ones that are damaged.

    Raises:
        OSError: A manifest cannot be read now, so it is not known which one is the newest.
    """
    chosen = _usable(newest_first(found))[:1]
    for one in found:
        if one.obstacle is not None and may_be_whole(one.obstacle):
            raise one.obstacle
        is_newer = one.is_unreadable or not chosen or one.order > chosen[0].order
        if one.state in UNUSABLE and is_newer:
            note(f"latest is not {one.name}: {one.problem}")
    others = about_others(chosen[0], lines_of(found)) if chosen else None
    if others is not None:
        note(f"latest: {others}")
    return chosen


def _best(text: str) -> Choose:
    metric, _, mode = text.removeprefix("best").removeprefix(":").rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise UsageProblem(f"{text!r} is not complete", hint="write best:loss:min or best:acc:max")
    sign = 1 if mode == "min" else -1

    def choose(found: list[Checkpoint]) -> list[Checkpoint]:
        ranked = [c for c in _usable(found) if math.isfinite(c.metrics.get(metric, math.nan))]
        # Of equal values the newer one is better; `found` is oldest first and min() takes the
        # first.
        return [min(reversed(ranked), key=lambda c: sign * c.metrics[metric])] if ranked else []

    return choose


def _usable(found: list[Checkpoint]) -> list[Checkpoint]:
    return [c for c in found if c.is_countable]


def _newest_attempts(found: list[Checkpoint], step: int) -> list[Checkpoint]:
    """Return the newest checkpoint of a step in each series, of the run that is meant if it has one."""
    oldest_first = [c for c in reversed(newest_first(found)) if c.step == step]
    # Another file may claim the same step; an unproven one counts only where none is proven.
    proven = [c for c in oldest_first if not c.is_unproven] or oldest_first
    chosen = {c.series: c for c in sorted(proven, key=lambda c: c.is_countable)}
    runs = run_by_name(lines_of(found))
    for one in proven:
        taken = chosen[one.series]
        if one.is_countable and runs[one.name] != runs[taken.name]:
            own, other = shown_run(runs[taken.name]), shown_run(runs[one.name])
            note(f"step {step} is {taken.name} of run {own}; run {other} has {one.name}")
    return list(chosen.values())


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
        raise CheckpointFileNotFound("no such checkpoint", path=path, hint=f"give {_FORMS}")
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
