# SPDX-License-Identifier: Apache-2.0
"""Watch a run and warn in time: before it starts about space and memory, after the first saves about what they cost.

Each kind of warning comes once, in the log and as a `forecast` event. Nothing here ever fails a save.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.handle import SaveHandle
from ckptmgr.engine.engine import mode_of
from ckptmgr.formats.tensor import Item
from ckptmgr.observe.observers import Observers
from ckptmgr.policy.forecast import Concern, Demand, Forecast, Kind, Pace, most_kept
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state.items import tensors_of

_LOG = logging.getLogger(__name__)
_WINDOW = 6
_MEMORY_INFO = Path("/proc/meminfo")


class Forecaster:
    """Measures a run and warns.

    Args:
        config: What the run asks for.
        observers: Hear the warnings.
    """

    def __init__(self, config: CheckpointConfig, observers: Observers) -> None:
        self._config = config
        self._observers = observers
        self._is_checked = False
        self._warned: set[Kind] = set()
        self._saves: deque[tuple[float, SaveHandle]] = deque(maxlen=_WINDOW)
        self._count = 0

    def before_run(self, writer: SeriesWriter, save_bytes: Callable[[], int]) -> None:
        """Warn of what will not do; only the first time.

        Args:
            writer: What the run writes to.
            save_bytes: Returns the size of one checkpoint.
        """
        if self._is_checked:
            return
        self._is_checked = True
        try:
            concerns = self.forecast(writer, save_bytes()).concerns
        except CkptmgrError as error:
            hint = error.hint or "the first save will fail"
            self._warn(Concern(kind="state", text=f"cannot be saved: {error.message}", hint=hint))
        except (
            Exception
        ) as error:  # the state is anybody's code; what is wrong with it shows when it is saved
            _LOG.debug("no forecast: %r", error)
        else:
            for concern in concerns:
                self._warn(concern)

    def after_save(self, handle: SaveHandle, at: float) -> None:
        """Note a save that was handed over, and warn when saves cost too much.

        Args:
            handle: Of the save.
            at: When it was asked for, in seconds on any clock.
        """
        self._saves.append((at, handle))
        self._count += 1
        pace = self.pace
        if pace is None or {"time", "backlog"} <= self._warned:
            return
        demand = demand_of(self._config, handle.stats.size_bytes, available_bytes=None)
        for concern in Forecast(demand=demand, pace=pace).concerns:
            self._warn(concern)

    @property
    def pace(self) -> Pace | None:
        """What the last saves cost; None before there were three, the first of which warms up memory and disk."""
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
        """Return what is to be expected.

        Args:
            writer: What the run writes to.
            save_bytes: Size of one checkpoint.

        Raises:
            OSError: From the disk.
        """
        demand = demand_of(self._config, save_bytes, available_bytes=available_memory_bytes())
        fs, place = writer.store.fs, writer.store.directory
        while fs.status(place) is None and place != place.parent:
            place = place.parent
        demand = replace(
            demand,
            free_bytes=fs.free_bytes(place),
            present_bytes=sum(checkpoint.size_bytes for checkpoint in writer.own_history()),
        )
        return Forecast(demand=demand, pace=self.pace)

    def _warn(self, concern: Concern) -> None:
        if concern.kind in self._warned:
            return
        self._warned.add(concern.kind)
        _LOG.warning("%s\nhint: %s", concern.text, concern.hint)
        self._observers.emit(
            "forecast", error=concern.text, error_type=concern.kind, notes=(concern.hint,)
        )


def demand_of(config: CheckpointConfig, save_bytes: int, *, available_bytes: int | None) -> Demand:
    """Return what a configuration asks for; what the disk has is not known here.

    Args:
        config: The configuration.
        save_bytes: Size of one checkpoint.
        available_bytes: Memory that the system has, or None when unknown.
    """
    policy, memory = config.retention_policy(), config.memory
    states = 0
    if mode_of(config.async_save) != "sync":
        states = 2 if config.back_pressure == "coalesce" else 1
    budget_bytes = None if memory is None else memory.usable_host_bytes
    can_spill = memory is not None and memory.spill_directory is not None and config.keys is None
    return Demand(
        save_bytes=save_bytes,
        keep=most_kept(policy),
        policy=str(policy),
        staged_states=states,
        memory_bytes=None if can_spill else budget_bytes or available_bytes,
        has_memory_budget=budget_bytes is not None,
        may_spill=config.keys is None,
    )


def size_of(items: Sequence[Item]) -> int:
    """Return about the size of a file of these items."""
    tensors = (tensor for item in items for tensor in tensors_of(item))
    return sum(tensor.spec.size_bytes for tensor in tensors)


def available_memory_bytes(path: Path = _MEMORY_INFO) -> int | None:
    """Return the memory that new work can have without swapping, or None when the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
