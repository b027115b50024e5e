# SPDX-License-Identifier: Apache-2.0
"""Names the mirrors that a change of keys, pins or tags did not reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.cli.exits import note

if TYPE_CHECKING:
    from ckptmgr.store.store import Store


def note_mirrors(changed: Iterable[Store]) -> None:
    """Name the mirrors of directories in which something was changed, and how it gets there."""
    from ckptmgr.remote.places import mirrors_of

    for store in {one.directory: one for one in changed}.values():
        for url in mirrors_of(store):
            note(
                f"{url}, the mirror of {store.directory}, is as it was: the next run brings it up to date, or "
                f"ckptmgr copy {store.directory} {url}"
            )
