# SPDX-License-Identifier: Apache-2.0
"""File systems of directories, by the table of mounts of this process."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


def kind_of(path: Path, *, table: Path = _TABLE) -> str | None:
    """Return the kind of file system that a path is on, such as `ext4`; None when unknown."""
    real = os.fsencode(os.path.realpath(path))
    try:
        lines = table.read_bytes().splitlines()
    except OSError:
        return None
    found, longest = None, -1
    for line in lines:
        place, dash, rest = line.partition(b" - ")
        fields = place.split()
        if not dash or len(fields) < 5 or not rest:
            continue
        mount = _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), fields[4])
        is_above = real == mount or real.startswith(mount.rstrip(b"/") + b"/")
        if is_above and len(mount) >= longest:  # of two at one place the later one is on top
            found, longest = rest.split()[0].decode(errors="replace"), len(mount)
    return found


def is_shared(kind: str | None) -> bool:
    """Return whether other hosts may change files of such a file system unheard.

    >>> [is_shared(kind) for kind in ("nfs4", "fuse.sshfs", "fuseblk", "ext4", None)]
    [True, True, False, False, False]
    """
    return kind is not None and (kind in _SHARED or kind == "fuse" or kind.startswith("fuse."))
