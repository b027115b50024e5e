# SPDX-License-Identifier: Apache-2.0
"""Retention by tags: `tagged(release)`, `tagged("paper*")`."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ckptmgr.core.model import Checkpoint, Reason
from ckptmgr.policy.rules import DecidedRule

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


@dataclass(frozen=True, slots=True)
class Tagged(DecidedRule):
    """Keep the checkpoints with a tag of this name; `*` and `?` stand for other characters."""

    name: str

    def __str__(self) -> str:
        is_bare = _BARE.fullmatch(self.name)
        name = self.name if is_bare else json.dumps(self.name, ensure_ascii=False)
        return f"tagged({name})"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint has such a tag."""
        return [bool(one.tags) and bool(self.tags_of(one)) for one in history]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason | None]:
        """Return the tags of each checkpoint that stays."""
        return [
            self.reason(f"tagged {', '.join(self.tags_of(one))}") if is_kept else None
            for one, is_kept in zip(history, stays, strict=True)
        ]

    def tags_of(self, checkpoint: Checkpoint) -> list[str]:
        """Return the tags of a checkpoint that have the name."""
        return [tag for tag in checkpoint.tags if fnmatch.fnmatchcase(tag, self.name)]
