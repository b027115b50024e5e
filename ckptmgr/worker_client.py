# SPDX-License-Identifier: Apache-2.0
"""The parent's end of the worker process: start it, give it orders, notice when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmgr import manifest as manifests
from ckptmgr.digest import FileDigest
from ckptmgr.errors import SaveFailed
from ckptmgr.formats.tensor import Item
from ckptmgr.manifest import FileEntry, Manifest
from ckptmgr.saver import Publish, SaveOptions
from ckptmgr.staging_state import StagedState
from ckptmgr.store import Store
from ckptmgr.worker_protocol import rebuild_error, receive, send

_STOP_TIMEOUT_S = 60.0
_NOTHING = FileDigest(size_bytes=0, ranges=())


class WorkerClient:
    """One worker process; started with the first save, restarted after its death.

    What it raises instead of `save_items`: SaveFailed when the worker died; the earlier checkpoints are then intact.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._known: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The process id of the worker, or None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the worker unless it runs; its start-up overlaps with the training."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            # The parent's import path, because the worker is no fork of it; nothing secret travels in the environment.
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            }
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "ckptmgr.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._connection = ours

    def publisher(self, staged: StagedState) -> Publish:
        """Return a function like `save_items` that saves in the worker; the items must be those of `staged`."""

        def publish(
            store: Store,
            name: str,
            items: Sequence[Item],
            *,
            options: SaveOptions,
            series: str,
            describe: Callable[[FileEntry, Mapping[str, float]], Manifest],
            metadata: Mapping[str, str] | None = None,
        ) -> Manifest:
            del (
                items,
                series,
            )  # the worker builds them from the description of the staged state, and the draft
            return self._publish(
                store.directory, name, staged, options=options, describe=describe, metadata=metadata
            )

        return publish

    def _publish(
        self,
        directory: Path,
        name: str,
        staged: StagedState,
        *,
        options: SaveOptions,
        describe: Callable[[FileEntry, Mapping[str, float]], Manifest],
        metadata: Mapping[str, str] | None,
    ) -> Manifest:
        self.start()
        entry = FileEntry(name=name, digest=_NOTHING, format=options.format)
        regions = staged.descriptors()
        new = [region for region in regions if region not in self._known]
        order: dict[str, Any] = {
            "directory": str(directory),
            "name": name,
            "items": staged.describe(),
            "regions": list(regions),
            "new_regions": new,
            "draft": manifests.encode(describe(entry, {})).decode(),
            "metadata": None if metadata is None else dict(metadata),
            "format": options.format,
            "mode": options.mode,
            "has_crc": options.has_crc,
            "file_mode": options.file_mode,
            "key": None if options.key is None else options.key.raw.hex(),
        }
        answer = self._exchange(order, [regions[region] for region in new])
        self._known = set(regions)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        text = str(answer["manifest"]).encode()
        return manifests.decode(text, path=directory / manifests.manifest_name(name))

    def _exchange(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        connection = self._connection
        try:
            if connection is None:
                raise EOFError
            send(connection, order, descriptors)
            return receive(connection)[0]
        except (EOFError, OSError) as error:
            raise SaveFailed(
                f"the saving process died ({self._bury()}); the earlier checkpoints are intact",
                hint="look for the out-of-memory killer in the system log; the next save starts a new process",
            ) from error

    def _bury(self) -> str:
        """Take leave of a dead worker and return what is known about its end."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        self._known = set()
        if connection is not None:
            connection.close()
        if process is None:
            return "it was not running"
        code = process.wait(_STOP_TIMEOUT_S)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the worker; it has nothing to do when this is called."""
        if self._process is not None:
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
            self._bury()
