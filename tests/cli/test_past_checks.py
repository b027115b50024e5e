# SPDX-License-Identifier: Apache-2.0
"""What `ls` knows of an earlier `verify`."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr.core.shard_names import shard_name
from ckptmgr.maintenance.past_checks import FOLDER_NAME, recall, recorder
from tests.cli.running import NOW_S, key_file, run, run_json
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.saved import KEY, flip, save_run
from tests.support.shard_sets import ATTEMPT, CONTENTS, SET, sharded

IN_A_TENSOR = 126


class DeadProcesses:
    """All processes are dead, our own too."""

    def token(self) -> str:
        return "host-boot-1-1"

    def is_dead(self, token: str) -> bool | None:
        return True


class ProcessesElsewhere(DeadProcesses):
    """All processes run on other machines."""

    def is_dead(self, token: str) -> bool | None:
        return None


def records(directory: Path) -> list[Path]:
    return sorted((directory / FOLDER_NAME).glob("*"))


def remembered(directory: Path) -> list[str]:
    (path,) = records(directory)
    return sorted(json.loads(line)["name"] for line in path.read_text().splitlines())


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


def test_damage_of_a_checkpoint_of_many_ranks_is_remembered(tmp_path: Path) -> None:
    names = [
        shard_name("net-1", rank, world=700, attempt_id=ATTEMPT, format="ckpt")
        for rank in range(700)
    ]
    files = tuple(replace(sharded().shards[0], name=name) for name in names)
    many = replace(sharded(), file=files[0], shards=files, world_size=len(files))
    (tmp_path / api.manifest_name(SET)).write_bytes(api.encode_manifest(many))
    for name in names:
        (tmp_path / name).write_bytes(CONTENTS[0])
    store = api.place(tmp_path)
    (found,) = store.scan()
    with recorder(store, at=found.saved_at) as kept:
        kept.note(
            api.Verification(checkpoint=found, level=api.Level.QUICK, status=api.Status.DAMAGED)
        )
    assert recall(store, [found])[found.name].is_bad
    (tmp_path / names[0]).write_bytes(b"another one")
    assert not recall(store, [found])


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
    (record,) = records(tmp_path)
    record.write_text(record.read_text().replace('"status": "ok"', '"status": "damaged"'))
    assert "2 damaged" in run("ls", tmp_path).stdout
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
    first, _ = save_run(runs, [10, 20], options=api.SaveOptions(key=KEY))
    key = key_file(tmp_path)
    run("verify", runs, "--key", key)
    assert checked(runs, "--key", key) == [None, None]
    flip(first, -1)
    run("verify", runs, "--key", key)
    past = checked(runs, "--key", key)
    assert past[0] is not None
    assert (past[0]["status"], past[1]) == ("damaged", None)


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (b"", b""),
        (b"{", b"\n"),
        (b"[]", b"\n"),
        (b"\xff", b"\n"),
        (b'{"at": "now"}', b"\n"),
        (b'{"schema": "ckptmgr.check/2"}', b"\n"),
        (b'{"status": "fine"}', b"\n"),
        (b'{"files": "none"}', b"\n"),
        (b'{"level": "full"}', b""),  # a line that a killed run did not end
        (b'{"problem": "' + b"x" * (1 << 14) + b'"}', b"\n"),
    ],
)
def test_record_that_is_none_says_nothing(content: bytes, end: bytes, tmp_path: Path) -> None:
    (first,) = save_run(tmp_path, [10])
    run("verify", tmp_path)
    (record,) = records(tmp_path)
    known = json.loads(record.read_text())
    assert known["name"] == first.name
    text = content
    if content.startswith(b'{"'):
        text = json.dumps({**known, **json.loads(content)}).encode()
    record.write_bytes(text + end)
    assert checked(tmp_path) == [None]


def test_entry_that_is_no_file_is_no_record(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    run("verify", tmp_path)
    (tmp_path / FOLDER_NAME / "checks-0.jsonl").mkdir()
    assert [item["status"] if item else None for item in checked(tmp_path)] == ["ok"]
    assert run("verify", tmp_path).exit_code == 0
    assert (tmp_path / FOLDER_NAME / "checks-0.jsonl").is_dir()


def test_records_of_removed_checkpoints_go(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    run("verify", tmp_path)
    run("prune", tmp_path, "--keep", "last(2)", "--yes", "--now")
    assert remembered(tmp_path) == ["net-1_10.ckpt", "net-2_10.ckpt", "net-3_10.ckpt"]
    run("verify", tmp_path)
    assert remembered(tmp_path) == ["net-2_10.ckpt", "net-3_10.ckpt"]


def test_check_of_one_checkpoint_keeps_what_is_known_of_the_others(tmp_path: Path) -> None:
    first, second, third = save_run(tmp_path, [10, 20, 30])
    run("verify", tmp_path, "--deep", now_s=NOW_S)
    before = [path.name for path in records(tmp_path)]
    run("verify", second, "--quick", now_s=NOW_S + 1)
    levels = [item["level"] if item else None for item in checked(tmp_path)]
    assert levels == ["deep", "quick", "deep"]
    assert set(before) < {path.name for path in records(tmp_path)}  # the large one stays as it is
    run("verify", first, third, now_s=NOW_S + 2)
    assert [item["level"] if item else None for item in checked(tmp_path)] == [
        "full",
        "quick",
        "full",
    ]
    assert len(records(tmp_path)) == 1


def test_runs_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    first, second = store.scan()
    with recorder(store, at=first.saved_at) as ours:
        ours.note(api.verify(store, first))
        assert set(recall(store, [first, second])) == {first.name}  # as soon as it is known
        with recorder(api.place(tmp_path), at=first.saved_at) as others:
            others.note(api.verify(store, second))
        assert set(recall(store, [first, second])) == {first.name, second.name}
    assert set(recall(store, [first, second])) == {first.name, second.name}


def test_results_of_a_killed_run_are_shown_and_taken_over(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path, processes=DeadProcesses())
    first, second = store.scan()
    killed = recorder(store, at=first.saved_at).__enter__()  # never left
    killed.note(api.verify(store, first))
    assert set(recall(store, [first, second])) == {first.name}
    with recorder(store, at=first.saved_at) as next_run:
        next_run.note(api.verify(store, second))
    assert set(recall(store, [first, second])) == {first.name, second.name}
    assert len(records(tmp_path)) == 1


@pytest.mark.parametrize(("age_s", "is_taken_over"), [(3_600, False), (100_000, True)])
def test_results_of_a_run_on_another_machine_are_taken_over_when_they_are_a_day_old(
    age_s: int, is_taken_over: bool, tmp_path: Path
) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path, processes=ProcessesElsewhere())
    first, second = store.scan()
    other = recorder(store, at=first.saved_at).__enter__()
    other.note(api.verify(store, first))
    (path,) = records(tmp_path)
    before_s = path.stat().st_mtime - age_s
    os.utime(path, (before_s, before_s))
    with recorder(store, at=first.saved_at) as next_run:
        next_run.note(api.verify(store, second))
    assert path.exists() is not is_taken_over
    assert set(recall(store, [first, second])) == {first.name, second.name}
    other.close()  # it was alive, and has lost nothing
    assert set(recall(store, [first, second])) == {first.name, second.name}


def test_last_of_many_results_that_differ_in_their_time_alone_counts(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    for now_s in (NOW_S + 60, NOW_S, NOW_S + 120):  # as clocks of several machines
        run("verify", tmp_path, now_s=now_s)
        (path,) = records(tmp_path)
        path.rename(tmp_path / f"checks-{now_s}.jsonl")
    for path in tmp_path.glob("checks-*"):
        path.rename(tmp_path / FOLDER_NAME / path.name)
    ages = [one["at"] for one in checked(tmp_path) if one is not None]
    assert ages == [datetime.fromtimestamp(NOW_S + 120, UTC).isoformat().replace("+00:00", "Z")] * 2


def test_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10])
    (tmp_path / "else").mkdir()
    (tmp_path / "run" / FOLDER_NAME).symlink_to(tmp_path / "else")
    assert run("verify", tmp_path / "run").exit_code == 0
    assert not list((tmp_path / "else").iterdir())
    assert checked(tmp_path / "run") == [None]


@pytest.mark.parametrize("operation", ["create", "write_at", "status"])
def test_directory_that_cannot_be_written_is_verified_all_the_same(
    operation: str, tmp_path: Path
) -> None:
    save_run(tmp_path, [10])
    plain = api.place(tmp_path)
    (one,) = plain.scan()
    answer = api.verify(plain, one)
    disk = FailingDisk(api.OsFileSystem(), operation=operation, call=1, is_lasting=True)
    with recorder(api.place(tmp_path, fs=disk), at=one.saved_at) as made:
        made.note(answer)
        made.note(answer)
    assert recall(api.place(tmp_path, fs=disk), [one]) == {}
    assert records(tmp_path) == []


@pytest.mark.parametrize(("operation", "call"), [("replace", 1), ("write_at", 2), ("sync", 1)])
def test_run_whose_records_get_no_name_keeps_them_where_they_were_written(
    operation: str, call: int, tmp_path: Path
) -> None:
    save_run(tmp_path, [10])
    disk = FailingDisk(api.OsFileSystem(), operation=operation, call=call, is_lasting=True)
    store = api.place(tmp_path, fs=disk)
    (one,) = store.scan()
    with recorder(store, at=one.saved_at) as made:
        made.note(api.verify(store, one))
    assert set(recall(api.place(tmp_path), [one])) == {one.name}


def test_files_without_a_manifest_have_no_record(tmp_path: Path) -> None:
    (first,) = save_run(tmp_path / "run", [10])
    (tmp_path / "bare").mkdir()
    shutil.copy(first, tmp_path / "bare/a.ckpt")
    run("verify", tmp_path / "bare")
    assert not (tmp_path / "bare" / FOLDER_NAME).exists()
