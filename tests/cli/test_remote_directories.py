# SPDX-License-Identifier: Apache-2.0
"""`ls`, `verify` and `prune` of the address of an object store."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import UnsafePrune
from ckptmgr.objects.places import open_place
from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import KEY, flip, items, save_run
from tests.support.shard_sets import CONTENTS, SET, shard, sharded

pytest.importorskip("obstore")


from tests.remote.buckets import listed, new_url

_METRICS = {1: {"loss": 0.1}, 2: {"loss": 0.3}, 3: {"loss": 0.2}}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The address of a store with three checkpoints."""
    save_run(tmp_path / "runs", [1, 2, 3], metrics=_METRICS)
    address = new_url()
    assert run("copy", tmp_path / "runs", address).exit_code == 0
    return address


def _names(url: str) -> set[str]:
    return set(listed(api.open_objects(url)))


def test_listing_of_an_address_is_that_of_the_directory(url: str, tmp_path: Path) -> None:
    there, here = run("ls", url), run("ls", tmp_path / "runs")
    assert there.exit_code == 0, there.stderr
    assert there.stdout == here.stdout
    document = run_json("ls", url)
    assert document["root"] == url
    assert document["items"][0]["path"] == f"{url}/net-1_1.ckpt"
    assert run("ls", url, "-q").stdout.splitlines()[-1] == f"{url}/net-1_3.ckpt"


def test_listing_asks_again_only_for_what_is_new(url: str) -> None:
    assert run("verify", "latest", "--dir", url).exit_code == 0
    assert run("verify", f"{url}/net-1_2.ckpt", "-q").stdout == ""


def test_listing_without_checkpoints_is_not_found() -> None:
    result = run("ls", new_url())
    assert result.exit_code == 10
    assert "no checkpoint is below this address" in result.stderr


def test_verify_finds_a_damaged_object_and_missing_data(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [1, 2, 3])
    url = f"file://{tmp_path}/bucket"
    run("copy", tmp_path / "runs", url)
    (first,) = (tmp_path / "bucket").glob("data/*/net-1_1.ckpt")
    flip(first, 40)
    (last,) = (tmp_path / "bucket").glob("data/*/net-1_3.ckpt")
    last.unlink()
    result = run("verify", url)
    assert result.exit_code == 1
    words = [line.split()[:2] for line in result.stdout.splitlines()]
    states = {one[1].rstrip(":"): one[0] for one in words if len(one) == 2}
    assert states["net-1_1.ckpt"] == "damaged"
    assert states["net-1_2.ckpt"] == "ok"
    assert states["net-1_3.ckpt"] == "missing"


def test_verify_of_encrypted_checkpoints_proves_them(tmp_path: Path) -> None:
    options = api.SaveOptions(format="safetensors", key=KEY)
    save_run(tmp_path / "runs", [1], options=options, content=items()[:2])
    url = new_url()
    run("copy", tmp_path / "runs", url)
    key = key_file(tmp_path)
    result = run("verify", url, "--key", key)
    assert result.exit_code == 0, result.stdout
    assert "cipher blocks" in result.stdout
    assert run("verify", url, "--key", key_file(tmp_path, hex_digits="00" * 32)).exit_code == 12


def test_sharded_checkpoint_is_listed_and_named_by_its_address(tmp_path: Path) -> None:
    for rank, content in enumerate(CONTENTS):
        (tmp_path / shard(rank)).write_bytes(content)
    (tmp_path / api.manifest_name(SET)).write_bytes(api.encode_manifest(sharded()))
    url = new_url()
    assert run("copy", tmp_path, url).exit_code == 0
    (one,) = run_json("ls", url)["items"]
    assert one["state"] == "ok"
    back = run("copy", f"{url}/{SET}", tmp_path / "back")
    assert back.exit_code == 0, back.stderr
    assert (tmp_path / "back" / shard(1)).read_bytes() == CONTENTS[1]


def test_damaged_manifest_is_listed_as_corrupt_and_hides_no_other(url: str) -> None:
    objects = api.open_objects(url)
    objects.delete(["net-1_2.ckpt.manifest.json"])
    objects.create("net-1_2.ckpt.manifest.json", b"{}")
    states = {one["path"].rpartition("/")[2]: one["state"] for one in run_json("ls", url)["items"]}
    assert states == {"net-1_1.ckpt": "ok", "net-1_2.ckpt": "corrupt", "net-1_3.ckpt": "ok"}
    assert run("copy", f"{url}/net-1_2.ckpt", "nowhere").exit_code == 1


def test_huge_object_with_the_name_of_a_manifest_is_corrupt_and_never_read_at_once(
    tmp_path: Path,
) -> None:
    save_run(tmp_path / "runs", [1, 2])
    url = f"file://{tmp_path}/bucket"
    assert run("copy", tmp_path / "runs", url).exit_code == 0
    with (tmp_path / "bucket" / "net-1_3.ckpt.manifest.json").open("wb") as file:
        file.truncate((64 << 20) + 1)  # sparse
    states = {one["path"].rpartition("/")[2]: one["state"] for one in run_json("ls", url)["items"]}
    assert states == {"net-1_1.ckpt": "ok", "net-1_2.ckpt": "ok", "net-1_3.ckpt": "corrupt"}
    for command in (["verify", url], ["copy", f"{url}/net-1_3.ckpt", tmp_path / "back"]):
        result = run(*command)
        assert result.exit_code == 1
        assert "a manifest at most" in result.stdout + result.stderr
    result = run("prune", url, "--keep", "last(1)", "--now", "--yes")
    assert result.exit_code == 0, result.stderr
    assert sorted(_names(url)) == ["net-1_2.ckpt", "net-1_3.ckpt"]


def test_quarantine_is_refused(url: str) -> None:
    result = run("verify", url, "--quarantine")
    assert result.exit_code == 2
    assert "--quarantine has no effect in an object store" in result.stderr


def test_prune_shows_its_plan_and_removes_nothing_without_now(url: str) -> None:
    before = api.open_objects(url).list(""), api.open_objects(url).list("data/")
    shown = run("prune", url, "--keep", "last(1) | best(1, loss, min)", "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert "drop" in shown.stdout
    assert "2 stay" in shown.stdout
    assert run("prune", url, "--keep", "last(1)", "--check").exit_code == 1
    assert run("prune", url, "--keep", "last(9)", "--check").exit_code == 0
    refused = run("prune", url, "--keep", "last(1)", "--yes")
    assert refused.exit_code == 2
    assert "goes for good" in refused.stderr
    assert (api.open_objects(url).list(""), api.open_objects(url).list("data/")) == before


def test_prune_removes_manifests_and_data_of_what_the_policy_drops(url: str) -> None:
    result = run("prune", url, "--keep", "last(1) | best(1, loss, min)", "--now", "--yes")
    assert result.exit_code == 0, result.stderr
    assert "removed 1 checkpoint" in result.stdout
    assert _names(url) == {"net-1_1.ckpt", "net-1_3.ckpt"}
    assert len(api.open_objects(url).list("data/")) == 2
    again = run("prune", url, "--keep", "last(2)", "--now", "--yes", "-q")
    assert again.exit_code == 0
    assert again.stdout == ""


def test_prune_asks_and_takes_no_for_an_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run("prune", url, "--keep", "last(1)", "--now")
    assert alone.exit_code == 13
    monkeypatch.setattr("ckptmgr.cli.options.check_can_ask", lambda refusal: None)
    monkeypatch.setattr("ckptmgr.cli.options.confirm", lambda question, *, refusal: False)
    declined = run("prune", url, "--keep", "last(1)", "--now")
    assert declined.exit_code == 1
    assert "nothing was changed" in declined.stderr
    assert len(_names(url)) == 3


@pytest.mark.parametrize("option", [("--undo",), ("--grace", "1h")])
def test_prune_refuses_options_about_the_trash(url: str, option: tuple[str, ...]) -> None:
    result = run("prune", url, "--keep", "last(1)", *option)
    assert result.exit_code == 2
    assert "there is no trash" in result.stderr


def test_options_without_effect_there_are_refused_by_name(url: str) -> None:
    result = run("ls", url, "-r")
    assert result.exit_code == 2
    assert "has no effect in an object store" in result.stderr


def test_conditions_choose_what_may_go_there(url: str) -> None:
    prune = ("prune", url, "--keep", "last(1)", "--dry-run")
    assert run_json(*prune)["summary"]["dropped"] == 2
    assert run_json(*prune, "--filter", "step<2")["summary"]["dropped"] == 1


def test_prune_needs_a_policy(url: str) -> None:
    result = run("prune", url, "--now", "--yes")
    assert result.exit_code == 2
    assert "--keep" in result.stderr


def test_line_that_changed_since_its_plan_is_left_alone(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grown(question: str, *, refusal: object) -> bool:
        save_run(tmp_path / "runs", [4])
        assert run("copy", tmp_path / "runs", url).exit_code == 0
        return True

    monkeypatch.setattr("ckptmgr.cli.options.check_can_ask", lambda refusal: None)
    monkeypatch.setattr("ckptmgr.cli.options.confirm", grown)
    result = run("prune", url, "--keep", "last(1)", "--now")
    assert result.exit_code == 13
    assert "changed after its plan was made" in result.stderr
    assert len(_names(url)) == 4


def test_removal_that_the_store_denies_is_reported(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Locked:
        def __init__(self, objects: api.Objects) -> None:
            self._objects = objects

        def __getattr__(self, name: str) -> object:
            return getattr(self._objects, name)

        def delete(self, keys: list[str]) -> None:
            raise PermissionError(13, "held by an object lock", keys[0])

        def list(self, folder: str = "") -> list[object]:
            if folder and sys._getframe(1).f_code.co_name == "sweep":
                raise PermissionError(13, "may not be listed", folder)
            return list(self._objects.list(folder))

    monkeypatch.setattr(
        "ckptmgr.objects.requests.open_objects", lambda url: _Locked(api.open_objects(url))
    )
    result = run("prune", url, "--keep", "last(1)", "--now", "--yes")
    assert result.exit_code == 2
    assert "held by an object lock" in result.stderr
    assert "may not be listed" in result.stderr
    assert len(_names(url)) == 3


def test_named_checkpoint_there_goes_for_good_and_the_last_good_one_stays(url: str) -> None:
    one = f"{url}/net-1_1.ckpt"
    refused = run("rm", one, "--yes")
    assert (refused.exit_code, "say --now" in refused.stderr) == (2, True)
    assert run("rm", one, "--dry-run").stdout.splitlines()[-1].startswith("would remove 1 ")
    assert run("rm", one, "--now", "--yes").exit_code == 0
    assert _names(url) == {"net-1_2.ckpt", "net-1_3.ckpt"}
    newest = run("rm", f"{url}/net-1_3.ckpt", "--now", "--yes")
    assert (newest.exit_code, "the newest good one" in newest.stderr) == (13, True)
    assert run("rm", "3", "--dir", url, "--now", "--yes", "--force").exit_code == 0
    last = run("rm", f"{url}/net-1_2.ckpt", "--now", "--yes", "--force")
    assert (last.exit_code, "the last good checkpoint" in last.stderr) == (13, True)
    assert len(api.open_objects(url).list("data/")) == 1


def test_address_of_a_run_is_no_checkpoint_to_remove(url: str) -> None:
    refused = run("rm", url, "--now", "--yes")
    assert (refused.exit_code, "prune removes by a policy" in refused.stderr) == (2, True)
    assert len(_names(url)) == 3


def test_checkpoint_that_was_replaced_since_it_was_listed_stays(url: str) -> None:
    place = open_place(url, trust=api.DEFAULT_TRUST)
    listed_before = {one.name: one for one in place.scan()}
    old = replace(listed_before["net-1_1.ckpt"], id="0" * 64)
    (failure,) = place.remove([old])
    assert isinstance(failure, UnsafePrune)
    assert "was saved again" in str(failure)
    assert len(_names(url)) == 3
