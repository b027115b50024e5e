# SPDX-License-Identifier: Apache-2.0
"""Addresses of object stores, and the refusal of one where only a path works.

A text that was meant as an address, or that a shell should have expanded, must never become the
name of a local folder: the saves of a run there are lost with its machine. So everything that
resembles an address counts as one, and `objects.requests.checked_url` refuses all others.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn

SCHEMES = ("s3", "gs", "az", "file", "memory")
"""Schemes that a mirror, `copy` and the commands for object stores take."""

_KNOWN_ELSEWHERE = (
    *("abfs", "abfss", "adl", "azure", "b2", "cos", "dbfs", "ftp", "gcs", "gdrive", "hdfs", "hf"),
    *("http", "https", "minio", "obs", "oss", "r2", "s3a", "s3n", "sftp", "swift", "viewfs"),
    *("wandb", "wasb", "wasbs", "webhdfs"),
)
# What settings files leave before an address: spaces, quotes, brackets, marks of a byte order.
_BEFORE = "[\\s\"'`<(\\[\ufeff\u200b-\u200f\u2060]*"
_KNOWN = rf"(?:{'|'.join((*SCHEMES, *_KNOWN_ELSEWHERE))}):"
_SCHEME = re.compile(
    rf"{_BEFORE}(?:{_KNOWN}|[a-z][a-z0-9+.-]+:/)|(?!/).*/{_KNOWN}/", re.IGNORECASE | re.DOTALL
)
_RESOLVED = re.compile(rf"/(?:{_KNOWN})/", re.IGNORECASE)  # an address made absolute as a path
_SLASHES = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
_VARIABLE = re.compile(r"\$[A-Za-z_{(]")


def is_url(path: object) -> bool:
    """Return whether a text or path is, or was meant as, the address of an object store or service.

    >>> [is_url(text) for text in ("s3://bucket/run", " 's3://bucket/run'", "dbfs:/run", "runs/a")]
    [True, True, True, False]
    """
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    # A Path has one slash where an address has two.
    return isinstance(path, str) and ("://" in path or _SCHEME.match(path) is not None)


def refuse_unexpanded(path: object) -> None:
    """Raise ValueError for a path that a shell should have expanded: `~/run`, `${HOME}/run`.

    >>> refuse_unexpanded("runs/~a-5$")
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or is_url(text):
        return
    has_home = os.path.expanduser(text) != text  # noqa: PTH111 - a Path raises for another user
    if os.path.lexists(text):
        return
    if _RESOLVED.search(text):
        raise ValueError(
            f"the path {without_secrets(text)!r} is what a function of paths makes of an address: pass the address itself, "
            "as a text; where such a folder is meant, make it first"
        )
    if has_home or _VARIABLE.search(text):
        function = "expanduser" if has_home else "expandvars"
        raise ValueError(
            f"the path {text!r} is not expanded, and would make a folder of that name; write os.path.{function}(...); "
            "where such a folder is meant, make it first"
        )


def url_without_path(path: object) -> ValueError:
    """Return the error for an address in the place of a local path."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return ValueError(
        f"{without_secrets(text)} is the address of an object store, and a path on this machine is wanted; "
        "CheckpointManager(URL) saves there, CheckpointManager(directory, mirror=URL) uploads what it saves here, and "
        "ckptmgr copy SEL URL and ckptmgr copy URL DIR copy checkpoints"
    )


def refuse_url(path: object) -> None:
    """Raise ValueError for an address in the place of a local path, or one that is not expanded."""
    if is_url(path):
        _refuse(path)
    refuse_unexpanded(path)


def _refuse(path: object) -> NoReturn:
    raise url_without_path(path)


def without_secrets(url: str) -> str:
    """Return an address for messages: without user, password, query and fragment.

    >>> without_secrets("s3://id:a/b@bucket/run?sig=c")
    's3://...@bucket/run'
    """
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    found = _SLASHES.search(shown)
    if found is None:
        return shown
    start, rest = shown[: found.end()], shown[found.end() :]
    host = rest.partition("/")[0]
    # A password may hold any character, also a slash: then it ends after the host as it is parsed.
    if "@" in rest and (":" in host or "@" in host):
        rest = f"...@{rest.rpartition('@')[2]}"
    return f"{start}{rest}"


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an absolute path, with its links, or an address as it is."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.abspath(text)  # noqa: PTH100 - links stay
