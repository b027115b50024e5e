# SPDX-License-Identifier: Apache-2.0
"""JSON fields of checkpoints and results of `verify`, as all commands print them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.verdict import Verification


def finite(value: Json) -> Json:
    """Return a JSON value with null for NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def timestamp(time: datetime) -> str:
    """Return a time as RFC 3339 in UTC."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def has_known_step(checkpoint: Checkpoint) -> bool:
    """Return whether the step of a checkpoint is more than a default."""
    if not checkpoint.has_step:
        return False
    is_known = checkpoint.run_id is not None or checkpoint.is_countable or checkpoint.is_bare
    return is_known or checkpoint.state is State.INCOMPLETE  # of another tool


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Json]:
    """Return the JSON fields of a checkpoint that all commands share."""
    return {
        "path": str(checkpoint.path),
        "series": checkpoint.series,
        "run": checkpoint.run_id or None,
        "step": checkpoint.step if has_known_step(checkpoint) else None,
        "attempt": checkpoint.attempt,
        "sequence": checkpoint.sequence,
        "epoch": checkpoint.epoch,
        "why": checkpoint.why,
        "saved_at": timestamp(checkpoint.saved_at),
        "size_bytes": checkpoint.size_bytes,
        "metrics": dict(checkpoint.metrics),
        "pins": [{"name": pin.name, "reason": pin.reason} for pin in checkpoint.pins],
        "tags": list(checkpoint.tags),
        "state": checkpoint.state.value,
        "health": checkpoint.health,
        "format": checkpoint.format,
        "cipher": checkpoint.cipher,
        "key_id": checkpoint.key_id,
        "opened_by": list(checkpoint.opened_by),
        "problem": checkpoint.problem,
        "id": checkpoint.id,
    }


def verification_json(answer: Verification) -> dict[str, Json]:
    """Return the JSON fields of one result of `verify`."""
    return {
        **checkpoint_json(answer.checkpoint),
        "status": answer.status.value,
        "problems": list(answer.problems),
        "checked": list(answer.checked),
        "unchecked": list(answer.unchecked),
        "nonfinite": {
            name: {"nan_count": nan_count, "inf_count": inf_count}
            for name, (nan_count, inf_count) in answer.nonfinite.items()
        },
        "hint": answer.hint,
    }


def verify_summary(
    level: str,
    statuses: Iterable[str],
    *,
    missing: Sequence[str] = (),
    bundles: Sequence[str] = (),
    quarantined: Sequence[str] = (),
) -> dict[str, Json]:
    """Return the JSON fields of the summary of `verify`, from the statuses of its results."""
    counts = Counter(statuses)
    return {
        "level": level,
        "count": counts.total(),
        "statuses": dict(sorted(counts.items())),
        "missing": list(missing),
        "bundles": list(bundles),
        "quarantined": list(quarantined),
    }


def verify_line(event: str, fields: Mapping[str, Json]) -> dict[str, Json]:
    """Return a line of `verify --jsonl`: `verified` for a result, `summary` at the end."""
    line: dict[str, Json] = {"schema": "ckptmgr.verify.line/1", "event": event, **fields}
    return {name: finite(value) for name, value in line.items()}
