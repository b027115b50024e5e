# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs with ours and the bare disk alone, and leaves nothing but its figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tools.bench.command import main
from tools.bench.contestant import Background, Flight
from tools.bench.figures import Figures, cpu_of
from tools.bench.loops import lost_share, new_step
from tools.bench.options import SECTIONS, parse
from tools.bench.ranks import PLAN, REPLICATED
from tools.bench.sections import FLOORS
from tools.bench.session import Pace, Session
from tools.bench.team import Failed, Setup, Team
from tools.bench.workload import Workload, new_state, size_of, tiny

_QUICKER = tuple(section for section in SECTIONS if section not in ("memory", "loops"))
_RANKS = ["2 ranks", f"2 ranks{REPLICATED}"]
_SMALL = ("--size", "1MiB", "--rounds", "1", "--rest", "0", "--libraries", "raw", "ckptmgr")


@pytest.mark.slow
def test_bench_measures_sections_and_writes_it_down(tmp_path: Path) -> None:
    output = tmp_path / "output"
    asked = ("--sections", *_QUICKER, "--modes", "ckpt", "ckpt-sm4")
    scale = (
        "--sizes",
        "1MiB",
        "2MiB",
        "--counts",
        "10",
        "20",
        "--lazy-size",
        "4MiB",
        "--worlds",
        "2",
    )
    code = main([*_SMALL, *asked, *scale, "--dir", str(tmp_path), "--output", str(output)])
    result = json.loads((output / "figures.json").read_text())
    assert code == 0
    assert {one["section"] for one in result["figures"]} == {*_QUICKER} - {"slow"} | {"slow files"}
    assert {one["target"] for one in result["targets"]} == {
        f"T{number}" for number in (1, 5, 6, 7, 10, 11, 12, 13, 14)
    }
    limits = ("save", "load", *FLOORS)
    assert {one["what"] for one in result["figures"] if one["mode"] == "limit"} == {
        *limits,
        *map(cpu_of, limits),
    }
    assert {one["who"] for one in result["figures"] if one["section"] == "background"} == {
        "one memcpy",
        "ckptmgr",
    }
    for what in ("save", "load"):
        ranks = [
            one["mode"]
            for one in result["figures"]
            if (one["section"], one["what"]) == ("ranks", what)
        ]
        assert ranks == _RANKS
    tables = (output / "tables.md").read_text()
    assert " s/GiB, residuals " in tables
    assert all(f"| {mode} |" in tables for mode in (*_RANKS, f"plan for {PLAN}"))
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.slow
def test_bench_on_one_processor_says_so_and_gives_the_others_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = os.sched_getaffinity(0)
    asked = ("--sections", "files", "--modes", "safetensors", "--processors", "1")
    assert main([*_SMALL, *asked, "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ", 1 cores, " in printed
    for what in ("load", "load mmap", "into", "into own", "verify", "load warm"):
        assert f"## Files: {what}, 1 MiB" in printed
    assert os.sched_getaffinity(0) == allowed


def test_loop_beside_a_save_loses_no_more_than_all_its_steps(tmp_path: Path) -> None:
    order: list[str] = []
    background = Background(
        name="ours",
        mode="thread",
        start=lambda path: Flight(wait=lambda: order.append("durable")),
    )
    lost, durable_s = lost_share(background, tmp_path, lambda: order.append("step"), window_s=0.001)
    assert lost <= 1
    assert durable_s > 0
    assert order[0] == order[-1] == "step"
    assert order.count("durable") == 1


def test_loop_beside_a_save_that_fails_raises_its_failure(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    background = Background(name="ours", mode="thread", start=lambda path: Flight(wait=fail))
    with pytest.raises(OSError, match="full"):
        lost_share(background, tmp_path, lambda: None, window_s=0.001)


def test_loop_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="python, numpy, torch"):
        new_step("fortran")


def test_options_quick_takes_its_own_defaults_and_keeps_what_was_given() -> None:
    asked = parse(["--quick", "--rounds", "4"])
    assert asked.rounds == 4
    assert asked.size_bytes == 256 << 20
    assert asked.sections != SECTIONS


@pytest.mark.parametrize(
    "arguments",
    [["--size", "much"], ["--rounds", "0"], ["--python", "mindspore"], ["--sections", "none"]],
)
def test_options_that_mean_nothing_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_team_library_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    setup = Setup(
        libraries=["mindspore"],
        pythons={"mindspore": str(tmp_path / "no" / "python")},
        directory=tmp_path,
        rest_s=0,
    )
    with Team(setup, tiny(1)) as team:
        assert list(team.players("contestants")) == []
    assert team.missing == {"mindspore": "not installed"}


def test_rare_modes_of_ours_take_part_in_the_rounds_of_peers_only(tmp_path: Path) -> None:
    session = Session(
        section="files",
        workload=tiny(1),
        directory=tmp_path,
        pace=Pace(rounds=2, peer_rounds=1, rest_s=0),
        figures=Figures(),
        failures={},
        report=lambda line: None,
    )
    setup = Setup(libraries=["ckptmgr"], pythons={}, directory=tmp_path, rest_s=0)
    with Team(setup, session.workload) as team:
        last = {one.mode for one in team.players("contestants") if not session.takes_part(one, 1)}
    assert last == {"container-cbc", "container-sm4"}


def test_team_failure_of_ours_is_raised_with_its_reason(tmp_path: Path) -> None:
    setup = Setup(libraries=["ckptmgr"], pythons={}, directory=tmp_path, rest_s=0)
    with Team(setup, tiny(1)) as team:
        player = next(one for one in team.players("contestants") if one.mode == "ckpt")
        with pytest.raises(Failed, match="does not exist"):
            player.ask("act", tmp_path / "absent.ckpt", what="load")


@pytest.mark.parametrize("workload", [Workload(size_bytes=3_000_000), tiny(30)])
def test_workload_state_has_the_size_and_number_it_says(workload: Workload) -> None:
    state = workload.new_state()
    assert size_of(state) == workload.total_bytes
    assert len(state) == workload.tensors


def test_state_is_the_same_every_time() -> None:
    first, second = new_state(1 << 20), new_state(1 << 20)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_chart_is_drawn_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tools.bench.chart import draw

    paths = draw(Figures(), tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert all(path.stat().st_size for path in paths)
