# SPDX-License-Identifier: Apache-2.0
"""Quarantine of damaged checkpoints: out of the way of every run, and kept for people to look at.

```
<directory>/.ckptmgr-quarantine/20260301T101500.000000Z/net-1_20.ckpt
                                                        net-1_20.ckpt.manifest.json
```

The moves are those into the trash (see `store.trash`). After a crash between them the manifest is
alone in the directory: the checkpoint is listed as missing or as a leftover, never as whole. Files
of many ranks stay: `repair` needs them beside each other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import Checkpoint
from ckptmgr.store.store import Store
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import QUARANTINE_NAME, STAMP


def quarantine(store: Store, checkpoint: Checkpoint, *, now: datetime) -> Path:
    """Move a damaged checkpoint, as listed, into the quarantine; return its folder there.

    Raises:
        StoreLocked: A live process writes its series.
        UnsafePrune: It is the last one that the listing counts, or of many ranks.
        OSError: From the disk, or another process saves under its name.
    """
    if checkpoint.shards:
        raise UnsafePrune(
            "files of many ranks are not moved into quarantine",
            path=checkpoint.path,
            hint="ckptmgr repair repairs them from each other; prune removes them",
        )
    into = store.directory / QUARANTINE_NAME / now.astimezone(UTC).strftime(STAMP)
    with store.lease(checkpoint.series):
        for failure in DirectoryTrash(store).throw_away([checkpoint], into):
            raise failure
    return into
