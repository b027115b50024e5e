# SPDX-License-Identifier: Apache-2.0
"""What a `CheckpointManager` is made of when it is one of many ranks: the directory, the writer, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ckptmgr.config import CheckpointConfig
from ckptmgr.observe import Observers
from ckptmgr.parallel.coordinator import Coordinator
from ckptmgr.parallel.rank_writer import RankWriter
from ckptmgr.parallel.shard_store import ShardStore
from ckptmgr.save_failure import parse_on_error
from ckptmgr.save_policy import EverySeconds, Overhead, SavePolicy
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
    )


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
    is_by_time = isinstance(policy, (EverySeconds, Overhead))
    if is_by_time:
        raise ValueError(
            "saving by time with a coordinator: the clocks of the ranks differ, so they would save at different steps; "
            "use save_checkpoint_steps"
        )
