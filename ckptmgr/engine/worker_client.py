# SPDX-License-Identifier: Apache-2.0
"""The parent's end of the worker process: start it, send it orders, notice when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.forks import reset_in_child
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.child_environment import child_environment
from ckptmgr.crypto.keys.ring import keys_to_document
from ckptmgr.engine.staged_state import StagedState
from ckptmgr.engine.worker_protocol import IGNORED_SIGNALS, rebuild_error, receive, send
from ckptmgr.files.save.job import SaveOptions, SaveOrder
from ckptmgr.io.descriptors import reserve_standard_descriptors
from ckptmgr.io.leases import lease_path
from ckptmgr.io.locks import lock_descriptor
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.recovery import remove_dead_temps
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    connection: socket.socket
    at_exit: weakref.finalize[..., WorkerClient]

    def end(self) -> str:
        """End the process, which is idle or dead, and return how it ended."""
        self.at_exit.detach()
        return _end(self.process, self.connection)

    def forget(self) -> None:
        """Release the process, which belongs to the parent of this one."""
        self.at_exit.detach()
        self.connection.close()
        self.process.returncode = 0  # neither wait for it nor warn about it


class WorkerClient:
    """One worker process; started with the first save, restarted after its death.

    Safe to use from several threads. A death of the worker raises SaveFailed; the earlier
    checkpoints are then intact.
    """

    def __init__(self) -> None:
        self._in_use = threading.Lock()
        self._starting = threading.Lock()
        self._running: _Running | None = None
        reset_in_child(self)

    @property
    def pid(self) -> int | None:
        """The process id of the worker, or None while there is none."""
        running = self._running
        return None if running is None else running.process.pid

    def start(self) -> None:
        """Start the worker unless it runs; its start-up overlaps with the training.

        Raises:
            SaveFailed: The system does not start another process.
        """
        with self._starting:
            # In use means that it runs; the thread that uses it handles its death.
            if not self._in_use.locked():
                self._ensure_running()

    def save_items(self, staged: StagedState, store: Store, order: SaveOrder) -> Manifest:
        """Do as `saver.save_items` in the worker; the items of the order must be in `staged`."""
        regions = staged.descriptors()
        lease = store.leases.get(order.series)
        lock = lock_descriptor(lease_path(store.directory, order.series))
        message: dict[str, Any] = {
            "directory": os.path.abspath(store.directory),  # noqa: PTH100 - no links resolved
            "name": order.name,
            "items": staged.describe(order.items),  # the worker builds them from this
            "regions": len(regions),
            "wiped_regions": staged.wiped_slabs,
            "draft": manifests.encode(order.draft).decode(),
            "metadata": None if order.metadata is None else dict(order.metadata),
            "trust": _trust_to_document(store.trust),
            "is_rank_file": order.is_rank_file,
            "lease": None if lease is None else [lease.text, lease.identity],
            **_described(order.options),
        }
        descriptors = [*regions.values(), *([] if lock is None else [lock])]
        answer = self._exchange(message, descriptors, store=store, series=order.series)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        text = str(answer["manifest"]).encode()
        return manifests.decode(text, path=store.directory / manifests.manifest_name(order.name))

    def _exchange(
        self, order: dict[str, Any], descriptors: Sequence[int], *, store: Store, series: str
    ) -> dict[str, Any]:
        with self._in_use:
            with self._starting:
                running = self._ensure_running()
            try:
                send(running.connection, order, descriptors)
                return receive(running.connection)[0]
            except (EOFError, OSError) as error:
                end = self._bury(running)
                # Otherwise its half-written file would stay as long as this run.
                with contextlib.suppress(OSError):
                    for sentence in _cleaned_up(store, series, is_rank_file=order["is_rank_file"]):
                        _LOG.warning("%s: %s", store.directory, sentence)
                raise SaveFailed(
                    f"the saving process died ({end}); the earlier checkpoints are intact",
                    hint=_hint_about(end),
                ) from error
            except BaseException:  # the next save must not get the answer to this one
                self._bury(running)
                raise

    def _ensure_running(self) -> _Running:
        running = self._running
        if running is not None and running.process.poll() is None:
            return running
        if running is not None:
            _LOG.warning("the saving process died while idle (%s)", self._bury(running))
        self._running = _start(self)
        return self._running

    def _bury(self, running: _Running) -> str:
        self._running = None
        return running.end()

    def close(self) -> None:
        """End the idle worker. The next save starts another one."""
        with self._in_use, self._starting:
            if self._running is not None:
                self._bury(self._running)

    def forget_parent(self) -> None:
        """Leave the worker to the parent, and do not keep it alive; for a forked child."""
        self._in_use, self._starting = threading.Lock(), threading.Lock()
        running, self._running = self._running, None
        if running is not None:
            running.forget()


def _cleaned_up(store: Store, series: str, *, is_rank_file: bool) -> list[str]:
    """Clean up after a worker that died in a save; return one sentence per action."""
    if is_rank_file:  # ranks on other hosts are writing, and this host cannot check them
        return remove_dead_temps(store.fs, store.directory, store.processes)
    return store.recover(series)


def _start(owner: WorkerClient) -> _Running:
    with reserve_standard_descriptors():
        ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        descriptor = str(theirs.fileno())
        # -P: the parent's import path, not a file of that name in the working directory.
        command = [
            sys.executable,
            "-P",
            "-m",
            "ckptmgr.engine.worker",
            descriptor,
            str(os.getpid()),
        ]
        try:
            with _blocked(IGNORED_SIGNALS):
                process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    command,
                    pass_fds=[theirs.fileno()],
                    env={**child_environment(), "PYTHONPATH": _import_path()},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            raise SaveFailed(
                f"the saving process could not be started: {error}",
                hint="use async_save='thread', which needs no process",
            ) from error
        undo.pop_all()
    # The worker ends with the interpreter, and with its client.
    at_exit = weakref.finalize(owner, _end, process, ours)
    return _Running(process=process, connection=ours, at_exit=at_exit)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    try:
        code = process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread; a new process keeps them blocked until it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _import_path() -> str:
    # Without the empty entry: it means the working directory, which may have changed and may hold
    # foreign modules.
    paths = []
    for path in filter(None, sys.path):
        with contextlib.suppress(FileNotFoundError):  # relative to a removed directory
            paths.append(os.path.abspath(path))  # noqa: PTH100
    return os.pathsep.join([*paths, str(Path(__file__).parents[2])])


def _described(options: SaveOptions) -> dict[str, Any]:
    return {
        "format": options.format,
        "mode": options.mode,
        "has_crc": options.has_crc,
        "compression_level": options.compression_level,
        "file_mode": options.file_mode,
        "verify_after_write": options.verify_after_write,
        "keys": None if options.key is None else keys_to_document(options.key),
    }


def _hint_about(end: str) -> str:
    if end == signal.SIGKILL.name:
        return "look for the out-of-memory killer in the system log; the next save starts a new process"
    return "its own words, if any, are on standard error; the next save starts a new process"


def _trust_to_document(trust: Trust) -> dict[str, Any]:
    """Return the trust settings as plain values; the keys are part of the save options."""
    return {
        "signing_key": None if trust.signing_key is None else trust.signing_key.raw.hex(),
        "trusted_keys": [key.raw.hex() for key in trust.trusted_keys],
        "allow_unsealed": trust.allow_unsealed,
        "allow_unencrypted": trust.allow_unencrypted,
    }
