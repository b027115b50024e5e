# SPDX-License-Identifier: Apache-2.0
"""Power cuts on real file systems: a mounted disk image is copied at every call of a process that changes it.

A copy of the image of a mounted file system holds the bytes that the file system has sent to the device, as after a power
cut at this moment leaves. strace stops the process with SIGSTOP at each call, so that one run shows every moment.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.faults.straced import ROOT, environment

_CALLS = (
    "pwrite64,fallocate,ftruncate,fsync,fdatasync,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir"
)
_SIGSTOP = re.compile(r"(\d+) +--- (SIGSTOP \{|stopped by SIGSTOP)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystemKind:
    """A file system that can be made in a file.

    Attributes:
        size_mib: The smallest that its tools make.
        make: The command that makes it.
        options: Of mount.
    """

    size_mib: int
    make: tuple[str, ...]
    options: str


# The clock must not commit a journal while its image is copied: hence commit=300.
KINDS = {
    "ext4": FileSystemKind(size_mib=32, make=("mkfs.ext4", "-q", "-F"), options="loop,commit=300"),
    "xfs": FileSystemKind(size_mib=300, make=("mkfs.xfs", "-q", "-f"), options="loop"),
    "btrfs": FileSystemKind(
        size_mib=128, make=("mkfs.btrfs", "-q", "-f"), options="loop,commit=300"
    ),
}


class Unavailable(Exception):
    """This machine cannot make or mount a file system."""


def run_tool(*command: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True)


def copy(image: Path, target: Path) -> Path:
    """Copy an image without its holes."""
    run_tool("cp", "--sparse=always", image, target)
    return target


@dataclass(frozen=True, slots=True)
class Disks:
    """Images of one file system; one is mounted at a time.

    Attributes:
        kind: The file system.
        folder: Where images and the mount point are.
    """

    kind: FileSystemKind
    folder: Path

    def new(self) -> Path:
        """Return an empty image.

        Raises:
            Unavailable: With the reason.
        """
        image = self.folder / "new.img"
        with image.open("wb") as file:
            file.truncate(self.kind.size_mib << 20)
        if shutil.which(self.kind.make[0]) is None:
            raise Unavailable(f"needs {self.kind.make[0]}")
        run_tool(*self.kind.make, image)
        try:
            with self.mounted(image):
                pass
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"cannot mount: {error.stderr.decode().strip()}") from None
        return image

    @contextlib.contextmanager
    def mounted(self, image: Path) -> Iterator[Path]:
        """Mount an image; unmounted by its path, whatever happens."""
        directory = self.folder / "m"
        directory.mkdir(exist_ok=True)
        run_tool("mount", "-o", self.kind.options, image, directory)
        try:
            yield directory
        finally:
            run_tool("umount", directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Photograph:
    """The state that a power cut leaves.

    Attributes:
        image: Of the disk.
        is_acknowledged: Whether the work was acknowledged before.
        after: The last call before.
    """

    image: Path
    is_acknowledged: bool
    after: str


def photographs(
    disks: Disks, image: Path, command: Callable[[Path], list[str]]
) -> list[Photograph]:
    """Run a command on a mounted copy of an image, and photograph it after every call that changes it, and at the end."""
    disk = copy(image, disks.folder / "disk.img")
    found: list[Photograph] = []

    def take(after: str, *, is_acknowledged: bool) -> None:
        photo = copy(disk, disks.folder / f"photo-{len(found)}.img")
        found.append(Photograph(image=photo, is_acknowledged=is_acknowledged, after=after))

    with disks.mounted(disk) as directory, tempfile.TemporaryFile("w+") as output:

        def take_stopped(after: str) -> None:
            if str(directory) in after and ".lease" not in after:
                # The offset is shared with the process, which is stopped.
                text = os.pread(output.fileno(), 1 << 16, 0)
                take(after, is_acknowledged=b"acknowledged" in text)

        returncode = _stop_at_each_call(command(directory), output, take_stopped)
        output.seek(0)
        assert returncode == 0, output.read()
        take("the end", is_acknowledged=True)
    disk.unlink()
    return found


def _stop_at_each_call(command: Sequence[str], output: IO[str], take: Callable[[str], None]) -> int:
    """Run a command; call `take` with the last call of a process that is stopped, and let it go on. Return its exit code."""
    reader, writer = os.pipe()
    inject = f"inject={_CALLS}:signal=SIGSTOP"
    strace = [
        "strace",
        "-f",
        "-y",
        "-o",
        f"/dev/fd/{writer}",
        "-e",
        f"trace={_CALLS}",
        "-e",
        inject,
    ]
    process = subprocess.Popen(
        [*strace, *command],
        pass_fds=[writer],
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(),
    )
    os.close(writer)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with open(reader, errors="replace") as log:
            for line in log:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    _follow(lines, take)
    return process.wait()


def _follow(lines: queue.SimpleQueue[str | None], take: Callable[[str], None]) -> None:
    last: dict[str, str] = {}
    delivered: set[str] = set()
    stopping: dict[int, str] = {}
    while True:
        for pid in list(stopping):
            states = _thread_states(pid)
            if states <= set("tTZX"):
                after = stopping.pop(pid)
                if states & set("tT"):
                    take(after)
                    os.kill(pid, signal.SIGCONT)
        try:
            line = lines.get(block=not stopping)
        except queue.Empty:
            os.sched_yield()
            continue
        if line is None:
            return
        thread = line.split(" ", 1)[0]
        match = _SIGSTOP.match(line)
        if match is None:
            last[thread] = line
        elif match[2].startswith("SIGSTOP"):
            delivered.add(thread)
        elif thread in delivered:
            # Its threads stop one after the other.
            delivered.discard(thread)
            with contextlib.suppress(FileNotFoundError):
                stopping[_process_of(thread)] = last.get(thread, "")


def _process_of(thread: str) -> int:
    status = Path(f"/proc/{thread}/status").read_text()
    return int(status.partition("Tgid:")[2].split()[0])


def _thread_states(pid: int) -> set[str]:
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(path.read_text().rpartition(")")[2].split()[0])
    return states
