# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prune URL` without `--keep`: the policy of the runs that saved there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.remote import upload as writers
from tests.cli.running import key_file, run, run_json
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.counted_objects import CountedObjects
from tests.support.saved import KEY, save_run

pytest.importorskip("obstore")


from tests.remote.buckets import listed, new_url, whole_names

pytestmark = pytest.mark.usefixtures("machine")

_Train = Callable[..., None]


class _Locked(CountedObjects):
    """Objects that are locked against removal."""

    def delete(self, keys: object) -> None:
        raise PermissionError(13, "object lock")


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> _Train:
    """Return a function that saves three steps there, of which the store removes none."""

    def save(url: str, keep: str, *, prefix: str = "net", key: bytes | None = None) -> None:
        config = CheckpointConfig(keep=keep, format="safetensors", enc_key=key)
        with monkeypatch.context() as patched:
            patched.setattr(writers, "open_objects", lambda url: _Locked(api.open_objects(url)))
            with CheckpointManager(url, config, prefix=prefix) as manager:
                for step in (1, 2, 3):
                    manager.save(step, {"w": np.full(3, float(step))})

    return save


def _planned(url: str, *arguments: str) -> dict[str, list[int]]:
    items = run_with_schema("prune", url, "--dry-run", *arguments)["items"]
    return {
        name: sorted(item["step"] for item in items if item["keep"] is is_kept)
        for name, is_kept in (("keep", True), ("drop", False))
    }


def test_prune_without_flags_applies_the_policy_of_the_run(train: _Train, tmp_path: Path) -> None:
    url = new_url()
    train(url, "last(2)")
    assert run_json("prune", url, "--dry-run")["summary"]["policy"] == "last(2)"
    assert _planned(url) == {"keep": [2, 3], "drop": [1]}
    assert _planned(url, "--keep", "last(1)") == {"keep": [3], "drop": [1, 2]}
    assert run("prune", url, "--check").exit_code == 1
    done = run("prune", url, "--now", "--yes")
    assert (done.exit_code, "policy last(2)" in done.stdout) == (0, True)
    left = whole_names(api.open_objects(url), tmp_path)
    assert left == {"net-2.safetensors", "net-3.safetensors"}


def test_policy_of_each_series_is_applied(train: _Train) -> None:
    url = new_url()
    train(url, "last(1)", prefix="a")
    train(url, "last(9)", prefix="b")
    assert run_json("prune", url, "--dry-run")["summary"]["policy"] == "last(1); last(9)"
    assert _planned(url) == {"keep": [1, 2, 3, 3], "drop": [1, 2]}
    assert _planned(url, "--series", "b") == {"keep": [1, 2, 3], "drop": []}


def test_policy_in_a_copy_is_for_the_directory_that_it_was_copied_from(tmp_path: Path) -> None:
    url = new_url()
    with CheckpointManager(tmp_path / "run", CheckpointConfig(keep="last(1)"), mirror=url) as one:
        for step in (1, 2):
            one.save(step, {"w": np.zeros(3)})
            one.wait()
    assert run_json("prune", tmp_path / "run", "--dry-run")["summary"]["policy"] == "last(1)"
    refused = run("prune", url, "--now", "--yes")
    assert (refused.exit_code, "no retention policy" in refused.stderr) == (2, True)
    assert "only a CheckpointManager that saves to the address itself" in refused.stderr
    assert len(listed(api.open_objects(url))) == 2


def test_policy_in_an_archive_of_a_run_is_for_the_address_that_it_was_copied_from(
    train: _Train, tmp_path: Path
) -> None:
    url, archive = new_url(), new_url()
    train(url, "last(1)")
    assert run("copy", url, tmp_path / "between").exit_code == 0
    assert run("copy", tmp_path / "between", archive).exit_code == 0
    refused = run("prune", archive, "--now", "--yes")
    assert (refused.exit_code, "no retention policy" in refused.stderr) == (2, True)
    assert len(listed(api.open_objects(archive))) == 3
    assert _planned(f"{url}/") == {"keep": [3], "drop": [1, 2]}


def test_copies_beside_a_run_are_named_and_stay(train: _Train, tmp_path: Path) -> None:
    url = new_url()
    save_run(tmp_path / "runs", [10, 20], series="copied")
    assert run("copy", tmp_path / "runs", url).exit_code == 0
    train(url, "last(1)")
    shown = run("prune", url, "--dry-run").stdout
    assert f"{url} [copied]  all stay: their run recorded no policy; --keep names one" in shown
    assert run("prune", url, "--now", "--yes").exit_code == 0
    steps = [one["step"] for one in run_json("ls", url)["items"]]
    assert sorted(steps) == [3, 10, 20]


def test_changed_policy_of_an_authenticated_manifest_decides_nothing(
    train: _Train, tmp_path: Path
) -> None:
    url, key = new_url(), key_file(tmp_path)
    train(url, "last(9)", key=KEY.raw)
    objects = api.open_objects(url)
    (newest,) = [one.key for one in objects.list() if one.key.startswith("net-3.")]
    changed = objects.get(newest).replace(b"last(9)", b"last(1)")
    objects.put(newest, [changed], len(changed))
    found = run_json("prune", url, "--dry-run", "--key", key)["summary"]
    assert (found["policy"], found["dropped"]) == ("last(9)", 0)


def test_downloaded_run_is_pruned_by_its_policy(train: _Train, tmp_path: Path) -> None:
    url = new_url()
    train(url, "last(2)")
    assert run("copy", url, tmp_path / "back").exit_code == 0
    assert run_json("prune", tmp_path / "back", "--dry-run")["summary"]["policy"] == "last(2)"
