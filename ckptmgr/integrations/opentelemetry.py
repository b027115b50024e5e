# SPDX-License-Identifier: Apache-2.0
"""Events as OpenTelemetry metrics: `CheckpointManager(..., observe=OpenTelemetryObserver())`.

| instrument | unit | attributes |
|---|---|---|
| `ckptmgr.operation.duration` (histogram) | s | `ckptmgr.operation`, `ckptmgr.outcome`, `error.type` |
| `ckptmgr.io` (counter) | By | `ckptmgr.operation`, `ckptmgr.io.direction` |
| `ckptmgr.train.blocked` (histogram) | s | |

Needs `opentelemetry-api`; the SDK that the program sets up exports them.
"""

from __future__ import annotations

from opentelemetry.metrics import Meter, get_meter

from ckptmgr._version import __version__
from ckptmgr.observe.events import MOMENTS, Event, direction_of


class OpenTelemetryObserver:
    """Record events.

    Args:
        meter: Makes the instruments; that of the global provider by default.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        made = meter or get_meter("ckptmgr", __version__)
        self._duration = made.create_histogram(
            "ckptmgr.operation.duration", unit="s", description="Duration of what was done"
        )
        self._io = made.create_counter(
            "ckptmgr.io", unit="By", description="Bytes of checkpoint files"
        )
        self._blocked = made.create_histogram(
            "ckptmgr.train.blocked", unit="s", description="For how long a save held up training"
        )

    def __call__(self, event: Event) -> None:
        """Record one event."""
        if event.name in MOMENTS:
            return
        about = {"ckptmgr.operation": event.operation}
        outcome = {**about, "ckptmgr.outcome": event.outcome}
        if event.error_type is not None:
            outcome["error.type"] = event.error_type
        self._duration.record(event.seconds, outcome)
        direction = direction_of(event)
        if direction is not None:
            self._io.add(event.size_bytes, {**about, "ckptmgr.io.direction": direction})
        if "blocked_s" in event.figures:
            self._blocked.record(event.figures["blocked_s"])
