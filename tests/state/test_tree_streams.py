# SPDX-License-Identifier: Apache-2.0
"""`io.BytesIO` in a state: its bytes and its position."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, StateMismatch, UnsupportedState


def _stream(content: bytes, place: int) -> io.BytesIO:
    stream = io.BytesIO(content)
    stream.seek(place)
    return stream


def _manager(directory: Path) -> CheckpointManager:
    return CheckpointManager(directory, CheckpointConfig(), prefix="net")


@pytest.mark.parametrize("content", [b"", b"short", b"long" * 5000], ids=len)
@pytest.mark.parametrize("has_target", [True, False])
def test_stream_comes_back_with_its_bytes_and_its_position(
    tmp_path: Path, content: bytes, has_target: bool
) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, {"stream": _stream(content, 3), "w": np.ones(2)})
    mine = _stream(b"another content, and longer", 7)
    target = {"stream": mine, "w": np.zeros(2)} if has_target else None
    restored: Any = _manager(tmp_path).resume(target).state
    assert restored["stream"].getvalue() == content
    assert restored["stream"].tell() == 3
    assert (restored["stream"] is mine) is has_target


def test_one_stream_in_two_places_is_one_again(tmp_path: Path) -> None:
    stream = _stream(b"shared", 0)
    with _manager(tmp_path) as manager:
        manager.save(1, [stream, stream])
    restored: Any = _manager(tmp_path).resume().state
    assert restored[0] is restored[1]


def test_stream_and_plain_bytes_do_not_fit_each_other(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, {"stream": _stream(b"x", 0)})
    with pytest.raises(StateMismatch, match="is a bytes, stored is a BytesIO"):
        _manager(tmp_path).resume({"stream": b""})


def test_stream_of_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    class Stream(io.BytesIO):
        pass

    with pytest.raises(
        UnsupportedState, match=r"state\['s'\] is a .*Stream, which cannot be stored"
    ):
        _manager(tmp_path).save(1, {"s": Stream()})
