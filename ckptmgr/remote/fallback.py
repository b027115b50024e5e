# SPDX-License-Identifier: Apache-2.0
"""The way back from a mirror: a run downloads the newer checkpoints there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import TIMEOUT_MAX, Thread
from typing import NamedTuple, TypeVar

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, KeyProblem
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import parse_step_name
from ckptmgr.core.notes import add_note
from ckptmgr.core.trust import Trust
from ckptmgr.io.passing_errors import is_damage, is_gone
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.requests import StoredObject
from ckptmgr.policy.lines import about_others, lines_of
from ckptmgr.remote.download import download
from ckptmgr.series.candidates import Skipped, first_that_loads, newest_first
from ckptmgr.store.manifest.codec import SUFFIX, decode
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_READERS = 8
_CLOCK_SKEW = timedelta(hours=1)
"""How far the clocks of machines and store may differ."""
_Answer = TypeVar("_Answer")


class Fetched(NamedTuple):
    """The address of the checkpoint that was downloaded, if any, those skipped, and the doubt."""

    url: str | None
    skipped: tuple[Skipped, ...] = ()
    doubt: str | None = None


class Answer(NamedTuple):
    """The checkpoints of a mirror of the line of one here, and of others that continue it.

    `skipped` are those whose manifests cannot be read or are not proven: they decide nothing.
    """

    related: tuple[Checkpoint, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class MirroredCandidates:
    """The checkpoints of a series in a mirror, newest first; `load` downloads one."""

    def __init__(
        self,
        directory: RemoteDirectory,
        listing: Store,
        target: Store,
        *,
        series: str,
        damaged: Collection[str],
    ) -> None:
        self._directory = directory
        self._listing = listing
        self._target = target
        self._series = series
        self._damaged = damaged

    def listed(self) -> Sequence[Checkpoint]:
        """List the mirror; return the checkpoints of the series."""
        present = self._listing.scan()
        return newest_first([one for one in present if one.series == self._series])

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        """Download a checkpoint; return it as it is here."""
        return download(self._directory, checkpoint.name, self._target, damaged=self._damaged)


def fetch_newest(
    directory: RemoteDirectory,
    listing: Store,
    target: Store,
    *,
    series: str,
    damaged: Collection[str],
) -> Fetched:
    """Download the newest checkpoint of a series that the keys prove, if there is one.

    `damaged` are the ids of those here that may be replaced by a whole copy. The lease of the series
    must be held.

    Raises:
        OSError: The mirror cannot be reached: a start without it would lose the run in silence.
        CkptmgrError: No checkpoint can be had, and not because all are damaged.
    """
    candidates = MirroredCandidates(directory, listing, target, series=series, damaged=damaged)
    found, here, skipped = first_that_loads(candidates, listing.fs)
    for one in skipped:
        _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
    if found is None or here is None:
        return Fetched(None, tuple(skipped))
    url = f"{directory.objects.url}/{found.name}"
    _LOG.warning(
        "%s had no checkpoint of %r to resume from: step %d was downloaded from %s",
        target.directory,
        series,
        here.step,
        url,
    )
    return Fetched(url, tuple(skipped))


def within(limit_s: float, ask: Callable[[], _Answer]) -> _Answer:
    """Return an answer, or raise TimeoutError when there is none in that time."""
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name="ckptmgr-mirror-asked", daemon=True).start()
    try:
        return answer.result(min(limit_s, TIMEOUT_MAX))
    except TimeoutError as error:
        if answer.done():
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


def ask_for_newer(
    directory: RemoteDirectory,
    here: Checkpoint,
    *,
    trust: Trust,
    passed_over: Collection[str] = (),
) -> Answer:
    """Return the checkpoints of a mirror that may be newer than one here, and are related to it.

    The names carry the steps. Their manifests are read from the highest step down, until one of the
    line is not newer than the newest that is known. After a rollback a lower step is newer, so
    those that were written since are read, too. `passed_over` are names that are not asked for.

    Raises:
        OSError: The mirror cannot be reached.
    """
    runs = {here.run_id, *here.parent_run_ids} - {None, ""}
    newest, is_passed = here, False
    left = sorted(_named(directory, here.series, passed_over), reverse=True, key=lambda one: one[0])
    related: list[Checkpoint] = []
    skipped: list[Skipped] = []
    while True:
        left = [
            (place, stored)
            for place, stored in left
            if (place[0] > newest.step and not is_passed)
            or stored.modified_at + _CLOCK_SKEW > newest.saved_at
        ]
        if not left:
            return Answer(tuple(related), tuple(skipped))
        for one in _read(directory, here.series, left[:_READERS], trust):
            if isinstance(one, Skipped):
                skipped += [one] if one.checkpoint.step > here.step else []
            elif one.series == here.series and not runs.isdisjoint(
                (one.run_id, *one.parent_run_ids)
            ):
                related.append(one)
                is_passed = is_passed or one.order <= newest.order
                newest = max(newest, one, key=lambda found: found.order)
        del left[:_READERS]


_Named = tuple[tuple[int, int], StoredObject]


def _named(
    directory: RemoteDirectory, series: str, passed_over: Collection[str]
) -> Iterator[_Named]:
    """Yield step and attempt, and the manifests of a series; -1 for a step that is in no name."""
    for stored in directory.objects.list():
        name = stored.key.removesuffix(SUFFIX)
        if not stored.key.endswith(SUFFIX) or name in passed_over:
            continue
        named = parse_step_name(name)
        if named is None and name.startswith(series):
            yield (-1, 0), stored
        elif named is not None and named.prefix == series:
            yield (named.step, named.attempt), stored


def _read(
    directory: RemoteDirectory, series: str, chosen: Sequence[_Named], trust: Trust
) -> Iterator[Checkpoint | Skipped]:
    def read(one: _Named) -> Checkpoint | Skipped | None:
        (step, attempt), stored = one
        path = directory.path / stored.key
        try:
            data = directory.objects.get(stored.key)
            return decode(data, path=path, trust=trust).to_checkpoint(directory.path)
        except FileNotFoundError:
            return None
        except CkptmgrError as error:
            claimed = Checkpoint(
                path=directory.path / stored.key.removesuffix(SUFFIX),
                series=series,
                step=step,
                attempt=attempt,
                saved_at=stored.modified_at,
                size_bytes=stored.size_bytes,
                state=State.UNPROVEN if isinstance(error, KeyProblem) else State.CORRUPT,
            )
            return Skipped.because(claimed, error)

    with ThreadPoolExecutor(_READERS) as pool:
        for one in pool.map(read, chosen):
            if one is not None:
                yield one


def newer_of(answer: Answer, here: Checkpoint, present: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return those of a mirror that `resume` would try before `here` if all were in one directory."""
    known = {_save(one) for one in present}
    there = [one for one in answer.related if _save(one) not in known]
    tried = newest_first([*present, *there])
    return [one for one in tried[: tried.index(here)] if one in there]


def _save(one: Checkpoint) -> tuple[str, str | None, int]:
    """Return which save it is: data that was encrypted again has another id."""
    return one.name, one.run_id, one.sequence


def fetch_newer(
    directory: RemoteDirectory,
    target: Store,
    here: Checkpoint,
    present: Sequence[Checkpoint],
    *,
    damaged: Collection[str],
    answer: Answer,
) -> Fetched:
    """Download the newest checkpoint of the line of `here` if the mirror has a newer one.

    `present` are the usable checkpoints of the series here, `damaged` the ids of others, which may
    be replaced by a whole copy. The lease of the series must be held.

    Raises:
        UnsafeWrite: Another file has its name here.
        OSError: It cannot be read: it is known to be newer, so nothing older is used in its place.
    """
    skipped = list(answer.skipped)
    while True:
        newer = newer_of(answer, here, present)
        for one in newer:
            try:
                download(directory, one.name, target, damaged=damaged)
            except (CkptmgrError, OSError) as error:
                is_removed = is_gone(error) or isinstance(error, CheckpointNotFound)
                if not (is_damage(error) or is_removed):
                    add_note(
                        error,
                        f"ckptmgr: {directory.path / one.name} (step {one.step}) is newer than what is here (step "
                        f"{here.step}), so that is not resumed from",
                    )
                    raise
                skipped.append(Skipped.because(one, error))
                continue
            url = f"{directory.objects.url}/{one.name}"
            _LOG.warning(
                "%s is newer than %s (step %d): step %d was downloaded from there",
                url,
                target.directory / here.name,
                here.step,
                one.step,
            )
            return Fetched(url, tuple(skipped))
        if not newer:
            break
        passed_over = {one.checkpoint.name for one in skipped}
        answer = ask_for_newer(directory, here, trust=target.trust, passed_over=passed_over)
    for passed in skipped:
        _LOG.warning("skipped %s: %s", passed.checkpoint.path, passed.reason)
    others = about_others(here, lines_of([*present, *answer.related]))
    return Fetched(
        None, tuple(skipped), None if others is None else f"{directory.objects.url}: {others}"
    )
