# SPDX-License-Identifier: Apache-2.0
"""The processes that save a series together, one or many, and options that exclude each other."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.config.failure import parse_on_error

if TYPE_CHECKING:  # one process needs none of this
    from ckptmgr.config.config import CheckpointConfig
    from ckptmgr.io.filesystem import FileSystem
    from ckptmgr.parallel.coordinator import Coordinator
    from ckptmgr.parallel.dedup import Balance, Sharing
    from ckptmgr.parallel.layout import Layouts, ParallelLayout
    from ckptmgr.parallel.mindspore.context import AutoParallelContext
    from ckptmgr.parallel.mindspore.placement import MindSporePlacement
    from ckptmgr.parallel.mindspore.strategy_files import StrategyOutput
    from ckptmgr.parallel.slicer import LayoutSlicer
    from ckptmgr.policy.save import SavePolicy

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that save together, each its own state: `ranks=Ranks(job_coordinator())`.

    They make the same calls in the same order. Rank 0 removes and pins. Another number of ranks can
    resume their checkpoints: see `docs/sharded-checkpoints.md`.

    Attributes:
        coordinator: Exchanges small values between them; None for one process.
        timeout_s: How long the ranks wait for each other, and how long a collective save may take.
        layout: Name of a tensor, such as `model/weight`, to its layout over the ranks; the state
            holds slices. DTensors contain their layout.
        keep_redundancy: With `remove_redundancy`: copies to keep of data that several ranks hold.
        balance: With `remove_redundancy`: `bytes` balances the bytes that the ranks write;
            `round_robin` assigns whole tensors by name, as MindSpore does.
    """

    coordinator: Coordinator | None = None
    _: KW_ONLY
    timeout_s: float = DEFAULT_TIMEOUT_S
    layout: Mapping[str, ParallelLayout] | None = None
    keep_redundancy: int = 1
    balance: Balance = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The processes that save together.

    Attributes:
        coordinator: The ranks; None for one process.
        timeout_s: How long the ranks wait for each other, and how long a collective save may take.
        sharing: Deduplication; None when each rank writes all that it holds.
        slicer: Finds the leaves of the state of this rank that are slices; None for one process.
        has_layout: Whether it is known how tensors are cut over the ranks.
        placement: Place of this process in a parallel context; None without one.
        strategy: The strategy file to write beside the checkpoints, or None.
    """

    coordinator: Coordinator | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    sharing: Sharing | None = None
    slicer: LayoutSlicer | None = None
    has_layout: bool = False
    placement: MindSporePlacement | None = None
    strategy: StrategyOutput | None = None

    @property
    def is_many(self) -> bool:
        """Whether there are ranks, if only one."""
        return self.coordinator is not None

    def own_directory(self, directory: Path) -> Path:
        """Return the directory that this process saves into: `rank_N` of a rank without the others.

        Raises:
            ValueError: As `MindSporePlacement.own_directory`.
        """
        if self.coordinator is not None or self.placement is None:
            return directory
        return self.placement.own_directory(directory)

    def write_strategy(self, directory: Path, *, fs: FileSystem) -> None:
        """Write the strategy file, if there is one, beside the checkpoints of all ranks.

        `directory` is that of this process. With a coordinator rank 0 writes it.
        """
        if self.strategy is None or (self.coordinator is not None and self.coordinator.rank != 0):
            return
        is_own = self.coordinator is None and self.placement and not self.placement.is_alone
        self.strategy.write(directory.parent if is_own else directory, fs=fs)


ALONE = Team()
"""One process."""


def team_for(config: CheckpointConfig, ranks: Ranks, context: AutoParallelContext | None) -> Team:
    """Return the team for a configuration.

    `context` places this process; None for the context of the process, if it was set.

    Raises:
        TypeError: It is no context.
        ValueError: The ranks would save at different steps; options of deduplication without it; or
            the context contradicts itself, the coordinator or the layout.
        CkptmgrError: About the strategy file that the context names.
    """
    coordinator, layout = ranks.coordinator, ranks.layout
    if coordinator is not None:
        check_ranks_agree(config)
    elif layout is not None:
        raise ValueError("a layout says what each rank holds; give a coordinator, too")
    placement, layouts, strategy = _placement(context), layout, None
    if placement is not None:
        if coordinator is not None:
            placement.check_coordinator(coordinator)
        world = placement.world if coordinator is None else coordinator.world
        layouts = placement.layouts(layout, world=world)
        strategy = _strategy(placement, layouts)
        _check_redundancy(config, placement, coordinator)
    return Team(
        coordinator=coordinator,
        timeout_s=ranks.timeout_s,
        sharing=_sharing(config, keep_redundancy=ranks.keep_redundancy, balance=ranks.balance),
        slicer=_slicer(coordinator, layouts),
        has_layout=layouts is not None,
        placement=placement,
        strategy=strategy,
    )


def _placement(context: AutoParallelContext | None) -> MindSporePlacement | None:
    """Return the placement by a context; None where no program has made one."""
    if context is None and "ckptmgr.parallel.mindspore.context" not in sys.modules:
        return None
    from ckptmgr.parallel.mindspore.placement import placement_of

    return placement_of(context)


def _strategy(placement: MindSporePlacement, layouts: Layouts | None) -> StrategyOutput | None:
    if placement.save_file is None:
        return None
    from ckptmgr.parallel.mindspore.strategy_files import strategy_output

    return strategy_output(placement.save_file, layouts, source=placement.load_file)


def _check_redundancy(
    config: CheckpointConfig, placement: MindSporePlacement, coordinator: Coordinator | None
) -> None:
    is_many = not placement.is_alone or placement.mode not in (None, "stand_alone")
    if config.remove_redundancy and coordinator is None and is_many:
        raise ValueError(
            "remove_redundancy without a coordinator, although the parallel context has several ranks: only ranks that "
            "compare what they hold lose nothing; give a coordinator, such as SharedDirectory"
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
        return None
    from ckptmgr.parallel.slicer import LayoutSlicer

    return LayoutSlicer(coordinator.rank, layout)


def policy_of_all(
    policy: SavePolicy, coordinator: Coordinator | None, *, timeout_s: float, beside: str = ""
) -> SavePolicy:
    """Return a policy that decides the same on all ranks; see `rank_policy.for_all_ranks`."""
    if coordinator is None:
        return policy
    from ckptmgr.parallel.rank_policy import for_all_ranks

    return for_all_ranks(policy, coordinator, timeout_s=timeout_s, beside=beside)


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
