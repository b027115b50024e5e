# SPDX-License-Identifier: Apache-2.0
"""Count how often runs were started from the same checkpoint: a crash loop looks like progress to a scheduler.

The count lies in `.<series>.starts`, a small JSON file. It is a hint, not a promise: it is not synced, and a damaged one
counts as absent.
"""

from __future__ import annotations

import contextlib
import json

from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.source import read_bytes
from ckptmgr.store.store import Store

_MAX_BYTES = 4096


def count_start(store: Store, series: str, checkpoint: Checkpoint) -> int:
    """Note one more start from `checkpoint` and return how many there were without a newer save."""
    identity = [checkpoint.name, checkpoint.sequence]
    path = store.directory / f".{series}.starts"
    starts = 1
    with contextlib.suppress(
        OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError
    ):
        with contextlib.closing(store.fs.open(path)) as file:
            noted = json.loads(read_bytes(file, 0, min(file.size, _MAX_BYTES)))
        if noted["checkpoint"] == identity:
            starts += int(noted["starts"])
    with contextlib.suppress(OSError):
        note = json.dumps({"checkpoint": identity, "starts": starts}).encode()
        store.write_note(path, note, series=series)
    return starts
