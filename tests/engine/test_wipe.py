# SPDX-License-Identifier: Apache-2.0
"""Plaintext of background saves in staging memory: wiped when the save ends, or buffer by buffer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, MemoryConfig, ModelCheckpoint
from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.files.save.compressed import _rooms
from ckptmgr.files.save.compressed_chunks import _memory
from ckptmgr.files.save.container_stream import _segments
from ckptmgr.files.save.streams import _scratch
from ckptmgr.io.buffers import BufferPool
from ckptmgr.observe.observers import Event
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on
from tests.support.staging_memory import MIB

KEY = b"sixteen byte key"
SECRET = 0xA7
SIZES = (3 * MIB, 2 * MIB, 40_000, 100, 7)
EACH, AT_END = MemoryConfig.from_ascend(1, 3), MemoryConfig.from_ascend(0, 3)
KINDS: dict[str, dict[str, Any]] = {
    "ckpt": {"crc_check": True},
    "container": {"format": "safetensors"},
    "late head": {"format": "safetensors", "crc_check": True},
    "compressed": {"format": "safetensors", "compression": "zstd"},
}


def state() -> dict[str, Any]:
    return {f"w{i}": np.full(size, SECRET, np.uint8) for i, size in enumerate(SIZES)}


def staged_secrets() -> int:
    """Return how many secret bytes the staging memory of this process holds.

    It is the writable memory that is kept out of core dumps.
    """
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        found = 0
        for start, size in _staging_memory():
            memory.seek(start)
            found += memory.read(size).count(bytes([SECRET]) * 7) * 7
    return found


def _staging_memory() -> Iterator[tuple[int, int]]:
    start = size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line):
            start = int(region[1], 16)
            size = int(region[2], 16) - start
        elif line.startswith("VmFlags:") and {"dd", "wr"} <= set(line.split()):
            yield start, size


class Watch:
    """Counts the secret bytes in staging memory when retention removes a checkpoint.

    That is after the file is durable, and before the state is released.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, event: Event) -> None:
        if event.name == "prune":
            self.seen.append(staged_secrets())


class WatchedDisk(FailingDisk):
    """A disk that counts the secret bytes in staging memory before each sync of a file."""

    def __init__(self) -> None:
        super().__init__(api.OsFileSystem())
        self.seen: list[int] = []

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation == "sync":
            self.seen.append(staged_secrets())


def config_of(memory: MemoryConfig, mode: str, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(
        **{"async_save": mode, "enc_key": KEY, "keep": "last(1)", "memory": memory, **options}
    )


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_buffer_of_a_background_save_is_wiped_before_the_save_ends(
    tmp_path: Path, mode: str, kind: str
) -> None:
    watch = Watch()
    config = config_of(EACH, mode, **KINDS[kind])
    with CheckpointManager(tmp_path, config, observe=watch) as manager:
        for step in (1, 2):
            manager.save(step, state())
            manager.wait()
        assert watch.seen == [0]
        restored: Any = manager.load("latest")
    assert {name: value.tobytes() for name, value in restored.items()} == {
        name: value.tobytes() for name, value in state().items()
    }


@pytest.mark.parametrize(
    ("kind", "buffers"),
    [("ckpt", _scratch), ("container", _segments), ("compressed", _rooms), ("compressed", _memory)],
)
def test_buffers_in_which_small_tensors_are_encrypted_together_are_wiped(
    tmp_path: Path, kind: str, buffers: BufferPool | SpareBuffers
) -> None:
    config = config_of(EACH, "thread", **KINDS[kind])
    with CheckpointManager(tmp_path, config) as manager:
        sizes = (500, 40_000, 700)
        secrets = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
        manager.save(1, {f"w{i}": np.frombuffer(one, np.uint8) for i, one in enumerate(secrets)})
    taken = [buffers.take() for _ in range(4)]
    try:
        assert not any(secret[:100] in bytes(one) for one in taken for secret in secrets)
    finally:
        for one in taken:
            buffers.give_back(one)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_wipe_at_the_end_leaves_the_plaintext_until_then(tmp_path: Path, mode: str) -> None:
    watch = Watch()
    with CheckpointManager(tmp_path, config_of(AT_END, mode), observe=watch) as manager:
        for step in (1, 2):
            manager.save(step, state())
            manager.wait()
            assert staged_secrets() == 0
    assert watch.seen != [0]


def test_buffers_are_wiped_when_they_are_written_not_when_the_file_is_durable(
    tmp_path: Path,
) -> None:
    seen = {}
    for memory in (EACH, AT_END):
        disk = WatchedDisk()
        with manager_on(tmp_path, config_of(memory, "thread"), fs=disk) as manager:
            manager.save(1, state())
        seen[memory.wipe] = disk.seen[0]  # the data file
    assert seen["each_buffer"] == 0
    assert seen["at_end"] > sum(SIZES) // 2


def test_buffers_of_a_torch_state_with_zero_stall_are_wiped(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    watch = Watch()
    config = config_of(EACH, "thread", zero_stall=True)
    with CheckpointManager(tmp_path, config, observe=watch) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((2 * MIB,), SECRET, dtype=torch.uint8), "n": step})
            manager.wait()
    assert watch.seen == [0]


def test_plain_background_save_is_wiped_too(tmp_path: Path) -> None:
    watch = Watch()
    config = config_of(EACH, "thread", enc_key=None)
    with CheckpointManager(tmp_path, config, observe=watch) as manager:
        for step in (1, 2):
            manager.save(step, state())
            manager.wait()
    assert watch.seen == [0]


def test_spilled_state_in_a_process_is_saved_although_buffers_are_wiped(tmp_path: Path) -> None:
    memory = MemoryConfig(
        wipe="each_buffer",
        host_budget_bytes=3 * MIB,
        slab_bytes=MIB,
        spill_directory=tmp_path / "spill",
    )
    config = config_of(memory, "process", enc_key=None)
    with CheckpointManager(tmp_path / "run", config) as manager:
        manager.save(1, state())
        manager.wait()
        restored: Any = manager.load(1)
    assert all(np.all(value == SECRET) for value in restored.values())


def test_wiped_buffers_cannot_be_saved_again_so_retries_are_refused(tmp_path: Path) -> None:
    config = config_of(EACH, "thread", on_error="retry(2)")
    with pytest.raises(ValueError, match=r"wipe='each_buffer'.*on_error='retry\(2\)'"):
        CheckpointManager(tmp_path, config)
    with pytest.raises(ValueError, match=r"wipe='each_buffer'"):
        ModelCheckpoint("net", str(tmp_path), config)
