# SPDX-License-Identifier: Apache-2.0
"""Spill files: how they are written, and their remains."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmgr import MemoryConfig, StagingExhausted
from ckptmgr.engine.spill import SpillFile
from ckptmgr.engine.staging import StagingPool
from ckptmgr.io.threads import for_each
from tests.support.descriptors import nothing_stays_open
from tests.support.staging_memory import MIB, filled, values

KIB = 1 << 10


class CountedWrites:
    """Stands in for `os.pwrite`: counts calls, their sizes, and how many run at the same time.

    A call waits until `expected` of them run, so that the count does not depend on luck.
    """

    def __init__(self, expected: int) -> None:
        self._write = os.pwrite
        self._meet = threading.Barrier(expected, timeout=30)
        self._lock = threading.Lock()
        self._running = 0
        self.sizes: list[int] = []
        self.most_running = 0

    def __call__(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self.sizes.append(len(data))
            self._running += 1
            self.most_running = max(self.most_running, self._running)
        self._meet.wait()
        count = self._write(descriptor, data, offset)
        self._meet.wait()
        with self._lock:
            self._running -= 1
        return count


@pytest.mark.parametrize(("depth", "block_kib"), [(4, 64), (1, 64), (8, 128)])
def test_aio_keys_say_how_many_writes_of_which_size_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, block_kib: int
) -> None:
    writes = CountedWrites(expected=depth)
    monkeypatch.setattr(os, "pwrite", writes)
    config = MemoryConfig(
        is_automatic=False,
        staging_place="disk",
        spill_directory=tmp_path,
        write_block_bytes=block_kib * KIB,
        writes_in_flight=depth,
    )
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", MIB)])
        assert writes.sizes == [block_kib * KIB] * (1024 // block_kib)
        assert writes.most_running == depth
        assert values(staged.items) == values([filled("a", MIB)])
        staged.release()


def test_write_that_writes_less_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:3], offset))
    spill = SpillFile(tmp_path, size_bytes=10, block_bytes=10, writes_in_flight=1)
    spill.write([(0, lambda: memoryview(b"0123456789"))], size_bytes=10)
    assert bytes(spill.view()) == b"0123456789"
    spill.close()


def test_full_disk_is_reported_with_the_way_out_and_the_budget_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    config = MemoryConfig(is_automatic=False, staging_place="disk", spill_directory=tmp_path)
    with StagingPool(config) as pool:
        with pytest.raises(StagingExhausted, match="No space left on device") as caught:
            pool.stage([filled("a", MIB)])
        assert caught.value.path == str(tmp_path)
        assert pool.ledger.disk_bytes == 0


def test_spill_file_that_cannot_be_sized_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with nothing_stays_open(), pytest.raises(OSError, match="File too large"):
        SpillFile(tmp_path, size_bytes=1, block_bytes=1, writes_in_flight=1)


def test_read_of_what_was_never_written_is_refused(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path, size_bytes=0, block_bytes=1, writes_in_flight=1)
    spill.write([(0, lambda: memoryview(b"abc"))], size_bytes=3)
    buffer = bytearray(2)
    spill.read_into(1, memoryview(buffer))
    assert buffer == b"bc"
    with pytest.raises(ValueError, match="nothing was written at offset 3"):
        spill.read_into(2, memoryview(buffer))
    spill.close()


KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.config.memory import MemoryConfig
from ckptmgr.engine.staging import StagingPool
config = MemoryConfig(is_automatic=False, staging_place="disk", spill_directory=Path(sys.argv[1]))
staged = StagingPool(config).stage([tensor_from_array("a", np.zeros(1 << 20, np.uint8))])
print("staged", flush=True)
sys.stdin.read()
"""


def test_spill_files_are_gone_after_kill_9(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"staged\n"
        process.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_for_each_first_failure_stops_the_rest_and_is_raised() -> None:
    made = []

    def pieces() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    def work(piece: int) -> None:
        raise LookupError(piece)

    with pytest.raises(LookupError):
        for_each(pieces(), work, threads=3)
    assert len(made) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptmgr-staging"]


def test_for_each_without_threads_to_start_raises_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        for_each(iter([1, 2]), lambda _: None, threads=3)
