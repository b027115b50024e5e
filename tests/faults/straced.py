# SPDX-License-Identifier: Apache-2.0
"""Real processes under strace, which fails, lies to or kills them at a chosen system call.

A first run without interference is read to find the calls that change a directory, and how many calls of that name the
thread had made: strace counts by name and thread. No `--seccomp-bpf`: with it strace 6.1 delivers no signals.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

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
_FILE = re.compile(r"\(\d+<(?P<path>[^<>]+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A system call that changes a directory.

    Attributes:
        name: Of the call.
        number: How many calls of that name its thread had made, with this one.
        kind: What it does: create, write, reserve, sync, close, rename, remove.
        line: As strace shows it.
        is_shared: Whether another thread had made as many calls of that name before: an error is injected into both, and
            SIGKILL into the other one.
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
        """What the call returned."""
        return self.line.rpartition("= ")[2]

    def __str__(self) -> str:
        return f"{self.name} {self.number}: {self.line}"


@dataclass(frozen=True, slots=True)
class Straced:
    """How a process under strace ended.

    Attributes:
        returncode: Of the process; negative for a signal.
        output: What it said to both streams.
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

    @property
    def is_killed(self) -> bool:
        """Whether a process was killed at the chosen call."""
        return "killed by SIGKILL" in self.log

    def injected(self) -> list[str]:
        """Return the calls that met the fault."""
        return [line for line in self.log.splitlines() if "(INJECTED)" in line]

    def has_met(self, call: Call) -> bool:
        """Return whether the fault happened in a call on the same kind of file as in the run without faults."""
        return any(_signature(call.line) == _signature(line) for line in self.injected())


def straced(command: Sequence[str], log: Path, *options: str, timeout_s: float = 120) -> Straced:
    """Run a command under strace, which logs calls that change a disk, with the paths of descriptors.

    Args:
        command: Begins with a real interpreter: a shim would be traced as well.
        log: Where strace writes.
        options: Of strace: `-e inject=...`.
        timeout_s: After so long the test fails.
    """
    done = subprocess.run(
        ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={CHANGES}", *options, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(),
        timeout=timeout_s,
    )
    return Straced(done.returncode, done.stdout + done.stderr, log.read_text(errors="replace"))


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
    """Return the calls that change files below a directory, leases aside.

    Of shared calls only those of kinds of which a failure elsewhere is survived: leases and the count of starts.
    """
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
        is_first = (name, number) not in seen
        seen.add((name, number))
        if kind is None or not (is_first or kind in ("write", "reserve", "rename")):
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
        call = f"{call.partition('(')[0]} {match['path']}"
    return re.sub(r"[0-9a-f]+(-[0-9a-f.]+)+\.tmp|\d{8}T[\d.]+Z|\) += .*", "", call)


def python(*arguments: str | Path) -> list[str]:
    """Return the command that runs this interpreter."""
    return [sys.executable, *map(str, arguments)]
