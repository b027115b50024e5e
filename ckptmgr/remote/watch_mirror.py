# SPDX-License-Identifier: Apache-2.0
"""Mirror of watched directories: one thread uploads verified checkpoints, the newest first.

It only reads in the directories, so live runs of others may write there. An upload that is given up
leaves data that the next one uses; the mirror is listed before the first upload, so a
restart goes on where the last watch stopped. Checkpoints that are there already are compared, and brought up to
date. After a failure, the requests for that directory are
tried again after pauses that double.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import check_is_run
from ckptmgr.core.printable import error_text
from ckptmgr.core.trust import Trust
from ckptmgr.core.urls import is_url
from ckptmgr.maintenance.prune_plan import counted_together, plan_with
from ckptmgr.maintenance.watch.directory import problem_of
from ckptmgr.maintenance.watch.mirroring import UploadAttempt
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.objects.requests import Objects, checked_url, open_objects, retry_pause_s
from ckptmgr.policy.retention import without_unranked
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.remote.copies import Copies
from ckptmgr.store.store import Store

_RETRY_S = 1.0
_STOP_S = 5.0


def addresses_of(url: str, directories: Sequence[Path]) -> dict[Path, str]:
    """Return the address of each directory: that of a single one, else a folder below it.

    Raises:
        TypeError, ValueError: It is no address, or two directories have the same name.
    """
    url = checked_url(url)
    check_is_run(UrlPath(url))
    if len(directories) == 1:
        return {directories[0]: url}
    found: dict[Path, str] = {}
    for path in directories:
        address = checked_url(f"{url}/{path.name}")
        twin = next((one for one, other in found.items() if other == address), None)
        if twin is not None:
            raise ValueError(
                f"{twin} and {path} would both be mirrored to {address}; watch them apart, each with an address of "
                "its own"
            )
        found[path] = address
    return found


class _Stopped(Exception):
    """The end of an upload because the watch ends."""


class _Stoppable:
    """Objects whose uploads end when `is_stopping` says so."""

    def __init__(self, objects: Objects, is_stopping: Callable[[], bool]) -> None:
        self.url = objects.url
        self.create, self.get, self.read = objects.create, objects.get, objects.read
        self.fetch, self.find = objects.fetch, objects.find
        self.list, self.delete = objects.list, objects.delete
        self._put = objects.put
        self._is_stopping = is_stopping

    def put(self, key: str, pieces: Iterable[bytes], size_bytes: int) -> None:
        """Write an object from its pieces."""
        self._put(key, self._while_going_on(pieces), size_bytes)

    def _while_going_on(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._is_stopping():
                raise _Stopped
            yield piece


@dataclass(slots=True, eq=False)
class _Place:
    """A watched directory and its mirror."""

    path: Path
    store: Store
    copies: Copies
    wanted: dict[str, Checkpoint] = field(default_factory=dict)
    there: set[str] | None = None
    failures: int = 0
    retry_at: float = 0.0

    @property
    def address(self) -> str:
        return str(self.copies.place.directory)


class WatchMirror:
    """Uploads for the directories of a watch, each to its address.

    `addresses` maps directory to address. The mirror gets the files as they are; `keep` says which
    stay at each address, and with None all do. The pause after a failure doubles up to a minute.

    Raises:
        CkptmgrError: obstore is not installed, or refuses its configuration.
    """

    def __init__(
        self,
        addresses: Mapping[Path, str],
        *,
        trust: Trust,
        keep: RetentionPolicy | None,
        clock: Callable[[], float],
        retry_s: float = _RETRY_S,
    ) -> None:
        self._keep = keep
        self._clock = clock
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self.is_stopping = False
        self._ended: list[UploadAttempt] = []
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None
        self._places = {
            path: self._place(path, open_objects(address), trust)
            for path, address in addresses.items()
        }

    def _place(self, path: Path, objects: Objects, trust: Trust) -> _Place:
        stoppable = _Stoppable(objects, lambda: self.is_stopping)
        store = Store(path, trust=trust)
        place = ObjectPlace(stoppable, trust=trust, clock=self._clock)
        judge = partial(self._dropped, store)
        return _Place(path=path, store=store, copies=Copies(store, place, self._keep, judge))

    def start(self, wake: Callable[[], None]) -> None:
        """Begin; see `Uploads`."""
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name="ckptmgr-watch-mirror", daemon=True)
        self._thread.start()

    def want(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        """Replace the checkpoints that are to be uploaded."""
        with self._changed:
            self._places[directory].wanted = {one.name: one for one in checkpoints}
            self._changed.notify_all()

    def ended(self) -> list[UploadAttempt]:
        """Return the attempts that ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    @property
    def is_settled(self) -> bool:
        """Whether each thing to do has ended, or failed at least once."""
        with self._changed:
            return not any(
                (one.there is None or one.wanted) and not one.failures
                for one in self._places.values()
            )

    def stop(self) -> None:
        """Give up the current upload; the next watch goes on with it."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            with contextlib.suppress(_Stopped):
                self._carry_out(*job)

    def _next_job(self) -> tuple[_Place, Checkpoint | None] | None:
        """Wait for the next thing to do: a checkpoint, or a listing; None at the end."""
        with self._changed:
            while not self.is_stopping:
                place = self._next()
                if place is not None:
                    return place, self._newest(place)
                self._changed.wait(self._pause())
        return None

    def _next(self) -> _Place | None:
        """Return the place with the next thing to do now; listings come first."""
        at = time.monotonic()
        ready = [one for one in self._places.values() if one.retry_at <= at]
        for place in ready:
            if place.there is None:
                return place
        waiting = [one for one in ready if one.wanted]
        newest = ((self._newest(one), one) for one in waiting)
        dated = [(one.saved_at, place) for one, place in newest if one is not None]
        return max(dated, key=lambda pair: pair[0], default=(None, None))[1]

    @staticmethod
    def _newest(place: _Place) -> Checkpoint | None:
        if place.there is None:
            return None
        return max(place.wanted.values(), key=lambda one: one.saved_at, default=None)

    def _pause(self) -> float | None:
        busy = [one for one in self._places.values() if one.there is None or one.wanted]
        soonest = min((one.retry_at for one in busy), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _carry_out(self, place: _Place, one: Checkpoint | None) -> None:
        upload: UploadAttempt | None
        try:
            upload = self._list(place) if one is None else self._upload(place, one)
        except _Stopped:
            raise
        except Exception as error:  # the watch goes on, whatever the store answers
            upload = self._failed(place, one, error)
        with self._changed:
            if upload is None or upload.outcome == "failed":
                place.failures += 1
                pause_s = retry_pause_s(place.failures, first_s=self._retry_s)
                place.retry_at = time.monotonic() + pause_s
            else:
                place.failures, place.retry_at = 0, 0.0
            if upload is None:
                return
            if one is not None and upload.outcome != "failed":
                if place.there is not None and upload.outcome in ("uploaded", "present"):
                    place.there.add(one.name)
                place.wanted = {n: other for n, other in place.wanted.items() if other != one}
            self._ended.append(upload)
        self._wake()

    def _list(self, place: _Place) -> UploadAttempt:
        found = place.copies.place.scan()
        removed: tuple[Checkpoint, ...] = ()
        problem = None
        if place.copies.going(found):
            removed, problem = self._retain(place)  # a watch that was killed had that left to do
        with self._changed:
            place.there = {one.name for one in found if one not in removed}
        return UploadAttempt(
            directory=place.path,
            address=place.address,
            outcome="listed",
            removed=removed,
            problem=problem,
        )

    def _upload(self, place: _Place, one: Checkpoint) -> UploadAttempt:
        started = time.perf_counter()
        address = f"{place.address}/{one.name}"
        done = UploadAttempt(
            directory=place.path, address=address, outcome="present", checkpoint=one
        )
        is_there = place.there is not None and one.name in place.there
        if not (is_there or place.copies.kept([one])):
            return replace(done, outcome="left out")
        if not place.copies.send(one.name):
            return done
        removed, problem = self._retain(place)
        if place.there is not None:
            place.there -= {gone.name for gone in removed}
        return replace(
            done,
            outcome="uploaded",
            seconds=time.perf_counter() - started,
            removed=removed,
            problem=problem,
        )

    def _failed(
        self, place: _Place, one: Checkpoint | None, error: Exception
    ) -> UploadAttempt | None:
        """Return the end of a failed attempt; None: the checkpoint is gone or being replaced."""
        is_gone = isinstance(error, FileNotFoundError) and not is_url(error.filename)
        if is_gone or isinstance(error, BlockingIOError):
            return None
        is_final = one is not None and isinstance(error, CkptmgrError)
        problem = f"{type(error).__name__}: {error_text(error)}"
        if isinstance(error, (CkptmgrError, OSError)):
            problem = problem_of(error)
        return UploadAttempt(
            directory=place.path,
            address=place.address,
            outcome="refused" if is_final else "failed",
            checkpoint=one,
            problem=problem,
        )

    def _dropped(
        self, store: Store, found: Sequence[Checkpoint], keep: RetentionPolicy
    ) -> list[Checkpoint]:
        now = datetime.fromtimestamp(self._clock(), UTC)
        pinned = {one.name for one in store.scan() if one.pins}

        def spared(one: Checkpoint) -> str | None:
            return "pinned here" if one.name in pinned else None

        dropped: list[Checkpoint] = []
        for counted in counted_together(found):
            history = [one for line in counted.lines for one in line.checkpoints]
            applied, _ = without_unranked(history, keep)
            dropped += plan_with(counted, {}, applied, now, spared).dropped
        return dropped

    @staticmethod
    def _retain(place: _Place) -> tuple[tuple[Checkpoint, ...], str | None]:
        """Apply the policy of the mirror; return the removed checkpoints, or why it failed."""
        try:
            return tuple(place.copies.retain()), None
        except (CkptmgrError, OSError) as error:
            return (), f"retention at {place.address}: {problem_of(error)}"
