# SPDX-License-Identifier: Apache-2.0
"""A mirror of a run in an object store: uploads in a thread of its own, and the way back.

A save does not wait for its upload. The newest checkpoint goes first; an older one that local
retention removes meanwhile, or that is one too many in the queue, is not uploaded, and the event
`mirror.skipped` and the handle of its save say so. A failed upload is tried again, after pauses
that double, and never stops the training.

Changes here after an upload (of keys, pins, tags, metrics) are brought there when the run
resumes, when it pins or records, and when it ends. A run that resumed without an answer of the
mirror compares before its first upload; a newer checkpoint of its line there stops it, as a rival
does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

from ckptmgr.core.arguments import checked_interval
from ckptmgr.core.errors import (
    CheckpointNotFound,
    CkptmgrError,
    KeyProblem,
    SaveFailed,
    StoreLocked,
)
from ckptmgr.core.forks import reset_in_child
from ckptmgr.core.handle import Outcome, SaveHandle
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import check_is_run
from ckptmgr.core.notes import add_note
from ckptmgr.core.printable import error_text
from ckptmgr.objects.comparison import Difference
from ckptmgr.objects.directory import Uploaded
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.objects.requests import Objects, checked_url, open_objects, retry_pause_s
from ckptmgr.observe.events import Facts, about
from ckptmgr.observe.observers import Observers
from ckptmgr.policy.retention import dropped, without_unranked
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import parse_policy
from ckptmgr.remote.copies import Copies
from ckptmgr.remote.fallback import (
    Fetched,
    ask_for_newer,
    fetch_newer,
    fetch_newest,
    within,
)
from ckptmgr.remote.places import note_mirror
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_MOST_FAILURES_AT_CLOSE = 3
_READERS = 8
_SHOWN = 5
_START = (0, 0, 0)
_NOTES = {
    Uploaded.NEW: "uploaded to",
    Uploaded.CHANGED: "brought up to date at",
    Uploaded.PRESENT: "was there already:",
}


@dataclass(frozen=True, slots=True)
class Mirror:
    """An object store that gets a copy of each checkpoint of a run.

    Attributes:
        url: The address: `s3://bucket/run`, `gs://bucket/run` or `az://container/run`; for
            tests `file:///folder`, and `memory://name` in one process.
        keep: What to keep there, as text such as `last(3) | every(1000)`; None removes nothing.
        queue: Most checkpoints that wait for their upload; of more the oldest are skipped.
        close_timeout_s: How long the end of the run waits for uploads, in seconds.
        retry_s: Pause before a failed upload is tried again, in seconds; it doubles up to a minute.
        at_resume: Where the mirror does not answer when a run resumes: `doubt` goes on from what is
            here and says so; `require` raises.
        at_resume_s: How long `resume` waits for that answer, in seconds.
    """

    url: str
    _: KW_ONLY
    keep: RetentionPolicy | str | None = None
    queue: int = 8
    close_timeout_s: float = 600.0
    retry_s: float = 1.0
    at_resume: Literal["doubt", "require"] = "doubt"
    at_resume_s: float = 60.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            TypeError, ValueError: One of them is unusable.
        """
        object.__setattr__(self, "url", checked_url(self.url))
        check_is_run(UrlPath(self.url))
        if isinstance(self.keep, str):
            object.__setattr__(self, "keep", parse_policy(self.keep))
        checked_interval("queue", self.queue)
        if self.at_resume not in ("doubt", "require"):
            raise ValueError(
                f"at_resume of a Mirror is 'doubt' or 'require', but got {self.at_resume!r}"
            )
        for name in ("close_timeout_s", "retry_s", "at_resume_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name} of a Mirror is a number of seconds, but got {value!r}")

    @property
    def policy(self) -> RetentionPolicy | None:
        """What to keep there."""
        return parse_policy(self.keep) if isinstance(self.keep, str) else self.keep


def mirror_of(mirror: Mirror | str, below: PurePath) -> Mirror:
    """Return the mirror of a directory below that of the run, such as the one of a rank.

    Raises:
        TypeError, ValueError: It is neither a Mirror nor an address.
    """
    given = mirror if isinstance(mirror, Mirror) else Mirror(mirror)
    return given if not below.parts else replace(given, url=f"{given.url}/{below.as_posix()}")


@dataclass(slots=True, eq=False)
class _Upload:
    checkpoint: Checkpoint
    done: Future[str] = field(default_factory=Outcome)


class MirrorUploads:
    """Uploads the checkpoints of one series to a mirror.

    `clock` returns seconds since the epoch; `objects` replaces those of the address.
    """

    def __init__(
        self,
        mirror: Mirror,
        writer: SeriesWriter,
        *,
        observers: Observers,
        clock: Callable[[], float],
        objects: Objects | None = None,
    ) -> None:
        self.url = mirror.url
        self._mirror = mirror
        self._writer = writer
        here = writer.store  # another one, because its listing in memory is not for other threads
        self._store = Store(here.directory, fs=here.fs, trust=here.trust)
        self._observers = observers
        self._clock = clock
        self._objects = open_objects(mirror.url) if objects is None else objects
        self.listing = ObjectPlace(self._objects, trust=writer.store.trust, clock=clock)
        self.directory = self.listing.remote
        self._copies = Copies(self._store, self.listing, mirror.policy, self._dropped)
        self._is_of_parent = False
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._missing: list[_Upload] = []  # of earlier runs: after those of this one
        self._current: _Upload | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._has_to_catch_up = False
        self._failures = 0
        self._has_noted = False
        self._has_said_rival = False
        self._known: set[tuple[int, int, int]] | None = None  # there at the start
        self._unasked: Checkpoint | None = None
        self._compared: dict[str, Checkpoint] = {}  # by name: those that are there as here

    def forget_parent(self) -> None:
        """Upload nothing in a forked child: its parent does, and the library has no threads here."""
        self._reset()
        self._is_of_parent = True

    def follow(self, handle: SaveHandle) -> SaveHandle:
        """Upload the checkpoint of a save; return its handle with the future of the upload."""
        if self._is_of_parent:
            return handle
        done: Future[str] = Outcome()

        def saved(durable: Future[Checkpoint]) -> None:
            error = durable.exception()
            if error is None:
                self._add(_Upload(durable.result(), done))
            else:
                done.set_exception(error)

        handle.durable.add_done_callback(saved)
        return replace(handle, mirrored=done)

    def catch_up(self) -> None:
        """Upload the saves and changes of an earlier run of this series that it did not upload."""
        if self._is_of_parent:
            return
        with self._changed:
            self._has_to_catch_up = True
            self._start()

    def fetch(
        self, here: Checkpoint | None, present: Sequence[Checkpoint], damaged: Collection[str]
    ) -> Fetched:
        """Download checkpoints newer there than `here`, or the newest of the series if that is None.

        Errors and arguments as of `fallback.fetch_newer` and `fetch_newest`. Where the mirror does
        not answer, the run goes on from `here`, in doubt, unless `at_resume` requires an answer.
        """
        self._note_place()
        target = self._writer.store
        with self._changed:
            self._unasked = None
        if here is None:
            fetched = fetch_newest(
                self.directory,
                self.listing,
                target,
                series=self._writer.series,
                damaged=damaged,
            )
            self._known = {_START, *(one.checkpoint.order for one in fetched.skipped)}
            return fetched
        try:
            answer = within(
                self._mirror.at_resume_s,
                lambda: ask_for_newer(self.directory, here, trust=target.trust),
            )
        except OSError as error:
            if self._mirror.at_resume == "require":
                add_note(
                    error,
                    f"ckptmgr: the mirror {self.url} must answer before this run resumes; at_resume='doubt' goes on from what "
                    "is here",
                )
                raise
            return self._go_on_unasked(here, present, error)
        self._known = {here.order, *(one.order for one in answer.related)}
        self._writer.hold_back((), "")
        return fetch_newer(self.directory, target, here, present, damaged=damaged, answer=answer)

    def _go_on_unasked(
        self, here: Checkpoint, present: Sequence[Checkpoint], error: OSError
    ) -> Fetched:
        doubt = f"the mirror was not asked: {self.url}: {error.strerror or error}"
        _LOG.warning(
            "%s; the run goes on from step %d (%s), and compares before its first upload. Until then nothing that is "
            "here now is removed",
            doubt,
            here.step,
            here.path,
        )
        self._observers.emit("mirror", error, series=self._writer.series, notes=(doubt,))
        self._writer.hold_back(present, f"the mirror {self.url} was not asked yet")
        with self._changed:
            self._unasked = here
        return Fetched(None, doubt=doubt)

    def _note_place(self) -> None:
        """Note the address beside the run, for the commands that change keys, pins and tags."""
        if not self._has_noted:
            self._has_noted = note_mirror(self._writer.store, self._writer.series, self.url)

    def close(self) -> list[str]:
        """Wait for the uploads, up to the limit of the mirror; return the names of the others."""
        if self._writer.has_saved and self._writer.rival is None:
            self.catch_up()  # a save in an emergency has no handle that was followed
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join(min(self._mirror.close_timeout_s, threading.TIMEOUT_MAX))
        with self._changed:
            queued = (*self._missing, *self._waiting, self._current)
            left = [one for one in queued if one is not None]
            is_behind, self._has_to_catch_up = self._has_to_catch_up, False
            self._waiting, self._missing, self._thread, self._is_closing = [], [], None, False
        for one in left:
            self._fail(one, SaveFailed("the run ended before it was uploaded"))
        names = [one.checkpoint.name for one in left]
        if is_behind and not names:
            _LOG.warning(
                "%s: not compared when the run ended: it may lack what was saved, pinned, recorded or given other keys "
                "here; the next run with this mirror brings it there, or ckptmgr copy does",
                self.url,
            )
        if names:
            _LOG.warning(
                "%s: not uploaded when the run ended: %s; the next run with this mirror uploads what is here, or "
                "ckptmgr copy does",
                self.url,
                ", ".join(names),
            )
            self._observers.emit(
                "mirror.unfinished",
                path=self._writer.store.directory,
                series=self._writer.series,
                figures={"left": len(names)},
                notes=tuple(f"not uploaded: {name}" for name in names),
            )
        return names

    def _add(self, upload: _Upload) -> None:
        self._note_place()
        if self._writer.rival is not None:
            self._fail(upload, self._writer.rival)
            return
        with self._changed:
            self._waiting.append(upload)
            skipped = self._waiting[: -self._mirror.queue]
            del self._waiting[: -self._mirror.queue]
            self._start()
        for one in skipped:
            self._skip(one, f"{self._mirror.queue} newer ones were waiting for their upload")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckptmgr-mirror", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            with self._changed:
                while self._is_idle(me):
                    self._changed.wait()
                if self._is_over(me):
                    return
                has_to_catch_up, self._has_to_catch_up = self._has_to_catch_up, False
                upload = None
                queue = self._waiting or self._missing
                if not has_to_catch_up and queue:
                    upload = self._current = queue.pop()
            try:
                if not self._is_sole_writer():
                    pass
                elif has_to_catch_up:
                    self._find_missing()
                elif upload is not None:
                    self._carry_out(upload)
                self._failures = 0
            except Exception as error:  # a mirror must not end the training, whatever it meets
                self._retry_later(upload, error)
            finally:
                with self._changed:
                    if self._thread is me:
                        self._current = None

    def _is_idle(self, me: threading.Thread) -> bool:
        return self._thread is me and not (self._has_work() or self._is_closing)

    def _has_work(self) -> bool:
        return bool(self._waiting or self._missing or self._has_to_catch_up)

    def _is_over(self, me: threading.Thread) -> bool:
        if self._thread is not me:
            return True
        is_hopeless = self._failures >= _MOST_FAILURES_AT_CLOSE
        return self._is_closing and (is_hopeless or not self._has_work())

    def _carry_out(self, upload: _Upload) -> None:
        one, store = upload.checkpoint, self._store
        started = time.perf_counter()
        try:
            outcome = self._copies.send(one.name)
        except FileNotFoundError as error:
            now = store.look(one.name)
            if now is not None and now.id == one.id:
                raise
            del error
            self._skip(upload, "it was removed here before its upload")
            return
        except CkptmgrError as error:  # the next attempt would meet the same
            _LOG.warning("%s is not uploaded to %s: %s", one.path, self.url, error_text(error))
            self._emit_failure(one, error)
            self._compared[one.name] = one
            self._fail(upload, error)
            return
        self._compared[one.name] = one
        note = f"{_NOTES[outcome]} {self.url}"
        seconds = time.perf_counter() - started
        self._observers.emit("mirror", **about(one) | Facts(seconds=seconds, notes=(note,)))
        if not upload.done.done():
            upload.done.set_result(f"{self.url}/{one.name}")
        self._retain()

    def _retry_later(self, upload: _Upload | None, error: Exception) -> None:
        self._failures += 1
        pause_s = retry_pause_s(self._failures, first_s=self._mirror.retry_s)
        if upload is not None and not upload.done.done():
            self._emit_failure(upload.checkpoint, error)
        if self._failures == 1:
            what = "the mirror" if upload is None else upload.checkpoint.name
            text = error_text(error)
            _LOG.warning("%s: %s failed, and is tried again: %s", self.url, what, text)
        with self._changed:
            if self._thread is not threading.current_thread():
                return
            if upload is None:
                self._has_to_catch_up = True
            elif not upload.done.done():
                self._waiting.append(upload)
                self._waiting.sort(key=lambda one: one.checkpoint.order)
            self._current = None
            self._changed.wait(pause_s)

    def _emit_failure(self, one: Checkpoint, error: Exception) -> None:
        self._observers.emit("mirror", error, **about(one) | Facts(notes=(f"to {self.url}",)))

    def _skip(self, upload: _Upload, why: str) -> None:
        one = upload.checkpoint
        _LOG.warning("%s is not uploaded to %s: %s", one.name, self.url, why)
        self._observers.emit("mirror.skipped", **about(one) | Facts(notes=(why,)))
        self._fail(upload, CheckpointNotFound(f"not uploaded: {why}", path=one.path))

    @staticmethod
    def _fail(upload: _Upload, error: Exception) -> None:
        if not upload.done.done():
            upload.done.set_exception(error)

    def _own(self, present: Sequence[Checkpoint]) -> list[Checkpoint]:
        runs = self._writer.own_runs
        return [one for one in present if one.run_id in runs and one.series == self._writer.series]

    def _is_sole_writer(self) -> bool:
        """Return whether no other run of this line has saved there; one that has stops this run.

        Only a run that could not ask when it resumed asks again.
        """
        here, began, rival = self._unasked, self._writer.resumed_from, self._writer.rival
        if rival is not None:
            self._give_up(rival)
            return False
        if here is None:
            return True
        related: Sequence[Checkpoint] = ()
        if began is not None:
            related = ask_for_newer(self.directory, here, trust=self._store.trust).related
        with self._changed:
            is_asked_meanwhile = self._unasked is not here
            if not is_asked_meanwhile:
                self._unasked, self._known = None, {here.order}
        if is_asked_meanwhile:
            return self._is_sole_writer()
        newer = [
            one for one in related if one.order > here.order and one.run_id != self._writer.run_id
        ]
        if newer:
            newest = max(newer, key=lambda one: one.order)
            error = _rival(newest, here, f"{self.url}/{newest.name}")
            if not self._writer.stop(error, began=began):  # it has begun anew meanwhile
                return self._is_sole_writer()
            _LOG.warning("%s", error)
            self._observers.emit("mirror", error, series=self._writer.series)
            self._give_up(error)
            return False
        self._writer.hold_back((), "")
        return True

    def _give_up(self, error: StoreLocked) -> None:
        """Give up all uploads."""
        with self._changed:
            queued = (*self._missing, *self._waiting, self._current)
            self._missing, self._waiting, self._has_to_catch_up = [], [], False
        for one in queued:
            if one is not None:
                self._fail(one, error)

    def _find_missing(self) -> None:
        """Add the intact local checkpoints that the mirror lacks and that its policy keeps.

        Also those that have changed since they were compared with the mirror.
        """
        names = set(self.directory.names())
        with self._changed:
            waiting = {one.checkpoint.name for one in self._waiting}
        here = [one for one in self._own(self._store.scan()) if one.state is State.OK]
        here = [one for one in here if one.name not in waiting]
        both = [one for one in here if one.name in names and self._compared.get(one.name) != one]
        with ThreadPoolExecutor(_READERS) as pool:
            is_changed = list(pool.map(self._is_changed, both))
        changed = [one for one, is_so in zip(both, is_changed, strict=True) if is_so]
        missing = self._copies.kept([one for one in here if one.name not in names])
        with self._changed:
            missing = sorted([*missing, *changed], key=lambda one: one.order)
            self._missing = [_Upload(one) for one in missing]
        if changed and self._store.trust.keys is not None:
            self._name_those_under_other_keys({one.name for one in here})
        if not missing:
            self._retain()  # a run that was killed may have had that left to do

    def _name_those_under_other_keys(self, here: Collection[str]) -> None:
        """Name the checkpoints that are only there, and so keep the keys that were changed here."""
        found = [one for one in self.listing.scan() if one.series == self._writer.series]
        left = sorted(one.name for one in found if one.is_unproven and one.name not in here)
        if not left:
            return
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        error = KeyProblem(
            f"the given keys do not prove what is only there: {', '.join(left[:_SHOWN])}{more}",
            path=self.url,
            hint="after a change of keys, copy them into a directory, change their keys there, and copy them back",
        )
        _LOG.warning("%s", error)
        self._observers.emit("mirror", error, series=self._writer.series)

    def _is_changed(self, one: Checkpoint) -> bool:
        """Return whether an upload would change the copy there, or say why it must not."""
        try:
            found = self.directory.difference(self._store, one.name)
        except (FileNotFoundError, BlockingIOError):
            return False  # it was removed here, or is being replaced
        except CkptmgrError:
            return True  # the upload says so
        if found is Difference.SAME:
            self._compared[one.name] = one
        return found is not Difference.SAME

    def _dropped(
        self, found: Sequence[Checkpoint], policy: RetentionPolicy
    ) -> Sequence[Checkpoint]:
        """Return the checkpoints of this run that a policy drops of these."""
        own = self._own(found)
        if not any(one.is_countable for one in own):
            return ()
        applied, _ = without_unranked(own, policy)
        newest = max(own, key=lambda one: one.order)
        pinned = {one.name for one in self._store.scan() if one.pins}
        protected = {one.path: "pinned here" for one in own if one.name in pinned}
        rivals = self._of_rivals(own)
        protected |= {one.path: "saved since this run began" for one in rivals}
        if rivals and not self._has_said_rival:
            self._has_said_rival = True
            _LOG.warning(
                "%s: another run of this line saves there, too, up to %s; nothing of it is removed. End one of the two, or "
                "give it an address of its own",
                self.url,
                rivals[-1].name,
            )
        protected[newest.path] = "uploaded last"
        now = datetime.fromtimestamp(self._clock(), UTC)
        return dropped(own, applied, now, protected=protected).checkpoints

    def _of_rivals(self, own: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return those that an ancestor saved after this run was resumed from it."""
        began = self._writer.resumed_from
        if began is None or self._known is None:
            return []
        newest = max(began.order, *self._known)
        return [one for one in own if one.run_id != self._writer.run_id and one.order > newest]

    def _retain(self) -> None:
        """Apply the policy of the mirror to its checkpoints; a failure is logged."""
        try:
            going = self._copies.retain()
        except (CkptmgrError, OSError) as error:
            _LOG.warning("%s: retention: %s", self.url, error_text(error))
            self._observers.emit("mirror", error, series=self._writer.series, notes=("retention",))
            return
        if going:
            notes = tuple(f"dropped {self.url}/{one.name}" for one in going)
            figures = {"dropped": len(going), "freed_bytes": sum(one.size_bytes for one in going)}
            self._observers.emit(
                "mirror.pruned", series=self._writer.series, figures=figures, notes=notes
            )


def _rival(newer: Checkpoint, here: Checkpoint, address: str) -> StoreLocked:
    return StoreLocked(
        f"the mirror has step {newer.step} of another run of this line, saved {newer.saved_at:%Y-%m-%d %H:%M:%S} UTC, and "
        f"this run went on from step {here.step} while it did not answer; nothing is saved, uploaded or removed any more",
        path=address,
        hint="resume() goes on from what is there; to go on from what is here, end the other run, and give this one a mirror "
        "at an address of its own",
    )
