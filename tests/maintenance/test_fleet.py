# SPDX-License-Identifier: Apache-2.0
"""The pure function that cluster engines carry out: `ckptmgr.maintenance.fleet`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointNotFound, KeyProblem
from ckptmgr.maintenance.fleet import combined, parts_of, verify_part
from ckptmgr.maintenance.past_checks import FOLDER_NAME
from tests.cli.running import key_file, run
from tests.support import api
from tests.support.foreign import deepspeed_run
from tests.support.saved import KEY, flip, save_run

STEPS = list(range(10, 110, 10))


def lines_of_command(directory: Path | str, part: str, *options: str) -> list[dict[str, Any]]:
    result = run("verify", directory, "--part", part, "--jsonl", *options)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_part_gives_the_lines_of_the_command(tmp_path: Path) -> None:
    flip(save_run(tmp_path, STEPS)[3], -1)
    tasks = pickle.loads(pickle.dumps(parts_of(tmp_path, 3)))  # noqa: S301 - as engines do
    found = [verify_part(task) for task in tasks]
    assert found == [lines_of_command(tmp_path, f"{index}/3") for index in (1, 2, 3)]
    statuses = {str(line.get("status")) for lines in found for line in lines}
    assert statuses == {"ok", "damaged", "None"}


def test_answer_of_all_parts_is_that_of_one_command(tmp_path: Path) -> None:
    flip(save_run(tmp_path, STEPS)[3], -1)
    tasks = parts_of(tmp_path, 4, level="deep")
    answer = combined(tasks, [verify_part(task) for task in tasks])
    command = run("verify", tmp_path, "--deep", "--json")
    expected = json.loads(command.stdout)
    assert list(answer.results) == expected["items"]
    assert answer.summary == {**expected["summary"], "parts": 4, "failed": {}}
    assert (answer.exit_code, answer.is_ok) == (command.exit_code, False)


def test_checkpoints_of_another_tool_are_verified_as_by_the_command(tmp_path: Path) -> None:
    deepspeed_run(tmp_path)
    (task,) = parts_of(tmp_path, 1)
    assert verify_part(task) == lines_of_command(tmp_path, "1/1")
    assert len(verify_part(task)) > 1


def test_results_are_kept_for_ls(tmp_path: Path) -> None:
    save_run(tmp_path, STEPS)
    for task in parts_of(tmp_path, 3):
        verify_part(task)
    items = json.loads(run("ls", tmp_path, "--json").stdout)["items"]
    assert [item["checked"]["status"] for item in items] == ["ok"] * len(STEPS)
    assert (tmp_path / FOLDER_NAME).is_dir()


def test_key_travels_as_its_source_and_is_read_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "run", [10], options=api.SaveOptions(key=KEY))
    for source in (key_file(tmp_path), "env:OF_THE_WORKER"):
        (task,) = parts_of(tmp_path / "run", 1, key=source)
        carried = pickle.dumps(task)
        assert KEY.raw not in carried
        assert KEY.raw.hex().encode() not in carried
        monkeypatch.setenv("OF_THE_WORKER", KEY.raw.hex())
        assert [line.get("status") for line in verify_part(task)] == ["ok", None]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"key": bytes(32)}, TypeError, "must be the source of a key"),
        ({"key": bytes(32).hex()}, KeyProblem, "no source that a worker can read"),
        ({"key": "prompt:"}, KeyProblem, "a worker has no terminal"),
        ({"key": "passphrase:fd:3"}, KeyProblem, "a worker has no terminal"),
        ({"key": "file:key"}, ValueError, "the file in 'key' is relative"),
        ({"public_keys": "a.pub"}, TypeError, "'public_keys' must be a list"),
        ({"level": "most"}, ValueError, "'level' must be"),
        ({"count": 0}, ValueError, "'parts' must be at least 1"),
    ],
)
def test_wrong_argument_is_refused_before_any_task_is_made(
    options: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason) as caught:
        parts_of(tmp_path, **{"count": 2, **options})
    assert bytes(32).hex() not in str(caught.value)


def test_relative_directory_is_that_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parts_of("run", 1)[0].place == str(tmp_path / "run")
    assert parts_of("s3://bucket/run", 1)[0].place == "s3://bucket/run"


def test_series_narrows_down(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    save_run(tmp_path, [10], series="other")
    (task,) = parts_of(tmp_path, 1, series="other")
    assert [Path(str(line["path"])).name for line in verify_part(task)[:-1]] == ["other-1_10.ckpt"]


def test_directory_that_is_not_there_or_above_runs_is_named(tmp_path: Path) -> None:
    save_run(tmp_path / "runs" / "one", [10])
    for name, reason in (("none", "no such directory"), ("runs", "but in one and other folders")):
        tasks = parts_of(tmp_path / name, 2)
        with pytest.raises(CheckpointNotFound, match=reason):
            verify_part(tasks[0])


def test_worker_that_sees_an_empty_directory_fails_its_part(tmp_path: Path) -> None:
    save_run(tmp_path / "run", STEPS)
    (tmp_path / "mount").mkdir()  # on a worker on which nothing is mounted there
    here = parts_of(tmp_path / "run", 2)[0]
    (empty,) = parts_of(tmp_path / "mount", 1)
    with pytest.raises(CheckpointNotFound, match="no checkpoints here") as caught:
        verify_part(empty)
    answer = combined([here, empty], [verify_part(here), caught.value])
    assert (answer.is_ok, answer.exit_code, list(answer.failed)) == (False, 3, ["1/1"])


def test_part_without_an_outcome_is_named_and_the_others_count(tmp_path: Path) -> None:
    save_run(tmp_path, STEPS)
    tasks = parts_of(tmp_path, 2)
    answer = combined(tasks, [verify_part(tasks[0]), RuntimeError("the worker died\nat once")])
    assert answer.failed == {"2/2": "RuntimeError: the worker died"}
    assert (answer.exit_code, answer.is_ok, answer.summary["failed"]) == (3, False, answer.failed)
    assert 0 < len(answer.results) < len(STEPS)
    assert combined(tasks, [verify_part(tasks[0]), MemoryError()]).failed == {"2/2": "MemoryError"}


def test_error_of_all_parts_is_raised(tmp_path: Path) -> None:
    tasks = parts_of(tmp_path, 2)
    with pytest.raises(KeyProblem, match="no key"):
        combined(tasks, [KeyProblem("no key"), RuntimeError()])


def test_object_store_is_verified_as_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="needs obstore: ckptmgr[s3]")
    save_run(tmp_path / "run", [10, 20])
    url = f"file://{tmp_path}/bucket"
    assert run("copy", tmp_path / "run", url).exit_code == 0
    (task,) = parts_of(url, 1)
    assert verify_part(task) == lines_of_command(url, "1/1")
    (task,) = parts_of(f"{url}/none", 1)
    with pytest.raises(CheckpointNotFound, match="no checkpoint is below this address"):
        verify_part(task)
