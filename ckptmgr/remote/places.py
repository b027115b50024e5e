# SPDX-License-Identifier: Apache-2.0
"""The note of a run about its mirror, beside its checkpoints.

`.<series>.mirror` holds the address. Commands that change keys, pins or tags name it: they do not
reach the mirror. It is a hint: it is not synced, nothing is requested because of it, and a damaged
one counts as absent.
"""

from __future__ import annotations

import contextlib

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.objects.requests import checked_url
from ckptmgr.store.store import Store

_SUFFIX = ".mirror"


def note_mirror(store: Store, series: str, url: str) -> bool:
    """Note the address of the mirror of a series, unless there is no directory; return if it is noted.

    A disk that cannot take the note is no error.
    """
    with contextlib.suppress(CkptmgrError, OSError):
        if store.fs.status(store.directory) is None:
            return False
        if _address(store, series) != url:
            path = store.directory / f".{series}{_SUFFIX}"
            store.write_note(path, url.encode(), series=series)
    return True


def mirrors_of(store: Store) -> list[str]:
    """Return the addresses that are noted in a directory."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(store.fs.names(store.directory))
    noted = [one for one in names if one.startswith(".") and one.endswith(_SUFFIX)]
    found = (_address(store, one[1:].removesuffix(_SUFFIX)) for one in noted)
    return list(dict.fromkeys(one for one in found if one is not None))


def _address(store: Store, series: str) -> str | None:
    noted = store.read_note(f".{series}{_SUFFIX}")
    with contextlib.suppress(ValueError):
        return None if noted is None else checked_url(noted.decode())
    return None
