# SPDX-License-Identifier: Apache-2.0
"""The cost of a load of a part of a checkpoint of many ranks: files that are opened, bytes that are read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.parallel import ParallelLayout
from tests.faults.training import KEY
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.runs import manager_on

MIB = 1 << 20
PAGE = 64 << 10
ROWS = ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))
SIX = ParallelLayout(device_matrix=(6,), tensor_map=((0,), ()))


class CountingFile:
    """A file that notes which pages of 64 KiB are read from it, however often."""

    def __init__(self, file: api.InputFile, pages: set[tuple[str, int]], name: str) -> None:
        self._file = file
        self._pages = pages
        self._name = name

    @property
    def size(self) -> int:
        return self._file.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        touched = range(offset // PAGE, -(-(offset + buffer.nbytes) // PAGE))
        self._pages.update((self._name, page) for page in touched)
        self._file.read_into(offset, buffer)

    def close(self) -> None:
        self._file.close()


class CountingFileSystem(api.OsFileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.pages: set[tuple[str, int]] = set()

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        return CountingFile(super().open(path, is_uncached=is_uncached), self.pages, path.name)


def manager(directory: Path, meeting: Meeting, rank: int, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(
        format="safetensors", enc_key=options.pop("key"), remove_redundancy=True
    )
    return manager_on(directory, config, ranks=Ranks(Seat(meeting, rank)), **options)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_rank_reads_the_ranges_it_needs(key: bytes | None, tmp_path: Path) -> None:
    whole = np.arange(96 * MIB // 8, dtype=np.int64).reshape(96, -1)  # a row is 1 MiB
    meeting = Meeting(2)

    def save(rank: int) -> None:
        with manager(tmp_path, meeting, rank, key=key, layout={"w": ROWS}) as ours:
            ours.save(1, {"w": whole[48 * rank : 48 * rank + 48]})

    for outcome in run_ranks(meeting, save):
        assert outcome.raised is None, outcome.raised
    six = Meeting(6)

    def load(rank: int) -> Counter[str]:
        fs = CountingFileSystem()
        with manager(tmp_path, six, rank, key=key, layout={"w": SIX}, fs=fs) as ours:
            state: Any = ours.resume({"w": np.zeros((16, whole.shape[1]), np.int64)}).state
        np.testing.assert_array_equal(state["w"], whole[16 * rank : 16 * rank + 16])
        return Counter(name for name, _ in fs.pages)

    counts = [outcome.must() for outcome in run_ranks(six, load)]
    unit = 16 * MIB if key is None else 4 * MIB  # ranges of digests, segments of the cipher
    head = 16 * MIB  # the range of the description of the tensors, or of the key slots
    for rank in (2, 5):  # they have no file of their own, so they look at the heads of both
        for name, pages in counts[rank].items():
            shard = parse_shard_name(name)
            if shard is not None:
                wanted = 16 * MIB + 2 * unit if shard.rank == rank // 3 else 0
                assert pages * PAGE <= wanted + head + 2 * PAGE
