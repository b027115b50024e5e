# SPDX-License-Identifier: Apache-2.0
"""Events as metrics, through the real OpenTelemetry SDK and the real Prometheus client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager
from ckptmgr.events import Event, direction_of
from tests.faults.training import state_of

SAVED = Event(
    name="save.durable",
    at=1000.0,
    seconds=0.5,
    size_bytes=100,
    step=1,
    figures={"blocked_s": 0.25},
)
FAILED = Event(name="save.failed", at=1001.0, seconds=2.0, error="full", error_type="StoreFull")
SKIPPED = Event(name="save.skipped", at=1002.0)
VERIFIED = Event(name="verify", at=1003.0, seconds=1.0, size_bytes=40)
DAMAGED = Event(name="verify", at=1004.0, size_bytes=50, error="cut", error_type="damaged")
STARTED = Event(name="save.started", at=999.0)
WARNED = Event(name="forecast", at=999.0, error="too small", error_type="disk")
ALL = (STARTED, WARNED, SAVED, FAILED, SKIPPED, VERIFIED, DAMAGED)


@pytest.mark.parametrize(
    ("event", "operation", "outcome", "direction"),
    [
        (SAVED, "save", "durable", "write"),
        (FAILED, "save", "failed", None),
        (SKIPPED, "save", "skipped", None),
        (VERIFIED, "verify", "ok", "read"),
        (DAMAGED, "verify", "failed", None),
    ],
)
def test_event_says_what_was_done_and_how_it_went(
    event: Event, operation: str, outcome: str, direction: str | None
) -> None:
    assert (event.operation, event.outcome) == (operation, outcome)
    assert direction_of(event) == direction


def test_prometheus_counts_events(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    from ckptmgr.integrations.prometheus import PrometheusObserver

    registry = client.CollectorRegistry()
    observer = PrometheusObserver(registry)
    for event in ALL:
        observer(event)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(f"ckptmgr_{name}", labels)
        return found

    duration = "operation_duration_seconds"
    assert value(f"{duration}_sum", operation="save", outcome="durable") == 0.5
    assert value(f"{duration}_count", operation="save", outcome="failed") == 1
    assert value(f"{duration}_count", operation="save", outcome="skipped") == 1
    assert value(f"{duration}_count", operation="save", outcome="started") is None
    assert value("io_bytes_total", operation="save", direction="write") == 100
    assert value("io_bytes_total", operation="verify", direction="read") == 40
    assert value("train_blocked_seconds_total") == 0.25
    assert value("errors_total", operation="save", error_type="StoreFull") == 1
    assert value("errors_total", operation="forecast", error_type="disk") == 1
    assert value("last_success_timestamp_seconds", operation="save") == 1000.0
    assert value("last_success_timestamp_seconds", operation="verify") == 1003.0
    observer.write_textfile(tmp_path / "ckptmgr.prom")
    assert "ckptmgr_train_blocked_seconds_total 0.25" in (tmp_path / "ckptmgr.prom").read_text()


def test_opentelemetry_records_events() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from ckptmgr.integrations.opentelemetry import OpenTelemetryObserver

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observer = OpenTelemetryObserver(provider.get_meter("test"))
    for event in ALL:
        observer(event)
    document = json.loads(str(getattr(reader.get_metrics_data(), "to_json", dict)()))
    provider.shutdown()
    (scope,) = document["resource_metrics"][0]["scope_metrics"]
    metrics = {metric["name"]: metric for metric in scope["metrics"]}

    def points(name: str) -> dict[tuple[str, ...], dict[str, Any]]:
        found = metrics[name]["data"]["data_points"]
        return {tuple(sorted(point["attributes"].values())): point for point in found}

    duration, io, blocked = "operation.duration", "io", "train.blocked"
    units = [metrics[f"ckptmgr.{name}"]["unit"] for name in (duration, io, blocked)]
    assert units == ["s", "By", "s"]
    durations = points("ckptmgr.operation.duration")
    assert set(durations) == {
        ("durable", "save"),
        ("StoreFull", "failed", "save"),
        ("save", "skipped"),
        ("ok", "verify"),
        ("damaged", "failed", "verify"),
    }
    failed = durations["StoreFull", "failed", "save"]
    assert (failed["sum"], failed["attributes"]["error.type"]) == (2.0, "StoreFull")
    moved = points("ckptmgr.io")
    assert moved["save", "write"]["value"] == 100
    assert moved["read", "verify"]["value"] == 40
    assert points("ckptmgr.train.blocked")[()]["sum"] == 0.25


def test_opentelemetry_uses_the_global_meter_by_default() -> None:
    pytest.importorskip("opentelemetry")
    from ckptmgr.integrations.opentelemetry import OpenTelemetryObserver

    OpenTelemetryObserver()(SAVED)


def test_observer_of_a_manager_counts_its_saves(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    from ckptmgr.integrations.prometheus import PrometheusObserver

    registry = client.CollectorRegistry()
    with CheckpointManager(tmp_path, observe=PrometheusObserver(registry)) as manager:
        manager.save(1, state_of(1.0))
    labels = {"operation": "save", "outcome": "durable"}
    name = "ckptmgr_operation_duration_seconds_count"
    assert registry.get_sample_value(name, labels) == 1
