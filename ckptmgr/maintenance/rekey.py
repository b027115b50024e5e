# SPDX-License-Identifier: Apache-2.0
"""Change which keys open checkpoints: keys, passphrases and public keys; the data stays.

| file | effect |
|---|---|
| container (`.ckpe`) | its header is rewritten, a few KiB; the payload is not touched |
| encrypted `.ckpt` | one key and no slots: re-encrypted as a stream and swapped like a save |
| plain | nothing; it is named |

The order, for each checkpoint: its manifest can be checked by old and new keys; header copies, each
durable before the next; its manifest can be checked by the new keys only. So after a crash it opens
with the old or the new keys, and doing the same again finishes it. A reader with an old key may
have kept the data key of a file: `reencrypt` gives the file a new one.
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
    """Return a store that reads manifests which any old or new key authenticates, and no others.

    With a signing key it signs re-encrypted files, and reads only manifests signed by that key.
    Where `trust` accepts unsealed files, a file without manifest is trusted by its name, and a
    manifest that is only authenticated gets signed.
    """
    own = () if trust.signing_key is None else (trust.signing_key.public_key,)
    given = replace(trust, keys=change.all_keys, trusted_keys=own)
    return Store(directory, fs=fs, trust=given, processes=processes)


def plan_rekeying(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Return the plan of `rekey_checkpoint`; the store is from `open_for_rekeying`.

    Raises:
        KeyProblem: It does not open with these keys.
        UnsafeWrite: No key would open it any more, or it cannot have such keys.
        CkptmgrError, OSError: It is damaged or cannot be read.
    """
    return CheckpointKeys(store, checkpoint, change).plan()


def rekey_checkpoint(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Change the keys of a checkpoint, durably; steps that are done already are not done again.

    Raises:
        StoreLocked: Another process is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. It opens with the old or the new keys; doing the same again finishes
            it.
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
    """Return what `reencrypt_checkpoint` would do; changes nothing. Raises as `plan_rekeying`."""
    return CheckpointKeys(store, checkpoint, change, clock=clock).plan_reencryption()


def reencrypt_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    change: KeyChange,
    *,
    clock: Callable[[], float] = time.time,
) -> RekeyPlan:
    """Re-encrypt a checkpoint under a new data key, durably; the change must be exclusive.

    A file that was encrypted for the new keys alone is done. `clock` (seconds since 1970) names the
    new files of ranks, and says which files have expired.

    Raises:
        StoreLocked: Another process is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. It opens with the old or the new keys; doing the same again finishes
            it.
    """
    with lease_of_checkpoint(store, checkpoint):
        store.finish_swap(checkpoint)
        return CheckpointKeys(store, checkpoint, change, clock=clock).reencrypt()
