# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr pin` and `ckptmgr unpin`."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, save_run
from tests.support.shard_sets import CONTENTS, SET, shard, sharded


def test_pin_is_listed_and_survives_prune(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    result = run("pin", "10", "--dir", tmp_path, "--reason", "table 2")
    assert result.stdout == "net-1_10.ckpt  step 10  @pinned table 2\n"
    plan = run_json("prune", tmp_path, "--keep", "last(1)", "--dry-run")
    kept = {item["step"]: item["reasons"] for item in plan["items"] if item["keep"]}
    assert set(kept) == {10, 30}
    assert kept[10][0]["detail"] == "pinned: table 2"


def test_pin_of_the_same_name_is_replaced_and_others_stay(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    run("pin", path, "--name", "a", "--reason", "old")
    run("pin", path, "--name", "b")
    document = run_json("pin", path, "--name", "a", "--reason", "new")
    assert document["schema"] == "ckptmgr.pin/1"
    assert document["items"][0]["pins"] == [
        {"name": "b", "reason": ""},
        {"name": "a", "reason": "new"},
    ]
    assert run("unpin", path, "--name", "a").stdout.endswith("@b\n")
    assert run("unpin", "@pinned", "--dir", tmp_path).stdout.endswith("not pinned\n")
    assert run("unpin", "@pinned", "--dir", tmp_path).exit_code == 10


def test_quiet_prints_the_path(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    assert run("pin", path, "-q").stdout == f"{path}\n"


def test_authenticated_manifest_stays_authenticated(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "runs", [10], options=api.SaveOptions(key=KEY))
    refused = run("pin", path)
    assert (refused.exit_code, "without its key" in refused.stderr) == (12, True)
    assert run("pin", path, "--key", key_file(tmp_path)).exit_code == 0
    (found,) = api.listed(tmp_path / "runs", keys=KEY)
    assert (found.state, len(found.pins)) == (api.State.OK, 1)


def save_sharded(directory: Path) -> None:
    directory.mkdir()
    for rank, content in enumerate(CONTENTS):
        (directory / shard(rank)).write_bytes(content)
    (directory / api.manifest_name(SET)).write_bytes(
        api.encode_manifest(replace(sharded(), pins=()))
    )


def test_checkpoint_of_many_ranks_is_pinned_and_unpinned(tmp_path: Path) -> None:
    save_sharded(tmp_path / "runs")
    pinned = run("pin", "1", "--dir", tmp_path / "runs", "--reason", "table 2")
    assert pinned.stdout == f"{SET}  step 1  @pinned table 2\n"
    (found,) = api.listed(tmp_path / "runs")
    assert (found.state, [pin.reason for pin in found.pins]) == (api.State.OK, ["table 2"])
    assert run("unpin", "@pinned", "--dir", tmp_path / "runs").stdout.endswith("not pinned\n")
    (found,) = api.listed(tmp_path / "runs")
    assert (found.state, found.pins) == (api.State.OK, ())


def test_checkpoint_of_many_ranks_is_named_by_its_path(tmp_path: Path) -> None:
    save_sharded(tmp_path / "runs")
    pinned = run("pin", tmp_path / "runs" / SET)
    assert pinned.stdout == f"{SET}  step 1  @pinned\n"
    missing = run("pin", tmp_path / "runs" / "net-9.shards")
    assert "no such checkpoint" in missing.stderr
    nowhere = run("pin", tmp_path / "runs" / shard(0) / "net-9.shards")
    assert "no such checkpoint" in nowhere.stderr


def test_bare_file_cannot_be_pinned(tmp_path: Path) -> None:
    path = shutil.copy(GOLDEN_FILES / "slices_sync.ckpt", tmp_path)
    result = run("pin", path)
    assert (result.exit_code, "without a manifest" in result.stderr) == (2, True)


@pytest.mark.parametrize("lease", ["net", "net-1_10.ckpt"])
def test_series_that_a_run_writes_and_file_that_is_overwritten_are_locked(
    tmp_path: Path, lease: str
) -> None:
    save_run(tmp_path, [10])
    with api.place(tmp_path).lease(lease):
        result = run("pin", "10", "--dir", tmp_path)
    assert (result.exit_code, "process" in result.stderr) == (11, True)


def test_pin_without_a_name_and_a_reason_is_called_pinned(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    assert run("pin", "10", "--dir", tmp_path).exit_code == 0
    plan = run("simulate", "last(1)", tmp_path).stdout
    assert re.search(r"^keep +10 .* pinned$", plan, re.MULTILINE)
    assert (
        "net-1_10.ckpt is pinned; nothing was removed" in run("rm", "10", "--dir", tmp_path).stderr
    )
