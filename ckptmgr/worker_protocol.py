# SPDX-License-Identifier: Apache-2.0
"""What a saving process and its worker say to each other: JSON messages over a socket, and errors that survive the trip.

A message is a 4-byte little-endian length and UTF-8 JSON; file descriptors of shared memory travel beside it. Nothing is
pickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from ckptmgr import errors
from ckptmgr.errors import CkptmgrError, SaveFailed

MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_MAX_DESCRIPTORS = 64


def send(
    connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None
) -> None:
    """Send one message, with descriptors attached to its first bytes."""
    body = json.dumps(message).encode()
    head = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(connection, [head], descriptors)
    else:
        connection.sendall(head)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and the descriptors that came with it.

    Raises:
        EOFError: The other side is gone.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_DESCRIPTORS)
    if not head:
        raise EOFError
    head += _exactly(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise EOFError
    message: dict[str, Any] = json.loads(_exactly(connection, length))
    return message, list(descriptors)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values."""
    described: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    if isinstance(error, CkptmgrError):
        described |= {"message": error.message, "path": error.path, "hint": error.hint}
    if isinstance(error, OSError):
        described |= {"errno": error.errno, "strerror": error.strerror, "filename": error.filename}
    return described


def rebuild_error(described: dict[str, Any]) -> BaseException:
    """Return the error that `describe_error` described: the same class where it is one of ours or an OSError."""
    kind = getattr(errors, str(described.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, CkptmgrError):
        error = kind(
            described.get("message", ""), path=described.get("path"), hint=described.get("hint")
        )
        if isinstance(error, OSError):
            error.errno = described.get("errno")
        return error
    if described.get("errno") is not None:
        return OSError(described["errno"], described.get("strerror"), described.get("filename"))
    return SaveFailed(f"{described.get('type')}: {described.get('text')}")
