# SPDX-License-Identifier: Apache-2.0
"""Names of temporary files: unique, never too long, and with the writer in them.

`.<final name>.<writer token>.<series tag>.<thread>-<number>.tmp`; see `leases` for tokens and tags.
"""

from __future__ import annotations

import itertools
import os
import threading

from ckptmgr.io.leases import series_tag

_SUFFIX = ".tmp"
_MAX_NAME_BYTES = 143  # of eCryptfs; other file systems allow more
_ATTEMPTS = itertools.count()  # one for the process: two stores must never choose the same name


def temp_name(name: str, *, token: str, series: str) -> str:
    """Return a unique temporary name for a file that will be called `name`."""
    unique = f"{token}.{series_tag(series)}.{threading.get_ident():x}-{next(_ATTEMPTS)}"
    room = _MAX_NAME_BYTES - len(f"..{unique}{_SUFFIX}")
    if (
        len(os.fsencode(name)) > room
    ):  # a long name must not fail because its temporary one is longer
        head = os.fsencode(name)[: room - len(series_tag(name)) - 1].decode(errors="ignore")
        name = f"{head}~{series_tag(name)}"
    return f".{name}.{unique}{_SUFFIX}"


def final_name(name: str) -> str:
    """Return the final name in that of a temporary file; it may be shortened."""
    return name.removeprefix(".").rsplit(".", 4)[0]


def is_temp_of(temp: str, name: str) -> bool:
    """Return whether `temp` is a temporary name for a file called `name`."""
    if parse_temp(temp) is None:
        return False
    found = final_name(temp)
    head, tilde, tag = found.rpartition("~")
    is_shortened = tilde and tag == series_tag(name) and name.startswith(head)
    return found == name or bool(is_shortened)


def parse_temp(name: str) -> tuple[str, str] | None:
    """Return (writer token, series tag) of a temporary name, or None if it is no such name."""
    if not (name.startswith(".") and name.endswith(_SUFFIX)):
        return None
    parts = name.removesuffix(_SUFFIX).rsplit(".", 3)
    if len(parts) != 4 or not parts[0] or parts[1].count("-") < 1 or "-" not in parts[3]:
        return None
    return parts[1], parts[2]
