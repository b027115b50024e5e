# SPDX-License-Identifier: Apache-2.0
"""Buffers that all saves share, and that an interrupt must not lose."""

from __future__ import annotations

import gc
import threading

import pytest

from ckptmgr.io import buffers
from ckptmgr.io.buffers import BufferPool

SIZE = 4096


def test_buffers_are_made_when_needed_and_used_again() -> None:
    pool = BufferPool(3, SIZE)
    first = pool.take()
    pool.give_back(first)
    assert pool.take() is first
    assert pool.made_bytes == SIZE
    others = pool.take_many(2)
    assert pool.made_bytes == SIZE + sum(other.nbytes for other in others) == 3 * SIZE


def test_buffer_that_nothing_refers_to_any_more_is_not_lost() -> None:
    pool = BufferPool(2, SIZE)
    for _ in range(5):
        pool.take_many(2)
    assert pool.made_bytes == 0
    kept = pool.take_many(2)
    assert [buffer.nbytes for buffer in kept] == [SIZE, SIZE]


def test_thread_that_waits_gets_the_place_of_a_lost_buffer() -> None:
    pool = BufferPool(1, SIZE)
    lent = pool.take_many(1)
    taken: list[memoryview] = []
    waiting = threading.Thread(target=lambda: taken.append(pool.take()), daemon=True)
    waiting.start()
    lent.clear()
    waiting.join(timeout=30)
    assert [buffer.nbytes for buffer in taken] == [SIZE]


def test_place_of_a_buffer_that_could_not_be_made_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(size_bytes: int) -> memoryview:
        raise MemoryError(size_bytes)

    pool = BufferPool(1, SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(buffers, "new_pages", fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                pool.take()
    gc.collect()
    assert pool.take().nbytes == SIZE
