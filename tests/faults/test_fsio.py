# SPDX-License-Identifier: Apache-2.0
"""The real disk: promises of `OsFileSystem` that the model does not mirror."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmgr import StoreLocked, TruncatedError
from ckptmgr.crypto.buffers import new_pages
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.files import DIRECT_IO_ALIGNMENT
from tests.support import api
from tests.support.descriptors import nothing_stays_open, open_descriptors

ROOT_OF_PROJECT = Path(__file__).parents[2]
DISK = api.OsFileSystem()


def read(path: Path) -> bytes:
    file = DISK.open(path)
    try:
        return read_bytes(file, 0, file.size)
    finally:
        file.close()


def child(code: str, *command: str) -> subprocess.Popen[str]:
    """Start a Python process in the project; `command` goes before the interpreter."""
    return subprocess.Popen(
        [*command, sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT_OF_PROJECT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


STRAY_PRINTS = """
    import contextlib, os, sys
    from pathlib import Path
    from ckptmgr.io.filesystem import OsFileSystem
    path = Path(sys.argv[1])
    file = OsFileSystem().change(path) if path.exists() else OsFileSystem().create(path, mode=0o600)
    file.write_at(0, b"content")
    for descriptor in range(3):  # as a library in C does
        with contextlib.suppress(OSError):
            os.write(descriptor, b"STRAY!")
    file.sync()
    file.close()
"""


@pytest.mark.parametrize("is_there", [False, True])
def test_what_libraries_print_to_closed_streams_is_not_in_the_file(
    tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        (tmp_path / "file").touch()
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh"]
    command = [sys.executable, "-c", textwrap.dedent(STRAY_PRINTS), str(tmp_path / "file")]
    subprocess.run([*closed, *command], cwd=ROOT_OF_PROJECT, timeout=60, check=True)
    assert read(tmp_path / "file") == b"content"


STRAY_PRINTS_INTO_A_SAVE = """
    import contextlib, os, sys
    from pathlib import Path
    import numpy as np
    from ckptmgr.config.config import CheckpointConfig
    from ckptmgr.formats.tensor import tensor_from_array
    from ckptmgr.training.manager import CheckpointManager
    from ckptmgr.config.memory import MemoryConfig
    from ckptmgr.engine.staging import StagingPool

    def print_strays():
        for descriptor in range(3):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"STRAY!")

    ones = np.ones(9)
    on_disk = MemoryConfig(spill_directory=Path(sys.argv[1]), staging_place="disk", is_automatic=False)
    for pool in (StagingPool(is_shared=True), StagingPool(on_disk)):
        staged = pool.stage([tensor_from_array("w", ones)])
        print_strays()
        assert np.array_equal(np.frombuffer(staged.items[0].content()), ones)
        staged.release()
        pool.close()
    with CheckpointManager(sys.argv[1], CheckpointConfig(async_save="process")) as manager:
        for step in (1, 2):
            manager.save(step, {"w": ones})
            print_strays()
        manager.wait()
        of_worker = f"/proc/{manager._engine._worker.pid}/fd"
        assert [os.readlink(f"{of_worker}/{number}") for number in range(3)] == ["/dev/null"] * 3
        assert b"STRAY!" not in (manager.directory / ".ckpt.lease").read_bytes()
"""


def test_what_libraries_print_to_closed_streams_is_not_in_the_memory_of_a_save(
    tmp_path: Path,
) -> None:
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh"]
    command = [sys.executable, "-c", textwrap.dedent(STRAY_PRINTS_INTO_A_SAVE), str(tmp_path)]
    done = subprocess.run([*closed, *command], cwd=ROOT_OF_PROJECT, timeout=60, check=False)
    assert done.returncode == 0
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"ckpt-1.ckpt", "ckpt-2.ckpt"}


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_create_refuses_a_taken_name(tmp_path: Path) -> None:
    DISK.create(tmp_path / "a", mode=0o600).close()
    with pytest.raises(FileExistsError):
        DISK.create(tmp_path / "a", mode=0o600)


def test_create_refuses_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        DISK.create(tmp_path / "link", mode=0o600)
    assert not (tmp_path / "elsewhere").exists()


def test_create_gives_the_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        DISK.create(tmp_path / "a", mode=0o664).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o664


def test_create_closes_its_descriptor_when_the_mode_cannot_be_set(tmp_path: Path) -> None:
    with nothing_stays_open(), pytest.raises(OverflowError):
        DISK.create(tmp_path / "a", mode=1 << 80)


def test_read_only_file_is_written_past_the_page_cache_by_everybody(tmp_path: Path) -> None:
    # Root without its capabilities is an owner like any other.
    as_owner = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    if as_owner and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, or not to be root")
    writer = child(
        f"""
        import os
        from pathlib import Path
        from ckptmgr.io.filesystem import OsFileSystem

        def direct(mode):
            file = OsFileSystem().create(Path({str(tmp_path)!r}) / oct(mode), mode=mode)
            flags = [Path("/proc/self/fdinfo", name).read_text().split()[3]
                     for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fdinfo/{{name}}")]
            file.close()
            return sum(bool(int(flag, 8) & os.O_DIRECT) for flag in flags)

        print(direct(0o600) == direct(0o400), flush=True)
        """,
        *as_owner,
    )
    output, errors = writer.communicate()
    assert output == "True\n", errors


@pytest.mark.parametrize("offset", [0, 1, DIRECT_IO_ALIGNMENT])
@pytest.mark.parametrize("size", [1, DIRECT_IO_ALIGNMENT, 3 * DIRECT_IO_ALIGNMENT, 5000])
@pytest.mark.parametrize("shift", [0, 8])
def test_write_at_writes_whatever_the_alignment(
    tmp_path: Path, offset: int, size: int, shift: int
) -> None:
    pages = mmap.mmap(-1, 5 * DIRECT_IO_ALIGNMENT)
    pages[:] = os.urandom(len(pages))
    data = memoryview(pages)[shift : shift + size]
    file = DISK.create(tmp_path / "a", mode=0o600)
    file.write_at(offset, data)
    file.sync()
    file.close()
    assert read(tmp_path / "a") == bytes(offset) + bytes(data)


def test_write_at_counts_bytes_of_views_of_wider_items(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a", mode=0o600)
    file.write_at(0, memoryview(bytes(range(16))).cast("I"))
    file.close()
    assert read(tmp_path / "a") == bytes(range(16))


def test_reserve_sets_the_size_and_reads_as_zeros(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a", mode=0o600)
    file.reserve(0)
    file.reserve(5000)
    file.write_at(1, b"x")
    file.close()
    assert read(tmp_path / "a") in (b"\0x" + bytes(4998), b"\0x")


def test_reserve_beyond_a_limit_is_reported_with_the_path(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a", mode=0o600)
    with file_size_limit(4096), pytest.raises(OSError, match=r"File too large.*/a'"):
        file.reserve(4097)
    file.close()


@pytest.mark.parametrize("size", [2 * DIRECT_IO_ALIGNMENT, 5000])
def test_write_beyond_a_limit_is_reported(tmp_path: Path, size: int) -> None:
    pages = mmap.mmap(-1, 2 * DIRECT_IO_ALIGNMENT)
    file = DISK.create(tmp_path / "a", mode=0o600)
    with file_size_limit(4096), pytest.raises(OSError, match="File too large") as caught:
        file.write_at(0, memoryview(pages)[:size])
    file.close()
    assert caught.value.errno == errno.EFBIG


def test_change_that_fails_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "header").write_bytes(bytes(4096))
    file = DISK.change(tmp_path / "header")
    with file_size_limit(4096), pytest.raises(OSError, match=r"File too large.*/header'"):
        file.write_at(4096, bytes(4096))
    file.close()


def test_close_twice_is_harmless(tmp_path: Path) -> None:
    file = DISK.create(tmp_path / "a", mode=0o600)
    file.close()
    file.close()
    source = DISK.open(tmp_path / "a")
    source.close()
    source.close()


def test_close_reports_a_lost_descriptor(tmp_path: Path) -> None:
    before = open_descriptors()
    file = DISK.create(tmp_path / "a", mode=0o600)
    for descriptor, _ in open_descriptors() - before:
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.close()
    file.close()


def test_open_follows_a_final_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "link").symlink_to("a")
    assert read(tmp_path / "link") == b"content"


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch, *, reads_end: bool = False) -> list[int]:
    """Let the system refuse every transfer past the page cache, or end such reads at once; return who asked."""
    asked: list[int] = []
    pwrite, preadv = os.pwrite, os.preadv

    def is_direct(descriptor: int) -> bool:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return False
        asked.append(descriptor)
        return True

    def write(descriptor: int, data: memoryview, offset: int) -> int:
        if is_direct(descriptor):
            raise OSError(errno.EOPNOTSUPP, "not here")
        return pwrite(descriptor, data, offset)

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(descriptor):
            if reads_end:
                return 0
            raise OSError(errno.EOPNOTSUPP, "not here")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    return asked


@pytest.mark.parametrize("reads_end", [False, True])
def test_file_system_that_takes_the_flag_but_no_direct_transfer_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_end: bool
) -> None:
    content, path = new_pages(1 << 20), tmp_path / "a"
    content[:] = os.urandom(len(content))
    asked = refuse_direct_io(monkeypatch, reads_end=reads_end)
    new = DISK.create(path, mode=0o600)
    new.write_at(0, content)
    new.close()
    file = DISK.open(path, is_uncached=True)
    back = new_pages(len(content))
    file.read_into(0, back)
    file.close()
    assert back == content == path.read_bytes()
    if not asked:
        pytest.skip("this file system has no direct I/O")
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["fifo", "device", "directory"])
@pytest.mark.parametrize("is_head", [False, True], ids=["open", "read_head"])
def test_open_refuses_what_is_no_regular_file(tmp_path: Path, kind: str, is_head: bool) -> None:
    path = Path("/dev/null") if kind == "device" else tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "directory":
        path.mkdir()
    with (
        nothing_stays_open(),
        pytest.raises(OSError, match="not a regular file") as caught,
    ):
        DISK.read_head(path.parent, path.name, most_bytes=1) if is_head else DISK.open(path)
    assert caught.value.filename == str(path)


def test_head_of_a_file_comes_with_its_whole_size_and_its_identity(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    status = DISK.status(tmp_path / "a")
    assert status is not None
    head = DISK.read_head(tmp_path, "a", most_bytes=4)
    assert head == (b"0123", 10, status.identity)
    assert DISK.read_head(tmp_path, "a", most_bytes=99).data == b"0123456789"


@pytest.mark.parametrize("is_held", [False, True])
def test_head_of_a_link_is_refused(tmp_path: Path, is_held: bool) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("a")
    with (
        DISK.hold_directory(tmp_path) if is_held else contextlib.nullcontext(),
        pytest.raises(OSError, match="is a link") as caught,
    ):
        DISK.read_head(tmp_path, "link", most_bytes=4)
    assert caught.value.filename == str(tmp_path / "link")


def test_read_past_the_end_names_where_the_file_ended(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    file = DISK.open(tmp_path / "a")
    with pytest.raises(TruncatedError) as caught:
        file.read_into(6, memoryview(bytearray(8)))
    file.close()
    assert caught.value.offset == 10


def test_replace_swaps_names_and_keeps_open_readers(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"new")
    reader = DISK.open(tmp_path / "old")
    DISK.replace(tmp_path / "new", tmp_path / "old")
    DISK.sync_directory(tmp_path)
    assert read_bytes(reader, 0, 3) == b"old"
    reader.close()
    assert read(tmp_path / "old") == b"new"
    assert list(DISK.list(tmp_path)) == ["old"]


def test_list_tells_files_directories_and_others_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "same").hardlink_to(tmp_path / "file")
    listed = DISK.list(tmp_path)
    assert (listed["file"].size_bytes, listed["file"].is_file) == (5, True)
    assert (listed["directory"].is_file, listed["directory"].is_directory) == (False, True)
    assert (listed["link"].is_file, listed["link"].is_directory) == (False, False)
    assert listed["same"].identity == listed["file"].identity
    assert DISK.status(tmp_path / "same") == listed["file"]
    assert DISK.status(tmp_path / "absent") is None


def test_sync_directory_accepts_file_systems_that_cannot() -> None:
    with contextlib.suppress(FileNotFoundError):
        DISK.sync_directory(Path("/proc/self"))


def test_sync_directory_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError):
        DISK.sync_directory(tmp_path / "a")


def test_make_directory_makes_parents_with_the_mode(tmp_path: Path) -> None:
    DISK.make_directory(tmp_path / "a" / "b", mode=0o700)
    DISK.make_directory(tmp_path / "a" / "b", mode=0o755)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_make_directory_refuses_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(NotADirectoryError, match="exists and is not a directory"):
        DISK.make_directory(tmp_path / "a", mode=0o755)


def test_free_bytes_is_what_statvfs_says(tmp_path: Path) -> None:
    free = DISK.free_bytes(tmp_path)
    assert free is not None
    assert 0 < free <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_lock_of_a_live_process_shows_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    holder = child(f"""
        from pathlib import Path
        from ckptmgr.io.filesystem import OsFileSystem
        with OsFileSystem().lock(Path({str(tmp_path / "lock")!r}), owner="rank 3"):
            print("held", flush=True)
            input()
    """)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with DISK.lock(tmp_path / "lock", owner="me") as owner:
            assert owner == "rank 3"
        holder.kill()
    with DISK.lock(tmp_path / "lock", owner="me") as owner:
        assert owner is None
    assert (tmp_path / "lock").read_text() == "me"


def test_lock_is_not_kept_by_a_child_that_was_forked_under_it(tmp_path: Path) -> None:
    trainer = child(f"""
        import os, time
        from pathlib import Path
        from ckptmgr.io.filesystem import OsFileSystem
        with OsFileSystem().lock(Path({str(tmp_path / "lock")!r}), owner="trainer"):
            if os.fork() == 0:
                print("loader", flush=True)
                os.close(1)
                input()
                os._exit(0)
            os.wait()
    """)
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "loader\n"
        with DISK.lock(tmp_path / "lock", owner="me") as owner:
            assert owner == "trainer"
        trainer.kill()
        trainer.wait()
        with DISK.lock(tmp_path / "lock", owner="me") as owner:
            assert owner is None


def test_lock_that_a_forked_child_unwinds_stays_with_its_parent(tmp_path: Path) -> None:
    trainer = child(f"""
        import os
        from pathlib import Path
        from ckptmgr.io.filesystem import OsFileSystem
        with OsFileSystem().lock(Path({str(tmp_path / "lock")!r}), owner="trainer"):
            is_child = os.fork() == 0
            if not is_child:
                print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
                input()
    """)
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "0\n"
        with DISK.lock(tmp_path / "lock", owner="me") as owner:
            assert owner == "trainer"
        trainer.kill()


def test_lock_refuses_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "lock").symlink_to("precious")
    with (
        pytest.raises(StoreLocked, match="symbolic link"),
        DISK.lock(tmp_path / "lock", owner="me"),
    ):
        pytest.fail("locked through a link")
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_lock_passes_on_errors_of_its_file(tmp_path: Path) -> None:
    lock = DISK.lock(tmp_path / "lock", owner="me")
    with file_size_limit(0), pytest.raises(OSError, match="too large"), lock:
        pytest.fail("the owner cannot have been written")


def test_full_disk_is_reported_and_can_still_be_locked(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1M tmpfs /mnt 2>/dev/null || exit 77; exec "$@"'
    writer = child(
        """
        import errno, os
        from pathlib import Path
        from ckptmgr.io.filesystem import OsFileSystem
        disk = OsFileSystem()
        file = disk.create(Path("/mnt/a"), mode=0o600)
        for call in (lambda: file.reserve(2 << 20), lambda: file.write_at(0, bytes(2 << 20))):
            try:
                call()
            except OSError as error:
                print(errno.errorcode[error.errno])
        print(disk.free_bytes(Path("/mnt")))
        with disk.lock(Path("/mnt/lock"), owner="me") as owner:
            print(owner, disk.status(Path("/mnt/lock")).size_bytes)
        """,
        *("unshare", "-Urm", "sh", "-c", mount, "sh"),
    )
    output, problem = writer.communicate(timeout=60)
    if writer.returncode == 77 or "unshare" in problem:
        pytest.skip(f"no tmpfs in a user namespace here: {problem}")
    assert (output.split(), problem) == (["ENOSPC", "ENOSPC", "0", "None", "0"], "")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A read-only file of the user who runs the test, who is nobody special."""
    path = tmp_path / "data"
    path.write_bytes(b"old content")
    path.chmod(0o400)
    if os.geteuid() != 0:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        path = path.rename(home / "data")
        os.chown(path, 65534, 65534)
        os.seteuid(65534)
        try:
            yield path
        finally:
            os.seteuid(0)


def test_change_overwrites_bytes_of_a_read_only_file_and_leaves_its_mode(read_only: Path) -> None:
    with contextlib.closing(api.OsFileSystem().change(read_only)) as file:
        file.reserve(100)
        file.write_at(0, b"new")
        file.sync()
    assert read_only.read_bytes() == b"new content"
    assert read_only.stat().st_mode & 0o777 == 0o400


def test_change_refuses_what_is_not_a_file_of_its_own(tmp_path: Path) -> None:
    fs = api.OsFileSystem()
    target = tmp_path / "target"
    target.write_bytes(b"content")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="symbolic links"):
        fs.change(tmp_path / "link")
    with pytest.raises(OSError, match="not a regular file"):
        fs.change(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        fs.change(tmp_path / "absent")
    (tmp_path / "other").hardlink_to(target)
    with pytest.raises(OSError, match="has other names"):
        fs.change(target)
