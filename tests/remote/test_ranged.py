# SPDX-License-Identifier: Apache-2.0
"""An object as an open file: its bytes, and the requests that they take."""

from __future__ import annotations

import numpy as np
import pytest

from ckptmgr import TruncatedError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.whole_ranges import WholeRanges
from tests.support.counted_objects import CountedObjects

pytest.importorskip("obstore")

from ckptmgr.objects.ranged import BLOCK_BYTES, HEAD_BYTES, ObjectFile
from ckptmgr.objects.requests import FetchedRange
from tests.remote.buckets import new_objects

MIB = 1 << 20
DATA = np.random.default_rng(5).integers(0, 256, 20 * MIB, np.uint8).tobytes()


def opened(data: bytes = DATA) -> tuple[ObjectFile, CountedObjects]:
    objects = CountedObjects(new_objects())
    objects.put("x", [data], len(data))
    return ObjectFile(objects, "x", name="memory://x"), objects


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 100),
        (HEAD_BYTES - 10, 20),
        (HEAD_BYTES - 10, 5 * MIB),
        (BLOCK_BYTES * 20 - 3, 6),
        (HEAD_BYTES, MIB),
        (3 * MIB + 1, 16 * MIB),
        (20 * MIB - 5, 5),
        (0, 20 * MIB),
        (7, 0),
    ],
)
def test_bytes_are_those_of_the_object(offset: int, length: int) -> None:
    file, _ = opened()
    assert file.size == len(DATA)
    assert read_bytes(file, offset, length) == DATA[offset : offset + length]
    file.close()


def test_head_comes_with_the_size_in_one_request() -> None:
    file, objects = opened()
    read_bytes(file, 0, HEAD_BYTES)
    assert objects.requests[1:] == ["fetch x"]


def test_object_without_bytes_is_opened() -> None:
    file, _ = opened(b"")
    assert (file.size, read_bytes(file, 0, 0)) == (0, b"")


def test_object_that_is_not_there_is_not_found() -> None:
    with pytest.raises(FileNotFoundError):
        ObjectFile(new_objects(), "x", name="memory://x")


def test_range_past_the_end_is_never_asked_for() -> None:
    file, objects = opened(bytes(100))
    with pytest.raises(TruncatedError):
        file.read_into(99, memoryview(bytearray(2)))
    assert objects.requests[1:] == ["fetch x"]


def test_long_read_is_cut_into_requests_of_4_mib() -> None:
    file, objects = opened()
    read_bytes(file, MIB, 16 * MIB)
    assert sorted(objects.ranges[1:]) == [("x", (1 + 4 * n) * MIB, 4 * MIB) for n in range(4)]


def test_short_reads_of_one_block_are_one_request() -> None:
    file, objects = opened()
    for offset in (0, 40, 100, BLOCK_BYTES - 40):
        read_bytes(file, 2 * MIB + offset, 40)
    assert objects.ranges[1:] == [("x", 2 * MIB, BLOCK_BYTES)]


def test_short_reads_in_a_row_get_longer_and_longer_ranges() -> None:
    file, objects = opened()
    stop = MIB + 100 * BLOCK_BYTES
    found = b"".join(read_bytes(file, at, 4096) for at in range(MIB, stop, 4096))
    assert found == DATA[MIB:stop]
    assert len(objects.ranges) <= 9


def test_short_reads_at_even_distances_are_read_several_at_a_time() -> None:
    file, objects = opened()
    waits = 0
    for offset in range(MIB, 20 * MIB, 200_000):
        before = len(objects.ranges)
        assert read_bytes(file, offset, 48) == DATA[offset : offset + 48]
        waits += len(objects.ranges) > before
    assert waits <= 8
    assert len(objects.ranges) <= 105


def test_blocks_in_memory_are_few() -> None:
    file, objects = opened()
    for offset in range(MIB, 20 * MIB, BLOCK_BYTES):
        read_bytes(file, offset, 8)
    before = len(objects.ranges)
    read_bytes(file, 19 * MIB, 8)
    assert len(objects.ranges) == before
    read_bytes(file, MIB, 8)
    assert len(objects.ranges) == before + 1


def test_answer_of_another_length_is_an_error() -> None:
    class Short(CountedObjects):
        def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
            found = super().fetch(key, offset, length)
            return FetchedRange(found.stored, found.data[:-1] if offset else found.data)

    objects = Short(new_objects())
    objects.put("x", [DATA], len(DATA))
    file = ObjectFile(objects, "x", name="memory://x")
    with pytest.raises(TruncatedError, match="1048576 bytes asked for, 1048575 given"):
        read_bytes(file, MIB, MIB)


def test_version_without_a_tag_is_known_by_its_time() -> None:
    class Untagged(CountedObjects):
        def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
            found = super().fetch(key, offset, length)
            return FetchedRange(found.stored._replace(e_tag=None), found.data)

    objects = Untagged(new_objects())
    objects.put("x", [DATA], len(DATA))
    file = ObjectFile(objects, "x", name="memory://x")
    assert read_bytes(file, MIB, 8) == DATA[MIB : MIB + 8]
    objects.put("x", [DATA], len(DATA))
    with pytest.raises(ValueError, match="replaced while it was being read"):
        read_bytes(file, 9 * MIB, MIB)


def test_network_error_about_an_object_that_is_gone_says_that_it_was_removed() -> None:
    class Refusing(CountedObjects):
        def fetch(self, key: str, offset: int, length: int) -> FetchedRange:
            if offset:
                raise ConnectionError("no range")
            return super().fetch(key, offset, length)

    objects = Refusing(new_objects())
    objects.put("x", [DATA], len(DATA))
    file = ObjectFile(objects, "x", name="memory://x")
    objects.delete(["x"])
    with pytest.raises(FileNotFoundError, match="removed while it was being read"):
        read_bytes(file, MIB, MIB)


def test_few_whole_ranges_stay_in_memory() -> None:
    file, objects = opened()
    ranges = WholeRanges(file, MIB)
    for start in (*range(MIB, 8 * MIB, MIB), MIB):
        assert read_bytes(ranges, start + 5, 9) == DATA[start + 5 : start + 14]
    assert len(objects.ranges) == 1 + 8
