# SPDX-License-Identifier: Apache-2.0
"""How saves run: in the caller, in a thread, or in a worker process. The promises are the same; the waiting is not.

| mode | the caller waits for |
|---|---|
| `sync` | the disk |
| `thread` | one copy of the state into staging memory |
| `process` | the same copy; encryption and digests then cost this interpreter nothing |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from ckptmgr.background import BackgroundSaver
from ckptmgr.config import CheckpointConfig
from ckptmgr.formats.tensor import Item
from ckptmgr.fsio import OsFileSystem
from ckptmgr.handle import SaveHandle
from ckptmgr.memory_config import MemoryConfig
from ckptmgr.model import Checkpoint
from ckptmgr.save_failure import BackPressure, OnError
from ckptmgr.saver import Publish, save_items
from ckptmgr.staging import StagingPool
from ckptmgr.staging_state import StagedState
from ckptmgr.store import Store
from ckptmgr.worker_client import WorkerClient

Mode = Literal["sync", "thread", "process"]
Save = Callable[[Sequence[Item], Publish], Checkpoint]


def mode_of(async_save: bool | str) -> Mode:
    """Return the mode that MindSpore's `async_save` asks for: False, True or "thread", "process"."""
    if async_save is False:
        return "sync"
    return "process" if async_save == "process" else "thread"


def engine_for(config: CheckpointConfig) -> SaveEngine:
    """Return the engine that a configuration asks for."""
    return SaveEngine(
        mode_of(config.async_save),
        memory=config.memory,
        back_pressure=config.back_pressure,
        on_error=config.on_error,
    )


class SaveEngine:
    """Runs saves, one at a time.

    Args:
        mode: Where they run.
        memory: Budget and kind of the staging memory.
        back_pressure: What happens to a save while another one runs: `wait`, `skip` or `coalesce`.
        on_error: What happens to a failure in the background: `raise`, `warn`, `retry(n)` or a function.
    """

    def __init__(
        self,
        mode: Mode = "sync",
        *,
        memory: MemoryConfig | None = None,
        back_pressure: BackPressure = "wait",
        on_error: OnError = "raise",
    ) -> None:
        self.mode: Mode = mode
        self._memory = memory
        self._background = BackgroundSaver(back_pressure=back_pressure, on_error=on_error)
        self._pool: StagingPool | None = None
        self._worker: WorkerClient | None = None

    def run(self, store: Store, items: Sequence[Item], save: Save) -> SaveHandle | None:
        """Save `items`; return the handle, or None when the save was skipped under back-pressure.

        Args:
            store: Where to; a worker process can only reach the real disk.
            items: What to save. They may change as soon as `handle.staged` is done, which it is on return.
            save: Saves items with the function it is given and returns the checkpoint; runs in the background.

        Raises:
            BaseException: In `sync` mode the failure of this save, otherwise that of an earlier one.
        """
        if self.mode == "sync":
            return self._run_now(items, save)
        if self.mode == "process" and not isinstance(store.fs, OsFileSystem):
            raise ValueError(
                "async_save='process' needs the real disk; use 'thread' with another file system"
            )
        return self._background.submit(
            lambda: self._stage(items), lambda staged: self._finish(staged, save)
        )

    @staticmethod
    def _run_now(items: Sequence[Item], save: Save) -> SaveHandle:
        started = time.perf_counter()
        handle = SaveHandle()
        checkpoint = save(items, save_items)
        handle.stats.blocked_s = time.perf_counter() - started
        handle.stats.size_bytes = checkpoint.size_bytes
        handle.staged.set_result(None)
        handle.durable.set_result(checkpoint)
        return handle

    def _stage(self, items: Sequence[Item]) -> StagedState:
        if self._pool is None:
            self._pool = StagingPool(self._memory, is_shared=self.mode == "process")
        if self.mode == "process":
            self._started_worker()
        return self._pool.stage(items)

    def _finish(self, staged: StagedState, save: Save) -> Checkpoint:
        if self.mode == "thread":
            return save(staged.items, save_items)
        return save(staged.items, self._started_worker().publisher(staged))

    def _started_worker(self) -> WorkerClient:
        if self._worker is None:
            self._worker = WorkerClient()
        self._worker.start()
        return self._worker

    def check(self) -> None:
        """Raise the failure of an earlier background save, once."""
        self._background.check()

    def wait(self) -> None:
        """Wait for what is in flight; then raise a failure, if any."""
        self._background.wait()

    def close(self) -> None:
        """Wait, then free the staging memory and end the worker; saving again starts anew.

        Raises:
            BaseException: The failure of a background save that nobody has fetched.
        """
        try:
            self._background.wait()
        finally:
            worker, self._worker = self._worker, None
            pool, self._pool = self._pool, None
            if worker is not None:
                worker.close()
            if pool is not None:
                pool.close()
