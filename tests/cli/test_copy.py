# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr copy`: to an object store, and from one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager, load_checkpoint
from ckptmgr.formats.tensor import Item, tensor_from_array
from tests.cli.running import key_file, run
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.counted_objects import CountedObjects, Died
from tests.support.saved import KEY, flip, items, save_run

pytest.importorskip("obstore")

from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.remote.download import download
from tests.remote.buckets import listed, new_url, whole_names

_NAMES = {"net-1_1.ckpt", "net-1_2.ckpt", "net-1_3.ckpt"}
_METRICS = {1: {"loss": 0.3}, 2: {"loss": 0.1}, 3: {"loss": 0.2}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with three checkpoints."""
    save_run(tmp_path / "runs", [1, 2, 3], metrics=_METRICS)
    return tmp_path / "runs"


def test_selected_checkpoint_is_copied_with_one_line(runs: Path) -> None:
    url = new_url()
    result = run("copy", "best:loss:min", url, "--dir", runs)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{runs}/net-1_2.ckpt → {url}/net-1_2.ckpt  ")
    assert result.stderr == ""
    assert listed(api.open_objects(url)).keys() == {"net-1_2.ckpt"}
    again = run("copy", "2", url, "--dir", runs, charset="ascii")
    assert " -> " in again.stdout
    assert again.stdout.endswith("was there already\n")


def test_whole_directory_goes_there_and_back_byte_for_byte(runs: Path, tmp_path: Path) -> None:
    url = new_url()
    document = run_with_schema("copy", runs, url)
    assert document["summary"]["copied"] == 3
    assert document["items"][0]["target"] == f"{url}/net-1_1.ckpt"
    assert whole_names(api.open_objects(url), tmp_path) == _NAMES
    back = tmp_path / "back"
    assert run("copy", url, back).exit_code == 0
    names = _NAMES | {f"{name}.manifest.json" for name in _NAMES}
    for name in names:
        assert (back / name).read_bytes() == (runs / name).read_bytes()
    assert {one.name for one in back.iterdir()} == names
    document = run_with_schema("copy", url, back)
    assert document["summary"]["present"] == 3
    assert document["summary"]["size_bytes"] == 0


def test_one_checkpoint_of_a_store_is_named_by_its_address_or_a_selector(
    runs: Path, tmp_path: Path
) -> None:
    url = new_url()
    run("copy", runs, url)
    result = run("copy", f"{url}/net-1_2.ckpt", tmp_path / "a", "-q")
    assert result.stdout == f"{tmp_path}/a/net-1_2.ckpt\n"
    assert run("copy", "latest", tmp_path / "b", "--dir", url).exit_code == 0
    assert load_checkpoint(str(tmp_path / "b" / "net-1_3.ckpt"))
    assert run("copy", f"{url}/net-9.ckpt", tmp_path / "c").exit_code == 10
    assert run("copy", "9", tmp_path / "c", "--dir", url).exit_code == 10


def test_local_folder_of_the_local_store_is_a_store(runs: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    assert run("copy", runs, url).exit_code == 0
    assert (tmp_path / "bucket" / "net-1_1.ckpt.manifest.json").is_file()
    assert run("copy", f"{url}/net-1_1.ckpt", tmp_path / "back").exit_code == 0


def test_encrypted_checkpoint_needs_no_key_and_with_a_wrong_one_it_is_refused(
    tmp_path: Path,
) -> None:
    options = api.SaveOptions(format="safetensors", key=KEY)
    save_run(tmp_path / "runs", [1], options=options, content=items()[:2])
    url = new_url()
    assert run("copy", tmp_path / "runs", url).exit_code == 0
    assert run("copy", url, tmp_path / "plain").exit_code == 0
    right = key_file(tmp_path)
    assert run("copy", url, tmp_path / "right", "--key", right).exit_code == 0
    other = tmp_path / "other.key"
    other.write_text("00" * 32)
    other.chmod(0o600)
    wrong = run("copy", url, tmp_path / "wrong", "--key", f"file:{other}")
    assert wrong.exit_code == 12
    assert not list((tmp_path / "wrong").glob("net*"))


def test_damaged_checkpoint_is_not_uploaded_and_the_others_are(runs: Path) -> None:
    damaged = runs / "net-1_2.ckpt"
    damaged.chmod(0o600)
    flip(damaged, 40)
    url = new_url()
    result = run("copy", runs, url)
    assert result.exit_code == 3
    assert "do not match the digest" in result.stderr
    assert listed(api.open_objects(url)).keys() == _NAMES - {"net-1_2.ckpt"}
    assert run("copy", damaged, url).exit_code != 0


def test_damaged_object_is_not_downloaded_and_leaves_no_name(runs: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    run("copy", "1", url, "--dir", runs)
    (stored,) = (tmp_path / "bucket").glob("data/*/*")
    flip(stored, 40)
    result = run("copy", url, tmp_path / "back")
    assert result.exit_code == 1
    assert "do not match the digest" in result.stderr
    assert not list((tmp_path / "back").glob("net*"))


def test_name_that_is_taken_here_or_there_is_refused(runs: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "other", [1], metrics={1: {"loss": 9.0}}, content=items(7.0))
    url = new_url()
    run("copy", runs, url)
    there = run("copy", tmp_path / "other", url)
    assert there.exit_code == 13
    assert "another checkpoint has this name there: step 1" in there.stderr
    here = run("copy", f"{url}/net-1_1.ckpt", tmp_path / "other")
    assert here.exit_code == 13
    assert "another file has this name here" in here.stderr


@pytest.mark.parametrize("series", ["a\nb", "\x1b[31m", b"\xff".decode("utf-8", "surrogateescape")])
def test_name_that_no_object_can_have_is_refused_and_the_others_are_copied(
    runs: Path, series: str
) -> None:
    save_run(runs, [4], series=series)
    url = new_url()
    result = run("copy", runs, url)
    assert result.exit_code == 3
    assert "no object can have a name with control characters" in result.stderr
    assert "hint: save with another prefix" in result.stderr
    assert listed(api.open_objects(url)).keys() == _NAMES


def test_file_without_a_manifest_is_refused(runs: Path) -> None:
    (runs / "net-1_1.ckpt.manifest.json").unlink()
    result = run("copy", runs / "net-1_1.ckpt", new_url())
    assert result.exit_code == 10
    assert "has no manifest" in result.stderr


def test_directories_and_two_stores_are_refused_with_the_way_out(runs: Path) -> None:
    local = run("copy", runs, "elsewhere")
    assert local.exit_code == 2
    assert "give a URL" in local.stderr
    both = run("copy", new_url(), new_url())
    assert both.exit_code == 2
    assert "by way of a directory" in both.stderr
    bad = run("copy", runs, "http://host/run")
    assert bad.exit_code == 2
    assert "s3://bucket/run" in bad.stderr


def test_live_run_keeps_its_directory(runs: Path, tmp_path: Path) -> None:
    url = new_url()
    run("copy", runs, url)
    with CheckpointManager(tmp_path / "live", prefix="net") as manager:
        manager.save(1, {"a": 1})
        assert run("copy", f"{url}/net-1_2.ckpt", tmp_path / "live").exit_code == 11


@pytest.mark.parametrize("is_too_long", [False, True])
def test_killed_download_is_continued_where_it_was_cut(tmp_path: Path, is_too_long: bool) -> None:
    big = bytes(range(256)) * (1 << 13) * 10  # two ranges
    save_run(tmp_path / "runs", [1], content=_tensor(big))
    objects = api.open_objects(new_url())
    there = RemoteDirectory(objects, clock=lambda: 0.0)
    there.upload(api.place(tmp_path / "runs"), "net-1_1.ckpt")
    target = api.place(tmp_path / "back", trust=api.Trust())
    with target.lease("net"):
        with contextlib.suppress(Died):
            dying = CountedObjects(objects, last=3, is_over=False)
            download(RemoteDirectory(dying, clock=lambda: 0.0), "net-1_1.ckpt", target)
        (part,) = (tmp_path / "back").glob("*.part")
        if is_too_long:
            part.chmod(0o600)
            part.write_bytes(bytes(len(big) * 2))
        counted = CountedObjects(objects)
        download(RemoteDirectory(counted, clock=lambda: 0.0), "net-1_1.ckpt", target)
    reads = [one for one in counted.requests if one.startswith("read")]
    assert len(reads) == (2 if is_too_long else 1)
    name = "net-1_1.ckpt"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "runs" / name).read_bytes()


def _tensor(data: bytes) -> list[Item]:
    return [tensor_from_array("w", np.frombuffer(data, np.uint8))]
