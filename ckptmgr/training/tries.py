# SPDX-License-Identifier: Apache-2.0
"""`Tries`: starts from one checkpoint that ended before they saved, and the step each of them reached.

A crash loop looks like progress to a scheduler. A try begins with the first step that ends after a
resumption, and is taken back by a save, by a clean end of the manager, and by a stop that a signal
or Ctrl-C asked for. What stays are processes that ended otherwise: at the same step each time where
the program or the data fails, at different ones where the machine goes away.

They are in `.<series>.starts`, a small JSON file that tells and decides nothing: it is not synced, and a
damaged one counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.training.companions import Companion

if TYPE_CHECKING:
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.files.save.job import SaveFacts
    from ckptmgr.store.store import Store

_MOST_TRIES = 100
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit codes, as a shell gives them
_SHARE = 0.01  # of the time that writing the note may take


def tries_from(store: Store, series: str, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the steps that earlier tries from a checkpoint reached, in their order."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        noted = json.loads(store.read_note(_name(series)) or b"{}")
        if noted["checkpoint"] == [checkpoint.name, checkpoint.sequence]:
            steps = noted["tries"]
            return tuple(one for one in steps[-_MOST_TRIES:] if type(one) is int)
    return ()


def said_of(tries: Sequence[int], checkpoint: Checkpoint) -> str | None:
    """Return what several tries show; None for fewer than two."""
    if len(tries) < 2:
        return None
    steps = ", ".join(map(str, tries[-8:]))
    if len(set(tries)) == 1:
        return (
            f"{len(tries)} tries from {checkpoint.name} ended at step {tries[0]} before they saved: the program or the data"
            " fails there. To begin further back: Resume(at=STEP)"
        )
    return (
        f"{len(tries)} tries from {checkpoint.name} ended before they saved, at the steps {steps}: the machine may go away."
        " Save more often"
    )


class Tries(Companion):
    """Notes how far this try has come, until it is taken back."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._earlier: Sequence[int] = ()
        self._write: Callable[[Sequence[int]], None] | None = None
        self._handle: SaveHandle | None = None
        self._is_noted = False
        self._step = 0
        self._next_at = 0.0

    def begin(self, store: Store, series: str, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Begin with a resumption; return the steps that earlier tries reached."""
        earlier = self._earlier = tries_from(store, series, checkpoint)
        identity = [checkpoint.name, checkpoint.sequence]

        def write(tries: Sequence[int]) -> None:
            note = json.dumps({"checkpoint": identity, "tries": list(tries)}).encode()
            with contextlib.suppress(OSError, CkptmgrError):
                store.write_note(store.directory / _name(series), note, series=series)

        self._write, self._handle, self._is_noted, self._next_at = write, None, False, 0.0
        return earlier

    def step_ended(self, step: int) -> None:
        """Note the step that this try has reached, as often as that costs little."""
        if self._write is None:
            return
        handle = self._handle
        if handle is not None and handle.durable.done() and handle.durable.exception() is None:
            self._write = None  # the next resumption is from the new checkpoint
            return
        now, self._step = self._monotonic(), step
        if now >= self._next_at:
            self._note(step)
            done = self._monotonic()
            self._next_at = done + (done - now) / _SHARE

    def _note(self, step: int) -> None:
        if self._write is not None:
            self._write([*self._earlier, step][-_MOST_TRIES:])
            self._is_noted = True

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """Take a save, which takes the try back once it is durable."""
        del facts
        self._handle = handle

    def failed(self, error: BaseException) -> None:
        """Leave the try noted, unless it was asked to stop."""
        asked = isinstance(error, KeyboardInterrupt) or (
            isinstance(error, SystemExit) and error.code in (None, 0, *_STOPPED)
        )
        if not asked:
            if self._is_noted:  # the last steps may not be
                self._note(self._step)
            self._write = None

    def closing(self) -> None:
        """Take the try back: the program ended as it wanted to."""
        if self._write is not None and self._is_noted:
            self._write(self._earlier)
        self._write = None


def _name(series: str) -> str:
    return f".{series}.starts"
