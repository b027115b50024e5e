# SPDX-License-Identifier: Apache-2.0
"""restic's 40 policy cases: each keeps the same, or is one of the differences that are listed here."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import Checkpoint, UnsafePrune, parse_policy, plan
from ckptmgr.policy.rules import RetentionPolicy

_FACTS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "golden" / "restic.json").read_text(encoding="utf-8")
)
_CASES: list[tuple[int, str | None, list[int]]] = [
    (number, case["policy"], case["kept"]) for number, case in enumerate(_FACTS["cases"])
]
NEWEST_STAYS = (18, 20)
"""No tag of the newest is named: restic drops it, here it stays."""
NOT_EXPRESSIBLE = {0: "an empty policy keeps all there", 19: "two tags at once"}


def history() -> list[Checkpoint]:
    """Return the snapshots as checkpoints; of equal times the one that restic sees first is newer."""
    found = _FACTS["snapshots"]
    return [
        Checkpoint(
            path=Path(f"net-{number}.ckpt"),
            series="net",
            step=len(found) - number,
            sequence=len(found) - number,
            saved_at=datetime.fromisoformat(time).replace(tzinfo=UTC),
            size_bytes=1,
            tags=tuple(tags),
        )
        for number, (time, tags) in enumerate(found)
    ]


@pytest.mark.parametrize(("number", "policy", "kept"), _CASES)
def test_policy_keeps_what_restic_keeps(number: int, policy: str | None, kept: list[int]) -> None:
    if policy is None:
        assert number in NOT_EXPRESSIBLE
        return
    present = history()
    decided = plan(present, parse_policy(policy), present[0].saved_at)
    here = [number for number, one in enumerate(present) if one in decided.kept]
    assert here == ([0, *kept] if number in NEWEST_STAYS else kept)


def test_all_forty_cases_are_here_and_two_cannot_be_said() -> None:
    assert len(_CASES) == 40
    assert [number for number, policy, _ in _CASES if policy is None] == [*NOT_EXPRESSIBLE]


def test_empty_policy_is_refused_and_not_all() -> None:
    present = history()
    with pytest.raises(UnsafePrune, match="empty"):
        plan(present, RetentionPolicy(()), present[0].saved_at)
