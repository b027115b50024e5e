# SPDX-License-Identifier: Apache-2.0
"""How saves run: in the caller, in a thread, or in a worker process. The promises are the same; the waiting is not.

| mode | the caller waits for |
|---|---|
| `sync` | the disk |
| `thread` | one copy of the state into staging memory |
| `process` | the same copy; encryption and digests then cost this interpreter nothing |
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ckptmgr.background import BackgroundSaver
from ckptmgr.config import CheckpointConfig
from ckptmgr.formats.tensor import Item
from ckptmgr.fsio import OsFileSystem
from ckptmgr.handle import SaveHandle, SaveStats
from ckptmgr.manifest import FileEntry, Manifest
from ckptmgr.memory_config import MemoryConfig
from ckptmgr.model import Checkpoint
from ckptmgr.observe import EVERYBODY, SaveWatch
from ckptmgr.save_failure import BackPressure, OnError
from ckptmgr.saver import Publish, SaveOptions, save_items
from ckptmgr.staging import StagingPool
from ckptmgr.staging_state import StagedState
from ckptmgr.store import Store
from ckptmgr.worker_client import WorkerClient

_LOG = logging.getLogger(__name__)

Mode = Literal["sync", "thread", "process"]
Save = Callable[[Sequence[Item], Publish], Checkpoint]


def mode_of(async_save: bool | str) -> Mode:
    """Return the mode that MindSpore's `async_save` asks for: False, True or "thread", "process"."""
    if async_save is False:
        return "sync"
    return "process" if async_save == "process" else "thread"


def engine_for(config: CheckpointConfig) -> SaveEngine:
    """Return the engine that a configuration asks for.

    With a key nothing is spilled: the files would hold the plaintext that the key is to protect.
    """
    memory = config.memory
    if config.enc_key is not None and memory is not None and memory.spill_directory is not None:
        _LOG.warning(
            "staging does not spill to %s: the state is saved encrypted", memory.spill_directory
        )
        memory = replace(memory, spill_directory=None)
    return SaveEngine(
        mode_of(config.async_save),
        memory=memory,
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
        self._worker = WorkerClient()
        self._free_pool: Callable[[], object] = _nothing
        _engines.add(self)

    def run(
        self, store: Store, items: Sequence[Item], save: Save, *, watch: SaveWatch | None = None
    ) -> SaveHandle | None:
        """Save `items`; return the handle, or None when the save was skipped under back-pressure.

        Args:
            store: Where to; a worker process can only reach the real disk.
            items: What to save. They may change as soon as `handle.staged` is done, which it is on return.
            save: Saves items with the function it is given and returns the checkpoint; runs in the background.
            watch: Hears how the save proceeds.

        Raises:
            BaseException: In `sync` mode the failure of this save, otherwise that of an earlier one.
        """
        watch = EVERYBODY.watch(series="", step=None, why="manual") if watch is None else watch
        if self.mode == "sync":
            return self._run_now(items, save, watch)
        if self.mode == "process" and not isinstance(store.fs, OsFileSystem):
            raise ValueError(
                "async_save='process' needs the real disk; use 'thread' with another file system"
            )
        handle = self._background.submit(
            lambda: self._stage(items),
            lambda staged, stats: self._finish(staged, save, stats, watch=watch),
        )
        watch.follow(handle)
        return handle

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._background.is_busy

    @staticmethod
    def _run_now(items: Sequence[Item], save: Save, watch: SaveWatch) -> SaveHandle:
        started = time.perf_counter()
        handle = SaveHandle()
        stats = handle.stats

        def note_blocked(path: Path) -> None:
            stats.blocked_s = time.perf_counter() - started
            watch.durable(path, stats)

        checkpoint = save(items, _measured(save_items, stats, note_blocked))
        stats.blocked_s = time.perf_counter() - started
        handle.staged.set_result(None)
        handle.durable.set_result(checkpoint)
        return handle

    def _stage(self, items: Sequence[Item]) -> StagedState:
        if self.mode == "process":
            self._worker.start()
        return self._staging_pool().stage(items)

    def _finish(
        self, staged: StagedState, save: Save, stats: SaveStats, *, watch: SaveWatch
    ) -> Checkpoint:
        publish: Publish = save_items
        if self.mode == "process":
            publish = self._worker.publisher(staged)
        stats.staging_bytes = self._staging_pool().ledger.host_bytes
        measured = _measured(publish, stats, lambda path: watch.durable(path, stats))
        return save(staged.items, measured)

    def _staging_pool(self) -> StagingPool:
        if self._pool is None:
            self._pool = StagingPool(self._memory, is_shared=self.mode == "process")
            # Memory that a worker maps has descriptors, which only close() gives back.
            self._free_pool = weakref.finalize(self, self._pool.close)
        return self._pool

    def check(self) -> None:
        """Raise the failure of an earlier background save, once."""
        self._background.check()

    def wait(self) -> None:
        """Wait for what is in flight; then raise a failure, if any."""
        self._background.wait()

    def wait_until_idle(self) -> None:
        """Wait for what is in flight; a failure stays to be raised by the next call."""
        self._background.wait_until_idle()

    def close(self) -> None:
        """Wait, then free the staging memory and end the worker; saving again starts anew.

        Raises:
            BaseException: The failure of a background save that nobody has fetched.
        """
        try:
            self._background.wait()
        finally:
            # After Ctrl-C the save goes on, and the end of the program waits for it.
            if not self._background.is_busy:
                self._free()

    def _free(self) -> None:
        self._worker.close()
        free, self._free_pool, self._pool = self._free_pool, _nothing, None
        free()

    def forget_parent(self) -> None:
        """Leave the staging memory to the parent, which may be saving from it; for a forked child."""
        if isinstance(self._free_pool, weakref.finalize):
            self._free_pool.detach()
        self._free_pool, self._pool = _nothing, None


def _nothing() -> None:
    pass


_engines: weakref.WeakSet[SaveEngine] = weakref.WeakSet()


def _forget_parent() -> None:
    for engine in list(_engines):
        engine.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


def _measured(publish: Publish, stats: SaveStats, done: Callable[[Path], None]) -> Publish:
    """Return `publish`, noting what it costs, and calling `done` with the path of the file that is now durable."""

    def measured(
        store: Store,
        name: str,
        items: Sequence[Item],
        *,
        options: SaveOptions,
        series: str,
        describe: Callable[[FileEntry, Mapping[str, float]], Manifest],
        metadata: Mapping[str, str] | None = None,
    ) -> Manifest:
        def describe_cost(entry: FileEntry, figures: Mapping[str, float]) -> Manifest:
            return describe(entry, {**_known_early(stats), **figures})

        started = time.perf_counter()
        manifest = publish(
            store,
            name,
            items,
            options=options,
            series=series,
            describe=describe_cost,
            metadata=metadata,
        )
        stats.note_written(
            manifest.stats,
            size_bytes=manifest.file.digest.size_bytes,
            passed_s=time.perf_counter() - started,
        )
        done(store.directory / name)
        return manifest

    return measured


def _known_early(stats: SaveStats) -> dict[str, float]:
    """Return what a manifest can say about a save in the background: the figures from before the writing."""
    if stats.staged_bytes == 0:
        return {}
    return {
        "blocked_s": stats.blocked_s,
        "queue_s": stats.queue_s,
        "stage_s": stats.stage_s,
        "staged_bytes": stats.staged_bytes,
        "staging_bytes": stats.staging_bytes,
    }
