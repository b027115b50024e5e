# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that the kernel gives to no other program meanwhile.

    A server that shares ports (SO_REUSEPORT), such as those of gRPC, can listen at it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """Return a port of 127.0.0.1 that no program uses now, for a server that shares none."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
