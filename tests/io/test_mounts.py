# SPDX-License-Identifier: Apache-2.0
"""Which kind of file system a directory is on, by tables of mounts that are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.io.mounts import kind_of

TABLE = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
40 22 0:41 / /data rw - nfs4 server:/export rw
41 40 0:42 / /data/fast rw shared:9 master:3 - xfs /dev/nvme0 rw
42 22 0:43 / /mnt/with\\040blank rw - fuse.sshfs host: rw
43 22 0:44 / /twice rw - ext4 /dev/a rw
44 43 0:45 / /twice rw - lustre mds:/fs rw
this is no line of the table
50 22 0:46 / /data/fast/x rw without the dash
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/runs", "ext4"),
        ("/data", "nfs4"),
        ("/data/runs/net", "nfs4"),
        ("/data/fast/x/y", "xfs"),
        ("/database", "ext4"),
        ("/mnt/with blank/a", "fuse.sshfs"),
        ("/twice/a", "lustre"),
    ],
)
def test_nearest_mount_above_a_path_counts(tmp_path: Path, path: str, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert kind_of(Path(path), table=table) == kind


def test_kind_is_unknown_without_a_table(tmp_path: Path) -> None:
    assert kind_of(tmp_path, table=tmp_path / "none") is None


def test_this_machine_has_kinds() -> None:
    assert kind_of(Path("/proc/self")) == "proc"
