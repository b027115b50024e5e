# SPDX-License-Identifier: Apache-2.0
"""A server that has loaded Python, and forks a process for each work, which strace watches from the first call on.

strace counts calls by name and thread, and injects a fault by that number. Loading Python makes a thousand calls, and
their number changes with what Python finds of its byte code: so they come before strace does. Two threads of a work would
have calls of the same number: so the main thread begins with calls that fail and change nothing, if it is asked to.

On standard input: a request, and a line when strace is attached. On standard output: `loaded`, and for each request the
process identifier and the exit status.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy  # noqa: F401
import zstandard  # noqa: F401

from ckptmgr.cli import main as command_line
from ckptmgr.cli.commands import convert, crypt, export, pin, prune, rekey  # noqa: F401
from tests.faults import saver
from tests.faults.straced import LOADED, NO_FILE

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_OFFSET = 100  # more than any other thread of a work makes of one name
_OFFSET_OF_LOADING = 1500  # a worker process loads Python itself
_OPENED: tuple[Callable[[], object], ...] = (
    lambda: os.open("", os.O_RDONLY, dir_fd=NO_FILE),
    lambda: os.close(NO_FILE),
)
_CHANGED: tuple[Callable[[], object], ...] = (
    lambda: os.pwrite(NO_FILE, b"", 0),
    lambda: os.posix_fallocate(NO_FILE, 0, 1),
    lambda: os.ftruncate(NO_FILE, 0),
    lambda: os.fsync(NO_FILE),
    lambda: os.fdatasync(NO_FILE),
    lambda: os.rename("", "", src_dir_fd=NO_FILE, dst_dir_fd=NO_FILE),
    lambda: os.link("", "", src_dir_fd=NO_FILE, dst_dir_fd=NO_FILE),
    lambda: os.unlink("", dir_fd=NO_FILE),
    lambda: os.mkdir("", dir_fd=NO_FILE),
)


def load_rooms() -> None:
    """Import the modules that the works import when they use them first."""
    for room in ("core", "crypto", "engine", "files", "formats", "maintenance", "series", "store"):
        package = import_module(f"ckptmgr.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # of a framework or a key service
                import_module(found.name)


def serve() -> None:
    """Fork a process for each request."""
    load_rooms()
    say(LOADED.strip())
    while request := sys.stdin.readline():
        waits, begins = os.pipe()
        is_ready, readies = os.pipe()
        if (process := os.fork()) == 0:
            os.close(begins)
            os.close(is_ready)
            work(waits, readies, *json.loads(request))
            return
        os.close(waits)
        os.close(readies)
        os.read(is_ready, 1)  # strace would count some calls before that, or not
        os.close(is_ready)
        say(process)
        sys.stdin.readline()
        os.close(begins)
        say(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def work(
    waits: int, readies: int, output: str, is_offset: bool, module: str, arguments: Sequence[str]
) -> None:
    """Do a work once strace is there."""
    null = os.open(os.devnull, os.O_RDONLY)
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream, target in ((null, 0), (said, 1), (said, 2)):
        os.dup2(stream, target)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # strace is not our parent
    os.write(readies, b"1")
    os.read(waits, 1)
    for descriptor in (null, said, waits, readies):
        os.close(descriptor)
    if is_offset:
        _repeat(_OFFSET_OF_LOADING if "process" in arguments else _OFFSET, _OPENED)
        _repeat(_OFFSET, _CHANGED)
    if module == "ckptmgr":
        sys.argv[1:] = arguments
        command_line()
    else:
        directory, step, *options = arguments
        saver.main(directory, int(step), *options)


def say(text: object) -> None:
    """Send a line to the test."""
    print(text, flush=True)  # noqa: T201


def _repeat(count: int, calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        for _ in range(count):
            with contextlib.suppress(OSError):
                call()


if __name__ == "__main__":
    serve()
