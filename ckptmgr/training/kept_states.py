# SPDX-License-Identifier: Apache-2.0
"""`KeptStates`: the snapshots of a run, and the cost to get their states again."""

from __future__ import annotations

from collections.abc import Callable

from ckptmgr.config.subjects import Snapshots
from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.model import Checkpoint
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.engine.recent_states import RecentStates
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.training.companions import Companion
from ckptmgr.training.restore_costs import RestoreCosts


class KeptStates(Companion):
    """States in memory; a save may evict them. `is_there` says whether a checkpoint still exists."""

    def __init__(
        self,
        options: Snapshots,
        clock: Callable[[], float],
        engine: SaveEngine,
        is_there: Callable[[Checkpoint], bool],
    ) -> None:
        self.costs = RestoreCosts(clock, is_there)
        self.recent = RecentStates(
            engine.memory, clock, ledger=engine.ledger, cost_of=self.costs.of, most=options.most
        )
        engine.make_room = self.recent.give_way

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """Note what the state of a step costs from now on."""
        self.costs.saved(facts.step, handle)

    def closing(self) -> None:
        """Free the memory."""
        self.recent.close()
