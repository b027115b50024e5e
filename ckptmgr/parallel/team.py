# SPDX-License-Identifier: Apache-2.0
"""The processes that save a series together, one or many, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.failure import parse_on_error
from ckptmgr.parallel.coordinator import DEFAULT_TIMEOUT_S, Coordinator
from ckptmgr.policy.save import SavePolicy

if TYPE_CHECKING:  # one process needs none of this
    from ckptmgr.parallel.dedup import Balance, Sharing
    from ckptmgr.parallel.layout import ParallelLayout
    from ckptmgr.parallel.slicer import LayoutSlicer


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The processes that save together.

    Attributes:
        coordinator: The ranks; None for one process.
        timeout_s: How long the ranks wait for each other, and how long a collective save may take.
        sharing: Deduplication; None when each rank writes all that it holds.
        slicer: Finds the leaves of the state of this rank that are slices; None for one process.
    """

    coordinator: Coordinator | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    sharing: Sharing | None = None
    slicer: LayoutSlicer | None = None

    @property
    def is_many(self) -> bool:
        """Whether there are ranks, if only one."""
        return self.coordinator is not None


ALONE = Team()
"""One process."""


def team_for(
    config: CheckpointConfig,
    *,
    coordinator: Coordinator | None,
    timeout_s: float,
    layout: Mapping[str, ParallelLayout] | None,
    keep_redundancy: int,
    balance: Balance,
) -> Team:
    """Return the team for a configuration; arguments as for `Team`, `Sharing` and `LayoutSlicer`.

    Raises:
        ValueError: The ranks would save at different steps; or options of deduplication without it.
    """
    if coordinator is not None:
        check_ranks_agree(config)
    return Team(
        coordinator=coordinator,
        timeout_s=timeout_s,
        sharing=_sharing(config, keep_redundancy=keep_redundancy, balance=balance),
        slicer=_slicer(coordinator, layout),
    )


def _sharing(config: CheckpointConfig, *, keep_redundancy: int, balance: Balance) -> Sharing | None:
    if config.remove_redundancy:
        from ckptmgr.parallel.dedup import Sharing

        return Sharing(keep_redundancy=keep_redundancy, balance=balance)
    if (keep_redundancy, balance) != (1, "bytes"):
        raise ValueError(
            "keep_redundancy and balance say how redundancy is removed; give CheckpointConfig(remove_redundancy=True)"
        )
    return None


def _slicer(
    coordinator: Coordinator | None, layout: Mapping[str, ParallelLayout] | None
) -> LayoutSlicer | None:
    if coordinator is None:
        if layout is not None:
            raise ValueError("a layout says what each rank holds; give a coordinator, too")
        return None
    from ckptmgr.parallel.slicer import LayoutSlicer

    return LayoutSlicer(coordinator.rank, layout)


def policy_of_all(
    policy: SavePolicy, coordinator: Coordinator | None, *, timeout_s: float
) -> SavePolicy:
    """Return a policy that decides the same on all ranks; see `rank_policy.for_all_ranks`."""
    if coordinator is None:
        return policy
    from ckptmgr.parallel.rank_policy import for_all_ranks

    return for_all_ranks(policy, coordinator, timeout_s=timeout_s)


def check_ranks_agree(config: CheckpointConfig) -> None:
    """Raise ValueError for options with which ranks would save at different steps."""
    if config.back_pressure != "wait":
        raise ValueError(
            f"back_pressure={config.back_pressure!r} with a coordinator: each rank would leave out other saves; use 'wait'"
        )
    if parse_on_error(config.on_error).action != "raise":
        raise ValueError(
            "on_error with a coordinator: ranks that hear of a failed save at different steps, and go on, save at different "
            "steps from then on; use 'raise' or 'retry(n)'"
        )
