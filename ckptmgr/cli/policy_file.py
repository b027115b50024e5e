# SPDX-License-Identifier: Apache-2.0
"""Retention policy of a directory: `--keep`, else the key `keep` of its `ckptmgr.toml`, else that of its runs."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.errors import TruncatedError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.descriptors import HeldDirectories
from ckptmgr.io.files import CachedFile, NoRegularFile
from ckptmgr.maintenance.prune_plan import Counted, PolicyOf, counted_together
from ckptmgr.maintenance.recorded_policy import check_writers, deciding_checkpoint, recorded_policy
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import PolicyTextError, parse_policy
from ckptmgr.store.manifest.model import manifest_name
from ckptmgr.store.store import Store

CONFIG_NAME = "ckptmgr.toml"
_KEYS = ("keep",)
_MAX_CONFIG_BYTES = 1 << 20


def load_policy(keep: str | None, directory: Path) -> RetentionPolicy:
    """Return the policy of `--keep`, or of the directory where that is None.

    Raises:
        UsageProblem: There is no policy; there is no default.
        PolicyTextError: The text is empty or not a policy.
        CkptmgrError: The configuration is not valid, or another user could have written it.
    """
    if keep is not None:
        return parse_policy(keep)
    found = policy_of(directory)
    if found is None:
        path = directory / CONFIG_NAME
        raise UsageProblem(
            "no retention policy: nothing says what to keep",
            hint=f"pass --keep 'last(5)', or write keep = \"last(5)\" into {path}; a run of CheckpointManager records its own",
        )
    return found[0]


def policy_in(
    keep: str | None,
    store: Store,
    *,
    found: Sequence[Checkpoint] | None = None,
    series: str | None = None,
    by_series: bool = False,
) -> RetentionPolicy | PolicyOf:
    """Return the policy as `load_policy`, or else the function that finds recorded policies.

    `found` is the listing, where the caller has just made it.

    Raises:
        UsageProblem: There is no policy, and no run of the directory has recorded one.
        CkptmgrError: As `load_policy`. The errors of `recorded_policy` are left to the function:
            each is about one run.
    """
    recorded = partial(recorded_policy, store)
    if keep is None and (not store.can.config or policy_of(store.directory) is None):
        present = store.scan() if found is None else found
        together = counted_together(present, series=series, by_series=by_series)
        if any(_says_something(recorded, counted) for counted in together):
            return recorded
    if keep is None and not store.can.config:
        raise UsageProblem(
            "no retention policy: nothing says what to keep",
            hint="pass --keep 'last(5)'; only a CheckpointManager that saves to the address itself records its own for it",
        )
    return load_policy(keep, store.directory)


def _says_something(recorded: PolicyOf, counted: Counted) -> bool:
    try:
        return recorded(counted) is not None
    except (CkptmgrError, OSError):
        return True


def recorded_in(
    directory: Path,
) -> tuple[list[tuple[RetentionPolicy, Path]], list[Exception]]:
    """Return the policies that the runs of a directory recorded, and the errors of others.

    Each policy is there once, with a manifest that says it.
    """
    store = Store(directory)
    found: dict[RetentionPolicy, Path] = {}
    refused: list[Exception] = []
    for counted in counted_together(store.scan()):
        try:
            policy = recorded_policy(store, counted)
        except (CkptmgrError, OSError) as error:
            refused.append(error)
            continue
        newest = deciding_checkpoint(one for line in counted.lines for one in line.checkpoints)
        if policy is not None and newest is not None:
            found.setdefault(policy, store.directory / manifest_name(newest.name))
    return list(found.items()), refused


def policy_of(directory: Path) -> tuple[RetentionPolicy, Path] | None:
    """Return the policy of a directory and the file that says it; None without any.

    Raises:
        CkptmgrError: As `load_policy`.
    """
    path, held = directory / CONFIG_NAME, HeldDirectories()
    try:
        with (
            held.hold(directory),
            held.entry(path) as at,
            closing(CachedFile(path, dir_fd=at.dir_fd)) as file,
        ):
            text = keep_in(file, path)
    except FileNotFoundError:
        return None
    except NoRegularFile as error:
        raise CkptmgrError(
            f"says what to keep, but {error.strerror}",
            path=path,
            hint="put the file itself here, or pass --keep",
        ) from None
    if text is None:
        return None
    try:
        return parse_policy(text, is_stored=True), path
    except PolicyTextError as error:
        raise CkptmgrError(f"keep: {error.message}", path=path) from error


def keep_in(file: CachedFile, path: Path) -> str | None:
    """Return the text of the policy in an open file; None if it has none.

    Raises:
        CkptmgrError: As `load_policy`.
    """
    check_writers(path, file.status())
    if file.size > _MAX_CONFIG_BYTES:
        raise CkptmgrError(f"more than {_MAX_CONFIG_BYTES} bytes", path=path)
    try:
        data = read_bytes(file, 0, file.size)
    except TruncatedError as error:
        raise CkptmgrError(
            "says what to keep, but became shorter while it was read",
            path=path,
            hint="run the command again",
        ) from error
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CkptmgrError(f"not valid TOML: {error}", path=path) from error
    for name in document:
        if name not in _KEYS:
            close = difflib.get_close_matches(name, _KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_KEYS)}"
            raise CkptmgrError(f"unknown key {name!r}", path=path, hint=hint)
    keep = document.get("keep")
    if keep is not None and not isinstance(keep, str):
        raise CkptmgrError(
            "keep is not a text", path=path, hint='write keep = "last(5)", quotes included'
        )
    return keep
