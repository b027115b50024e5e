# SPDX-License-Identifier: Apache-2.0
"""Forked children inherit no buffer that is never given back, no lock that is never released, no memory to share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.held import run_program

# The alarm ends a child that waits forever.
PROLOGUE = """
import os, signal, sys, threading
import numpy as np
from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.training.options import System
from ckptmgr.files.save import pipeline, streams
from ckptmgr.io import threads as units

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        work()
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, code
"""

LENT = (
    PROLOGUE
    + """
pools = [pipeline._buffers, streams._scratch, units._buffers]
lent = [pool.take_many(pool._count) for pool in pools]
def wait_for_one():
    for pool in pools:
        pool.give_back(pool.take_many(1)[0])
waiting = threading.Thread(target=wait_for_one, daemon=True)
waiting.start()
while not pools[0]._taking_many.locked():
    os.sched_yield()
pools[1]._taking_many.acquire()

state = {name: np.full(3 << 20, 7, np.uint8) for name in "abc"}
def save_and_load():
    config = CheckpointConfig(enc_key=bytes(32), enc_mode=sys.argv[2]) if sys.argv[2] else CheckpointConfig()
    with CheckpointManager(sys.argv[1], config) as manager:
        manager.save(1, state)
        loaded = manager.load(1)
        assert all((loaded[name] == state[name]).all() for name in "abc")

in_child(save_and_load)

pools[1]._taking_many.release()
for pool, buffers in zip(pools, lent):
    for buffer in buffers:
        pool.give_back(buffer)
waiting.join(20)
assert not waiting.is_alive()
assert [pool.made_bytes for pool in pools] == [pool._count * pool._size_bytes for pool in pools]
"""
)


@pytest.mark.parametrize("mode", ["", "AES-GCM"])
def test_child_forked_while_buffers_are_lent_saves_and_loads(tmp_path: Path, mode: str) -> None:
    done = run_program(LENT, tmp_path, mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


READER = (
    PROLOGUE
    + """
from ckptmgr.crypto.buffers import SpareBuffers

buffers = SpareBuffers(4096)
buffers.give_back(buffers.take())
lent = buffers.take()
lent[:] = bytes([1]) * 4096
buffers.give_back(buffers.take())
buffers._lock.acquire()

def scribble():
    for _ in range(3):
        buffers.take()[:] = bytes([2]) * 4096
    lent[:] = bytes([3]) * 4096

in_child(scribble)
buffers._lock.release()
assert lent == bytes([1]) * 4096
assert buffers.take() == bytes(4096)
"""
)


def test_child_neither_waits_for_nor_writes_into_memory_of_a_reader_of_its_parent() -> None:
    done = run_program(READER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


STAGED = (
    PROLOGUE
    + """
from pathlib import Path
from ckptmgr.formats.tensor import tensor_from_array

def staging_memory():
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [text for text in [*links, *Path("/proc/self/maps").read_text().splitlines()] if "ckptmgr-staging" in text]

with CheckpointManager(sys.argv[1], CheckpointConfig(async_save="process")) as manager:
    manager.save(1, {"w": np.ones(1 << 20)})
    manager.wait()
    pool = manager._engine._staging_pool()
    staged = pool.stage([tensor_from_array("w", np.ones(1 << 20))]) if sys.argv[2] == "lent" else None
    before = staging_memory()
    assert before
    def check():
        if staged is not None:
            assert staged.items[0].content()[:8] == np.ones(1).tobytes()
            assert len(staging_memory()) < len(before)
            staged.release()
        assert not staging_memory(), staging_memory()
        os._exit(7)
    with pool._slabs._lock:
        in_child(check)
    assert staging_memory() == before
    if staged is not None:
        staged.release()
    manager.save(2, {"w": np.ones(1 << 20)})
assert not staging_memory()
"""
)


@pytest.mark.parametrize("how", ["kept", "lent"])
def test_child_does_not_keep_the_staging_memory_of_its_parent(tmp_path: Path, how: str) -> None:
    done = run_program(STAGED, tmp_path, how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BLOCKED = (
    PROLOGUE
    + """
from ckptmgr.io.filesystem import OsFileSystem

saving, go_on = threading.Event(), threading.Event()
class Slow(OsFileSystem):
    def create(self, path, *, mode, owner_of=None):
        saving.set()
        go_on.wait(20)
        return super().create(path, mode=mode, owner_of=owner_of)
"""
)

WAITING = (
    BLOCKED
    + """
def wait_for(handle):
    try:
        handle.wait()
    except RuntimeError as error:
        assert f"process {os.getppid()} is saving this" in str(error)
    else:
        sys.exit("nothing was raised")

with CheckpointManager._on(System(fs=Slow()), sys.argv[1], CheckpointConfig(async_save=True)) as manager:
    handle = manager.save(1, {"w": np.ones(4)})
    saving.wait(20)
    in_child(lambda: wait_for(handle))
    go_on.set()
    assert handle.wait(20).step == 1
    in_child(lambda: handle.wait().step == 1 or sys.exit(1))
"""
)


def test_child_that_waits_for_a_save_of_its_parent_is_told_that_it_will_not_hear(
    tmp_path: Path,
) -> None:
    done = run_program(WAITING, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ASKING = (
    BLOCKED
    + """
import asyncio, concurrent.futures
from ckptmgr.core.handle import SaveHandle

called = []
def told(ask):
    try:
        ask()
    except RuntimeError as error:
        assert f"process {os.getppid()} is saving this" in str(error)
    else:
        sys.exit("nothing was raised")
    assert called == []

async def awaited(future):
    await asyncio.wrap_future(future)

def ask_the_futures():
    for future in (handle.durable, unstaged.staged, unstaged.durable):
        told(future.result)
        told(lambda: concurrent.futures.wait([future], timeout=20).done.pop().result())
        told(lambda: next(concurrent.futures.as_completed([future])).result())
        told(lambda: asyncio.run(awaited(future)))
        assert future.done() and isinstance(future.exception(), RuntimeError)
        assert not future.cancel()
    assert handle.staged.result() is None
    late = []
    handle.durable.add_done_callback(late.append)
    assert late == [handle.durable]

with CheckpointManager._on(System(fs=Slow()), sys.argv[1], CheckpointConfig(async_save=True)) as manager:
    handle, unstaged = manager.save(1, {"w": np.ones(4)}), SaveHandle()
    handle.durable.add_done_callback(called.append)
    saving.wait(20)
    waiting = threading.Thread(target=handle.durable.result)
    waiting.start()
    held = threading.Event()
    def hold():  # as a thread that asks right now
        with unstaged.durable._condition:
            held.set()
            go_on.wait(20)
    holding = threading.Thread(target=hold)
    holding.start()
    held.wait(20)
    in_child(ask_the_futures)
    go_on.set()
    assert handle.durable.result(20).step == 1
    waiting.join()
    holding.join()
    assert called == [handle.durable]
    assert not unstaged.durable.done()
"""
)


def test_future_of_a_save_fails_in_a_child_that_was_forked_meanwhile(tmp_path: Path) -> None:
    done = run_program(ASKING, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


OPENING = (
    PROLOGUE
    + """
manager = CheckpointManager(sys.argv[1])
with manager._writer._opening, manager._writer.changing:
    in_child(lambda: manager.save(1, {"w": np.ones(4)}))
"""
)


def test_child_forked_while_a_series_is_being_opened_saves(tmp_path: Path) -> None:
    done = run_program(OPENING, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
