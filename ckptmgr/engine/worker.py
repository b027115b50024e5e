# SPDX-License-Identifier: Apache-2.0
"""The worker process: saves states that its parent staged in shared memory.

Run as `python -m ckptmgr.engine.worker FD PARENT`. It is started fresh (never forked from a process
with threads and devices), keeps its buffers warm between saves, and ends with its parent: the
socket reports that even if the parent was killed. A half-written save then stays under its
temporary name and the next run removes it. That run cannot start earlier: during a save the worker
shares the lease of its parent.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.ring import Keys, keys_from_document
from ckptmgr.crypto.keys.signing import PublicKey, SigningKey
from ckptmgr.engine.worker_protocol import IGNORED_SIGNALS, describe_error, receive, send
from ckptmgr.files.save.job import SaveOptions, SaveOrder
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.tensor import Tensor
from ckptmgr.io.descriptors import reserve_standard_descriptors
from ckptmgr.io.leases import worker_text
from ckptmgr.io.locks import add_worker_text
from ckptmgr.io.threads import work_beside_training
from ckptmgr.state.items import items_from
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

# The training goes first: where both want the same core, the save gets a quarter of it. With a tenth
# (10) the training loses as many seconds, and the save takes three times as long.
NICENESS = 5

_Order = tuple[dict[str, Any], list[int]]


class Worker:
    """Serves one parent over one socket.

    `parent` is a descriptor that becomes readable when the parent dies, or None where the system
    has no such descriptor.
    """

    def __init__(self, connection: socket.socket, parent: int | None = None) -> None:
        self._connection = connection
        self._parent = parent
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unanswered = 0

    def serve(self) -> None:
        """Save until the parent is gone."""
        work_beside_training()
        threading.Thread(target=self._listen, name="ckptmgr-listen", daemon=True).start()
        while (order := self._orders.get()) is not None:
            answer = _answer(*order)
            with self._lock:
                self._unanswered -= 1
            with contextlib.suppress(OSError):  # the parent is gone; the listener notices it, too
                send(self._connection, answer)

    def _listen(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                self._take_orders()
        finally:
            self._end()

    def _take_orders(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        # A process that native code of the parent forked may hold the parent's end of the socket
        # open.
        while self._parent not in [descriptor for descriptor, _ in poll.poll()]:
            order = receive(self._connection)
            with self._lock:
                self._unanswered += 1
            self._orders.put(order)

    def _end(self) -> None:
        with self._lock:
            if self._unanswered:
                # Not sys.exit: the main thread may be in the middle of a long write.
                os._exit(1)  # pragma: no cover - coverage is measured until a normal end
        self._orders.put(None)


def _answer(order: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    count = order["regions"]
    with contextlib.ExitStack() as locks:
        for descriptor in descriptors[count:]:
            locks.callback(os.close, descriptor)
            if order["lease"] is not None:
                # If the parent dies before the save ends, the lease must name a live process.
                add_worker_text(descriptor, order["lease"][0], worker_text())
        try:
            manifest = _save(order, _mapped(descriptors[:count], wiped=order["wiped_regions"]))
            return {"manifest": manifests.encode(manifest).decode()}
        except Exception as error:  # the parent raises it to its caller
            return {"error": describe_error(error)}


def _mapped(descriptors: Sequence[int], *, wiped: int) -> list[memoryview]:
    """Map memory of the parent, for one save only: the parent may free it afterwards.

    The first `wiped` regions are mapped for writing, too.
    """
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        return [
            memoryview(
                mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if i < wiped else mmap.ACCESS_READ)
            )
            for i, fd in enumerate(descriptors)
        ]


def _save(order: dict[str, Any], regions: list[memoryview]) -> Manifest:
    key = _keys(json.dumps(order["keys"]))
    directory = Path(order["directory"])
    draft = manifests.decode(
        order["draft"].encode(), path=directory / manifests.manifest_name(order["name"])
    )

    store = Store(directory, trust=_trust(order["trust"], key))
    if order["lease"] is not None:
        text, identity = order["lease"]
        store.leases.share(draft.series, text=text, identity=tuple(identity))
    ordered = SaveOrder(
        name=order["name"],
        items=items_from(order["items"], regions),
        options=SaveOptions(
            format=order["format"],
            key=key,
            mode=order["mode"],
            has_crc=order["has_crc"],
            compression_level=order["compression_level"],
            file_mode=order["file_mode"],
            verify_after_write=order["verify_after_write"],
        ),
        series=draft.series,
        draft=draft,
        metadata=order["metadata"],
        is_rank_file=order["is_rank_file"],
    )
    return save_items(store, ordered, on_used=_wipe if order["wiped_regions"] else None)


def _wipe(tensor: Tensor) -> None:
    """Overwrite a tensor in the memory of the parent; spilled ones stay."""
    content = tensor.content()
    if not content.readonly:
        np.frombuffer(content, np.uint8).fill(0)


def _trust(document: dict[str, Any], keys: Keys | None) -> Trust:
    signing_key = document["signing_key"]
    return Trust(
        keys=keys,
        trusted_keys=tuple(PublicKey(bytes.fromhex(raw)) for raw in document["trusted_keys"]),
        signing_key=None if signing_key is None else SigningKey(bytes.fromhex(signing_key)),
        allow_unsealed=document["allow_unsealed"],
        allow_unencrypted=document["allow_unencrypted"],
    )


@cache
def _keys(document: str) -> Keys | None:
    """Return the keys of the parent; cached, because each object stretches its passphrase once."""
    return keys_from_document(json.loads(document))


def _watch(parent: int) -> int | None:
    """Return a descriptor that becomes readable when the parent dies."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(parent)
    return None


def main() -> None:
    """Serve the parent at the other end of the inherited descriptor."""
    for ignored in IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    os.nice(NICENESS)
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    with reserve_standard_descriptors():  # the parent may have no standard error
        watch = _watch(parent)
        with socket.socket(fileno=descriptor) as connection:
            if os.getppid() == parent:
                Worker(connection, watch).serve()


if __name__ == "__main__":
    main()
