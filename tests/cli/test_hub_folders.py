# SPDX-License-Identifier: Apache-2.0
"""Folders of the Hugging Face Hub: shards with an index, and the links of its cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.running import run, run_json
from tests.cli.schemas import run_with_schema
from tests.support.foreign import GOLDEN
from tests.support.saved import save_run

WEIGHTS = GOLDEN / "transformers/run/checkpoint-4/model.safetensors"
SHARDS = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"


def model(folder: Path, *, has_index: bool = True) -> Path:
    """Write a folder of three shards."""
    folder.mkdir(parents=True)
    for name in SHARDS:
        shutil.copy(WEIGHTS, folder / name)
    if has_index:
        places = {f"w{number}": name for number, name in enumerate(SHARDS)}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text("{}")
    return folder


def cached(cache: Path) -> Path:
    """Write the folder that `snapshot_download` makes: links of a revision into `blobs`."""
    repo = cache / "models--org--name"
    source = model(cache / "source")
    snapshot = repo / "snapshots/abc123"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.move(file, repo / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    source.rmdir()
    return snapshot


def verdict(folder: Path) -> tuple[int, str, str]:
    """Return the exit code, status and problems of the one checkpoint that a folder is."""
    result = run("verify", folder, "--json")
    (item,) = json.loads(result.stdout)["items"]
    return result.exit_code, item["status"], "; ".join(item["problems"])


def test_folder_of_shards_is_one_checkpoint(tmp_path: Path) -> None:
    (item,) = run_with_schema("ls", model(tmp_path / "model"))["items"]
    assert (item["tool"], item["state"], item["step"]) == ("hub", "complete", None)
    assert item["size_bytes"] > 3 * WEIGHTS.stat().st_size
    assert verdict(tmp_path / "model") == (0, "unverified", "")


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[2]])
@pytest.mark.parametrize("has_index", [True, False])
def test_missing_shard_is_incomplete(name: str, has_index: bool, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", has_index=has_index)
    (folder / name).unlink()
    assert verdict(folder) == (1, "incomplete", f"{name} is missing")
    assert run_json("ls", folder)["items"][0]["state"] == "incomplete"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}'])
def test_index_that_lists_nothing_is_incomplete(content: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / INDEX).write_text(content)
    code, status, problems = verdict(folder)
    assert (code, status) == (1, "incomplete")
    assert INDEX in problems


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "sub/x", "", "a\0b"])
def test_index_that_names_a_file_elsewhere_is_incomplete(place: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    shutil.copy(WEIGHTS, tmp_path / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": place}}))
    assert verdict(folder)[:2] == (1, "incomplete")


def test_index_of_a_format_that_was_not_fetched_does_not_count(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    other = {"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(other))
    assert verdict(folder)[:2] == (0, "unverified")
    (folder / SHARDS[1]).unlink()
    assert verdict(folder)[:2] == (1, "incomplete")


def test_shard_that_is_cut_off_is_found(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    blob = (folder / SHARDS[1]).resolve()
    blob.write_bytes(blob.read_bytes()[:100])
    code, status, problems = verdict(folder)
    assert (code, status) == (1, "damaged")
    assert problems.startswith(f"{SHARDS[1]}: ")


def test_snapshot_of_links_is_one_whole_checkpoint(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    (item,) = run_json("ls", folder)["items"]
    assert (item["tool"], item["state"], item["path"]) == ("hub", "complete", str(folder))
    assert item["size_bytes"] > 3 * WEIGHTS.stat().st_size
    assert verdict(folder) == (0, "unverified", "")
    assert "1 checkpoint in 1 directory" in run("ls", "-r", tmp_path).stdout
    assert run_json("stats", tmp_path)["summary"]["count"] == 1


def test_snapshot_of_one_linked_file_is_a_checkpoint(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/1")
    assert verdict(folder) == (0, "unverified", "")
    assert run_json("ls", folder)["items"][0]["state"] == "complete"


@pytest.mark.parametrize("target", ["../../blobs/gone", "{}/outside.safetensors", "/dev/zero", "."])
def test_link_to_nothing_or_out_of_the_tree_is_a_missing_shard(target: str, tmp_path: Path) -> None:
    folder = cached(tmp_path / "cache")
    shutil.copy(WEIGHTS, tmp_path / "outside.safetensors")
    (folder / SHARDS[1]).unlink()
    (folder / SHARDS[1]).symlink_to(target.format(tmp_path))
    assert verdict(folder) == (1, "incomplete", f"{SHARDS[1]} is missing")


def test_shard_that_is_a_pipe_is_missing(tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    (folder / SHARDS[1]).unlink()
    os.mkfifo(folder / SHARDS[1])
    assert verdict(folder)[:2] == (1, "incomplete")


def test_linked_shard_of_a_trainer_counts_inside_its_directory_alone(tmp_path: Path) -> None:
    run_folder = Path(shutil.copytree(GOLDEN / "transformers/run", tmp_path / "run"))
    inside = run_folder / "checkpoint-4"
    (inside / INDEX).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    shutil.move(inside / "model.safetensors", run_folder / "shared")
    (inside / "model.safetensors").symlink_to("../shared")
    assert verdict(inside)[:2] == (0, "unverified")
    shutil.move(run_folder / "shared", tmp_path / "shared")
    (inside / "model.safetensors").unlink()
    (inside / "model.safetensors").symlink_to(tmp_path / "shared")
    assert verdict(inside) == (1, "incomplete", "no weights; model.safetensors is missing")
    (inside / INDEX).unlink()
    assert verdict(inside) == (1, "incomplete", "no weights")


@pytest.mark.parametrize("name", ["model.gguf", "tf_model.h5", "consolidated.00.pth"])
def test_snapshot_of_other_weights_is_listed_and_verified(name: str, tmp_path: Path) -> None:
    folder = cached(tmp_path)
    for file in folder.iterdir():
        file.unlink()
    (folder / name).symlink_to("../../blobs/1")
    (folder / "faiss.index.json").write_text("{}")
    (folder / "README.md").symlink_to("gone")
    code, status, _ = verdict(folder)
    assert (code, status) in ((0, "unverified"), (1, "damaged"))
    assert "links to nothing or out of the tree" in run("verify", folder).stdout
    assert "1 checkpoint in 1 directory" in run("ls", "-r", tmp_path).stdout
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/gone")
    assert verdict(folder) == (1, "incomplete", f"{name} is missing")


def test_folder_with_manifests_of_ours_stays_ours(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "x.safetensors"}}')
    assert [item["tool"] for item in run_json("ls", tmp_path)["items"]] == [None, None]


def test_folder_of_shards_is_not_counted_beside_checkpoints_of_ours(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    model(tmp_path / "exported")
    assert len(run_json("ls", tmp_path)["items"]) == 2
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "exported").iterdir())[1:4] == SHARDS


def test_shards_beside_checkpoints_of_a_trainer_are_one_more_checkpoint(tmp_path: Path) -> None:
    folder = model(tmp_path / "run")
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(GOLDEN / "transformers/run" / name, folder / name)
    tools = [(item["tool"], item["step"]) for item in run_json("ls", folder)["items"]]
    assert tools == [("transformers", 2), ("transformers", 4), ("hub", None)]
    assert run("verify", folder).exit_code == 0
    (folder / SHARDS[1]).unlink()
    result = run("verify", folder)
    assert (result.exit_code, f"{SHARDS[1]} is missing" in result.stdout) == (1, True)
    assert run("prune", folder, "--keep", "last(1)", "--yes").exit_code == 0
    names = {path.name for path in folder.iterdir()}
    assert {"checkpoint-4", *SHARDS[::2], INDEX} <= names
