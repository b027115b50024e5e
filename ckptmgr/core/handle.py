# SPDX-License-Identifier: Apache-2.0
"""Save handle: futures for "staged" and "durable", and the cost of the save."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.forks import keep_in_child, reset_in_child
from ckptmgr.core.model import Checkpoint

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class SaveStats:
    """The cost of a save in seconds and bytes; filled in while it proceeds.

    Attributes:
        blocked_s: How long the caller was held up.
        queue_s: How long the save waited for the one before it.
        stage_s: Copying the state into staging memory.
        write_s: Gathering, encrypting, digesting and writing, which overlap.
        sync_s: Waiting for the disk to confirm.
        commit_s: Manifest, rename and directory syncs; the votes of ranks; the upload of a run that
            saves to an address.
        size_bytes: Size of the file.
        staged_bytes: Bytes copied into staging memory.
        staging_bytes: All staging memory, kept for the next save.
        buffer_bytes: Buffers between memory and disk; all saves and loads of the process share
            them.
    """

    blocked_s: float = 0.0
    queue_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    size_bytes: int = 0
    staged_bytes: int = 0
    staging_bytes: int = 0
    buffer_bytes: int = 0

    def note_written(
        self, figures: Mapping[str, float], *, size_bytes: int, passed_s: float
    ) -> None:
        """Take over the manifest's `figures`; `passed_s` runs from the first byte to durable."""
        self.size_bytes = size_bytes
        self.write_s = figures.get("write_s", 0.0)
        until_synced_s = figures.get("until_synced_s", self.write_s)
        self.sync_s = until_synced_s - self.write_s
        self.commit_s = max(0.0, passed_s - until_synced_s)
        self.buffer_bytes = int(figures.get("buffer_bytes", 0))

    @property
    def peak_bytes(self) -> int:
        """Most memory that the save needed beside the state; it stays allocated."""
        return self.staging_bytes + self.buffer_bytes

    @property
    def gigabytes_per_s(self) -> float:
        """Size of the file over the time of writing and syncing it, in 10^9 bytes per second."""
        seconds = self.write_s + self.sync_s + self.commit_s
        return self.size_bytes / seconds / 1e9 if seconds > 0 else 0.0


class Outcome(Future[_T]):
    """A future that cannot be cancelled: a save outlives the task that waits for it.

    A callback cannot end the saving thread, not even by sys.exit(). In a child process that is
    forked before the future is done, it fails, because only the parent learns the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._process = os.getpid()
        reset_in_child(self)

    def set_result(self, result: _T) -> None:
        """Record the result."""
        super().set_result(result)
        keep_in_child(self)

    def set_exception(self, exception: BaseException | None) -> None:
        """Record the failure."""
        super().set_exception(exception)
        keep_in_child(self)

    def forget_parent(self) -> None:
        """Fail in a forked child, with new locks: a thread of the parent may hold the old ones."""
        process = self._process
        Outcome.__init__(self)
        self.set_exception(_saved_elsewhere(process))

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Call `fn` with the future when it is done; an exception of `fn` is logged."""
        super().add_done_callback(partial(_call, fn))


def _call(fn: Callable[[Future[_T]], object], future: Future[_T]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # concurrent.futures logs it
    except BaseException:
        if threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C or sys.exit()
        _LOG.exception("a callback of a save failed")


def _saved_elsewhere(process: int) -> RuntimeError:
    return RuntimeError(
        f"process {process} is saving this, and process {os.getpid()}, a fork of it, is not told when it is "
        "durable: wait there, or look for it with CheckpointManager.latest()"
    )


def wait_in_on_error() -> SaveFailed:
    """Return the error of an `on_error` that waits for a save."""
    return SaveFailed(
        "on_error cannot wait for saves: the one that failed is over only when it returns",
        hint="it may call save(), which then runs next, but neither wait() nor close()",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """A save in progress or done.

    Attributes:
        staged: Done when the caller may change its arrays again.
        durable: Done when the checkpoint survives a power cut; its result is the checkpoint, its
            exception the failure. `asyncio.wrap_future` awaits both; neither can be cancelled.
        stats: The cost so far.
        process: Id of the saving process. In its forked children the futures fail with
            RuntimeError.
        mirrored: With a mirror: done when the checkpoint is uploaded; its result is the address,
            its exception why it never will be. None without a mirror.
        asked_by: The saving thread, when `on_error` requested the save there; None otherwise.
    """

    staged: Future[None] = field(default_factory=Outcome)
    durable: Future[Checkpoint] = field(default_factory=Outcome)
    stats: SaveStats = field(default_factory=SaveStats)
    process: int = field(default_factory=os.getpid)
    mirrored: Future[str] | None = None
    asked_by: threading.Thread | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the save is over without a checkpoint."""
        return self.durable.done() and self.durable.exception() is not None

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once it is durable, or raise the failure of the save.

        Raises:
            TimeoutError: It is still being saved after `timeout_s` seconds.
            RuntimeError: The process that this one was forked from saves it.
            SaveFailed: Called by `on_error`, which would wait for itself.
        """
        if self.asked_by is threading.current_thread() and not self.durable.done():
            raise wait_in_on_error()
        if self.process != os.getpid() and not self.durable.done():
            # C code forked without running Python's fork hooks, so the futures did not fail.
            raise _saved_elsewhere(self.process)
        return self.durable.result(timeout_s)
