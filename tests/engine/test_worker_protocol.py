# SPDX-License-Identifier: Apache-2.0
"""Messages and errors between a saving process and its worker."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CkptmgrError, SaveFailed, StoreFull
from ckptmgr.core import errors
from ckptmgr.engine import worker_protocol
from ckptmgr.engine.worker_protocol import describe_error, rebuild_error, receive, send
from ckptmgr.io.space_errors import not_enough_space
from tests.support.descriptors import open_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_message_of_many_megabytes_arrives(pair: Pair) -> None:
    message = {"text": "x" * (5 << 20), "lone": "\ud800"}
    sender = threading.Thread(target=send, args=(pair[0], message))
    sender.start()
    assert receive(pair[1]) == (message, [])
    sender.join()


@pytest.mark.parametrize("count", [0, 1, 64, 65, 300])
def test_descriptors_arrive_in_order_and_are_not_inherited(
    pair: Pair, tmp_path: Path, count: int
) -> None:
    before = open_descriptors()
    files = [os.open(tmp_path / str(index), os.O_CREAT | os.O_RDWR) for index in range(count)]
    sender = threading.Thread(target=send, args=(pair[0], {"n": count}, files))
    sender.start()
    message, descriptors = receive(pair[1])
    sender.join()
    assert message == {"n": count}
    same = [os.path.sameopenfile(a, b) for a, b in zip(files, descriptors, strict=True)]
    assert all(same)
    assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
    for descriptor in (*files, *descriptors):
        os.close(descriptor)
    assert open_descriptors() - before == set()


def test_two_messages_do_not_run_into_each_other(pair: Pair) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    send(pair[0], {"n": 1}, [null])
    send(pair[0], {"n": 2}, [null, null])
    os.close(null)
    for number in (1, 2):
        message, descriptors = receive(pair[1])
        assert (message, len(descriptors)) == ({"n": number}, number)
        for descriptor in descriptors:
            os.close(descriptor)


def test_every_cut_of_a_message_is_the_end_and_leaves_no_descriptor(pair: Pair) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    body = json.dumps({"n": 1}).encode()
    head = worker_protocol._HEAD.pack(len(body), 1)
    before = open_descriptors()
    for cut in range(1 + len(head) + len(body)):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(head[:cut])
                if cut > len(head):
                    socket.send_fds(ours, [b"F"], [null])
                    ours.sendall(body[: cut - len(head) - 1])
            with pytest.raises(EOFError):
                receive(theirs)
    assert open_descriptors() - before == set()
    os.close(null)


@pytest.mark.parametrize("body", [b"{", b"\xff"])
def test_what_is_no_json_is_the_end(pair: Pair, body: bytes) -> None:
    pair[0].sendall(worker_protocol._HEAD.pack(len(body), 0) + body)
    with pytest.raises(EOFError):
        receive(pair[1])


def test_message_that_claims_to_be_huge_is_not_waited_for(pair: Pair) -> None:
    pair[0].sendall(worker_protocol._HEAD.pack(worker_protocol.MAX_MESSAGE_BYTES + 1, 0))
    with pytest.raises(EOFError):
        receive(pair[1])


def test_message_that_is_too_long_is_refused_before_a_byte_is_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_protocol, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(SaveFailed, match="async_save='thread'"):
        send(pair[0], {"text": "more than ten"})
    pair[0].close()
    assert pair[1].recv(1) == b""


OURS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkptmgrError)
]


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("hint", [None, "do this"])
def test_our_errors_arrive_as_what_they_are(kind: type[CkptmgrError], hint: str | None) -> None:
    error = kind("message", path="/runs/a.ckpt", hint=hint)
    if isinstance(error, OSError):
        error.errno = errno.ENOSPC
    arrived = rebuild_error(json.loads(json.dumps(describe_error(error))))
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert isinstance(arrived, CkptmgrError)
    assert (arrived.message, arrived.path, arrived.hint) == ("message", "/runs/a.ckpt", hint)
    if isinstance(arrived, OSError):
        assert arrived.errno == errno.ENOSPC


def test_place_of_a_damage_arrives() -> None:
    error = errors.ChecksumMismatch("bad", path="a", offset=12, tensor="w")
    arrived = rebuild_error(describe_error(error))
    assert isinstance(arrived, errors.ChecksumMismatch)
    assert (arrived.offset, arrived.tensor) == (12, "w")


@given(st.sampled_from(sorted(errno.errorcode)), st.sampled_from([None, "/runs/a", b"/runs/b"]))
def test_os_errors_arrive_with_number_and_name(number: int, filename: object) -> None:
    error = OSError(number, os.strerror(number), filename)
    arrived = rebuild_error(json.loads(json.dumps(describe_error(error))))
    assert type(arrived) is type(error)
    assert isinstance(arrived, OSError)
    expected = None if filename is None else str(filename)
    assert (arrived.errno, arrived.filename) == (number, expected)


def test_missing_bytes_of_a_full_disk_arrive() -> None:
    arrived = rebuild_error(describe_error(not_enough_space(Path("/run"), 12, 5)))
    assert isinstance(arrived, StoreFull)
    assert (arrived.missing_bytes, arrived.errno) == (7, errno.ENOSPC)
    assert not arrived.was_begun
    arrived.was_begun = True
    again = rebuild_error(describe_error(arrived))
    assert isinstance(again, StoreFull)
    assert again.was_begun


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError, TypeError, ValueError])
def test_common_errors_arrive_as_what_they_are(kind: type[Exception]) -> None:
    arrived = rebuild_error(describe_error(kind("what")))
    assert type(arrived) is kind
    assert str(arrived) == "what"


@pytest.mark.parametrize("error", [ZeroDivisionError("what"), OSError("what")])
def test_other_errors_arrive_as_failures_that_name_them(error: Exception) -> None:
    arrived = rebuild_error(describe_error(error))
    assert isinstance(arrived, SaveFailed)
    assert str(arrived) == f"{type(error).__name__}: what"


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"type": "os"},
        {"type": "CkptmgrError"},
        {"type": "StoreLocked", "path": 4096},
        {"type": "BlockingIOError", "errno": errno.EAGAIN, "strerror": "x", "filename": 0.5},
        {"type": "BlockingIOError", "errno": errno.EAGAIN, "strerror": "x", "filename": 1 << 70},
    ],
)
def test_odd_descriptions_are_errors_too(described: dict[str, object]) -> None:
    assert isinstance(rebuild_error(described), CkptmgrError)
