# SPDX-License-Identifier: Apache-2.0
"""The benchmark of many ranks, on a model of a few KiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.figures import Figures
from tools.bench.ranks import PLAN, REPLICATED, measure_ranks
from tools.bench.session import Pace, Session
from tools.bench.tables import report
from tools.bench.workload import Workload


@pytest.mark.slow
def test_ranks_save_and_load_shares_and_copies_of_a_model(tmp_path: Path) -> None:
    figures = Figures()
    session = Session(
        section="ranks",
        workload=Workload(size_bytes=2 << 20),
        directory=tmp_path,
        pace=Pace(rounds=1, peer_rounds=1, rest_s=0),
        figures=figures,
        failures={},
        report=lambda line: None,
    )
    measure_ranks(session, worlds=(2,))
    modes = ["2 ranks", f"2 ranks{REPLICATED}"]
    for what in ("save", "load"):
        assert [one.subject.mode for one in figures.find("ranks", what)] == modes
    table = report(figures, [], [], {})
    assert all(f"| {mode} |" in table for mode in (*modes, f"plan for {PLAN}"))
