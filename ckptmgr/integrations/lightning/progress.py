# SPDX-License-Identifier: Apache-2.0
"""The progress of a fit in a checkpoint of Lightning.

At the end of an epoch Lightning counts its batches until the next one begins. A run with `max_steps`
that resumes there trains one batch too many in an epoch of its own; so the next epoch is counted as
the one to begin, as Lightning does itself without a restart.
"""

from __future__ import annotations

from typing import Any

_BATCHES = "epoch_loop.batch_progress"
_OF_EPOCH = (_BATCHES, "epoch_loop.scheduler_progress")
_OPTIMIZER = "epoch_loop.automatic_optimization.optim_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def start_next_epoch(fit_loop: dict[str, Any]) -> None:
    """Count the epoch of a `fit_loop` as completed, and no batch of the next one."""
    progress = fit_loop["epoch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts["completed"] = counts["processed"]
    parts = [fit_loop[name] for name in _OF_EPOCH]
    parts += fit_loop[_OPTIMIZER]["optimizer"].values()
    for part in parts:
        _clear(part["current"])
    fit_loop[_BATCHES]["is_last_batch"] = False
    _clear(fit_loop[_VALIDATION]["total"])


def forget_begun_batch(fit_loop: dict[str, Any]) -> None:
    """Count no batch that has begun and not ended, such as one that an error has stopped."""
    total, current = (fit_loop[_BATCHES][name] for name in ("total", "current"))
    for name, count in current.items():
        total[name] -= count - current["completed"]
        current[name] = current["completed"]


def _clear(counts: dict[str, int]) -> None:
    counts.update(dict.fromkeys(counts, 0))
