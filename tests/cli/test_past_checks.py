# SPDX-License-Identifier: Apache-2.0
"""What `ls` knows of an earlier `verify`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptmgr.files.save.job import SaveOptions
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.maintenance.past_checks import FOLDER_NAME, recall, remember
from ckptmgr.maintenance.verify import verify_checkpoint
from ckptmgr.store.store import Store
from tests.cli.running import NOW_S, key_file, run, run_json
from tests.support.failingdisk import FailingDisk
from tests.support.saved import KEY, flip, save_run

IN_A_TENSOR = 126


def checked(directory: Path, *options: str) -> list[dict[str, object] | None]:
    items = run_json("ls", directory, *options)["items"]
    return [item.get("checked") for item in items]


def test_damage_that_verify_found_is_listed_with_its_age(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    flip(first, -1)
    assert run("verify", tmp_path, now_s=NOW_S).exit_code == 1
    result = run("ls", tmp_path, now_s=NOW_S + 7200)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[-2:] == ["TAGS", "CHECKED"]
    assert [line.split()[-5:] for line in lines[1:3]] == [
        ["damaged", "-", "2", "h", "ago"],
        ["ok", "-", "2", "h", "ago"],
    ]
    assert lines[3].startswith(f"{first.name}: verify found it damaged 2 h ago: ")
    assert lines[-1].endswith(", 1 damaged")


def test_json_says_what_was_checked_when(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    assert checked(tmp_path) == [None]
    run("verify", tmp_path, "--deep")
    (past,) = checked(tmp_path)
    assert past is not None
    assert (past["level"], past["status"], past["problem"]) == ("deep", "ok", None)


def test_checkpoint_that_was_saved_again_is_not_called_damaged(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    good = first.read_bytes()
    flip(first, -1)
    run("verify", tmp_path)
    first.write_bytes(good)
    assert [item["status"] if item else None for item in checked(tmp_path)] == [None, "ok"]


def test_quick_check_does_not_hide_damage_that_a_full_one_found(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    flip(first, IN_A_TENSOR)
    run("verify", tmp_path)
    assert run("verify", tmp_path, "--quick").exit_code == 0
    past = checked(tmp_path)[0]
    assert past is not None
    assert (past["status"], past["level"]) == ("damaged", "full")


def test_record_decides_nothing(tmp_path: Path) -> None:
    _, second = save_run(tmp_path, [10, 20])
    run("verify", tmp_path)
    record = tmp_path / FOLDER_NAME / f"{second.name}.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "damaged"}))
    assert "1 damaged" in run("ls", tmp_path).stdout
    assert run_json("inspect", "latest", "--dir", tmp_path)["summary"]["step"] == 20
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    assert second.exists()
    assert not list(tmp_path.glob("*-1_10.ckpt"))


def test_record_cannot_make_a_state_better(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    run("verify", tmp_path)
    first.write_bytes(b"cut")
    assert "1 corrupt" in run("ls", tmp_path).stdout


def test_with_a_key_only_damage_is_shown(tmp_path: Path) -> None:
    runs = tmp_path / "run"
    first, _ = save_run(runs, [10, 20], options=SaveOptions(key=KEY))
    key = key_file(tmp_path)
    run("verify", runs, "--key", key)
    assert checked(runs, "--key", key) == [None, None]
    flip(first, -1)
    run("verify", runs, "--key", key)
    past = checked(runs, "--key", key)
    assert past[0] is not None
    assert (past[0]["status"], past[1]) == ("damaged", None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"at": "now"}',
        b'{"schema": "ckptmgr.check/1", "at": "now", "level": "full", "status": "ok"}',
        b'{"schema": "ckptmgr.check/2"}',
        b'{"status": "fine"}',
    ],
)
def test_record_that_is_none_says_nothing(content: bytes, tmp_path: Path) -> None:
    (first,) = save_run(tmp_path, [10])
    run("verify", tmp_path)
    record = tmp_path / FOLDER_NAME / f"{first.name}.json"
    known = json.loads(record.read_text())
    text = content
    if content.startswith(b'{"'):
        text = json.dumps({**known, **json.loads(content)}).encode()
    record.write_bytes(text)
    assert checked(tmp_path) == [None]


def test_records_of_removed_checkpoints_go(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    run("verify", tmp_path)
    run("prune", tmp_path, "--keep", "last(1)", "--yes", "--now")
    assert len(list((tmp_path / FOLDER_NAME).iterdir())) == 2
    run("verify", tmp_path)
    assert len(list((tmp_path / FOLDER_NAME).iterdir())) == 1


def test_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10])
    (tmp_path / "else").mkdir()
    (tmp_path / "run" / FOLDER_NAME).symlink_to(tmp_path / "else")
    assert run("verify", tmp_path / "run").exit_code == 0
    assert not list((tmp_path / "else").iterdir())
    assert checked(tmp_path / "run") == [None]


@pytest.mark.parametrize("operation", ["create", "write_at", "replace", "status"])
def test_directory_that_cannot_be_written_is_verified_all_the_same(
    operation: str, tmp_path: Path
) -> None:
    save_run(tmp_path, [10])
    plain = Store(tmp_path)
    (one,) = plain.scan()
    answer = verify_checkpoint(plain, one)
    disk = FailingDisk(OsFileSystem(), operation=operation, call=1, is_lasting=True)
    remember(Store(tmp_path, fs=disk), answer, at=one.saved_at)
    assert not list(tmp_path.glob(f"{FOLDER_NAME}/*.json"))
    assert recall(Store(tmp_path, fs=disk), [one]) == {}


def test_files_without_a_manifest_have_no_record(tmp_path: Path) -> None:
    (first,) = save_run(tmp_path / "run", [10])
    (tmp_path / "bare").mkdir()
    shutil.copy(first, tmp_path / "bare/a.ckpt")
    run("verify", tmp_path / "bare")
    assert not (tmp_path / "bare" / FOLDER_NAME).exists()
