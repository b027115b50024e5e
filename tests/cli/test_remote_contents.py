# SPDX-License-Identifier: Apache-2.0
"""`inspect` and `diff` of addresses of object stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import KEY, flip, save_run
from tests.support.stores_of_objects import open_as

pytest.importorskip("obstore")


from tests.remote.buckets import new_url
from tests.support.counted_objects import CountedObjects


def uploaded(directory: Path, url: str) -> str:
    assert run("copy", directory, url).exit_code == 0
    return url


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The address of a store with three checkpoints."""
    save_run(tmp_path / "runs", [1, 2, 3])
    return uploaded(tmp_path / "runs", new_url())


def test_contents_of_an_address_are_those_of_the_file(url: str, tmp_path: Path) -> None:
    here = run("inspect", tmp_path / "runs/net-1_2.ckpt", "--stats")
    there = run("inspect", f"{url}/net-1_2.ckpt", "--stats")
    assert there.exit_code == 0, there.stderr
    assert there.stdout.replace(url, str(tmp_path / "runs")) == here.stdout
    by_manifest = run("inspect", f"{url}/net-1_2.ckpt.manifest.json", "--stats")
    assert by_manifest.stdout == there.stdout


@pytest.mark.parametrize("selector", ["latest", "3", "net-1_3.ckpt"])
def test_selector_is_looked_up_below_an_address(url: str, selector: str) -> None:
    name = f"{url}/{selector}" if selector.endswith("ckpt") else selector
    document = run_json("inspect", name, "--dir", url)
    assert document["summary"]["path"] == f"{url}/net-1_3.ckpt"
    assert [one["name"] for one in document["items"]] == ["fc.weight", "epoch_num", "net"]


def test_only_the_named_checkpoint_is_requested(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[CountedObjects] = []

    def wrap(objects: api.Objects) -> api.Objects:
        stores.append(CountedObjects(objects))
        return stores[-1]

    open_as(monkeypatch, wrap)
    assert run("inspect", f"{url}/net-1_2.ckpt").exit_code == 0
    requests = [one for store in stores for one in store.requests]
    assert all("net-1_2.ckpt" in one for one in requests), requests
    assert len(requests) <= 8


def test_envelope_is_shown_without_a_key_and_tensors_with_it(tmp_path: Path) -> None:
    options = api.SaveOptions(format="safetensors", key=KEY)
    save_run(tmp_path / "runs", [1], options=options, content=())
    url = uploaded(tmp_path / "runs", new_url())
    summary = run_json("inspect", "latest", "--dir", url)["summary"]
    assert (summary["cipher"], summary["is_content_shown"]) == ("AES-GCM", False)
    shown = run_json("inspect", "latest", "--dir", url, "--key", key_file(tmp_path))["summary"]
    assert shown["is_sealed"] is True
    wrong = key_file(tmp_path, hex_digits="00" * 32)
    assert run("inspect", f"{url}/net-1_1.safetensors", "--key", wrong).exit_code == 12


def test_file_of_another_tool_is_shown(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "runs", [1])
    url = new_url()
    api.open_objects(url).create("other.ckpt", path.read_bytes())
    summary = run_json("inspect", f"{url}/other.ckpt")["summary"]
    assert (summary["has_manifest"], summary["path"]) == (False, f"{url}/other.ckpt")


@pytest.mark.parametrize("arguments", [("{}/x.ckpt",), ("{}/net-1_1.ckpt", "--series", "other")])
def test_address_that_names_nothing_is_not_found(url: str, arguments: tuple[str, ...]) -> None:
    result = run("inspect", *(one.format(url) for one in arguments))
    assert result.exit_code == 10
    assert f"{url}/" in result.stderr


def test_damaged_object_is_damage_that_names_the_address(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [1])
    url = uploaded(tmp_path / "runs", f"file://{tmp_path}/bucket")
    (there,) = (tmp_path / "bucket").glob("data/*/*.ckpt")
    flip(there, 60)
    result = run("inspect", f"{url}/net-1_1.ckpt", "--stats")
    assert result.exit_code == 1
    assert f"{url}/net-1_1.ckpt" in result.stderr
    trouble = run("diff", f"{url}/net-1_1.ckpt", tmp_path / "runs/net-1_1.ckpt")
    assert trouble.exit_code >= 2
    assert f"{url}/net-1_1.ckpt" in trouble.stderr


def test_addresses_and_paths_are_compared(url: str, tmp_path: Path) -> None:
    here = tmp_path / "runs/net-1_2.ckpt"
    assert run("diff", f"{url}/net-1_2.ckpt", here).exit_code == 0
    assert run("diff", here, f"{url}/net-1_3.ckpt").exit_code == 1
    assert run("diff", f"{url}/net-1_1.ckpt", f"{url}/net-1_2.ckpt").exit_code == 1
    both = ("--dir", url, "--other-dir", tmp_path / "runs")
    assert run("diff", "2", "2", *both).exit_code == 0
    assert run("diff", "2", "3", "--dir", url).exit_code == 1


def test_directories_are_compared_with_addresses_step_by_step(url: str, tmp_path: Path) -> None:
    answer = run("diff", url, tmp_path / "runs")
    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.endswith("3 steps: 3 the same, 0 differ\n")
