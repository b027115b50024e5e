# SPDX-License-Identifier: Apache-2.0
"""Retention by tags: `tagged(release)`, `tagged("paper*")`."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ckptmgr.core.model import Checkpoint
from ckptmgr.policy.rules import Finding, Rule

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


@dataclass(frozen=True, slots=True)
class Tagged(Rule):
    """Keep the checkpoints with a tag of this name; `*` and `?` stand for other characters."""

    name: str

    def __str__(self) -> str:
        is_bare = _BARE.fullmatch(self.name)
        name = self.name if is_bare else json.dumps(self.name, ensure_ascii=False)
        return f"tagged({name})"

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding | None]:
        """Return the findings, newest first."""
        del now
        return [self._finding(one) for one in history]

    def tags_of(self, checkpoint: Checkpoint) -> list[str]:
        """Return the tags of a checkpoint that have the name."""
        return [tag for tag in checkpoint.tags if fnmatch.fnmatchcase(tag, self.name)]

    def _finding(self, checkpoint: Checkpoint) -> Finding | None:
        found = self.tags_of(checkpoint)
        return self.finding(True, f"tagged {', '.join(found)}") if found else None
