# SPDX-License-Identifier: Apache-2.0
"""Files that are read once: the same bytes, whatever the page cache holds, which stays as it was."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import TruncatedError, load_checkpoint, save_checkpoint
from ckptmgr.io.byte_counters import counting
from ckptmgr.io.files import CachedFile
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.page_cache import bypass_page_cache, is_one_of_many
from tests.support.descriptors import nothing_stays_open

MIB = 1 << 20
CONTENT = np.random.default_rng(0).bytes(9 * MIB + 1234)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cold") / "x"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[InputFile]:
    file = bypass_page_cache(CachedFile(path))
    yield file
    file.close()


def make_cold(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(file: InputFile, offset: int, length: int, *, skew: int = 0) -> bytes:
    """Read into memory that starts so many bytes after a page."""
    memory = mmap.mmap(-1, skew + length + 1)
    view = memoryview(memory)[skew : skew + length]
    file.read_into(offset, view)
    return bytes(view)


@settings(max_examples=40)
@given(
    offset=st.integers(0, len(CONTENT)) | st.integers(0, 2000).map(lambda page: page * 4096),
    length=st.integers(0, len(CONTENT)),
    skew=st.sampled_from([0, 1, 4095]),
    is_cold=st.booleans(),
)
def test_any_bytes_are_read_into_any_memory(
    path: Path, offset: int, length: int, skew: int, is_cold: bool
) -> None:
    if is_cold:
        make_cold(path)
    length = min(length, len(CONTENT) - offset)
    file = bypass_page_cache(CachedFile(path))
    assert read(file, offset, length, skew=skew) == CONTENT[offset : offset + length]
    file.close()


@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("offset", [0, 9 * MIB, len(CONTENT) + 1])
def test_file_ends_where_it_ends(path: Path, file: InputFile, offset: int, is_cold: bool) -> None:
    make_cold(path)
    if not is_cold:
        path.read_bytes()
    with pytest.raises(TruncatedError):
        read(file, offset, len(CONTENT) - offset + MIB if offset < len(CONTENT) else MIB)


@pytest.mark.parametrize("skew", [0, 16])
def test_cold_file_leaves_the_page_cache_as_it_was(path: Path, file: InputFile, skew: int) -> None:
    make_cold(path)
    if is_cached(path):
        pytest.skip("this file system lives in the page cache")
    read(file, 0, 8 * MIB, skew=skew)
    assert not is_cached(path)


def is_cached(path: Path) -> bool:
    """Return whether the page cache holds anything of a file; looking changes nothing."""
    return any(cached_pages(path))


def cached_pages(path: Path) -> bytes:
    """Return 1 for every page that is cached, else 0."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        pages = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
        address = np.frombuffer(memory, np.uint8).ctypes.data
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), pages)
        return bytes(page & 1 for page in pages)


def test_cached_file_stays_cached(path: Path, file: InputFile) -> None:
    path.read_bytes()
    assert read(file, 0, len(CONTENT)) == CONTENT
    assert is_cached(path)


class Counting(CachedFile):
    """Counts reads through the page cache."""

    count = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Count and read."""
        self.count += buffer.nbytes
        super().read_into(offset, buffer)


def put_into_cache(path: Path, *ranges: tuple[int, int]) -> None:
    """Have the page cache hold these bytes of a file and nothing else."""
    make_cold(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    for start, stop in ranges:
        os.pread(descriptor, stop - start, start)
    os.close(descriptor)


def test_of_half_a_cached_file_only_that_half_is_read_through_the_cache(path: Path) -> None:
    put_into_cache(path, (0, 4 * MIB))
    if all(cached_pages(path)):
        pytest.skip("this file system lives in the page cache")
    counting = Counting(path)
    file = bypass_page_cache(counting)
    for offset in range(7 * MIB, -1, -MIB):  # forwards, the kernel reads ahead
        assert read(file, offset, MIB) == CONTENT[offset : offset + MIB]
    file.close()
    assert counting.count == 4 * MIB


@pytest.mark.parametrize("is_cached", [True, False])
def test_few_odd_pages_do_not_change_how_the_rest_is_read(path: Path, is_cached: bool) -> None:
    odd = range(84 * mmap.PAGESIZE, 9 * MIB, 7 * MIB)
    holes = [0, *(edge for at in odd for edge in (at, at + mmap.PAGESIZE)), len(CONTENT)]
    kept = list(zip(holes[::2], holes[1::2], strict=True))
    put_into_cache(path, *(kept if is_cached else [(at, at + mmap.PAGESIZE) for at in odd]))
    counting = Counting(path)
    file = bypass_page_cache(counting)
    assert read(file, MIB, 6 * MIB) == CONTENT[MIB : 7 * MIB]
    file.close()
    if not is_cached and all(cached_pages(path)):
        pytest.skip("this file system lives in the page cache")
    assert counting.count == (6 * MIB if is_cached else 0)


@pytest.mark.parametrize("skew", [0, 16])
def test_every_byte_is_counted_once(path: Path, file: InputFile, skew: int) -> None:
    make_cold(path)
    counted: list[int] = []
    with counting(lambda _, count: counted.append(count)):
        read(file, 0, len(CONTENT), skew=skew)
    assert sum(counted) == len(CONTENT)


class NoDirectIo(CachedFile):
    """A file on a file system without direct I/O."""

    def reopen(self, flags: int) -> int:
        raise OSError(22, f"Invalid argument: {flags:#x}")


class NoDirectReads(CachedFile):
    """A file on a file system that promises direct I/O and then cannot do it."""

    def reopen(self, flags: int) -> int:
        return os.open(os.devnull, os.O_WRONLY | flags & 0)


class Shrunk(CachedFile):
    """A file that has become shorter since it was opened."""

    def map(self) -> mmap.mmap:
        raise TruncatedError("the file has become shorter", offset=1)


@pytest.mark.parametrize("kind", [NoDirectIo, NoDirectReads, Shrunk])
def test_file_that_cannot_be_read_directly_is_read_all_the_same(
    path: Path, kind: type[CachedFile]
) -> None:
    make_cold(path)
    file = bypass_page_cache(kind(path))
    assert read(file, 0, len(CONTENT)) == CONTENT
    file.close()


def test_small_file_is_read_and_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    file = bypass_page_cache(CachedFile(tmp_path / "x"))
    assert read(file, 3, 4) == b"tent"
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        read(file, 0, 1)


def test_closed_file_has_no_descriptors_left(path: Path) -> None:
    with nothing_stays_open():
        file = bypass_page_cache(CachedFile(path))
        read(file, 0, MIB)
        file.close()


def test_file_of_another_kind_stays_what_it_is() -> None:
    class Other:
        size = 0

        def read_into(self, offset: int, buffer: memoryview) -> None:
            raise NotImplementedError

        def close(self) -> None:
            raise NotImplementedError

    other = Other()
    assert bypass_page_cache(other) is other


@pytest.mark.parametrize(("value", "expected"), [("", False), ("1", False), ("8", True)])
def test_process_of_a_launcher_is_one_of_many(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    for name in ("RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", value)
    assert is_one_of_many() is expected


@pytest.mark.parametrize("world", ["1", "2"])
def test_checkpoint_is_loaded_by_one_or_by_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    save_checkpoint({"w": np.arange(MIB)}, tmp_path / "x.ckpt")
    make_cold(tmp_path / "x.ckpt")
    assert np.array_equal(load_checkpoint(tmp_path / "x.ckpt")["w"], np.arange(MIB))


class Noting(CachedFile):
    """Notes the lookups of the kernel."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[int] = []

    def will_need(self, offset: int, length: int) -> None:
        """Note where."""
        self.asked.append(offset)
        super().will_need(offset, length)


@pytest.mark.parametrize(
    ("offsets", "asked"),
    [
        ([0, 1, 2], [3, 4, 5, 6]),
        ([0, 1, 2, 3, 4], [3, 4, 5, 6]),
        ([0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8, 9]),
        ([1, 3, 5, 8], [7, 9]),
        ([0, 1, 3, 4, 6], [7, 9]),
        ([8, 6, 4], []),
    ],
)
def test_small_reads_as_far_apart_as_before_are_looked_up_ahead(
    path: Path, offsets: list[int], asked: list[int]
) -> None:
    noting = Noting(path)
    file = bypass_page_cache(noting)
    for offset in offsets:
        assert read(file, offset * MIB, 48) == CONTENT[offset * MIB :][:48]
        assert read(file, 0, 1) == CONTENT[:1]  # of another size, and so of another kind
    assert noting.asked == [offset * MIB for offset in asked]
    file.close()


@pytest.mark.parametrize("skew", [0, 16])
@pytest.mark.parametrize("is_cached", [True, False])
def test_large_reads_ask_for_nothing_ahead(path: Path, skew: int, is_cached: bool) -> None:
    put_into_cache(path, *([(0, len(CONTENT))] if is_cached else []))
    noting = Noting(path)
    file = bypass_page_cache(noting)
    for offset in range(0, 8 * MIB, MIB):
        assert read(file, offset, MIB - 100, skew=skew) == CONTENT[offset : offset + MIB - 100]
    file.close()
    assert noting.asked == []


class Deaf(CachedFile):
    """A file on a file system that takes no advice."""

    def will_need(self, offset: int, length: int) -> None:
        raise OSError(95, f"Operation not supported: {offset} {length}")


def test_file_that_takes_no_advice_is_read_all_the_same(path: Path) -> None:
    file = bypass_page_cache(Deaf(path))
    for offset in range(0, 9 * MIB, MIB):
        assert read(file, offset, 48) == CONTENT[offset:][:48]
    file.close()
