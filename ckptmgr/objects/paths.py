# SPDX-License-Identifier: Apache-2.0
"""Addresses of objects in the place of paths, so that listings and messages name them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PosixPath

from ckptmgr.objects.requests import checked_url

_SCHEME = re.compile(r"^([a-z0-9]+):/(?!/)")


class UrlPath(PosixPath):
    """The address of an object, or of a prefix.

    >>> str(UrlPath("s3://bucket/run") / "net-1.ckpt")
    's3://bucket/run/net-1.ckpt'
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the address; a path has one slash where an address has two."""
        text = super().__str__()
        # The address of a local folder has no host between the slashes.
        return _SCHEME.sub(r"\1:///" if text.startswith("file:") else r"\1://", text)

    def __fspath__(self) -> str:
        """Return the address, which no file has as its name."""
        return str(self)


def mark_of(address: Path) -> str:
    """Return 32 hex digits that tell an address from others, and do not show it."""
    return hashlib.sha256(str(address).encode()).hexdigest()[:32]


def checked_address(path: str | os.PathLike[str]) -> UrlPath:
    """Return an address that is given as a text or as a path, which has lost one of two slashes.

    Raises:
        ValueError: It is no address of an object store.
    """
    return UrlPath(checked_url(path if isinstance(path, str) else str(UrlPath(path))))


def checked_address_of_file(path: str | os.PathLike[str]) -> UrlPath:
    """Return the address of a file: below that of a run, which is `parent`.

    Raises:
        ValueError: It is no address of an object store, or names a bucket alone.
    """
    address = checked_address(path)
    prefix = str(address).rpartition("/")[0]
    if prefix.endswith(("/", ":")):
        raise ValueError(f"{str(address)!r} names no object; write {address}/run/NAME")
    return address
