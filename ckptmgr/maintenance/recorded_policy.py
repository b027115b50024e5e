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
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.maintenance.prune_plan import Counted
from ckptmgr.policy.retention import without_unranked
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import PolicyTextError, parse_policy
from ckptmgr.store.manifest.model import manifest_name
from ckptmgr.store.store import Store


def deciding_checkpoint(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint whose manifest says what to keep: the newest countable one of a run."""
    newest = max(
        (one for one in checkpoints if one.is_countable), key=lambda one: one.order, default=None
    )
    return newest if newest is not None and newest.run_id else None


def recorded_policy(store: Store, counted: Counted) -> RetentionPolicy | None:
    """Return the policy that the newest run of these checkpoints applied; None if none is recorded.

    Where no checkpoint has the metric of `best`, that rule is replaced as the run itself does.

    Raises:
        CkptmgrError: This version does not know the policy, another user could have written it,
            the manifest cannot be read, or of several lines of runs each says something else.
    """
    lines = [one.checkpoints for one in counted.lines if one.newest is not None]
    found = list(dict.fromkeys(_recorded_by(store, one) for one in lines))
    if len(found) > 1:
        raise CkptmgrError(
            f"the runs of series {counted.series[0]!r} recorded different policies: "
            + "; ".join("none" if one is None else str(one) for one in found),
            path=store.directory,
            hint="pass --keep; or leave out --by-series, then each run is pruned by its own",
        )
    if not found or found[0] is None:
        return None
    return without_unranked([one for line in lines for one in line], found[0])[0]


def _recorded_by(store: Store, line: Sequence[Checkpoint]) -> RetentionPolicy | None:
    newest = deciding_checkpoint(line)
    manifest = None if newest is None else store.read_manifest(newest.name)
    if newest is None or manifest is None or manifest.keep is None:
        return None
    path = store.directory / manifest_name(newest.name)
    if not store.can.config:  # where its writers may remove it, too
        from ckptmgr.objects.paths import mark_of

        if manifest.keep_at != mark_of(store.directory):
            return None
    elif manifest.auth is None and manifest.signed_by is None:  # nothing proves who wrote it
        check_writers(path, path.stat())
    try:
        return parse_policy(manifest.keep, is_stored=True)
    except PolicyTextError as error:
        raise CkptmgrError(
            f"the policy that its run recorded: {error.message}", path=path, hint="pass --keep"
        ) from error


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
