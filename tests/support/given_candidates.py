# SPDX-License-Identifier: Apache-2.0
"""Candidates of a resumption that a test lists and loads as it likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptmgr import Checkpoint

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class GivenCandidates(Generic[_Loaded]):
    """The checkpoints that `scan` returns, each loaded by `read`."""

    scan: Callable[[], Sequence[Checkpoint]]
    read: Callable[[Checkpoint], _Loaded]

    def listed(self) -> Sequence[Checkpoint]:
        return self.scan()

    def load(self, checkpoint: Checkpoint) -> _Loaded:
        return self.read(checkpoint)
