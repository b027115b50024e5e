# SPDX-License-Identifier: Apache-2.0
"""Which step counts as saved while a save is still running.

A save in flight counts, so that the policy does not ask for it again; one that failed does not, so that it does.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ckptmgr.core.handle import SaveHandle
from ckptmgr.policy.save import LastSave


class Progress:
    """The last save as the save policy shall see it. Safe to use from several threads.

    Args:
        start: Step 0 and the time of construction, or what a run was resumed from.
    """

    def __init__(self, start: LastSave) -> None:
        self._durable = start
        self._in_flight: list[tuple[SaveHandle, LastSave]] = []
        self._path = ""
        self._lock = threading.Lock()

    def note(self, handle: SaveHandle, save: LastSave) -> None:
        """Note that a save was handed over."""
        with self._lock:
            self._settle()
            self._in_flight.append((handle, save))

    def go_back(self, step: int, at: float) -> None:
        """Note a rollback to `step`. A last save after it is given up: no step counts as saved until a save succeeds.

        Nothing may be in flight.
        """
        with self._lock:
            self._settle()
            if self._durable.step > step or self._durable.is_given_up:
                self._durable = replace(self._durable, step=step, at=at, is_given_up=True)

    @property
    def last(self) -> LastSave:
        """The newest save that succeeded or may still do so, and for how long it held up the training."""
        with self._lock:
            self._settle()
            if not self._in_flight:
                return self._durable
            handle, save = self._in_flight[-1]
            return _with_cost(save, handle)

    @property
    def latest_path(self) -> str:
        """Path of the newest save that succeeded, or an empty string."""
        with self._lock:
            self._settle()
            return self._path

    def _settle(self) -> None:
        remaining = []
        for handle, save in self._in_flight:
            if not handle.durable.done():
                remaining.append((handle, save))
            elif handle.durable.exception() is None:
                self._durable = _with_cost(save, handle)
                self._path = str(handle.durable.result().path)
        self._in_flight = remaining


def _with_cost(save: LastSave, handle: SaveHandle) -> LastSave:
    return replace(save, cost_s=handle.stats.blocked_s)
