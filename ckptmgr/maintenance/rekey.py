# SPDX-License-Identifier: Apache-2.0
"""Change who may open checkpoints: keys, passphrases and public keys come and go, the data stays.

| file | what happens |
|---|---|
| container (`.ckpe`) | its header is rewritten, a few KiB; the payload is not touched |
| encrypted `.ckpt` | it has one key and no slots: the file is encrypted anew, as a stream, and swapped like a save |
| plain | nothing; it is named |

The order, for each checkpoint: its manifest can be checked by old and new keys; header copies, each durable before the next;
its manifest can be checked by the new keys only. So after a crash it opens with the old or the new keys, and doing the same
again finishes it. Whoever opened a file before may have kept its data key: `reencrypt` gives it a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptmgr.core.model import Checkpoint
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.leases import Processes
from ckptmgr.maintenance.rekey_change import Action, KeyChange, RekeyPlan
from ckptmgr.maintenance.rekey_steps import CheckpointKeys
from ckptmgr.store.change_leases import lease_of_checkpoint
from ckptmgr.store.store import Store

__all__ = [
    "Action",
    "RekeyPlan",
    "open_for_rekeying",
    "plan_reencryption",
    "plan_rekeying",
    "reencrypt_checkpoint",
    "rekey_checkpoint",
]


def open_for_rekeying(
    directory: Path,
    change: KeyChange,
    *,
    fs: FileSystem | None = None,
    processes: Processes | None = None,
    trust: Trust = DEFAULT_TRUST,
) -> Store:
    """Return a store that reads what any of the old and new keys authenticates, and nothing else.

    With a signing key it also signs anew what is encrypted anew, and reads only what that key has signed.

    Args:
        directory: Where the checkpoints lie.
        change: The change.
        fs: The disk.
        processes: Tells dead writers from live ones.
        trust: Its signing key signs anew. Where it accepts unsealed files, files without manifest are vouched for by
            their names, and manifests that are only authenticated are signed.
    """
    own = () if trust.signing_key is None else (trust.signing_key.public_key,)
    given = replace(trust, keys=change.all_keys, trusted_keys=own)
    return Store(directory, fs=fs, trust=given, processes=processes)


def plan_rekeying(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Return what would be done to a checkpoint; changes nothing.

    Args:
        store: From `open_for_rekeying`.
        checkpoint: As listed by it.
        change: The change.

    Raises:
        KeyProblem: It does not open with these keys.
        UnsafeWrite: Nobody would open it any more, or it cannot have such keys.
        CkptmgrError, OSError: It is damaged or cannot be read.
    """
    return CheckpointKeys(store, checkpoint, change).plan()


def rekey_checkpoint(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Change the keys of a checkpoint, durably; return what was done.

    Args:
        store: From `open_for_rekeying`.
        checkpoint: As listed by it.
        change: The change. What was done already is not done again.

    Raises:
        StoreLocked: Somebody is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. The checkpoint opens with the old or the new keys; doing the same again finishes it.
    """
    with lease_of_checkpoint(store, checkpoint):
        store.finish_swap(checkpoint)
        return CheckpointKeys(store, checkpoint, change).change()


def plan_reencryption(
    store: Store,
    checkpoint: Checkpoint,
    change: KeyChange,
    *,
    clock: Callable[[], float] = time.time,
) -> RekeyPlan:
    """Return what `reencrypt_checkpoint` would do; changes nothing. Errors as of `plan_rekeying`."""
    return CheckpointKeys(store, checkpoint, change, clock=clock).plan_reencryption()


def reencrypt_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    change: KeyChange,
    *,
    clock: Callable[[], float] = time.time,
) -> RekeyPlan:
    """Encrypt a checkpoint anew, durably; return what was done.

    Args:
        store: From `open_for_rekeying`.
        checkpoint: As listed by it.
        change: With `is_exclusive`: who opens it then. What was made for them alone was done before.
        clock: Seconds since 1970; names new files of many ranks, and tells which are garbage.

    Raises:
        StoreLocked: Somebody is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. The checkpoint opens with the old or the new keys; doing the same again finishes it.
    """
    with lease_of_checkpoint(store, checkpoint):
        store.finish_swap(checkpoint)
        return CheckpointKeys(store, checkpoint, change, clock=clock).reencrypt()
