# SPDX-License-Identifier: Apache-2.0
"""Names that no data file may have: those of manifests, sets, leases, notes and temporary files.

>>> [is_reserved_name(name) for name in ("a.ckpt.manifest.json", ".net.lease", "a.ckpt", "lease")]
[True, True, False, False]
"""

from __future__ import annotations

from ckptmgr.core.shard_names import is_set_name
from ckptmgr.io.leases import LEASE_SUFFIX
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.store.manifest.codec import SUFFIX
from ckptmgr.store.trash_folder import TRASH_NAME

_NOTE_SUFFIXES = (LEASE_SUFFIX, ".starts", ".mirror", ".save_now")


def is_reserved_name(name: str) -> bool:
    """Return whether a file of this name would replace one that belongs to other checkpoints."""
    return name.endswith(SUFFIX) or is_set_name(name) or is_bookkeeping_name(name)


def is_bookkeeping_name(name: str) -> bool:
    """Return whether a name in a directory of checkpoints is that of a run's own small files."""
    is_note = name.startswith(".") and name.endswith(_NOTE_SUFFIXES)
    return is_note or parse_temp(name) is not None or name == TRASH_NAME
