# SPDX-License-Identifier: Apache-2.0
"""A prefix of an object store as a place: no leases, no trash, and nothing is renamed.

It is listed, proven and read as a directory is (`RemoteFiles`), and changed by `RemoteDirectory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.place import OBJECT_STORE, Capabilities
from ckptmgr.core.trust import Trust
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.objects.directory import DATA, LEFTOVER_AGE, RemoteDirectory, id_in
from ckptmgr.objects.filesystem import RemoteFiles
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.requests import Objects
from ckptmgr.store.listing import entry_of
from ckptmgr.store.name_leases import check_as_listed, is_unchanged
from ckptmgr.store.store import Store

_FEW = 3  # requests for each are fewer than those of a listing
_PROBLEM = (
    "no manifest names this data: an upload goes on or was cut off, or a removal was; prune removes it "
    f"{LEFTOVER_AGE.days} days after it was written"
)


class ObjectPlace(Store):
    """The checkpoints below a prefix; `remote` publishes and removes them.

    `clock` returns seconds since the epoch.
    """

    can: Capabilities = OBJECT_STORE

    def __init__(
        self, objects: Objects, *, trust: Trust, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(UrlPath(objects.url), fs=RemoteFiles(objects), trust=trust, clock=clock)
        self.remote = RemoteDirectory(objects, clock=clock)

    def finish_moves(self, series: str) -> list[str]:
        """Do nothing: nothing is moved."""
        del series
        return []

    settle = finish_moves

    def check_needed(self, needed: Sequence[Checkpoint]) -> None:
        """Raise UnsafePrune unless these are still as they were listed; lists once for many."""
        if len(needed) < _FEW:
            super().check_needed(needed)
        else:
            check_as_listed(needed, {one.name: one for one in self.scan()})

    def remove(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint] = (),
        present: Sequence[Checkpoint] | None = None,
    ) -> list[Exception]:
        """Remove checkpoints: first all manifests, then their data; see `Place.remove`."""
        if not checkpoints:
            return []
        present = self.scan() if present is None else present
        self.check_not_all(checkpoints, present)
        self.check_needed(needed)
        now = {one.name: one for one in present}
        going: list[Checkpoint] = []
        failures: list[Exception] = []
        for one in checkpoints:
            try:
                going += [one] if is_unchanged(one, now.get(one.name)) else []
            except UnsafePrune as error:
                failures.append(error)
        try:
            self.remote.remove(going)
        except OSError as error:
            failures.append(error)
        return failures

    def clean_up(self) -> list[str]:
        """Remove old data that no manifest names; return one sentence per action.

        Raises:
            OSError: From the network.
        """
        swept = [f"removed {one.key}: no manifest names it" for one in self.remote.sweep()]
        left = self.leftovers(self.scan())
        if left:
            swept.append(
                f"{len(left)} data files that no manifest names stay until they are {LEFTOVER_AGE.days} days old, "
                "because an upload may be about to use them; ckptmgr ls --all lists them"
            )
        return swept

    def leftovers(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the data that none of the listed checkpoints has, one entry for each file.

        An upload or a removal that was cut off leaves it.
        """
        named = {one.id for one in found}
        left = []
        for one in self.remote.objects.list(DATA):
            id = id_in(one.key)
            if id is not None and id not in named:
                status = FileStatus(
                    one.size_bytes,
                    one.modified_at.timestamp(),
                    is_file=True,
                    is_directory=False,
                    identity=(0, 0),
                )
                left.append(entry_of(self.directory / one.key, status, State.LEFTOVER, _PROBLEM))
        return left
