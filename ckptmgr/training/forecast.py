# SPDX-License-Identifier: Apache-2.0
"""`Forecaster`: warns of a lack of space or memory before a run, and of costly saves during it.

It warns once of each kind, in the log and as a `forecast` event, and never fails a save. Only a
state that cannot be stored is refused.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.errors import CkptmgrError, UnsupportedState
from ckptmgr.core.handle import SaveHandle
from ckptmgr.engine.engine import save_mode_of
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.formats.tensor import Item
from ckptmgr.io.cgroups import memory_limit
from ckptmgr.observe.observers import Observers
from ckptmgr.policy.forecast import Concern, ConcernKind, Demand, Forecast, Pace, most_kept
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state.items import tensors_in
from ckptmgr.training.companions import Companion

_LOG = logging.getLogger(__name__)
_WINDOW = 6
_MEMORY_INFO = Path("/proc/meminfo")


class Forecaster(Companion):
    """Measures a run and warns."""

    def __init__(self, config: CheckpointConfig, observers: Observers) -> None:
        self._config = config
        self._observers = observers
        self._is_checked = False
        self._warned: set[ConcernKind] = set()
        self._saves: deque[tuple[float, SaveHandle]] = deque(maxlen=_WINDOW)
        self._count = 0

    def before_run(
        self, writer: SeriesWriter, save_bytes: Callable[[], int], *, refuses: bool = False
    ) -> None:
        """Warn of shortages in the first call; `save_bytes` returns the size of a checkpoint.

        Raises:
            UnsupportedState: With `refuses`: the state cannot be stored. Otherwise that is a
                warning.
        """
        if self._is_checked:
            return
        self._is_checked = True
        try:
            self._warn(*self.forecast(writer, save_bytes()).concerns)
        except CkptmgrError as error:
            if refuses and isinstance(error, UnsupportedState):
                self._is_checked = False
                raise
            hint = error.hint or "the first save will fail"
            self._warn(Concern("state", f"cannot be saved: {error.message}", hint))
        except Exception as error:  # from the user's state_dict(): it will fail the save, too
            _LOG.debug("no forecast: %r", error)

    def save_asked(self, writer: SeriesWriter, size_bytes: int) -> None:
        """Warn of shortages before the first save."""
        self.before_run(writer, lambda: size_bytes)

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """Count a save; warn when saves are costly."""
        self._saves.append((facts.at or 0.0, handle))
        self._count += 1
        pace = self.pace
        if pace is not None and not {"time", "backlog"} <= self._warned:
            demand = demand_of(self._config, handle.stats.size_bytes, available_bytes=None)
            self._warn(*Forecast(demand=demand, pace=pace).concerns)

    @property
    def pace(self) -> Pace | None:
        """Mean costs of the last saves without the first, which warms up memory and disk."""
        if len(self._saves) < 3:
            return None
        times = [at for at, _ in self._saves]
        costs = [handle.stats for _, handle in list(self._saves)[1:]]
        done = [stats for stats in costs if stats.size_bytes] or costs
        return Pace(
            saves=self._count,
            interval_s=max(0.0, times[-1] - times[0]) / (len(times) - 1),
            blocked_s=sum(stats.blocked_s for stats in costs) / len(costs),
            durable_s=sum(s.stage_s + s.write_s + s.sync_s + s.commit_s for s in done) / len(done),
        )

    def forecast(self, writer: SeriesWriter, save_bytes: int) -> Forecast:
        """Return the forecast of a run whose checkpoints have this size."""
        limit = memory_limit()
        demand = demand_of(
            self._config,
            save_bytes,
            available_bytes=available_memory_bytes(),
            group_bytes=None if limit is None else limit.available,
        )
        fs, place = writer.listing.fs, writer.listing.directory
        while fs.status(place) is None and place != place.parent:
            place = place.parent
        present_bytes = sum(checkpoint.size_bytes for checkpoint in writer.own_history())
        demand = replace(demand, free_bytes=fs.free_bytes(place), present_bytes=present_bytes)
        return Forecast(demand=demand, pace=self.pace)

    def _warn(self, *concerns: Concern) -> None:
        for kind, text, hint in concerns:
            if kind not in self._warned:
                self._warned.add(kind)
                _LOG.warning("%s\nhint: %s", text, hint)
                self._observers.emit("forecast", error=text, error_type=kind, notes=(hint,))


def demand_of(
    config: CheckpointConfig,
    save_bytes: int,
    *,
    available_bytes: int | None,
    group_bytes: int | None = None,
) -> Demand:
    """Return the demand of a configuration, without the disk.

    `available_bytes` is the memory that the system has, None when unknown; `group_bytes` the part
    that the limit of the control group leaves, None without one.
    """
    policy, memory = config.retention_policy(), config.memory
    states = 0
    if save_mode_of(config.async_save) != "sync":
        states = 2 if config.back_pressure == "coalesce" else 1
    budget_bytes = None if memory is None else memory.usable_host_bytes
    can_spill = memory is not None and memory.may_spill_staging and config.keys is None
    memory_bytes = budget_bytes or available_bytes
    is_limited = group_bytes is not None and (memory_bytes is None or group_bytes < memory_bytes)
    if is_limited:
        memory_bytes = group_bytes
    return Demand(
        save_bytes=save_bytes,
        keep=most_kept(policy),
        policy=str(policy),
        staged_states=states,
        memory_bytes=None if can_spill else memory_bytes,
        has_memory_budget=budget_bytes is not None and not is_limited,
        is_group_limited=is_limited,
        may_spill=config.keys is None,
    )


def size_of(items: Sequence[Item]) -> int:
    """Return the approximate size of a file of these items."""
    return sum(tensor.spec.size_bytes for tensor in tensors_in(items))


def available_memory_bytes(path: Path = _MEMORY_INFO) -> int | None:
    """Return the memory that the machine has without swapping, or None when unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
