# SPDX-License-Identifier: Apache-2.0
"""File systems of directories, by the table of mounts of this process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(rb"\\([0-7]{3})")
# The kernel of a host reports only its own changes there. Every FUSE may be of that kind.
_SHARED = frozenset(
    {
        *("9p", "acfs", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf"),
        *("virtiofs", "vmhgfs", "wekafs"),
    }
)


class Mount(NamedTuple):
    """A mounted file system: its kind, such as `ext4`, and its options, such as `nobarrier`."""

    kind: str
    options: frozenset[str]


def kind_of(path: Path, *, table: Path = _TABLE) -> str | None:
    """Return the kind of file system that a path is on, such as `ext4`; None when unknown."""
    found = mount_of(path, table=table)
    return None if found is None else found.kind


def mount_of(path: Path, *, table: Path = _TABLE) -> Mount | None:
    """Return the mounted file system that a path is on; None when unknown."""
    real = os.fsencode(os.path.realpath(path))
    try:
        lines = table.read_bytes().splitlines()
    except OSError:
        return None
    found, longest = None, -1
    for line in lines:
        place, dash, rest = line.partition(b" - ")
        fields = place.split()
        if not dash or len(fields) < 6 or not rest:
            continue
        mount = _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), fields[4])
        is_above = real == mount or real.startswith(mount.rstrip(b"/") + b"/")
        if is_above and len(mount) >= longest:  # of two at one place the later one is on top
            kind, *more = rest.split()
            options = b",".join([fields[5], *more[1:]]).decode(errors="replace")
            found = Mount(kind.decode(errors="replace"), frozenset(options.split(",")))
            longest = len(mount)
    return found


def is_shared(kind: str | None) -> bool:
    """Return whether other hosts may change files of such a file system unheard.

    >>> [is_shared(kind) for kind in ("nfs4", "fuse.sshfs", "fuseblk", "ext4", None)]
    [True, True, False, False, False]
    """
    return kind is not None and (kind in _SHARED or kind == "fuse" or kind.startswith("fuse."))
