# SPDX-License-Identifier: Apache-2.0
"""Addresses of objects in the place of paths, so that listings and messages name them."""

from __future__ import annotations

import re
from pathlib import PosixPath

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
