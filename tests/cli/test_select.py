# SPDX-License-Identifier: Apache-2.0
"""What selectors name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ckptmgr import CheckpointNotFound
from ckptmgr.cli.selectors import Selected, select, select_one
from tests.cli.running import run
from tests.support import api
from tests.support.saved import overwrite, save_run

METRICS = {10: {"loss": 0.5}, 20: {"loss": 0.25}, 30: {"loss": math.nan}, 40: {"loss": 0.25}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Five checkpoints, the newest damaged, one pinned."""
    save_run(tmp_path, [10, 20, 30, 40, 50], metrics=METRICS)
    overwrite(tmp_path / "net-5_10.ckpt", b"cut")
    store = api.place(tmp_path)
    with store.lease("net"):
        (second,) = [c for c in store.scan() if c.step == 20]
        store.change_pins(second, lambda _: (api.Pin(name="paper"),))
    return tmp_path


def steps(found: list[Selected]) -> list[int]:
    """Return the steps that were selected."""
    return [one.checkpoint.step for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20", [20]),
        ("latest", [40]),
        ("best:loss:min", [40]),
        ("best:loss:max", [10]),
        ("@pinned", [20]),
        ("20..40", [20, 30, 40]),
        ("..20", [10, 20]),
        ("40..", [40, 50]),
    ],
)
def test_selector_names(runs: Path, text: str, expected: list[int]) -> None:
    assert steps(select([text], runs, api.Place)) == expected


def test_no_selector_means_all_oldest_first(runs: Path) -> None:
    assert steps(select([], runs, api.Place)) == [10, 20, 30, 40, 50]


def test_path_and_link_name_the_same_checkpoint(runs: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(runs / "net-2_10.ckpt")
    assert steps(select([str(link), str(runs / "net-2_10.ckpt")], Path("/nowhere"), api.Place)) == [
        20
    ]


def test_file_of_a_strange_name_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    one = select_one(str(tmp_path / "weights.bin"), tmp_path, api.Place).checkpoint
    assert (one.series, one.state, one.size_bytes) == ("weights", api.State.UNVERIFIED, 1)


@pytest.mark.parametrize("text", ["99", "@pinned", "best:acc:max", "60..70", "/no/such.ckpt"])
def test_selector_that_names_nothing_is_not_found(tmp_path: Path, text: str) -> None:
    save_run(tmp_path, [10])
    with pytest.raises(CheckpointNotFound):
        select([text], tmp_path, api.Place)


@pytest.mark.parametrize("text", ["best", "best:loss", "best::min", "best:loss:least"])
def test_incomplete_best_is_a_usage_error(runs: Path, text: str) -> None:
    result = run("inspect", text, "--dir", runs)
    assert (result.exit_code, "write best:loss:min" in result.stderr) == (2, True)


def test_metric_with_colons_is_understood(tmp_path: Path) -> None:
    save_run(tmp_path, [10], metrics={10: {"val:loss": 1}})
    assert steps(select(["best:val:loss:min"], tmp_path, api.Place)) == [10]


def test_step_in_two_series_must_be_narrowed_down(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10], series=series)
    result = run("inspect", "10", "--dir", tmp_path)
    assert (result.exit_code, "a-1_10.ckpt, b-1_10.ckpt" in result.stderr) == (2, True)
    assert run("inspect", "10", "--dir", tmp_path, "--series", "b").exit_code == 0


def test_many_candidates_are_cut_short(tmp_path: Path) -> None:
    save_run(tmp_path, [1, 2, 3, 4, 5, 6])
    assert "net-1_5.ckpt, ..." in run("inspect", "1..6", "--dir", tmp_path).stderr


def test_newest_attempt_of_a_repeated_step_is_meant(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    save_run(tmp_path, [20, 10])
    assert select_one("10", tmp_path, api.Place).checkpoint.sequence == 3
