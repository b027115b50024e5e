# SPDX-License-Identifier: Apache-2.0
"""Which promise of durability a process did not keep, by the order of its system calls: no root, no power cut needed.

* A file gets its name only after its content was synced.
* A directory in which names changed is synced before the work is acknowledged.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.straced import whole_lines

_WRITE = re.compile(r"\b(?:pwrite64|write|ftruncate)\(\d+<([^<>]+)>")
_SYNC = re.compile(r"(?:fsync|fdatasync)\(\d+<([^<>]+)>")
_RENAME = re.compile(r"\b(?:rename|renameat|renameat2|link|linkat)\(")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FOLDER = re.compile(r"\d+<([^<>]+)>, (?=\")")
_PROMISES_NOTHING = (".lease", ".net.starts")
_ACKNOWLEDGED = '"acknowledged'


def broken_promise(log: str, directory: Path) -> str | None:
    """Return the first promise that a process broke until it acknowledged its work or ended, or None."""
    unsynced: set[str] = set()
    changed: set[str] = set()
    for line in whole_lines(log.splitlines()):
        if _ACKNOWLEDGED in line:
            break
        is_done = " = -1 " not in line and "(INJECTED)" not in line
        if not is_done or str(directory) not in line:
            continue
        if any(name in line for name in _PROMISES_NOTHING):
            continue
        if match := _WRITE.search(line):
            if match[1].startswith(str(directory)):
                unsynced.add(match[1])
        elif match := _SYNC.search(line):
            unsynced.discard(match[1])
            changed.discard(match[1])
        elif _RENAME.search(line):
            source, target = _names(line)
            if source in unsynced:
                return f"{target} was published before its content was synced"
            changed |= {str(Path(source).parent), str(Path(target).parent)}
    left = sorted(changed) + sorted(unsynced)
    return f"not synced: {', '.join(left)}" if left else None


def _names(line: str) -> tuple[str, str]:
    """Return the two paths of a rename, also where they are relative to descriptors."""
    folders, names = _FOLDER.findall(line), _QUOTED.findall(line)
    if len(folders) == 2:
        names = [str(Path(folder, name)) for folder, name in zip(folders, names, strict=True)]
    source, target = names
    return source, target
