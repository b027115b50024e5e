# SPDX-License-Identifier: Apache-2.0
"""The measurement of `watch` at rest: it waits for the checks, and measures the right process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.bench.watch import cpu_s, main, make_directories


def test_directories_have_the_checkpoints_that_are_asked_for(tmp_path: Path) -> None:
    made = make_directories(tmp_path, directories=2, checkpoints=3)
    assert [len(list(path.glob("*.ckpt"))) for path in made] == [3, 3]


def test_cpu_time_of_this_process_grows() -> None:
    before = cpu_s(os.getpid())
    while cpu_s(os.getpid()) == before:
        pass


@pytest.mark.slow
def test_measurement_runs_to_its_end(capsys: object) -> None:
    assert main(["--directories", "1", "--checkpoints", "1", "--seconds", "0.1"]) in (0, 1)
