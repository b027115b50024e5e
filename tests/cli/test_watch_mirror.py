# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch --mirror`: its uploads, their address, and its alarms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager
from tests.cli.running import run
from tests.cli.watching import schema, training, watching
from tests.maintenance.test_repair import saved as save_ranks
from tests.support import api
from tests.support.json_schema import violations
from tests.support.saved import KEY, flip, items, save_run

pytest.importorskip("obstore")


from tests.remote.buckets import listed, new_url


def names_at(url: str) -> set[str]:
    """Return the names of the checkpoints below an address."""
    return set(listed(api.open_objects(url)))


def reports_of(*arguments: str | Path, exit_code: int = 0) -> list[dict[str, Any]]:
    """Return the reports of a watch that does everything once."""
    result = run("watch", *arguments, "--once", "--json")
    assert result.exit_code == exit_code, result.output
    reports: list[dict[str, Any]] = [json.loads(line) for line in result.stdout.splitlines()]
    assert all(list(violations(one, schema())) == [] for one in reports)
    return reports


def events(reports: Iterable[dict[str, Any]], event: str) -> list[str]:
    return [one["message"] for one in reports if one["event"] == event]


def test_verified_checkpoints_are_uploaded_once(tmp_path: Path) -> None:
    save_run(tmp_path, [1, 2])
    url = new_url()
    assert sorted(events(reports_of(tmp_path, "--mirror", url), "mirrored")) == [
        f"net-1_{step}.ckpt to {url}/net-1_{step}.ckpt" for step in (1, 2)
    ]
    assert names_at(url) == {"net-1_1.ckpt", "net-1_2.ckpt"}
    save_run(tmp_path, [3], series="other")
    again = reports_of(tmp_path, "--mirror", url)
    assert events(again, "mirrored") == [f"other-1_3.ckpt to {url}/other-1_3.ckpt"]


def test_damaged_checkpoint_is_never_uploaded(tmp_path: Path) -> None:
    first, last = save_run(tmp_path, [1, 2])
    flip(last, 40)
    url = new_url()
    reports_of(tmp_path, "--mirror", url, exit_code=1)
    assert names_at(url) == {first.name}


def test_damage_that_a_quick_check_misses_is_found_by_the_upload(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [1])
    flip(path, path.stat().st_size - 20)
    url = new_url()
    reports = reports_of(tmp_path, "--quick", "--mirror", url, exit_code=1)
    assert [one["status"] for one in reports if one["event"] == "verified"] == ["ok"]
    (alarm,) = [one for one in reports if one["event"] == "alarm"]
    assert alarm["alarm"] == "mirror"
    assert alarm["checkpoint"]["path"] == str(path)
    assert names_at(url) == set()


def test_several_directories_are_folders_of_their_names(tmp_path: Path) -> None:
    save_run(tmp_path / "a", [1])
    save_run(tmp_path / "b", [2])
    url = new_url()
    reports_of(tmp_path / "a", tmp_path / "b", "--mirror", url)
    assert names_at(f"{url}/a") == {"net-1_1.ckpt"}
    assert names_at(f"{url}/b") == {"net-1_2.ckpt"}


def test_directories_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("x/run", "y/run"):
        (tmp_path / folder).mkdir(parents=True)
    url = new_url()
    result = run("watch", tmp_path / "x/run", tmp_path / "y/run", "--mirror", url)
    assert result.exit_code == 2
    assert f"would both be mirrored to {url}/run" in result.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--mirror", "runs/a"), "is no address of an object store"),
        (("--mirror", "s3://key:secret@bucket/run"), "credentials come from the environment"),
        (("--mirror-keep", "last(3)"), "need --mirror"),
        (("--mirror-within", "1h"), "need --mirror"),
    ],
)
def test_options_that_name_no_mirror_are_refused(
    tmp_path: Path, options: tuple[str, ...], text: str
) -> None:
    result = run("watch", tmp_path, *options)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "secret" not in result.stderr


def test_policy_of_the_mirror_decides_what_is_uploaded_and_what_stays_there(tmp_path: Path) -> None:
    save_run(tmp_path, [1, 2, 3])
    mirror = ("--mirror", new_url(), "--mirror-keep", "last(2)")
    assert len(events(reports_of(tmp_path, *mirror), "mirrored")) == 2
    assert names_at(mirror[1]) == {"net-1_2.ckpt", "net-1_3.ckpt"}
    with CheckpointManager(tmp_path, prefix="net") as manager:
        manager.resume()
        manager.save(4, {"w": np.ones(3)})
    reports = reports_of(tmp_path, *mirror)
    assert events(reports, "pruned") == [f"{mirror[1]}/net-1_2.ckpt for good"]
    assert names_at(mirror[1]) == {"net-1_3.ckpt", "net-4.ckpt"}


def test_checkpoint_whose_name_another_one_has_there_is_an_alarm_and_the_others_are_uploaded(
    tmp_path: Path,
) -> None:
    save_run(tmp_path / "mine", [1, 2])
    save_run(tmp_path / "theirs", [2], content=items(9))
    url = new_url()
    assert run("copy", tmp_path / "theirs", url).exit_code == 0
    reports = reports_of(tmp_path / "mine", "--mirror", url, exit_code=1)
    (alarm,) = [one for one in reports if one["event"] == "alarm"]
    assert alarm["message"].startswith("net-1_2.ckpt is not mirrored: ")
    assert "another checkpoint has this name there" in alarm["message"]
    assert names_at(url) == {"net-1_1.ckpt", "net-1_2.ckpt"}


def test_encrypted_checkpoints_are_mirrored_without_their_key(tmp_path: Path) -> None:
    options = api.SaveOptions(format="safetensors", key=KEY)
    (path,) = save_run(tmp_path, [1], options=options, content=items()[:2])
    url = f"file://{tmp_path}/mirror"
    reports_of(tmp_path, "--mirror", url)
    (there,) = (tmp_path / "mirror").glob("data/*/*")
    assert there.read_bytes() == path.read_bytes()


def test_sets_of_many_ranks_are_mirrored(tmp_path: Path) -> None:
    saved = save_ranks(tmp_path / "runs")
    url = new_url()
    reports_of(tmp_path / "runs", "--mirror", url)
    assert names_at(url) == {saved.name}
    assert len(api.open_objects(url).list("data/")) == 4


def test_nothing_is_pruned_here_before_it_was_mirrored(tmp_path: Path) -> None:
    runs, mirror = tmp_path / "runs", tmp_path / "mirror"
    save_run(runs, [1, 2])
    mirror.write_text("in the way")
    options = ("--prune", "--keep", "last(1)", "--mirror", f"file://{mirror}")
    reports = reports_of(runs, *options, exit_code=1)
    assert [one["alarm"] for one in reports if one["event"] == "alarm"] == ["mirror"]
    assert len(list(runs.glob("*.ckpt"))) == 2
    mirror.unlink()
    reports = reports_of(runs, *options)
    assert len(events(reports, "mirrored")) == 2
    assert events(reports, "pruned") == ["net-1_1.ckpt to the trash"]
    assert [one.name for one in runs.glob("*.ckpt")] == ["net-1_2.ckpt"]


def test_saves_of_a_live_run_are_mirrored_and_a_new_machine_resumes_from_there(
    tmp_path: Path,
) -> None:
    runs, url = tmp_path / "runs", f"file://{tmp_path}/mirror"
    runs.mkdir()
    with watching(runs, "--poll", "1d", "--mirror", url) as watch, training(runs) as trainer:
        for step in (1, 2):
            trainer.save(step)
            report = watch.until("mirrored")
            assert report["checkpoint"]["step"] == step
            assert report["figures"]["seconds"] > 0
        assert watch.stop() == 0
    with CheckpointManager(tmp_path / "new", prefix="net", mirror=url) as manager:
        assert manager.resume().step == 2


def test_store_that_cannot_be_reached_is_an_alarm_until_it_is_back(tmp_path: Path) -> None:
    runs, mirror, told = tmp_path / "runs", tmp_path / "mirror", tmp_path / "told"
    mirror.write_text("in the way")
    save_run(runs, [1])
    program = f"sh -c 'echo $CKPTMGR_WATCH_EVENT $CKPTMGR_WATCH_ALARM >> {told}'"
    options = ("--poll", "1d", "--exec", program)
    with watching(runs, *options, "--mirror", f"file://{mirror}") as watch:
        assert watch.until("alarm")["message"].startswith("the mirror fails, and is tried again: ")
        mirror.unlink()
        watch.until("mirrored")
        watch.until("cleared", alarm="mirror")
        assert watch.stop() == 0
    assert told.read_text().split()[:2] == ["alarm", "mirror"]
