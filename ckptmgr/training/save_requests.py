# SPDX-License-Identifier: Apache-2.0
"""`SaveRequests`: requests to save now and to go on, by a note beside the run, or by a signal.

The note is `.<series>.save_now`, an empty file that anything may create, such as `touch`. It is
looked for about once a second, and removed once a save that answers it is durable. One that belongs
to neither this user, the owner of the directory nor root counts for nothing.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.model import Checkpoint
from ckptmgr.io.filesystem import FileStatus, FileSystem, unlink_if_present
from ckptmgr.io.stop_signals import StopWatch

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 1.0


class SaveRequests:
    """Whether a save of the next step is asked for.

    Args:
        fs: The disk of the run.
        note: Path of the note; None where the run has no directory, or another rank looks for it.
        name: Name of the signal; None for none.
        monotonic: Seconds on any clock.
    """

    def __init__(
        self,
        fs: FileSystem,
        note: Path | None,
        name: str | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fs, self._note, self._monotonic = fs, note, monotonic
        self._number = None if name is None else signal.Signals[name]
        self._watch: StopWatch | None = None
        self._next_at = 0.0
        self._is_there = self._has_warned = False
        self._handle: SaveHandle | None = None
        self.watch()

    def watch(self) -> None:
        """Watch for the signal, if there is one to watch for; only the main thread can begin."""
        if self._number is not None and self._watch is None:
            self._watch = StopWatch(self._monotonic, (self._number,))
        if self._watch is not None:
            self._watch.install()

    def are_there(self) -> bool:
        """Return whether there is a request that no save answers yet."""
        self.watch()
        self._look()
        return self._is_there or (self._watch is not None and self._watch.number is not None)

    def _look(self) -> None:
        now = self._monotonic()
        is_answered = self._handle is not None and not self._handle.durable.done()
        if self._note is None or self._is_there or is_answered or now < self._next_at:
            return
        self._next_at = now + _INTERVAL_S
        with suppress(OSError, CkptmgrError):
            found = self._fs.status(self._note)
            self._is_there = (
                found is not None and found.is_file and self._may_ask(found, self._note)
            )

    def _may_ask(self, note: FileStatus, path: Path) -> bool:
        directory = self._fs.status(path.parent)
        owners = (None, 0, os.geteuid(), None if directory is None else directory.owner)
        if note.owner not in owners and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s belongs to uid %s, neither the user of this run nor the owner of its directory: its request is ignored",
                path,
                note.owner,
            )
        return note.owner in owners

    def saved(self, handle: SaveHandle) -> None:
        """Take a save, which answers what is there."""
        if self._watch is not None:
            self._watch.forget()
        if self._is_there:
            self._is_there, self._handle = False, handle
            handle.durable.add_done_callback(self._answered)

    def _answered(self, durable: Future[Checkpoint]) -> None:
        """Remove the note once the save is durable; after one that failed it asks again."""
        if not durable.cancelled() and durable.exception() is None and self._note is not None:
            with suppress(OSError, CkptmgrError):
                unlink_if_present(self._fs, self._note)

    def close(self) -> None:
        """Put the earlier handler of the signal back."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
