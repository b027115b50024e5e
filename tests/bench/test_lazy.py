# SPDX-License-Identifier: Apache-2.0
"""Single tensors of a file are read in every mode, from a file that has the size that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.figures import Figures
from tools.bench.lazy import READ_BYTES, Pairs, measure_lazy
from tools.bench.session import Pace, Session
from tools.bench.tables import report
from tools.bench.workload import Workload, size_of

_SIZE_BYTES = 4 << 20


def _new_session(directory: Path, failures: dict[str, str], figures: Figures) -> Session:
    return Session(
        section="lazy",
        workload=Pairs(size_bytes=_SIZE_BYTES),
        directory=directory,
        pace=Pace(rounds=2, peer_rounds=1, rest_s=0),
        figures=figures,
        failures=failures,
        report=lambda line: None,
    )


@pytest.mark.parametrize("size_bytes", [_SIZE_BYTES, 100 << 20])
def test_pairs_have_the_size_and_the_tensors_they_say(size_bytes: int) -> None:
    workload = Pairs(size_bytes=size_bytes)
    state = workload.new_state()
    assert size_of(state) == workload.total_bytes
    assert size_bytes * 0.99 < workload.total_bytes <= size_bytes
    assert len(state) == workload.tensors
    assert {state[f"layer{pair:03}.bias"].nbytes for pair in range(workload.pairs)} == {READ_BYTES}


def test_lazy_notes_every_round_of_every_mode_and_removes_its_files(tmp_path: Path) -> None:
    figures, failures = Figures(), dict[str, str]()

    def new_session(section: str, workload: Workload) -> Session:
        assert (section, workload.size_bytes) == ("lazy", _SIZE_BYTES)
        return _new_session(tmp_path, failures, figures)

    measure_lazy(new_session, _SIZE_BYTES)
    assert failures == {}
    assert list(tmp_path.iterdir()) == []
    for cache in ("cold", "warm"):
        whole = figures.find("lazy", f"{cache}, with opening")
        alone = figures.find("lazy", f"{cache}, alone")
        modes = [one.subject.mode for one in whole]
        assert sorted(modes) == ["ckpt-gcm", "container-gcm", "safetensors"]
        assert modes == [one.subject.mode for one in alone]
        for slower, faster in zip(whole, alone, strict=True):
            assert len(slower.values) == len(faster.values) == 2
            assert all(a > b > 0 for a, b in zip(slower.values, faster.values, strict=True))
    assert "of a file of 4 MiB" in report(figures, [], [], {})


def test_lazy_without_room_on_the_disk_is_left_out_with_the_reason(tmp_path: Path) -> None:
    figures, failures = Figures(), dict[str, str]()
    measure_lazy(lambda section, workload: _new_session(tmp_path, failures, figures), 1 << 60)
    assert list(figures) == []
    assert "GB of disk" in failures["lazy"]
