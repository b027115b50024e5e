# SPDX-License-Identifier: Apache-2.0
"""Run saves in the caller, in a thread, or in a worker process, with the same guarantees.

| mode | the caller waits for |
|---|---|
| `sync` | the disk |
| `thread` | one copy of the state into staging memory |
| `process` | the same copy; encryption and digests then cost this interpreter no time |

With zero stall the caller does not wait for the copy either, until it changes the state: see
`zero_stall`. In functions that `atexit` calls every save is of the mode `sync`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.failure import BackPressure, ErrorPolicy, OnError, parse_on_error
from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import StoreFull
from ckptmgr.core.forks import reset_in_child
from ckptmgr.core.handle import SaveHandle, SaveStats
from ckptmgr.core.model import Checkpoint
from ckptmgr.engine.background import BackgroundSaver, deliver, is_exiting, storable
from ckptmgr.engine.budget import Ledger, check_wipe, has_no_room, without_spilling
from ckptmgr.files.save.job import SaveJob, SaveOrder
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.tensor import Item
from ckptmgr.observe.observers import REGISTERED, SaveWatch
from ckptmgr.state.devices import accelerators, synchronize
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # imported only by the modes that need them
    from ckptmgr.engine.staged_state import StagedState
    from ckptmgr.engine.staging import StagingPool
    from ckptmgr.engine.worker_client import WorkerClient
    from ckptmgr.engine.zero_stall import DeferredState, Updates

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

Mode = Literal["sync", "thread", "process"]


class Write(Protocol):
    """Writes and publishes a file durably: `save_items`, here or in the worker process."""

    def __call__(self, store: Store, order: SaveOrder, /) -> Manifest:
        """Return the manifest once the file is durable."""
        ...


class Begun(Protocol):
    """A save that a writer has begun; committed or abandoned once."""

    @property
    def order(self) -> SaveOrder:
        """The file to write."""
        ...

    def commit(self, manifest: Manifest, /) -> Checkpoint:
        """Make a checkpoint of the written file; return it once it is durable."""
        ...

    def make_room(self, error: StoreFull, /) -> bool:
        """Remove what retention drops anyway; return whether the write may be tried again."""
        ...

    def abandon(self, error: Exception, /) -> None:
        """Record that the file could not be written; may raise the errors of other ranks."""
        ...

    def end(self) -> None:
        """Apply the retention policy of the job; called once the checkpoint is durable."""
        ...


class Writer(Protocol):
    """Names, orders and commits the saves of a series; many ranks do it together."""

    @property
    def store(self) -> Store:
        """The directory."""
        ...

    def begin(self, job: SaveJob, /) -> Begun:
        """Choose the name and the place of a save; raises the error of the job, if it has one."""
        ...


def save_mode_of(async_save: bool | str) -> Mode:
    """Return the mode for MindSpore's `async_save`: False, True or "thread", "process"."""
    if async_save is False:
        return "sync"
    return "process" if async_save == "process" else "thread"


def engine_for(
    config: CheckpointConfig, *, has_before_update: bool = False, has_peers: bool = False
) -> SaveEngine:
    """Return the engine for a configuration.

    With a key nothing is spilled: spill files would hold the plaintext that the key protects. A
    warning says so, with the size of the largest state that a background save can then stage.

    `has_before_update`: the caller calls `before_update()` before it changes its state. `has_peers`
    as for `SaveEngine`.

    Raises:
        ValueError: The configuration asks for zero stall, and the caller does not support it;
            background saves could stage nothing, as only the disk is allowed, and there is a key;
            or a failed one would be tried again from buffers that are wiped already.
    """
    if config.zero_stall and not has_before_update:
        raise ValueError(
            "zero_stall needs a loop that calls before_update(): use CheckpointManager, not a callback"
        )
    memory = config.memory
    if memory is not None and config.async_save:
        check_wipe(memory, config.on_error)
    if config.keys is not None and memory is not None and memory.spill_directory is not None:
        memory = without_spilling(memory, has_staging=bool(config.async_save))
    return SaveEngine(
        save_mode_of(config.async_save),
        memory=memory,
        back_pressure=config.back_pressure,
        on_error=config.on_error,
        has_zero_stall=config.zero_stall,
        has_peers=has_peers,
    )


class SaveEngine:
    """Runs saves, one at a time.

    Args:
        mode: Where they run.
        memory: Budget and kind of the staging memory.
        back_pressure: The treatment of a save while another one runs: `wait`, `skip` or `coalesce`.
        on_error: The treatment of a failure: `raise`, `warn`, `retry(n)` or a function.
        has_zero_stall: Whether states are copied in the background, too; not in `sync` mode.
        has_peers: Whether other ranks save at the same time and wait for this one. A job whose
            state could not be copied is then run with that error.

    Attributes:
        ledger: The account of its budget, for other users of that budget.
        make_room: Gives some of the budget back when a state does not fit; returns whether it did.
            Set before the first save.
    """

    def __init__(
        self,
        mode: Mode = "sync",
        *,
        memory: MemoryConfig | None = None,
        back_pressure: BackPressure = "wait",
        on_error: OnError = "raise",
        has_zero_stall: bool = False,
        has_peers: bool = False,
    ) -> None:
        self.mode: Mode = mode
        self._has_peers = has_peers
        self.memory = memory
        self.ledger = Ledger(MemoryConfig() if memory is None else memory)
        self.make_room: Callable[[], bool] = has_no_room
        self._background = BackgroundSaver(back_pressure=back_pressure, on_error=on_error)
        self._policy = parse_on_error(on_error)
        self._delivering: int | None = None  # the thread that passes a failure to `on_error`
        self._pool: StagingPool | None = None
        self._worker: WorkerClient | None = _worker_client() if mode == "process" else None
        # Reentrant: the handler of a signal may save, too.
        self._saving_now = threading.RLock()
        self._saves_now = 0
        self._free_pool: Callable[[], object] = _nothing
        self._updates = _updates() if has_zero_stall else None
        reset_in_child(self)

    def run(
        self,
        job: SaveJob,
        writer: Writer,
        *,
        watch: SaveWatch | None = None,
        state: object = None,
    ) -> SaveHandle | None:
        """Run a save; return the handle, or None when the save was skipped under back-pressure.

        The arrays of the job may change as soon as `handle.staged` is done, which it is on return
        without zero stall. `state` is the state of the items: its torch modules show which buffers
        change in the forward pass.

        Raises:
            BaseException: In `sync` mode the failure of this save, unless `on_error` takes it;
                otherwise that of an earlier one.
        """
        watch = REGISTERED.watch(series="", step=None, why="manual") if watch is None else watch
        if self._must_run_now():
            return self._run_by_policy(job, writer, watch)
        if job.error is not None:
            return self._refuse(job, job.error, writer, watch)
        if self.mode == "process" and not writer.store.is_on_real_disk:
            raise ValueError(
                "async_save='process' needs the real disk; use 'thread' with another file system"
            )
        failures: list[Exception] = []
        try:
            handle = self._submit(job, writer, watch, state=state, failures=failures)
        except Exception:
            if failures and self._has_peers:
                return self._refuse(job, failures.pop(), writer, watch)
            if not failures or self._policy.action == "raise":
                raise
            return self._failed(failures.pop(), self._policy, watch)
        finally:
            failures.clear()  # their tracebacks hold this frame: a cycle would keep the state
        watch.follow(handle)
        return handle

    def _refuse(
        self, job: SaveJob, error: Exception, writer: Writer, watch: SaveWatch
    ) -> SaveHandle | None:
        """Run a save whose state could not be copied: the other ranks wait for this one."""
        # As text, and without its frames: they would keep the state.
        _LOG.error("nothing to save:\n%s", "".join(traceback.format_exception(error)))
        refused = replace(job, items=(), error=error.with_traceback(None))
        handle = self._background.submit(
            _NoState, lambda _, stats: _carry_out(refused, writer, save_items, stats, watch)
        )
        watch.follow(handle)
        return handle

    def _submit(
        self,
        job: SaveJob,
        writer: Writer,
        watch: SaveWatch,
        *,
        state: object,
        failures: list[Exception],
    ) -> SaveHandle | None:
        """Submit a save; add a failure to copy the state to `failures`, no other one."""
        items, updates = job.items, self._updates
        job = replace(job, items=())  # a closure that held the arrays would keep them
        if updates is None:
            return self._background.submit(
                lambda: _noting(failures, lambda: self._stage(items)),
                lambda staged, stats: self._finish(staged, job, writer, stats, watch),
            )
        from ckptmgr.engine.zero_stall import changing_in_forward

        return self._background.submit(
            lambda: _noting(
                failures, lambda: self._defer(items, updates, changing_in_forward(state))
            ),
            lambda deferred, stats: self._finish_deferred(deferred, job, writer, stats, watch),
            handle_of=lambda deferred: deferred.handle,
        )

    def _must_run_now(self) -> bool:
        """Return whether a save runs in the caller.

        In a function that `atexit` calls it does: the staging memory may be freed already, and no
        thread can be started.

        Raises:
            BaseException: The failure of an earlier save.
        """
        if self.mode != "sync" and is_exiting():
            self._background.wait()
            return True
        return self.mode == "sync"

    def before_update(self) -> None:
        """Return when the state may be changed; at once without zero stall."""
        if self._updates is not None:
            self._updates.wait()

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._saves_now > 0 or self._background.is_busy

    def _run_by_policy(self, job: SaveJob, writer: Writer, watch: SaveWatch) -> SaveHandle:
        """Run a save in the caller, and treat its failure as `on_error` says.

        A save that `on_error` itself asks for raises its failure there.
        """
        is_own = self._delivering == threading.get_ident()
        policy = ErrorPolicy() if is_own else self._policy
        for _ in range(policy.attempts - 1):
            with contextlib.suppress(Exception):  # the last attempt raises that of its own
                return self.run_now(job, writer, watch)
        try:
            return self.run_now(job, writer, watch)
        except Exception as error:
            if policy.action == "raise":
                raise
            failure = error
        try:
            return self._failed(failure, policy, watch)
        finally:
            del failure  # its traceback holds this frame: a cycle would keep the state

    def _failed(self, failure: Exception, policy: ErrorPolicy, watch: SaveWatch) -> SaveHandle:
        """Pass the failure of a save in the caller to `on_error`; return the handle of the save."""
        handle = SaveHandle()
        handle.staged.set_result(None)
        handle.durable.set_exception(storable(failure))
        watch.follow(handle)
        self._delivering = threading.get_ident()
        try:
            deliver(policy, failure)
        finally:
            self._delivering = None
        return handle

    def run_now(self, job: SaveJob, writer: Writer, watch: SaveWatch) -> SaveHandle:
        """Run a save in the caller in every mode; return once it is durable. Raises its failure."""
        started = time.perf_counter()
        handle = SaveHandle()
        stats = handle.stats
        watch.costs(stats)
        synchronize(job.items, accelerators())
        with self._saving_now:  # another thread would choose the same name
            stats.queue_s = time.perf_counter() - started
            try:
                self._saves_now += 1
                checkpoint = _carry_out(
                    job, writer, save_items, stats, watch, blocked_since=started
                )
            finally:
                self._saves_now -= 1
        stats.blocked_s = time.perf_counter() - started
        handle.staged.set_result(None)
        handle.durable.set_result(checkpoint)
        return handle

    def _stage(self, items: Sequence[Item]) -> StagedState:
        if self._worker is not None:
            self._worker.start()
        return self._staging_pool().stage(items)

    def _defer(
        self, items: Sequence[Item], updates: Updates, changing: Container[int]
    ) -> DeferredState:
        from ckptmgr.engine.zero_stall import defer

        if self._worker is not None:
            self._worker.start()
        copies_all = self._worker is not None
        deferred = defer(items, self._staging_pool(), changing=changing, copies_all=copies_all)
        try:
            updates.add(deferred)
            if deferred.has_more and not self._background.begins_at_once:
                threading.Thread(target=deferred.copy, name="ckptmgr-stage", daemon=False).start()
        except BaseException:
            deferred.release()
            raise
        return deferred

    def _finish(
        self, staged: StagedState, job: SaveJob, writer: Writer, stats: SaveStats, watch: SaveWatch
    ) -> Checkpoint:
        return self._save_staged(staged, replace(job, items=staged.items), writer, stats, watch)

    def _finish_deferred(
        self,
        deferred: DeferredState,
        job: SaveJob,
        writer: Writer,
        stats: SaveStats,
        watch: SaveWatch,
    ) -> Checkpoint:
        try:
            deferred.wait()
        except Exception as error:
            if not self._has_peers:
                raise
            return _carry_out(replace(job, error=error), writer, save_items, stats, watch)
        job = replace(job, items=deferred.items)
        return self._save_staged(deferred.staged, job, writer, stats, watch)

    def _save_staged(
        self, staged: StagedState, job: SaveJob, writer: Writer, stats: SaveStats, watch: SaveWatch
    ) -> Checkpoint:
        stats.staging_bytes = self._staging_pool().host_bytes
        watch.costs(stats)
        write: Write = save_items
        if staged.wiped_slabs:
            write = partial(save_items, on_used=staged.discard)
        if self._worker is not None:
            write = partial(self._worker.save_items, staged)
        can_repeat = not staged.wiped_slabs
        return _carry_out(job, writer, write, stats, watch, can_repeat=can_repeat)

    def _staging_pool(self) -> StagingPool:
        if self._pool is None:
            from ckptmgr.engine.staging import StagingPool

            self._pool = StagingPool(
                self.memory,
                is_shared=self.mode == "process",
                ledger=self.ledger,
                make_room=self.make_room,
            )
            # Memory that a worker maps has descriptors, which only close() gives back.
            self._free_pool = weakref.finalize(self, self._pool.close)
        return self._pool

    def check(self) -> None:
        """Raise the failure of an earlier background save, once."""
        self._background.check()

    def wait(self) -> None:
        """Wait for saves in flight, also in other threads; then raise a failure, if any."""
        with self._saving_now:
            pass
        self._background.wait()

    def wait_until_idle(self) -> None:
        """Wait for saves in flight; a failure stays to be raised by the next call."""
        with self._saving_now:
            pass
        self._background.wait_until_idle()

    def close(self) -> None:
        """Wait, then free the staging memory and end the worker; the next save recreates both.

        Raises:
            BaseException: The failure of a background save that the program has not fetched.
        """
        try:
            self.wait()
        finally:
            # After an interrupt the save goes on, and the end of the program waits for it.
            if not self.is_busy:
                self._free()
                if self._updates is not None:
                    self._updates.close()

    def _free(self) -> None:
        if self._worker is not None:
            self._worker.close()
        free, self._free_pool, self._pool = self._free_pool, _nothing, None
        free()

    def forget_parent(self) -> None:
        """Leave the staging memory to the parent, which may save from it; for a forked child."""
        self._saving_now, self._saves_now = threading.RLock(), 0
        if isinstance(self._free_pool, weakref.finalize):
            self._free_pool.detach()
        if self._pool is not None:
            self._pool.forget_parent()
        self._free_pool, self._pool = _nothing, None
        # A thread of the parent may have held its locks; only inherited copies remain on the old
        # one.
        self.ledger, self.make_room = Ledger(self.ledger.config), has_no_room
        if self._updates is not None:
            self._updates.forget_parent()


def _worker_client() -> WorkerClient:
    from ckptmgr.engine.worker_client import WorkerClient

    return WorkerClient()


def _updates() -> Updates:
    from ckptmgr.engine.zero_stall import Updates

    return Updates()


class _NoState:
    size_bytes = 0

    def release(self) -> None:
        pass


def _noting(failures: list[Exception], work: Callable[[], _T]) -> _T:
    try:
        return work()
    except Exception as error:
        failures.append(error)
        raise


def _nothing() -> None:
    pass


def _carry_out(
    job: SaveJob,
    writer: Writer,
    write: Write,
    stats: SaveStats,
    watch: SaveWatch,
    *,
    blocked_since: float | None = None,
    can_repeat: bool = True,
) -> Checkpoint:
    """Begin a save, write its file, commit it, apply the retention policy; return the checkpoint.

    `blocked_since` is the start of the caller's wait, if it waits. `can_repeat`: a write that
    failed after its start leaves the items as they were.
    """
    begun = writer.begin(job)
    order = replace(begun.order, draft=replace(begun.order.draft, stats=_known_early(stats)))
    started = time.perf_counter()
    try:
        manifest = _written(begun, partial(write, writer.store, order), can_repeat=can_repeat)
    except Exception as error:
        begun.abandon(error)
        raise
    stats.note_written(
        manifest.stats,
        size_bytes=manifest.file.digest.size_bytes,
        passed_s=time.perf_counter() - started,
    )
    committing = time.perf_counter()
    checkpoint = begun.commit(manifest)
    stats.commit_s += time.perf_counter() - committing  # an upload, or the votes of the ranks
    if blocked_since is not None:
        stats.blocked_s = time.perf_counter() - blocked_since
    watch.durable(
        checkpoint.path,
        epoch=checkpoint.epoch,
        metrics=checkpoint.metrics,
        health=checkpoint.health,
    )
    begun.end()
    return checkpoint


def _written(begun: Begun, write: Callable[[], Manifest], *, can_repeat: bool) -> Manifest:
    """Write a file, also where the disk has room only without what retention drops."""
    while True:
        try:
            return write()
        except StoreFull as error:
            if (error.was_begun and not can_repeat) or not begun.make_room(error):
                raise


def _known_early(stats: SaveStats) -> dict[str, float]:
    """Return the figures of a background save from before the writing, for its manifest."""
    if stats.staged_bytes == 0:
        return {}
    return {
        "blocked_s": stats.blocked_s,
        "queue_s": stats.queue_s,
        "stage_s": stats.stage_s,
        "staged_bytes": stats.staged_bytes,
        "staging_bytes": stats.staging_bytes,
    }
