# SPDX-License-Identifier: Apache-2.0
"""`verify_after_write`: content that the disk does not hold is never published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    SaveFailed,
    TruncatedError,
    save_checkpoint,
)
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.files import UncachedFile
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import save_run
from tests.support.surface import Loop

VERIFIED = api.SaveOptions(verify_after_write=True)
LARGE = {"w": np.arange(9 << 20, dtype=np.float32)}


class Lying(api.OsFileSystem):
    """A disk that gives back other bytes than were written to it.

    Attributes:
        flipped: Offsets of the bytes that come back wrong.
        missing_bytes: How much shorter files come back.
    """

    flipped: tuple[int, ...] = ()
    missing_bytes = 0

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        """Open a file; the page cache still holds the written bytes."""
        file = super().open(path)
        return _Wrong(file, self) if is_uncached else file


class _Wrong:
    def __init__(self, file: api.InputFile, disk: Lying) -> None:
        self._file = file
        self._disk = disk
        self.close = file.close

    @property
    def size(self) -> int:
        return self._file.size - self._disk.missing_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._file.read_into(offset, buffer)
        for wrong in self._disk.flipped:
            if offset <= wrong < offset + buffer.nbytes:
                buffer[wrong - offset] ^= 1


def test_what_the_disk_holds_is_published(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [1], options=VERIFIED, fs=Lying())
    manifest = api.place(tmp_path).read_manifest(path.name)
    assert manifest is not None
    assert manifest.stats["verify_s"] > 0


def names(directory: Path) -> list[str]:
    """Return the names in a directory, but for the lease of a writer that was not closed."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lease")


@pytest.mark.parametrize("wrong", [{"flipped": (60,)}, {"missing_bytes": 1}])
def test_what_the_disk_lost_is_not_published(tmp_path: Path, wrong: dict[str, object]) -> None:
    (first,) = save_run(tmp_path, [1])
    before = names(tmp_path)
    disk = Lying()
    vars(disk).update(wrong)
    with pytest.raises(SaveFailed, match="not those that were written"):
        save_run(tmp_path, [2], options=VERIFIED, fs=disk)
    assert names(tmp_path) == before
    assert [c.path for c in api.listed(tmp_path)] == [first]


def test_without_the_option_nobody_reads_back(tmp_path: Path) -> None:
    disk = Lying()
    disk.flipped = (60,)
    assert save_run(tmp_path, [1], fs=disk)


def test_error_counts_the_ranges_that_are_wrong(tmp_path: Path) -> None:
    disk = Lying()
    disk.flipped = (60, 20 << 20, 33 << 20)
    manager = manager_on(tmp_path, CheckpointConfig(verify_after_write=True), fs=disk)
    with (
        manager,
        pytest.raises(SaveFailed, match=r"the bytes 0\.\.16777216 are not .* \(and 2 more ranges"),
    ):
        manager.save(1, LARGE)


@pytest.mark.parametrize("async_save", [False, "thread", "process"])
def test_manager_reads_back_in_every_mode(tmp_path: Path, async_save: bool | str) -> None:
    config = CheckpointConfig(verify_after_write=True, async_save=async_save)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"w": np.zeros(3)})
    manifest = api.place(tmp_path).read_manifest("ckpt-1.ckpt")
    assert manifest is not None
    assert "verify_s" in manifest.stats


def test_callback_reads_back(tmp_path: Path) -> None:
    network = {"w": np.zeros(3, np.float32)}
    config = CheckpointConfig(verify_after_write=True, saved_network=network)
    callback = ModelCheckpoint("net", str(tmp_path), config)
    Loop((callback,), batch_num=1, network=network).run(1, end=False)
    manifest = api.place(tmp_path).read_manifest("net-1_1.ckpt")
    assert manifest is not None
    assert "verify_s" in manifest.stats


def test_single_file_is_read_back(tmp_path: Path) -> None:
    save_checkpoint({"w": np.zeros(3)}, tmp_path / "x.ckpt", verify_after_write=True)
    manifest = api.place(tmp_path).read_manifest("x.ckpt")
    assert manifest is not None
    assert "verify_s" in manifest.stats


def test_option_is_a_bool() -> None:
    with pytest.raises(ValueError, match="verify_after_write"):
        CheckpointConfig(verify_after_write=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("uncached") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(3 * 4096 + 100))
    return path


@given(start=st.integers(0, 12_388), length=st.integers(0, 12_388))
@settings(max_examples=50)
def test_uncached_file_reads_any_bytes(content: Path, start: int, length: int) -> None:
    length = min(length, 12_388 - start)
    file = UncachedFile(content)
    try:
        assert read_bytes(file, start, length) == content.read_bytes()[start : start + length]
    finally:
        file.close()


def test_uncached_file_ends_where_the_file_ends(content: Path) -> None:
    file = UncachedFile(content)
    try:
        with pytest.raises(TruncatedError):
            file.read_into(8192, memoryview(bytearray(8192)))
    finally:
        file.close()


def test_uncached_file_is_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        UncachedFile(tmp_path)
