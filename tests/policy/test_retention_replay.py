# SPDX-License-Identifier: Apache-2.0
"""Driven by the same loop and clock as the real MindSpore 2.10.0, the policies add and remove the same files at each step.

The loop below is the whole callback, without a disk: decide, name, publish, plan. One order is different, and no recorded
outcome shows it: MindSpore removes before it writes, we after.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import pytest

from ckptmgr import Checkpoint, CheckpointConfig, plan
from ckptmgr.core.names import checkpoint_name, restart_prefix, step_in_epoch
from ckptmgr.policy.save import LastSave, SaveDecision, decide_at_end
from tests.support.policies import NOW


class _Case(TypedDict):
    name: str
    config: dict[str, int | str | None]
    steps: int
    batch_num: int
    dt: float | None
    end: bool
    prefix: str
    files: list[str]
    latest: str
    events: list[list[object]]


_CASES: list[_Case] = json.loads(
    (Path(__file__).parent.parent / "golden" / "policy.json").read_text(encoding="utf-8")
)


@dataclass
class _Training:
    """A training loop with a clock that starts at 0 s, and a directory that is a list."""

    config: CheckpointConfig
    prefix: str
    batch_num: int
    files: list[Checkpoint] = field(default_factory=list)
    events: list[list[object]] = field(default_factory=list)
    last: LastSave = field(default_factory=lambda: LastSave(at=0.0))
    latest: str = ""

    def save_if_due(self, event: int | str, step: int, *, now: float) -> None:
        decision = self._decide(event, step, now)
        if not decision.is_due:
            return
        added = self._publish(step, now)
        dropped = plan(self.files, self.config.retention_policy(), added.saved_at).dropped
        self.files = [item for item in self.files if item not in dropped]
        self.events.append([event, now, [added.name], sorted(item.name for item in dropped)])

    def _decide(self, event: int | str, step: int, now: float) -> SaveDecision:
        policy = self.config.save_policy()
        if event == "end":
            return decide_at_end(policy, step, last=self.last)
        return policy.decide(step, now, self.last)

    def _publish(self, step: int, now: float) -> Checkpoint:
        position = step_in_epoch(step, batch_num=self.batch_num)
        epoch = (step - 1) // self.batch_num + 1
        self.latest = checkpoint_name(
            self.prefix, epoch, step_in_epoch=position, format=self.config.format
        )
        self.last = LastSave(step=step, at=now)
        added = Checkpoint(
            path=Path(self.latest),
            series=self.prefix,
            step=step,
            saved_at=NOW + timedelta(seconds=now),
            size_bytes=1,
        )
        self.files.append(added)
        return added


def _run(case: _Case) -> _Training:
    config = CheckpointConfig(**case["config"])  # type: ignore[arg-type]
    training = _Training(config, restart_prefix(case["prefix"], []), case["batch_num"])
    now = 0.0
    for step in range(1, case["steps"] + 1):
        now += case["dt"] or 0
        training.save_if_due(step, step, now=now)
    if case["end"]:
        training.save_if_due("end", case["steps"], now=now)
    return training


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_training_adds_and_removes_the_recorded_files(case: _Case) -> None:
    assert _run(case).events == case["events"]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_training_leaves_the_recorded_files(case: _Case) -> None:
    training = _run(case)
    assert sorted(item.name for item in training.files) == case["files"]
    assert training.latest == case["latest"]
