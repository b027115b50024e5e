# SPDX-License-Identifier: Apache-2.0
"""The model is held against the real disk: the same calls, the same answers, the same errors."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptmgr import StoreLocked
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from tests.support import api
from tests.support.crashmodel import ModelDisk

FAST_DIRECTORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  not a fixed name
NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "a/x", "n" * 256])
OFFSETS = st.integers(-1, 9) | st.just(5000)


def outcome(call: Callable[[], object]) -> object:
    """Return the result of the call, or the mark of its error."""
    try:
        return call()
    except OSError as error:
        return (type(error), error.errno, error.filename, error.filename2)
    except FormatError as error:
        return (type(error), str(error))
    except ValueError:
        return ValueError


def read(disk: api.FileSystem, path: Path, beyond: int) -> bytes:
    file = disk.open(path)
    try:
        buffer = bytearray(file.size + beyond)
        file.read_into(0, memoryview(buffer))
        return bytes(buffer)
    finally:
        file.close()


def entries(disk: api.FileSystem, path: Path) -> dict[str, tuple[bool, bool, int]]:
    return {
        name: (status.is_file, status.is_directory, status.size_bytes * status.is_file)
        for name, status in disk.list(path).items()
    }


class SameAsTheRealDisk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        name = self.stack.enter_context(tempfile.TemporaryDirectory(dir=FAST_DIRECTORY))
        self.root = Path(name)
        self.model = ModelDisk()
        self.model.make_directory(self.root, mode=0o755)
        self.disks: tuple[api.FileSystem, ...] = (api.OsFileSystem(), self.model)
        self.files: list[tuple[api.OutputFile, ...]] = []

    def teardown(self) -> None:
        self.stack.close()
        for files in self.files:
            files[0].close()

    def both(self, call: Callable[[api.FileSystem], object]) -> None:
        real, model = (outcome(lambda disk=disk: call(disk)) for disk in self.disks)  # type: ignore[misc]
        assert model == real

    def both_files(self, index: int, call: Callable[[api.OutputFile], object]) -> None:
        files = self.files[index % len(self.files)]
        real, model = (outcome(lambda file=file: call(file)) for file in files)  # type: ignore[misc]
        assert model == real

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        made: list[api.OutputFile] = []
        self.both(lambda disk: made.append(disk.create(self.root / name, mode=0o600)))
        if made:
            self.files.append(tuple(made))

    @precondition(lambda self: self.files)
    @rule(index=st.integers(0, 9), offset=OFFSETS, data=st.binary(max_size=5))
    def write_at(self, index: int, offset: int, data: bytes) -> None:
        self.both_files(index, lambda file: file.write_at(offset, data))

    @precondition(lambda self: self.files)
    @rule(index=st.integers(0, 9), size=st.integers(0, 9))
    def reserve(self, index: int, size: int) -> None:
        self.both_files(index, lambda file: file.reserve(size))

    @precondition(lambda self: self.files)
    @rule(index=st.integers(0, 9), is_sync=st.booleans())
    def sync_or_close(self, index: int, *, is_sync: bool) -> None:
        self.both_files(index, lambda file: file.sync() if is_sync else file.close())

    @rule(old=NAMES, new=NAMES)
    def replace(self, old: str, new: str) -> None:
        # Which of two wrong names is reported depends on the version of Linux.
        assume(len(new) < 256 or os.path.lexists(self.root / old))
        self.both(lambda disk: disk.replace(self.root / old, self.root / new))

    @rule(name=NAMES)
    def unlink(self, name: str) -> None:
        self.both(lambda disk: disk.unlink(self.root / name))

    @rule(name=NAMES)
    def make_directory(self, name: str) -> None:
        self.both(lambda disk: disk.make_directory(self.root / name, mode=0o755))

    @rule(name=NAMES)
    def sync_directory(self, name: str) -> None:
        self.both(lambda disk: disk.sync_directory(self.root / name))

    @rule(name=NAMES, beyond=st.integers(0, 2))
    def read(self, name: str, beyond: int) -> None:
        self.both(lambda disk: read(disk, self.root / name, beyond))

    @rule(name=NAMES)
    def list(self, name: str) -> None:
        self.both(lambda disk: entries(disk, self.root / name))

    @rule(name=NAMES)
    def ask_for_space(self, name: str) -> None:
        self.both(lambda disk: disk.free_bytes(self.root / name) is not None)

    @rule(name=NAMES, owner=st.sampled_from(["pid 1", "pid 2 é"]))
    def lock_twice(self, name: str, owner: str) -> None:
        def holders(disk: api.FileSystem) -> tuple[str | None, str | None]:
            path = self.root / name
            try:
                with disk.lock(path, owner=owner) as first, disk.lock(path, owner="late") as second:
                    return first, second
            except StoreLocked as error:  # the real disk names the entry with the name of the lock
                raise IsADirectoryError(errno.EISDIR, error.message, str(path)) from error

        self.both(holders)

    @invariant()
    def shows_the_same(self) -> None:
        for name in (".", "a", "d", "d/a", "a/x"):
            self.both(lambda disk, path=self.root / name: disk.status(path) is None)  # type: ignore[misc]
        self.both(lambda disk: entries(disk, self.root))


TestSameAsTheRealDisk = SameAsTheRealDisk.TestCase
TestSameAsTheRealDisk.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("source", ["file", "empty", "full", "full/file", "absent"])
@pytest.mark.parametrize("target", ["file", "other", "empty", "full", "full/below", "file/below"])
def test_rename_equals_the_real_one(tmp_path: Path, source: str, target: str) -> None:
    def renamed(disk: api.FileSystem) -> list[object]:
        for directory in ("empty", "full"):
            disk.make_directory(tmp_path / directory, mode=0o755)
        for name in ("file", "other", "full/file"):
            disk.create(tmp_path / name, mode=0o600).close()
        result = outcome(lambda: disk.replace(tmp_path / source, tmp_path / target))
        left = [
            outcome(lambda: entries(disk, tmp_path)),
            outcome(lambda: entries(disk, tmp_path / "full")),
        ]
        return [result, *left]

    assert renamed(ModelDisk()) == renamed(api.OsFileSystem())


def test_identity_follows_a_file_through_a_rename() -> None:
    disk = ModelDisk()
    disk.create(Path("/a"), mode=0o600).write_at(0, b"x")
    disk.create(Path("/b"), mode=0o600)
    before, other = disk.status(Path("/a")), disk.status(Path("/b"))
    disk.replace(Path("/a"), Path("/c"))
    after = disk.status(Path("/c"))
    assert before is not None
    assert other is not None
    assert after is not None
    assert after == before
    assert after.identity != other.identity
    assert after.modified_at < other.modified_at


def test_open_file_is_read_through_a_swapped_name() -> None:
    disk = ModelDisk()
    for path, content in ((Path("/a"), b"old"), (Path("/b"), b"new")):
        disk.create(path, mode=0o600).write_at(0, content)
    file = disk.open(Path("/a"))
    disk.replace(Path("/b"), Path("/a"))
    assert read_bytes(file, 0, 3) == b"old"


def test_closed_input_file_refuses() -> None:
    disk = ModelDisk()
    disk.create(Path("/a"), mode=0o600).write_at(0, b"old")
    file = disk.open(Path("/a"))
    with pytest.raises(OSError, match="Invalid argument"):
        file.read_into(-1, memoryview(bytearray(1)))
    file.close()
    file.read_into(0, memoryview(b""))
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        read_bytes(file, 0, 1)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("path", [Path("relative"), Path("/a/../b")])
def test_path_that_the_model_cannot_follow_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        ModelDisk().status(path)


def test_threads_write_one_file_at_once() -> None:
    disk = ModelDisk()
    file = disk.create(Path("/a"), mode=0o600)
    threads = [
        threading.Thread(target=file.write_at, args=(index * 4, bytes([index]) * 4))
        for index in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disk.read_bytes(Path("/a")) == b"".join(bytes([index]) * 4 for index in range(16))
    assert [operation.kind for operation in disk.operations] == ["create", *["write_at"] * 16]


def test_copy_is_independent() -> None:
    disk = ModelDisk(available_bytes=None)
    copy = disk.copy()
    copy.create(Path("/a"), mode=0o600)
    assert disk.list(Path("/")) == {}
    assert list(copy.list(Path("/"))) == ["a"]
    assert copy.free_bytes(Path("/")) is None
