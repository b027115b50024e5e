# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a directory at an address: which are sent, and which the policy there drops.

A run, and `watch`, drive it from threads of their own; what counts there they judge themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptmgr.core.model import Checkpoint
from ckptmgr.objects.directory import Uploaded
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.applied import drop
from ckptmgr.store.store import Store

Judge = Callable[[Sequence[Checkpoint], RetentionPolicy], Sequence[Checkpoint]]
"""Returns the checkpoints that a policy drops of these."""


class Copies:
    """Copies of the checkpoints of `store` at `place`; with `policy` None all stay there."""

    def __init__(
        self, store: Store, place: ObjectPlace, policy: RetentionPolicy | None, judge: Judge
    ) -> None:
        self.place = place
        self._store = store
        self._policy = policy
        self._judge = judge
        self._has_swept = False

    def send(self, name: str) -> Uploaded:
        """Upload a checkpoint, or its changes since the upload; see `RemoteDirectory.upload`."""
        return self.place.remote.upload(self._store, name)

    def going(self, found: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Return the checkpoints that the policy drops of these."""
        return () if self._policy is None else self._judge(found, self._policy)

    def kept(self, new: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return those of some checkpoints from here that the policy keeps beside the present ones."""
        if self._policy is None or not new:
            return [*new]
        going = {one.path for one in self.going([*self.place.scan(), *new])}
        return [one for one in new if one.path not in going]

    def retain(self) -> Sequence[Checkpoint]:
        """Apply the policy there, and once remove old data of no checkpoint; return what went.

        Raises:
            CkptmgrError, OSError: The policy is refused, or something could not be removed.
        """
        if self._policy is None:
            return ()
        present = self.place.scan()
        going = self.going(present)
        for failed in drop(self.place, going, present=present):
            raise failed
        if not self._has_swept:
            self.place.remote.sweep()
            self._has_swept = True
        return going
