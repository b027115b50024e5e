# SPDX-License-Identifier: Apache-2.0
"""Last check of a checkpoint: its result, which alarm it is, and when to repeat it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptmgr.maintenance.verdict import Status
from ckptmgr.maintenance.watch.model import AlarmKind

PASSED = (Status.OK, Status.UNVERIFIED, Status.PARTIAL)
ALARM_OF: Mapping[Status, AlarmKind] = {
    Status.DAMAGED: "damaged",
    Status.MISSING: "damaged",
    Status.UNREADABLE: "unreadable",
    Status.WRONG_KEY: "unproven",
    Status.UNSEALED: "unproven",
    Status.UNPROVEN: "unproven",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Last check of a checkpoint: of which files, its result, and when to repeat it."""

    fingerprint: str
    status: Status = Status.OK
    problem: str = ""
    retry_at: float | None = None
    is_believed: bool = True

    @property
    def has_passed(self) -> bool:
        """Whether nothing wrong was found."""
        return self.status in PASSED


def result_of(check: Check | None) -> tuple[Status, str] | None:
    """Return the result of a check, or None without one."""
    return None if check is None else (check.status, check.problem)
