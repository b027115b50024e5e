# SPDX-License-Identifier: Apache-2.0
"""Retention policies that manifests record, so that `ckptmgr prune` applies those of the runs.

A run records its policy with every save (`Manifest.keep`). Of checkpoints that count together the
newest one decides: a policy that changed from one run of a series to the next is that of the last.
At an address only that of a run that saved there itself counts: the policy in a copy is for the
directory, or the other address, that it was copied from.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.urls import is_url
from ckptmgr.maintenance.prune_plan import Counted
from ckptmgr.policy.retention import without_unranked
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import PolicyTextError, parse_policy
from ckptmgr.store.manifest.model import manifest_name
from ckptmgr.store.store import Store


def deciding_checkpoint(counted: Counted) -> Checkpoint | None:
    """Return the checkpoint whose manifest says what to keep: the newest countable one of a run."""
    newest = max(
        (one for one in _all(counted) if one.is_countable), key=lambda one: one.order, default=None
    )
    return newest if newest is not None and newest.run_id else None


def recorded_policy(store: Store, counted: Counted) -> RetentionPolicy | None:
    """Return the policy that the newest run of these checkpoints applied; None if none is recorded.

    Where no checkpoint has the metric of `best`, that rule is replaced as the run itself does.

    Raises:
        CkptmgrError: This version does not know the policy, another user could have written it, or
            the manifest cannot be read.
    """
    newest = deciding_checkpoint(counted)
    manifest = None if newest is None else store.read_manifest(newest.name)
    if newest is None or manifest is None or manifest.keep is None:
        return None
    path = store.directory / manifest_name(newest.name)
    if is_url(store.directory):  # where its writers may remove it, too
        from ckptmgr.objects.paths import mark_of

        if manifest.keep_at != mark_of(store.directory):
            return None
    elif manifest.auth is None and manifest.signed_by is None:  # nothing proves who wrote it
        check_writers(path, path.stat())
    try:
        policy = parse_policy(manifest.keep, is_stored=True)
    except PolicyTextError as error:
        raise CkptmgrError(
            f"the policy that its run recorded: {error.message}", path=path, hint="pass --keep"
        ) from error
    return without_unranked(_all(counted), policy)[0]


def check_writers(path: Path, status: os.stat_result) -> None:
    """Raise CkptmgrError if a user with permission only to add files could choose removals."""
    trusted = (os.geteuid(), 0, path.parent.stat().st_uid)
    if status.st_uid not in trusted:
        problem = f"belongs to another user (uid {status.st_uid})"
    elif status.st_mode & stat.S_IWOTH:
        problem = f"can be changed by others (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise CkptmgrError(
        f"says what to keep, but {problem}",
        path=path,
        hint="pass --keep; or look at what it holds, then chown it to yourself or the directory's owner and chmod o-w",
    )


def _all(counted: Counted) -> Sequence[Checkpoint]:
    return [one for line in counted.lines for one in line.checkpoints]
