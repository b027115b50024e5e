# SPDX-License-Identifier: Apache-2.0
"""Real processes under strace, which fails, lies to or kills them at a chosen system call.

A first run without interference is read to find the calls that change a directory, and how many calls of that name the
thread had made: strace counts by name and thread. `loaded` makes these numbers the same in each run. No `--seccomp-bpf`:
with it strace 6.1 delivers no signals.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

LOADED = "loaded\n"
NO_FILE = 999_999  # no file has this descriptor
ROOT = Path(__file__).resolve().parents[2]
CHANGES = (
    "openat,write,pwrite64,fallocate,ftruncate,fsync,fdatasync,close,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,rmdir"
)
KINDS = {
    "write": "write",
    "pwrite64": "write",
    "fallocate": "reserve",
    "ftruncate": "reserve",
    "fsync": "sync",
    "fdatasync": "sync",
    "close": "close",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "link": "rename",
    "linkat": "rename",
    "unlink": "remove",
    "unlinkat": "remove",
    "rmdir": "remove",
    "mkdir": "create",
    "mkdirat": "create",
}
_NAMED = ("create", "rename", "remove")
_CALL = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<rest>.*)")
_FILE = re.compile(r"\(\d+<(?P<path>[^<>]+)>(?:, \"(?P<entry>[^\"]*)\")?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call that changes a directory.

    Attributes:
        name: Of the call.
        number: How many calls of that name its thread had made, with this one.
        kind: Its effect: create, write, reserve, sync, close, rename, remove.
        line: As strace shows it.
        is_shared: Whether another thread had made as many calls of that name before, which would meet the fault.
    """

    name: str
    number: int
    kind: str
    line: str
    is_shared: bool = False

    @property
    def path(self) -> str:
        """The path of the open file, or of calls that take names the whole line."""
        found = _FILE.search(self.line)
        return self.line if found is None or self.kind in _NAMED else found["path"]

    @property
    def result(self) -> str:
        """The result of the call."""
        return self.line.rpartition("= ")[2]

    def __str__(self) -> str:
        return f"{self.name} {self.number}: {self.line}"


@dataclass(frozen=True, slots=True)
class Straced:
    """How a process under strace ended.

    Attributes:
        returncode: Of the process; negative for a signal.
        output: Of both streams.
        log: What strace saw.
    """

    returncode: int
    output: str
    log: str

    @property
    def is_acknowledged(self) -> bool:
        """Whether the process said that all is done."""
        return self.returncode == 0

    @property
    def is_injected(self) -> bool:
        """Whether the fault happened at all; a wrong number would pass silently."""
        return "(INJECTED)" in self.log

    def injected(self) -> list[str]:
        """Return the calls that met the fault."""
        return [line for line in whole_lines(self.log.splitlines()) if "(INJECTED)" in line]

    def ended(self) -> list[str]:
        """Return the calls that a signal did not let return, of a process that SIGKILL ended."""
        is_killed = "killed by SIGKILL" in self.log
        lines = whole_lines(self.log.splitlines())
        return [line for line in lines if is_killed and line.endswith("= ?")]

    def met(self, fault: str) -> list[str]:
        """Return the calls that met an error, a lie or a signal."""
        return self.ended() if "signal=" in fault else self.injected()


def is_among(call: Call, lines: Iterable[str]) -> bool:
    """Return whether one of the calls is of the same name, on the same kind of file as in the run without faults."""
    return any(_signature(call.line) == _signature(line) for line in lines)


def straced(
    command: Sequence[str],
    log: Path,
    *options: str,
    is_offset: bool = True,
    timeout_s: float = 120,
) -> Straced:
    """Run a command under strace, which logs calls that change a disk, with the paths of descriptors.

    Args:
        command: `python -m`, then ckptmgr or the saver, with arguments; see `loaded`.
        log: Where strace writes.
        options: Of strace: `-e inject=...`.
        is_offset: Whether the main thread begins with calls that fail, so that no number is that of a call of another
            thread too. SIGKILL would meet these calls.
        timeout_s: After so long the test fails.
    """
    _, _, module, *arguments = command
    output = log.with_suffix(".output")
    server = _server()
    process = int(_ask(server, json.dumps([str(output), is_offset, module, arguments])))
    watch = ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={CHANGES}", *options]
    with subprocess.Popen(
        [*watch, "-p", str(process)], stderr=subprocess.PIPE, text=True
    ) as strace:
        try:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert "attached" in said, said
            _tell(server, "attached")
            strace.communicate(timeout=timeout_s)  # until workers of the process have ended as well
        except BaseException:
            os.kill(process, signal.SIGKILL)
            _server.cache_clear()
            raise
    returncode = int(_answer(server))
    return Straced(returncode, output.read_text(), log.read_text(errors="replace"))


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.loaded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    atexit.register(server.communicate)
    assert _answer(server) == LOADED
    return server


def _ask(server: subprocess.Popen[str], line: str) -> str:
    _tell(server, line)
    return _answer(server)


def _tell(server: subprocess.Popen[str], line: str) -> None:
    assert server.stdin is not None
    server.stdin.write(line + "\n")
    server.stdin.flush()


def _answer(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline()


def environment() -> dict[str, str]:
    """Return variables under which two runs of one command make the same calls while they load Python."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONPYCACHEPREFIX": _byte_code().name,
        "PYTHONHASHSEED": "0",
    }


@cache
def _byte_code() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="ckptmgr-pyc-")


def changes(log: str, directory: Path) -> list[Call]:
    """Return the calls that change files below a directory, leases aside."""
    counts: Counter[tuple[str, str]] = Counter()
    seen: set[tuple[str, int]] = set()
    found: list[Call] = []
    for line in whole_lines(log.splitlines()):
        match = _CALL.match(line)
        if match is None:
            continue
        thread, name = match["thread"], match["name"]
        counts[thread, name] += 1
        kind = _kind(name, line)
        number = counts[thread, name]
        if f"({NO_FILE}" in line:
            continue
        is_first = (name, number) not in seen
        seen.add((name, number))
        if kind is None:
            continue
        call = Call(name=name, number=number, kind=kind, line=line, is_shared=not is_first)
        if str(directory) in call.path and ".lease" not in call.path and " = -1 " not in line:
            found.append(call)
    return found


def _kind(name: str, line: str) -> str | None:
    if name == "openat":
        return "create" if "O_CREAT" in line else None
    if name == "close":
        return "close" if ".tmp" in line else None
    return KINDS.get(name)


def whole_lines(lines: Iterable[str]) -> Iterable[str]:
    """Join the two halves of calls during which other threads made one."""
    begun: dict[str, str] = {}
    for line in lines:
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
        elif "resumed>" in line and thread in begun:
            yield begun.pop(thread) + line.partition("resumed>")[2]
        else:
            yield line


def _signature(line: str) -> str:
    """Return the name of a call and the names of its files, without what differs between two runs."""
    call = line.partition(" ")[2].strip()
    if match := _FILE.search(call):
        # Files are opened by their name in a directory, leases as well as others. One that is
        # created may be opened once more, for direct writes.
        created = " O_EXCL" if "O_EXCL" in call else ""
        name = call.partition("(")[0]
        entry = match["entry"] or ""
        named = f" {entry}" if name.endswith("at") else ""  # not the bytes of a write
        call = f"{name} {match['path']}{named}{created}"
    return re.sub(
        r"(?<=export-)[0-9a-f]{16}|[0-9a-f]+(-[0-9a-f.]+)+\.tmp|\d{8}T[\d.]+Z|\) += .*", "", call
    )


def python(*arguments: str | Path) -> list[str]:
    """Return the command that runs this interpreter."""
    return [sys.executable, *map(str, arguments)]
