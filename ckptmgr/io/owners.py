# SPDX-License-Identifier: Apache-2.0
"""The users whose files decide in a directory.

Where a directory is sticky, such as `/tmp`, a user may add files but not remove those of others. A
file of such a user must not have files of others removed, or be believed in their place. Elsewhere
who may add files may remove them, too; and colleagues, containers and file servers that change user
ids go on.
"""

from __future__ import annotations

import os

from ckptmgr.io.filesystem import FileStatus


def is_of_stranger(file: FileStatus, directory: FileStatus | None) -> bool:
    """Return whether a file of a sticky directory belongs to an untrusted user.

    Trusted are this user, root and the owner of the directory.
    """
    if file.owner is None or directory is None or not directory.is_sticky:
        return False
    return file.owner not in (os.geteuid(), 0, directory.owner)


def about_stranger(file: FileStatus) -> str:
    """Return why a file of a stranger decides nothing."""
    return (
        f"belongs to uid {file.owner}, who may add files to this sticky directory but not remove "
        "those of others; it decides nothing"
    )
