# SPDX-License-Identifier: Apache-2.0
"""Events as Prometheus metrics: `CheckpointManager(..., observe=PrometheusObserver())`.

| metric | labels |
|---|---|
| `ckptmgr_operation_duration_seconds` (histogram) | operation, outcome |
| `ckptmgr_io_bytes_total` (counter) | operation, direction |
| `ckptmgr_train_blocked_seconds_total` (counter) | |
| `ckptmgr_errors_total` (counter) | operation, error_type |
| `ckptmgr_last_success_timestamp_seconds` (gauge) | operation |

A useful alert: `time() - ckptmgr_last_success_timestamp_seconds{operation="save"} > 3600`. Needs
`prometheus-client`; its `start_http_server` serves them, `write_textfile` is for jobs that end.
"""

from __future__ import annotations

import os

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    write_to_textfile,
)

from ckptmgr.observe.events import MOMENTS, Event, direction_of

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class PrometheusObserver:
    """Count events. One for each registry.

    Args:
        registry: Where the metrics are registered.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._duration = Histogram(
            "ckptmgr_operation_duration_seconds",
            "Duration of what was done",
            ["operation", "outcome"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._io = Counter(
            "ckptmgr_io_bytes",
            "Bytes of checkpoint files",
            ["operation", "direction"],
            registry=registry,
        )
        self._blocked = Counter(
            "ckptmgr_train_blocked_seconds",
            "For how long saves held up the training",
            registry=registry,
        )
        self._errors = Counter(
            "ckptmgr_errors", "What failed", ["operation", "error_type"], registry=registry
        )
        self._last = Gauge(
            "ckptmgr_last_success_timestamp_seconds",
            "When it last went well",
            ["operation"],
            registry=registry,
        )

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.error_type is not None:
            self._errors.labels(event.operation, event.error_type).inc()
        if event.name in MOMENTS:
            return
        self._duration.labels(event.operation, event.outcome).observe(event.seconds)
        direction = direction_of(event)
        if direction is not None:
            self._io.labels(event.operation, direction).inc(event.size_bytes)
            self._last.labels(event.operation).set(event.at)
        self._blocked.inc(max(0.0, event.figures.get("blocked_s", 0.0)))

    def write_textfile(self, path: str | os.PathLike[str]) -> None:
        """Write all metrics of the registry to a file for the textfile collector of node_exporter.

        Args:
            path: Ends in `.prom`; replaced atomically.
        """
        write_to_textfile(os.fspath(path), self._registry)
