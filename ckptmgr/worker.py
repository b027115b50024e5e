# SPDX-License-Identifier: Apache-2.0
"""The worker process: saves what its parent staged in shared memory. Run as `python -m ckptmgr.worker FD`.

It is started fresh (never forked from a process with threads and devices), keeps its buffers warm between saves, and ends when
its parent does: the socket reports that even if the parent was killed. A half-written save then stays under its temporary
name and is reaped by the next run.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmgr import manifest as manifests
from ckptmgr.crypto.key import Key
from ckptmgr.manifest import FileEntry, Manifest
from ckptmgr.saver import SaveOptions, save_items
from ckptmgr.staging_items import items_from
from ckptmgr.store import Store
from ckptmgr.worker_protocol import describe_error, receive, send


class Worker:
    """Serves one parent over one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], list[int]]] = queue.SimpleQueue()
        self._regions: dict[int, memoryview] = {}

    def serve(self) -> None:
        """Save until the parent is gone."""
        threading.Thread(target=self._listen, name="ckptmgr-listen", daemon=True).start()
        while True:
            order, descriptors = self._orders.get()
            try:
                self._map(order, descriptors)
                manifest = _save(order, [self._regions[region] for region in order["regions"]])
                answer: dict[str, Any] = {"manifest": manifests.encode(manifest).decode()}
            except Exception as error:  # the parent raises it where the caller sees it
                answer = {"error": describe_error(error)}
            send(self._connection, answer)

    def _listen(self) -> None:
        try:
            while True:
                self._orders.put(receive(self._connection))
        except (EOFError, OSError):
            # The parent is gone. Not sys.exit: the main thread may be in the middle of a long write.
            os._exit(0)

    def _map(self, order: dict[str, Any], descriptors: list[int]) -> None:
        for region in set(self._regions) - set(order["regions"]):
            del self._regions[region]
        for region, descriptor in zip(order["new_regions"], descriptors, strict=True):
            try:
                self._regions[region] = memoryview(
                    mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
                )
            finally:
                os.close(descriptor)


def _save(order: dict[str, Any], regions: list[memoryview]) -> Manifest:
    key = None if order["key"] is None else Key(bytes.fromhex(order["key"]))
    directory = Path(order["directory"])
    draft = manifests.decode(
        order["draft"].encode(), path=directory / manifests.manifest_name(order["name"])
    )

    def describe(entry: FileEntry, stats: Mapping[str, float]) -> Manifest:
        return draft.completed(entry, stats)

    return save_items(
        Store(directory, key=key),
        order["name"],
        items_from(order["items"], regions),
        options=SaveOptions(
            format=order["format"],
            key=key,
            mode=order["mode"],
            has_crc=order["has_crc"],
            file_mode=order["file_mode"],
        ),
        series=draft.series,
        describe=describe,
        metadata=order["metadata"],
    )


def main() -> None:
    """Serve the parent at the other end of the inherited descriptor."""
    Worker(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
