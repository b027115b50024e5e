# SPDX-License-Identifier: Apache-2.0
"""Addresses of object stores, and the refusal of one where only a path works."""

from __future__ import annotations

import os
import re
from typing import NoReturn

SCHEMES = ("s3", "gs", "az", "file", "memory")
"""Schemes that a mirror, `copy` and the commands for object stores take."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SLASHES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_COLLAPSED = re.compile(r"(s3|gs|az):/(?!/)")  # a Path joins the two slashes


def is_url(path: object) -> bool:
    """Return whether a text or path is the address of an object store or of another service.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    return isinstance(path, str) and bool(_URL.match(path) or _COLLAPSED.match(path))


def url_without_path(path: object) -> ValueError:
    """Return the error for an address in the place of a local path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return ValueError(
        f"{without_secrets(text)} is the address of an object store, and a path on this machine is wanted; "
        "CheckpointManager(URL) saves there, CheckpointManager(directory, mirror=URL) uploads what it saves here, and "
        "ckptmgr copy SEL URL and ckptmgr copy URL DIR copy checkpoints"
    )


def refuse_url(path: object) -> None:
    """Raise ValueError for an address in the place of a local path; see `url_without_path`."""
    if is_url(path):
        _refuse(path)


def _refuse(path: object) -> NoReturn:
    raise url_without_path(path)


def without_secrets(url: str) -> str:
    """Return an address for messages: without user, password, query and fragment.

    >>> without_secrets("s3://id:a/b@bucket/run?sig=c")
    's3://...@bucket/run'
    """
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    found = _SLASHES.match(shown)
    if found is None:
        return shown
    start, rest = found[0], shown[found.end() :]
    host = rest.partition("/")[0]
    # A password may hold any character, also a slash: then it ends after the host as it is parsed.
    if "@" in rest and (":" in host or "@" in host):
        rest = f"...@{rest.rpartition('@')[2]}"
    return f"{start}{rest}"
