# SPDX-License-Identifier: Apache-2.0
"""Coordinator of MPI processes over point-to-point messages, since collectives have no timeout.

When a process dies, most MPI runtimes end the whole job. The next start finds in the storage
whether a save in flight was committed.
"""

from __future__ import annotations

import threading
import time

from mpi4py import MPI

from ckptmgr.parallel.coordinator import KeyValueCoordinator, poll

_PAUSES_S = 0.0001, 0.002  # the first, the longest


def mpi_coordinator(communicator: MPI.Intracomm | None = None) -> KeyValueCoordinator:
    """Return a coordinator for the processes of a communicator; all of them call it.

    Args:
        communicator: The processes; all by default. It is duplicated: messages of training are
            never taken for ours.

    Raises:
        ValueError: MPI was initialized so that a background thread cannot use it while training
            does.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ValueError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which saves in the background need; "
            "leave mpi4py.rc.threads as it is"
        )
    own = (MPI.COMM_WORLD if communicator is None else communicator).Dup()
    return KeyValueCoordinator(_Messages(own), rank=own.Get_rank(), world=own.Get_size())


class _Messages:
    """A table that sends each value to all other processes when it is put."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._received: dict[str, bytes] = {}
        self._sending: list[MPI.Request] = []  # each holds a reference to its message
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        self._received[key] = value
        message = key.encode() + b"\0" + value
        own = self._communicator.Get_rank()
        with self._lock:
            self._sending = [one for one in self._sending if not one.Test()]
            for rank in range(self._communicator.Get_size()):
                if rank != own:
                    self._sending.append(self._communicator.Isend([message, MPI.BYTE], dest=rank))

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        def look() -> bytes | None:
            self._receive()
            return self._received.pop(key, None)

        return poll(
            look,
            timeout_s=timeout_s,
            pauses_s=_PAUSES_S,
            monotonic=time.monotonic,
            pause=time.sleep,
        )

    def drop(self, key: str) -> None:
        self._received.pop(key, None)

    def _receive(self) -> None:
        status = MPI.Status()
        while (message := self._communicator.Improbe(status=status)) is not None:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([buffer, MPI.BYTE])
            key, _, value = bytes(buffer).partition(b"\0")
            self._received[key.decode(errors="replace")] = value
