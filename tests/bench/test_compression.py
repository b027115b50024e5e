# SPDX-License-Identifier: Apache-2.0
"""Every element type is compressed, with and without a key; its remaining size is known before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.compression import ELEMENTS, KINDS, OneType, measure_compression
from tools.bench.figures import Figures
from tools.bench.session import Pace, Session
from tools.bench.tables import report
from tools.bench.workload import Workload, size_of

_SIZE_BYTES = 2 << 20


@pytest.mark.parametrize("elements", ELEMENTS)
def test_one_type_has_the_size_and_the_tensors_it_says(elements: str) -> None:
    workload = OneType(size_bytes=_SIZE_BYTES, elements=elements)
    state = workload.new_state()
    assert size_of(state) == workload.total_bytes == _SIZE_BYTES
    assert len(state) == workload.tensors
    assert len({array.dtype for array in state.values()}) == 1


def test_compression_notes_every_type_and_removes_its_files(tmp_path: Path) -> None:
    figures = Figures()

    def new_session(section: str, workload: Workload) -> Session:
        return Session(
            section=section,
            workload=workload,
            directory=tmp_path,
            pace=Pace(rounds=1, peer_rounds=1, rest_s=0),
            figures=figures,
            failures={},
            report=lambda line: None,
        )

    measure_compression(new_session, _SIZE_BYTES)
    assert list(tmp_path.iterdir()) == []
    found = figures.find("compression", "ratio")
    ratios = {one.subject.mode: one.median for one in found if one.subject.mode.endswith(KINDS)}
    assert list(ratios) == [f"{elements} {kind}" for elements in ELEMENTS for kind in KINDS]
    assert ratios["int64 plain"] < ratios["bf16 plain"] < ratios["fp32 plain"] < 0.9
    assert ratios["fp32 of bf16 plain"] < 0.4
    assert ratios["random bytes plain"] < 1.01
    for what in ("save", "load", "save cpu", "load cpu"):
        modes = [one.subject.mode for one in figures.find("compression", what)]
        assert [mode for mode in modes if mode.endswith(KINDS)] == list(ratios)
    alone = {one.subject.mode: one.median for one in found}
    assert alone["bf16 in memory"] == pytest.approx(ratios["bf16 plain"], abs=0.01)
    assert "| int64 container | 0.2" in report(figures, [], [], {})
