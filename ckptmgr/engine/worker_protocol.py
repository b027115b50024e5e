# SPDX-License-Identifier: Apache-2.0
"""The protocol between a saving process and its worker: JSON messages over a socket, and errors.

A message is two 4-byte little-endian numbers (the length of the text, the number of descriptors),
the descriptors of shared memory in batches, and UTF-8 JSON. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any

from ckptmgr.core import errors
from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, SaveFailed, StoreFull

# Terminals and batch systems send these to all processes of a job; the worker ends when its parent
# does, not before.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
MAX_MESSAGE_BYTES = 1 << 30
_HEAD = struct.Struct("<II")
_DESCRIPTOR = struct.Struct("i")
# The kernel accepts 253 at a time (SCM_MAX_FD).
_BATCH = 64
_BUILTIN = {kind.__name__: kind for kind in (MemoryError, RuntimeError, TypeError, ValueError)}


def send(
    connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send one message with copies of descriptors.

    Raises:
        SaveFailed: It is too long.
        OSError: The other side is gone.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise SaveFailed(
            f"the description of the state takes {len(body)} bytes, more than {MAX_MESSAGE_BYTES}",
            hint="use async_save='thread', which needs no description",
        )
    connection.sendall(_HEAD.pack(len(body), len(descriptors)))
    for start in range(0, len(descriptors), _BATCH):
        socket.send_fds(connection, [b"F"], descriptors[start : start + _BATCH])
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors.

    Raises:
        EOFError: The other side is gone, or does not speak this protocol.
        OSError: The connection is broken.
    """
    length, count = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if length > MAX_MESSAGE_BYTES:
        raise EOFError
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            descriptors += _batch(connection, count - len(descriptors))
        return _parsed(_exactly(connection, length)), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EOFError from error
    if isinstance(message, dict):
        return message
    raise EOFError


def _batch(connection: socket.socket, most: int) -> list[int]:
    # Not socket.recv_fds: it ignores the flags in Python 3.11.
    size = socket.CMSG_LEN(min(most, _BATCH) * _DESCRIPTOR.size)
    _, ancillary, _, _ = connection.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
    found = [number for _, _, data in ancillary for (number,) in _DESCRIPTOR.iter_unpack(data)]
    if not found:
        raise EOFError
    return found


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
    if isinstance(error, CorruptCheckpoint):
        described |= {"offset": error.offset, "tensor": error.tensor}
    if isinstance(error, StoreFull):
        described |= {"missing_bytes": error.missing_bytes, "was_begun": error.was_begun}
    if isinstance(error, OSError):
        filename = None if error.filename is None else str(error.filename)
        described |= {"errno": error.errno, "strerror": error.strerror, "filename": filename}
    return described


def rebuild_error(described: dict[str, Any]) -> Exception:
    """Return the error that `describe_error` described.

    It has the same class if that is one of ours, OSError, or a common built-in class. For others,
    or if the description does not fit the class, it is a SaveFailed that names the class.
    """
    try:
        return _rebuilt(described)
    except (TypeError, ValueError, OverflowError):
        return _unnamed(described)


def _rebuilt(described: dict[str, Any]) -> Exception:
    kind = getattr(errors, str(described.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, CkptmgrError):
        return _rebuild_ours(kind, described)
    if described.get("errno") is not None:
        return OSError(described["errno"], described.get("strerror"), described.get("filename"))
    builtin = _BUILTIN.get(str(described.get("type")))
    if builtin is not None:
        return builtin(described.get("text"))
    return _unnamed(described)


def _unnamed(described: dict[str, Any]) -> SaveFailed:
    return SaveFailed(f"{described.get('type')}: {described.get('text')}")


def _rebuild_ours(kind: type[CkptmgrError], described: dict[str, Any]) -> CkptmgrError:
    places = {name: described[name] for name in ("offset", "tensor") if name in described}
    error = kind(
        described.get("message", ""),
        path=described.get("path"),
        hint=described.get("hint"),
        **places,
    )
    if isinstance(error, OSError):
        error.errno = described.get("errno")
    if isinstance(error, StoreFull):
        error.missing_bytes = int(described.get("missing_bytes", 0))
        error.was_begun = bool(described.get("was_begun", False))
    return error
