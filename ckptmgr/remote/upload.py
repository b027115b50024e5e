# SPDX-License-Identifier: Apache-2.0
"""`Upload`: the destination of a run that saves to the address of an object store.

A save is written into a folder of this machine, as into any directory, and uploaded from there.
It is committed when its manifest is created at the address, and not before; then the file here is
removed. So a run needs room here for one checkpoint.

An object store has no locks. A run that finds a checkpoint of another run, which was saved since
this one began, refuses to save: of two runs that save at once, one goes on. Two runs of one machine
are kept apart by the lease of the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence

from ckptmgr.core.errors import SaveFailed, StoreLocked, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.notes import add_note
from ckptmgr.core.printable import error_text
from ckptmgr.objects.paths import mark_of
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.objects.requests import open_objects
from ckptmgr.objects.staging import (
    clear,
    clear_notes,
    discard_staged,
    in_staging,
    remove_staging,
    sweep_killed,
)
from ckptmgr.series.commit import OfWriter
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.codec import Manifest

_LOG = logging.getLogger(__name__)


_open_writers: weakref.WeakSet[SeriesWriter] = weakref.WeakSet()


class Upload(OfWriter):
    """The address of an object store as the destination of a run; see `series.commit.Destination`.

    The store of the writer is the folder here; `place` the address.
    """

    def __init__(self, writer: SeriesWriter, *, url: str) -> None:
        super().__init__(writer)
        self.place: ObjectPlace = ObjectPlace(
            open_objects(url), trust=writer.store.trust, clock=writer.clock
        )
        self._process = os.getpid()
        self._highest: int | None = None
        self._has_swept = False

    def open(self, take: Callable[[], None]) -> None:
        """Take the lease of the folder here.

        Raises:
            SaveFailed: The process was forked since the manager was made.
            StoreLocked: Another live process of this machine writes this series.
            PermissionError: The folder is not that of this user alone.
        """
        if os.getpid() != self._process:
            raise SaveFailed(
                "connections to an object store do not survive a fork",
                path=self.place.directory,
                hint="save in the process that made the manager, or start workers with spawn",
            )
        folder = self._writer.store.directory
        try:
            in_staging(folder, take)
        except StoreLocked as lost:
            if not self._writer.is_holder:  # another run has it
                raise
            # Programs that clean temporary folders remove files in use; nothing there is a checkpoint.
            in_staging(folder, self._writer.hold_again)
            _LOG.warning("%s; it was taken again", lost.message)
        _open_writers.add(self._writer)

    def clean_up(self) -> None:
        """Remove what killed runs left in the folder here."""
        clear(self._writer.store)
        sweep_killed(self._writer.store)

    def close(self, release: Callable[[], None]) -> None:
        """Release the lease, and remove the folder here.

        A run that has saved nothing since its start leaves the count of starts to the next one.
        """
        store, is_holder = self._writer.store, self._writer.is_holder
        if is_holder and self._has_gone_on:
            with contextlib.suppress(OSError):
                clear_notes(store)
        release()
        if is_holder:
            remove_staging(store)
        _open_writers.discard(self._writer)

    @property
    def _has_gone_on(self) -> bool:
        last, start = self._writer.last_saved, self._writer.resumed_from
        return last is not None and (start is None or last.order > start.order)

    def begin_at(self) -> None:
        """Take the present checkpoints as saved before this run."""
        self._highest = _highest(self._of_series(self.place.scan()))

    def present_at(self, step: int, last: Checkpoint | None) -> Sequence[Checkpoint]:
        """Return the checkpoints that are there.

        Raises:
            StoreLocked: Another run has saved since this one began.
        """
        present = self.place.scan()
        found = self._of_series(present)
        if self._highest is None:
            self._highest = _highest(found)
        for one in found:
            if self._is_of_rival(one, self._highest, last):
                raise StoreLocked(
                    f"another run writes this series: it saved step {one.step} at {one.saved_at:%Y-%m-%d %H:%M:%S} "
                    "UTC, after this run began; nothing was saved",
                    path=one.path,
                    hint="end one of the two, or give this run an address of its own; resume() goes on from what is there",
                )
        return present

    def publish(self, manifest: Manifest) -> None:
        """Upload a written file, and remove it here; it is committed once its manifest is there.

        Raises:
            UnsafeWrite: Another checkpoint has taken the name meanwhile.
            OSError: From the disk or the network; whether it was saved shows in the listing.
        """
        store = self._writer.store
        try:
            reads_back = self._writer.options.verify_after_write
            self.place.remote.upload(store, manifest.name, reads_back=reads_back)
        finally:
            discard_staged(store, manifest.name)

    def keep_at(self) -> str | None:
        """Return the mark of the address."""
        return mark_of(self.place.directory)

    def note_failed(self, error: Exception) -> None:
        """Add to the error of the disk here how another one is chosen."""
        if isinstance(error, OSError):
            folder = self._writer.store.directory
            add_note(
                error,
                f"ckptmgr: a save to {self.place.directory} is written into {folder} first, and needs room "
                "for one checkpoint there; TMPDIR names another folder",
            )

    def retained(self) -> None:
        """Once in each run remove old data of no checkpoint."""
        if not self._has_swept:
            try:
                self.place.remote.sweep()
                self._has_swept = True
            except OSError as error:
                _LOG.warning("retention: %s", error_text(error))

    def check_can_change(self) -> None:
        """Raise: no copy here could repeat a change of a manifest there."""
        raise UnsupportedCheckpoint(
            "pins, and metrics after the save, have no effect in an object store for a run without a directory: no copy here "
            "could repeat a change that was cut",
            path=self.place.directory,
            hint="give the metrics to save(), or keep the run in a directory with mirror=URL",
        )

    def _of_series(self, present: Sequence[Checkpoint]) -> list[Checkpoint]:
        return [one for one in present if one.series == self._writer.series and one.run_id]

    def _is_of_rival(self, one: Checkpoint, highest: int, last: Checkpoint | None) -> bool:
        """Return whether another run has saved a checkpoint since this one began.

        Of two runs that commit the same number at once, that with the smaller id goes on.
        """
        if one.run_id == self._writer.run_id or one.sequence <= highest:
            return False
        if last is None or one.sequence != last.sequence:
            return last is None or one.sequence > last.sequence
        return (one.run_id or "") < self._writer.run_id


@atexit.register
def _close_at_exit() -> None:
    """Remove the folders of the runs that were not closed; background saves have ended before."""
    for writer in list(_open_writers):
        if writer.is_holder:  # not in a forked child
            with contextlib.suppress(Exception):
                writer.close()


def _highest(present: Sequence[Checkpoint]) -> int:
    return max((one.sequence for one in present), default=-1)
