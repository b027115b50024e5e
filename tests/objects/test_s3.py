# SPDX-License-Identifier: Apache-2.0
"""Mirror, copy, ls, verify, prune and probe against servers of S3 and Azure: `make objects`."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager, load_checkpoint
from ckptmgr.formats.tensor import tensor_from_array
from tests.cli.running import run, run_json
from tests.objects.dying_run import STEPS, train
from tests.support import api
from tests.support.saved import save_run

pytestmark = pytest.mark.objects

_REQUESTS = 42  # at most, of an uncut run
_WRITERS, _ROUNDS = 8, 20
_PROGRAM = [sys.executable, "-m", "tests.objects.dying_run"]


def _train(directory: Path, url: str, last: int = 0) -> subprocess.CompletedProcess[str]:
    command = [*_PROGRAM, str(directory), url, str(last)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _listed(url: str) -> dict[int, api.State]:
    from ckptmgr.objects.place import ObjectPlace

    pass

    found = ObjectPlace(api.open_objects(url), trust=api.DEFAULT_TRUST).scan()
    return {one.step: one.state for one in found}


def test_uncut_run_is_mirrored_with_the_requests_that_the_next_test_cuts(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket()
    done = _train(tmp_path / "run", url)
    assert done.returncode == 0, done.stderr
    *steps, requests = map(int, done.stdout.split())
    assert steps == list(range(1, STEPS + 1))
    assert requests <= _REQUESTS
    assert _listed(url) == {STEPS: api.State.OK}


@pytest.mark.parametrize("last", range(1, _REQUESTS + 1))
def test_run_that_is_killed_before_a_request_loses_nothing_and_goes_on_on_a_new_machine(
    new_bucket: Callable[..., str], tmp_path: Path, last: int
) -> None:
    url = new_bucket()
    killed = _train(tmp_path / "first", url, last)
    if killed.returncode == 0:
        pytest.skip(f"the run has fewer than {last} requests")
    assert killed.returncode == 9, killed.stderr
    acknowledged = [int(line) for line in killed.stdout.split()]
    found = _listed(url)
    assert set(found.values()) <= {api.State.OK}
    for step in found:
        back = tmp_path / f"back-{step}"
        assert run("copy", str(step), back, "--dir", url).exit_code == 0
        assert (load_checkpoint(str(back / f"ckpt-{step}.ckpt"))["w"] == step).all()
    if acknowledged:
        assert max(found) >= acknowledged[-1]
    with CheckpointManager(tmp_path / "second", mirror=url) as manager:
        assert manager.resume().step == max(found, default=0)
    train(str(tmp_path / "first"), url)  # the killed machine comes back
    assert _listed(url) == {STEPS: api.State.OK}


def test_large_file_goes_in_parts_there_and_back(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket()
    data = np.random.default_rng(1).integers(0, 256, 40 << 20, np.uint8)
    save_run(tmp_path / "runs", [1], content=[tensor_from_array("w", data)])
    assert run("copy", tmp_path / "runs", url).exit_code == 0
    assert run("copy", url, tmp_path / "back").exit_code == 0
    name = "net-1_1.ckpt"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "runs" / name).read_bytes()


@pytest.mark.parametrize("has_versions", [False, True])
def test_probe_finds_what_is_needed_and_versions(
    store: str, new_bucket: Callable[..., str], has_versions: bool
) -> None:
    result = run("storage", "probe", new_bucket(has_versions=has_versions))
    # Ceph 16 checks no condition in a bucket with versions.
    is_unsafe = store == "ceph" and has_versions
    assert result.exit_code == int(is_unsafe), result.output
    assert ("were told that they created the same object" in result.stdout) == is_unsafe
    assert ("lifecycle rule" in result.stdout) == has_versions


def test_of_many_writers_that_create_one_object_one_wins(
    store: str, new_bucket: Callable[..., str]
) -> None:
    if store == "moto":
        pytest.skip("moto looks and writes in two steps: now and then two win")
    pass

    url = new_bucket()
    objects = [api.open_objects(url) for _ in range(_WRITERS)]
    start = threading.Barrier(_WRITERS)

    def create(number: int, key: str) -> bool:
        start.wait()
        try:
            objects[number].create(key, b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(_WRITERS) as pool:
        for key in map(str, range(_ROUNDS)):
            answers = list(pool.map(create, range(_WRITERS), [key] * _WRITERS))
            assert sum(answers) == 1
            assert objects[0].get(key) == b"%d" % answers.index(True)


def test_copies_are_listed_verified_and_pruned(
    new_bucket: Callable[..., str], tmp_path: Path
) -> None:
    url = new_bucket()
    save_run(tmp_path / "runs", [1, 2, 3])
    for command in (
        ("copy", tmp_path / "runs", url),
        ("verify", url),
        ("prune", url, "--keep", "last(1)", "--now", "--yes"),
        ("verify", url),
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
    assert [one["path"] for one in run_json("ls", url)["items"]] == [f"{url}/net-1_3.ckpt"]


def test_watch_mirrors_what_it_verified_and_goes_on_after_a_restart(
    new_bucket: Callable[..., str], lose_server: Callable[[str], None], tmp_path: Path
) -> None:
    url = new_bucket()
    watch = ("watch", tmp_path / "runs", "--once", "--mirror", url, "--mirror-keep", "last(2)")
    save_run(tmp_path / "runs", [1, 2])
    first = run(*watch)
    assert first.exit_code == 0, first.output
    assert first.stdout.count("mirrored") == 2
    with CheckpointManager(tmp_path / "runs", prefix="net") as manager:
        manager.resume()
        manager.save(3, {"w": np.zeros(9)})
    again = run(*watch)
    assert again.exit_code == 0, again.output
    assert again.stdout.count("mirrored") == 1
    assert _listed(url) == {2: api.State.OK, 3: api.State.OK}
    lose_server(url)
    lost = run(*watch)
    assert lost.exit_code == 1
    assert "mirror: the mirror fails, and is tried again: " in lost.stdout


def test_bucket_that_is_not_there_is_named(new_bucket: Callable[..., str], tmp_path: Path) -> None:
    scheme = new_bucket().partition(":")[0]
    save_run(tmp_path / "runs", [1])
    result = run("copy", tmp_path / "runs", f"{scheme}://no-such-bucket/run")
    assert result.exit_code == 2
    assert f"{scheme}://no-such-bucket/run" in result.stderr
    assert "bucket" in result.stderr


def test_wrong_endpoint_is_an_error_that_names_the_address(
    new_bucket: Callable[..., str], lose_server: Callable[[str], None], tmp_path: Path
) -> None:
    url = new_bucket()
    lose_server(url)
    save_run(tmp_path / "runs", [1])
    result = run("copy", tmp_path / "runs", url)
    assert result.exit_code == 2
    assert url in result.stderr


@pytest.mark.parametrize("store", ["moto"], indirect=True)
@pytest.mark.parametrize("key", ["run//a", "run/data//a", "run/../a", "run/\x1b[31m"])
def test_object_whose_name_cannot_be_listed_is_named_with_the_way_out(
    new_bucket: Callable[..., str], server: str, tmp_path: Path, key: str
) -> None:
    import boto3

    url = new_bucket()
    save_run(tmp_path, [1])
    assert run("copy", tmp_path, url).exit_code == 0
    bucket = url.removeprefix("s3://").removesuffix("/run")
    client = boto3.client("s3", endpoint_url=server)
    client.put_object(Bucket=bucket, Key=key, Body=b"")
    result = run("ls", url)
    assert result.exit_code == 2
    assert "remove or rename that object with the tool of the store" in result.stderr
    with (
        CheckpointManager(tmp_path / "new", prefix="net", mirror=url) as manager,
        pytest.raises(ConnectionError, match="remove or rename that object"),
    ):
        manager.resume()  # a fresh start would lose the run
    client.delete_object(Bucket=bucket, Key=key)
    assert _listed(url) == {1: api.State.OK}
