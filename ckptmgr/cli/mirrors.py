# SPDX-License-Identifier: Apache-2.0
"""Names the mirrors that a change of keys, pins or tags did not reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.cli.exits import note

if TYPE_CHECKING:
    from ckptmgr.store.store import Store


_ONLY_THERE = ". What is only there keeps its keys: copy it into a directory, change them there, and copy it back"


def note_mirrors(changed: Iterable[Store], *, are_keys: bool = False) -> None:
    """Name the mirrors of directories in which something was changed, and how it gets there."""
    from ckptmgr.remote.places import mirrors_of

    for store in {one.directory: one for one in changed}.values():
        for url in mirrors_of(store):
            note(
                f"{url}, the mirror of {store.directory}, is as it was: the next run brings it up to date, or "
                f"ckptmgr copy {store.directory} {url}{_ONLY_THERE if are_keys else ''}"
            )
