# SPDX-License-Identifier: Apache-2.0
"""`RemoteWriter`: writes a series at the address of an object store.

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
from dataclasses import replace

from ckptmgr.core.errors import SaveFailed, StoreLocked, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.notes import add_note
from ckptmgr.core.printable import error_text
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.io.signals import defer_signals
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
from ckptmgr.observe.observers import Observers
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.series.writer import Retained, SavePosition, SeriesWriter
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)


_open_writers: weakref.WeakSet[RemoteWriter] = weakref.WeakSet()


class RemoteWriter(SeriesWriter):
    """Writer of a series at an address; `store` is the folder here, `listing` the remote one."""

    def __init__(
        self,
        url: str,
        store: Store,
        series: str,
        *,
        options: SaveOptions,
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        objects = open_objects(url)
        place = ObjectPlace(objects, trust=store.trust, clock=clock)
        self._directory = place.remote
        self._process = os.getpid()
        self._highest: int | None = None
        self._has_swept = False
        super().__init__(
            store,
            series,
            options=options,
            clock=clock,
            observers=observers,
            listing=place,
        )

    def open(self) -> None:
        """Take the lease of the folder here, and remove leftovers of a killed run in it.

        Raises:
            SaveFailed: The process was forked since the manager was made.
            StoreLocked: Another live process of this machine writes this series.
            PermissionError: The folder is not that of this user alone.
        """
        if os.getpid() != self._process:
            raise SaveFailed(
                "connections to an object store do not survive a fork",
                path=self.listing.directory,
                hint="save in the process that made the manager, or start workers with spawn",
            )
        try:
            in_staging(self.store.directory, super().open)
        except StoreLocked as lost:
            if not self.is_holder:  # another run has it
                raise
            self._take_again(lost)
        _open_writers.add(self)

    def _take_again(self, lost: StoreLocked) -> None:
        """Take the lease again: programs that clean temporary folders remove files in use.

        Nothing here is a checkpoint, so nothing is lost. A save in flight may still need its file,
        so this removes nothing.
        """
        with defer_signals(), self._opening:
            super().close()
            in_staging(self.store.directory, self._take_lease)
            self._holder = os.getpid()
            self.store.follow()
        _LOG.warning("%s; it was taken again", lost.message)

    def clean_up(self) -> list[str]:
        """Remove leftovers of a killed run here; return one sentence per action."""
        sentences = super().clean_up()
        clear(self.store)
        sweep_killed(self.store)
        return sentences

    def close(self) -> None:
        """Release the lease, and remove the folder here.

        A run that has saved nothing since its start leaves the count of starts to the next one.
        """
        with self._opening:
            is_holder = self.is_holder
            if is_holder and self._has_gone_on:
                with contextlib.suppress(OSError):
                    clear_notes(self.store)
            super().close()
            if is_holder:
                remove_staging(self.store)
            _open_writers.discard(self)

    @property
    def is_holder(self) -> bool:
        """Whether this process holds the lease."""
        return self._holder == os.getpid()

    @property
    def _has_gone_on(self) -> bool:
        last, start = self._last_saved, self.resumed_from
        return last is not None and (start is None or last.order > start.order)

    def continue_from(self, checkpoint: Checkpoint, manifest: Manifest | None) -> None:
        """Continue the run of a checkpoint; present checkpoints count as saved before this run."""
        super().continue_from(checkpoint, manifest)
        self._highest = _highest(self._of_series(self.listing.scan()))

    def start_anew(self) -> None:
        """Begin beside the present checkpoints, which count as saved before this run."""
        super().start_anew()
        self._highest = _highest(self._of_series(self.listing.scan()))

    def present_at(self, step: int) -> Sequence[Checkpoint]:
        """Return the checkpoints that are there.

        Raises:
            StoreLocked: Another run has saved since this one began.
        """
        present = self.listing.scan()
        found = self._of_series(present)
        if self._highest is None:
            self._highest = _highest(found)
        for one in found:
            if self._is_of_rival(one, self._highest):
                raise StoreLocked(
                    f"another run writes this series: it saved step {one.step} at {one.saved_at:%Y-%m-%d %H:%M:%S} "
                    "UTC, after this run began; nothing was saved",
                    path=one.path,
                    hint="end one of the two, or give this run an address of its own; resume() goes on from what is there",
                )
        return present

    def publish(self, manifest: Manifest) -> Checkpoint:
        """Upload a written file; return its checkpoint once its manifest is there.

        Raises:
            UnsafeWrite: Another checkpoint has taken the name meanwhile.
            OSError: From the disk or the network; whether it was saved shows in the listing.
        """
        try:
            reads_back = self.options.verify_after_write
            self._directory.upload(self.store, manifest.name, reads_back=reads_back)
        finally:
            discard_staged(self.store, manifest.name)
        return self.note_saved(manifest)

    def draft(
        self,
        name: str,
        options: SaveOptions,
        facts: SaveFacts,
        *,
        place: SavePosition,
        retention: RetentionPolicy | None,
    ) -> Manifest:
        """Return the manifest of a file before its write; it says that the policy is applied there."""
        drafted = super().draft(name, options, facts, place=place, retention=retention)
        return replace(
            drafted, keep_at=None if drafted.keep is None else mark_of(self.listing.directory)
        )

    def note_failed(self, error: Exception) -> None:
        """Add to the error of the disk here how another one is chosen."""
        if isinstance(error, OSError):
            add_note(
                error,
                f"ckptmgr: a save to {self.listing.directory} is written into {self.store.directory} first, and needs room "
                "for one checkpoint there; TMPDIR names another folder",
            )

    def retain(self, policy: RetentionPolicy) -> Retained | None:
        """Apply a retention policy there; once in each run also remove old data of no checkpoint."""
        retained = super().retain(policy)
        if not self._has_swept:
            try:
                self._directory.sweep()
                self._has_swept = True
            except OSError as error:
                _LOG.warning("retention: %s", error_text(error))
        return retained

    def check_can_change(self) -> None:
        """Raise: no copy here could repeat a change of a manifest there."""
        raise UnsupportedCheckpoint(
            "pins, and metrics after the save, have no effect in an object store for a run without a directory: no copy here "
            "could repeat a change that was cut",
            path=self.listing.directory,
            hint="give the metrics to save(), or keep the run in a directory with mirror=URL",
        )

    def _of_series(self, present: Sequence[Checkpoint]) -> list[Checkpoint]:
        return [one for one in present if one.series == self.series and one.run_id]

    def _is_of_rival(self, one: Checkpoint, highest: int) -> bool:
        """Return whether another run has saved a checkpoint since this one began.

        Of two runs that commit the same number at once, that with the smaller id goes on.
        """
        last = self._last_saved
        if one.run_id == self.run_id or one.sequence <= highest:
            return False
        if last is None or one.sequence != last.sequence:
            return last is None or one.sequence > last.sequence
        return (one.run_id or "") < self.run_id


@atexit.register
def _close_at_exit() -> None:
    """Remove the folders of the runs that were not closed; background saves have ended before."""
    for writer in list(_open_writers):
        if writer.is_holder:  # not in a forked child
            with contextlib.suppress(Exception):
                writer.close()


def _highest(present: Sequence[Checkpoint]) -> int:
    return max((one.sequence for one in present), default=-1)
