# SPDX-License-Identifier: Apache-2.0
"""Retention policy of a directory: `--keep`, else the key `keep` of its `ckptmgr.toml`."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from contextlib import closing
from pathlib import Path

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.files import CachedFile
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import PolicyTextError, parse_policy

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
            hint=f"pass --keep 'last(5)', or write keep = \"last(5)\" into {path}",
        )
    return found[0]


def policy_of(directory: Path) -> tuple[RetentionPolicy, Path] | None:
    """Return the policy of a directory and the file that says it; None without any.

    Raises:
        CkptmgrError: As `load_policy`.
    """
    path = directory / CONFIG_NAME
    text = _keep_of(path) if path.exists() else None
    if text is None:
        return None
    try:
        return parse_policy(text, is_stored=True), path
    except PolicyTextError as error:
        raise CkptmgrError(f"keep: {error.message}", path=path) from error


def _check_writers(path: Path, status: os.stat_result) -> None:
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


def _keep_of(path: Path) -> str | None:
    with closing(CachedFile(path)) as file:  # which refuses a FIFO
        _check_writers(path, file.status())
        if file.size > _MAX_CONFIG_BYTES:
            raise CkptmgrError(f"more than {_MAX_CONFIG_BYTES} bytes", path=path)
        data = read_bytes(file, 0, file.size)
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
