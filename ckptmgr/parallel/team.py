# SPDX-License-Identifier: Apache-2.0
"""What a `CheckpointManager` is made of when it is one of many ranks: the directory, the writer, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ckptmgr.config import CheckpointConfig
from ckptmgr.observe import Observers
from ckptmgr.parallel.coordinator import Coordinator
from ckptmgr.parallel.layout import ParallelLayout
from ckptmgr.parallel.rank_writer import RankWriter
from ckptmgr.parallel.shard_store import ShardStore
from ckptmgr.parallel.sharing import Balance, Sharing
from ckptmgr.parallel.slicer import LayoutSlicer
from ckptmgr.save_failure import parse_on_error
from ckptmgr.save_policy import AnyOf, EverySeconds, Overhead, SavePolicy
from ckptmgr.saver import SaveOptions
from ckptmgr.series import SeriesWriter
from ckptmgr.store import Store


def store_maker(
    coordinator: Coordinator | None, clock: Callable[[], float]
) -> Callable[..., Store]:
    """Return what makes the directory of a manager."""
    return Store if coordinator is None else partial(ShardStore, clock=clock)


def writer_for(
    store: Store,
    series: str,
    *,
    coordinator: Coordinator | None,
    timeout_s: float,
    options: SaveOptions,
    clock: Callable[[], float],
    observers: Observers,
    sharing: Sharing | None = None,
) -> SeriesWriter:
    """Return the writer of a series: of one process, or of one of many ranks."""
    if coordinator is None or not isinstance(store, ShardStore):
        return SeriesWriter(store, series, options=options, clock=clock, observers=observers)
    return RankWriter(
        store,
        series,
        coordinator=coordinator,
        timeout_s=timeout_s,
        options=options,
        clock=clock,
        observers=observers,
        sharing=sharing,
    )


def sharing_for(
    config: CheckpointConfig, *, keep_redundancy: int, balance: Balance
) -> Sharing | None:
    """Return how the ranks share the writing of what they have alike; None when each writes all that it has.

    Raises:
        ValueError: They would not share it, but it is said how.
    """
    if config.remove_redundancy:
        return Sharing(keep_redundancy=keep_redundancy, balance=balance)
    if (keep_redundancy, balance) != (1, "bytes"):
        raise ValueError(
            "keep_redundancy and balance say how redundancy is removed; give CheckpointConfig(remove_redundancy=True)"
        )
    return None


def slicer_for(
    coordinator: Coordinator | None, layout: Mapping[str, ParallelLayout] | None
) -> LayoutSlicer | None:
    """Return what tells which leaves of the state of this rank are slices; None for one process alone.

    Raises:
        ValueError: There is a layout, but there are no ranks.
    """
    if coordinator is None:
        if layout is not None:
            raise ValueError("a layout says what each rank holds; give a coordinator, too")
        return None
    return LayoutSlicer(coordinator.rank, layout)


def check_ranks_agree(config: CheckpointConfig, policy: SavePolicy) -> None:
    """Check that all ranks will save at the same steps, and can.

    Raises:
        ValueError: They would save at different steps.
    """
    if config.back_pressure != "wait":
        raise ValueError(
            f"back_pressure={config.back_pressure!r} with a coordinator: each rank would leave out other saves; use 'wait'"
        )
    if parse_on_error(config.on_error).action != "raise":
        raise ValueError(
            "on_error with a coordinator: ranks that hear of a failed save at different steps, and go on, save at different "
            "steps from then on; use 'raise' or 'retry(n)'"
        )
    if _is_by_time(policy):
        raise ValueError(
            "saving by time with a coordinator: the clocks of the ranks differ, so they would save at different steps; "
            "use save_checkpoint_steps"
        )


def _is_by_time(policy: SavePolicy) -> bool:
    if isinstance(policy, AnyOf):
        return any(_is_by_time(one) for one in policy.policies)
    return isinstance(policy, (EverySeconds, Overhead))
