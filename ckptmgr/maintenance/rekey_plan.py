# SPDX-License-Identifier: Apache-2.0
"""What a change of keys does, or did, to one checkpoint."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ckptmgr.core.model import Checkpoint
from ckptmgr.maintenance.rekey_change import Removal


class Action(enum.Enum):
    """What is done to a checkpoint."""

    NOTHING = "nothing"
    """It is as it shall be."""
    PLAIN = "plain"
    """It is not encrypted; nothing is done."""
    HEADER = "header"
    """Its headers, or the authentication of its manifest, are rewritten."""
    REENCRYPT = "re-encrypt"
    """It is encrypted anew."""
    CLEAN_UP = "clean up"
    """It was encrypted anew, and files that the old keys open were left beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rekeying:
    """What is, or was, to be done to one checkpoint.

    Attributes:
        checkpoint: As listed.
        action: What.
        before: What opens it before, for people.
        after: What opens it afterwards.
        removals: Who of those that are to be removed has a slot in it.
    """

    checkpoint: Checkpoint
    action: Action
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    removals: frozenset[Removal] = frozenset()

    @property
    def is_pending(self) -> bool:
        """Whether there is something to do."""
        return self.action not in (Action.NOTHING, Action.PLAIN)
