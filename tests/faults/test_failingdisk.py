# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckptmgr.formats.source import read_bytes
from tests.faults.writers import DATA, NEW, OLD, TARGET, TEMPORARY, Mistake, write
from tests.support import api
from tests.support.crashmodel import FailingDisk, Failure, ModelDisk, Order, every_failure


def disk_with_old() -> ModelDisk:
    disk = ModelDisk()
    disk.make_directory(DATA, mode=0o755)
    write(disk, OLD)
    return disk


def is_sound(failure: Failure) -> bool:
    """A writer that raised left the old or the new content and nothing else; one that returned, the new one."""
    left = failure.disk
    allowed = (NEW,) if failure.raised is None else (OLD, NEW)
    return left.read_bytes(TARGET) in allowed and list(left.list(DATA)) == [TARGET.name]


def test_good_writer_is_sound_after_every_failure() -> None:
    failures = list(every_failure(disk_with_old(), lambda disk: write(disk, NEW)))
    assert {failure.operation for failure in failures} == {
        "create",
        "write_at",
        "sync",
        "close",
        "replace",
        "sync_directory",
    }
    for failure in failures:
        assert is_sound(failure), failure
        assert isinstance(failure.raised, OSError), failure
        assert failure.raised.errno == failure.error


@pytest.mark.parametrize("mistake", [Mistake.ERRORS_IGNORED, Mistake.TEMPORARY_LEFT])
def test_wrong_writer_is_caught(mistake: Mistake) -> None:
    failures = every_failure(disk_with_old(), lambda disk: write(disk, NEW, mistake))
    assert not all(is_sound(failure) for failure in failures)


def test_failure_shows_what_failed_and_what_is_left() -> None:
    failure = next(every_failure(disk_with_old(), lambda disk: write(disk, NEW)))
    assert str(failure).startswith("EMFILE from create, call 1: the run raised OSError(24")
    assert "/data/weights 400 bytes" in str(failure)


def test_failed_sync_leaves_the_content_unsynced() -> None:
    disk = disk_with_old()
    failing = FailingDisk(disk, operation="sync", call=1)
    with pytest.raises(OSError, match="Input/output"):
        write(failing, NEW, Mistake.TEMPORARY_LEFT)
    disk.sync_directory(DATA)
    assert b"" in {left.read_bytes(TEMPORARY) for left in disk.crash_states(Order.WEAK)}


def test_failed_write_has_written_half() -> None:
    disk = disk_with_old()
    failing = FailingDisk(disk, error=errno.ENOSPC, operation="write_at", call=2)
    with pytest.raises(OSError, match="No space"):
        write(failing, NEW, Mistake.TEMPORARY_LEFT)
    assert disk.read_bytes(TEMPORARY) == NEW[: 256 + 128]
    assert failing.has_failed


def test_lasting_failure_refuses_all_later_calls() -> None:
    failing = FailingDisk(
        disk_with_old(), error=errno.EROFS, operation="unlink", call=2, is_lasting=True
    )
    for name in "abc":
        failing.create(DATA / name, mode=0o600).close()
    failing.unlink(DATA / "a")
    for name in "bc":
        with pytest.raises(OSError, match="Read-only"):
            failing.unlink(DATA / name)


def test_single_failure_lets_later_calls_through() -> None:
    failing = FailingDisk(disk_with_old(), error=errno.EMFILE, operation="open", call=1)
    assert not failing.has_failed
    with pytest.raises(OSError, match="Too many open files"):
        failing.open(TARGET)
    file = failing.open(TARGET)
    assert read_bytes(file, 0, file.size) == OLD
    file.close()


def test_every_method_can_fail_and_works_otherwise(tmp_path: Path) -> None:
    def use_all(disk: api.FileSystem) -> None:
        disk.make_directory(tmp_path / "d", mode=0o700)
        with disk.lock(tmp_path / "d" / "lock", owner="me"):
            file = disk.create(tmp_path / "d" / "a", mode=0o600)
            file.reserve(8)
            file.write_at(0, b"x")
            file.sync()
            file.close()
        source = disk.open(tmp_path / "d" / "a")
        read_bytes(source, 0, source.size)
        source.close()
        disk.replace(tmp_path / "d" / "a", tmp_path / "d" / "b")
        disk.sync_directory(tmp_path / "d")
        assert set(disk.list(tmp_path / "d")) == {"b", "lock"}
        assert disk.free_bytes(tmp_path) is not None
        assert disk.status(tmp_path / "d") is not None
        disk.unlink(tmp_path / "d" / "b")

    counting = FailingDisk(api.OsFileSystem())
    use_all(counting)
    for call in range(1, len(counting.calls) + 1):
        failing = FailingDisk(api.OsFileSystem(), error=errno.EIO, call=call)
        for left in (tmp_path / "d").iterdir():
            left.unlink()
        with pytest.raises(OSError, match="Input/output"):
            use_all(failing)


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="fsync"):
        FailingDisk(ModelDisk(), operation="fsync")


def test_full_disk_takes_what_fits_and_gets_it_back() -> None:
    failing = FailingDisk(disk_with_old(), space_bytes=100)
    file = failing.create(TEMPORARY, mode=0o600)
    file.write_at(0, bytes(60))
    file.write_at(0, bytes(60))
    assert failing.free_bytes(DATA) == 40
    with pytest.raises(OSError, match="No space"):
        file.write_at(60, bytes(60))
    status = failing.status(TEMPORARY)
    assert status is not None
    assert status.size_bytes == 100
    failing.unlink(TEMPORARY)
    assert failing.free_bytes(DATA) == 100


def test_replaced_file_gives_its_space_back() -> None:
    failing = FailingDisk(disk_with_old(), space_bytes=len(NEW))
    write(failing, NEW)
    assert failing.free_bytes(DATA) == len(OLD)
    failing.replace(TARGET, TARGET)
    assert failing.free_bytes(DATA) == len(OLD)


def test_reservation_beyond_the_space_takes_nothing() -> None:
    failing = FailingDisk(disk_with_old(), space_bytes=100)
    file = failing.create(TEMPORARY, mode=0o600)
    with pytest.raises(OSError, match="No space"):
        file.reserve(101)
    assert failing.free_bytes(DATA) == 100
    file.reserve(100)
    assert failing.free_bytes(DATA) == 0
    file.write_at(0, bytes(100))


def test_disk_with_limited_space_still_reports_missing_directories() -> None:
    with pytest.raises(FileNotFoundError):
        FailingDisk(ModelDisk(), space_bytes=1).free_bytes(DATA)
