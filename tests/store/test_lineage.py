# SPDX-License-Identifier: Apache-2.0
"""The chain of checkpoints: contradictions of a swapped or rolled-back file, and everyday events that are none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, CorruptCheckpoint
from ckptmgr.core.model import Link
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.store.manifest.lineage import (
    Expected,
    Lineage,
    foreign_predecessor,
    link_to_newest,
)
from tests.support import api
from tests.support.manifests import PATH, changed, manifest
from tests.support.saved import KEY, flip, save_run, verify_all

OTHER_ID = "ab" * 32
Files = dict[str, bytes]


def taken(path: Path) -> Files:
    """Return a checkpoint's file and manifest, to be put back later."""
    return {
        name: path.with_name(name).read_bytes()
        for name in (path.name, api.manifest_name(path.name))
    }


def put_back(directory: Path, files: Files) -> None:
    for name, data in files.items():
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(data)


def statuses(directory: Path, key: Keys | None = None) -> dict[int, api.Status]:
    store = api.place(directory, keys=key, allow_unencrypted=not (key is not None))
    answers = verify_all(store, level=api.Level.QUICK, options=api.reading(keys=key))
    return {answer.checkpoint.step: answer.status for answer in answers}


@pytest.mark.parametrize(
    "options", [api.SaveOptions(), api.SaveOptions(key=KEY)], ids=["plain", "sealed"]
)
def test_file_replaced_by_an_older_one_of_its_name_is_damaged(
    tmp_path: Path, options: api.SaveOptions
) -> None:
    old = taken(save_run(tmp_path / "a", [10], options=options)[0])
    save_run(tmp_path / "b", [9, 10, 11], options=options)
    put_back(tmp_path / "b", old)
    assert statuses(tmp_path / "b", options.key) == {
        9: api.Status.OK,
        10: api.Status.DAMAGED,
        11: api.Status.OK,
    }


def test_problem_names_both_files_and_both_commits(tmp_path: Path) -> None:
    old = taken(save_run(tmp_path / "a", [10])[0])
    save_run(tmp_path / "b", [9, 10, 11])
    put_back(tmp_path / "b", old)
    store = api.place(tmp_path / "b")
    (problem,) = [p for answer in verify_all(store) for p in answer.problems]
    assert problem.startswith(
        "net-2_1.ckpt was saved after another file of this name (commit 2, id "
    )
    assert "; this one is of commit 1, id " in problem


def test_checkpoints_of_one_run_each_name_the_one_before(tmp_path: Path) -> None:
    save_run(tmp_path, [1, 2, 3])
    first, second, third = sorted(api.listed(tmp_path), key=lambda c: c.order)
    assert first.previous is None
    assert second.previous == Link(
        name=first.name, sequence=1, run_id="run-of-net", id=str(first.id)
    )
    assert third.previous is not None
    assert third.previous.id == second.id


def test_other_series_of_the_directory_is_another_chain(tmp_path: Path) -> None:
    save_run(tmp_path, [1], series="a")
    save_run(tmp_path, [1], series="b")
    assert all(c.previous is None for c in api.listed(tmp_path))


def train(
    directory: Path, steps: range, change: Callable[[CheckpointManager], object] | None = None
) -> list[Path]:
    """Run some steps and return the checkpoints then."""
    state = {"w": np.zeros(4)}
    config = CheckpointConfig(keep="last(2) | pinned")
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.resume(state)
        for step in steps:
            state["w"] += 1
            manager.step_end(step, state)
        if change is not None:
            change(manager)
    return sorted(directory.iterdir())


def pin_2(manager: CheckpointManager) -> None:
    manager.pin(2)


def go_back_and_save(manager: CheckpointManager) -> None:
    manager.rollback(steps_back=1)
    manager.save(5, {"w": np.ones(4)})


def removed(directory: Path, pattern: str) -> list[Path]:
    found = list(directory.glob(pattern))
    for path in found:
        path.unlink()
    return found


EVERYDAY: dict[str, Callable[[Path], object]] = {
    "retention": lambda d: train(d, range(1, 6)),
    "pin and retention": lambda d: [train(d, range(1, 4), pin_2), train(d, range(4, 9))],
    "unpin": lambda d: [
        train(d, range(1, 4), pin_2),
        train(d, range(4, 5), lambda manager: manager.unpin(2)),
    ],
    "a run that starts again": lambda d: [train(d, range(1, 4)), train(d, range(4, 7))],
    "rollback": lambda d: train(d, range(1, 6), go_back_and_save),
    "newest removed by hand": lambda d: [
        train(d, range(1, 4)),
        removed(d, "net-3*"),
        train(d, range(3, 5)),
    ],
    "copied directory": lambda d: [
        train(d / "a", range(1, 4)),
        shutil.copytree(d / "a", d, dirs_exist_ok=True),
    ],
}


@pytest.mark.parametrize("event", EVERYDAY)
def test_what_happens_every_day_contradicts_nothing(tmp_path: Path, event: str) -> None:
    EVERYDAY[event](tmp_path)
    assert set(statuses(tmp_path).values()) == {api.Status.OK}


def test_name_that_is_overwritten_by_its_run_contradicts_nothing(tmp_path: Path) -> None:
    # As the callback does after a rollback: the same names, later commits.
    save_run(tmp_path, [1, 2])
    save_run(tmp_path, [1, 2])
    assert set(statuses(tmp_path).values()) == {api.Status.OK}


def test_overwritten_name_follows_the_newest_even_itself(tmp_path: Path) -> None:
    save_run(tmp_path, [1])
    save_run(tmp_path, [1])
    (found,) = api.listed(tmp_path)
    assert found.previous is not None
    assert found.previous.name == found.name
    assert Lineage([found]).why_replaced(found) is None


def listed(content: bytes = b"content", **changes: Any) -> Checkpoint:
    return replace(manifest(content=content).to_checkpoint(Path("/runs")), **changes)


def later_than(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    link = link_to_newest([checkpoint], checkpoint.series)
    name = Path("/runs/net-2.ckpt")
    values: dict[str, Any] = {"path": name, "sequence": checkpoint.sequence + 1, **changes}
    return listed(b"later", previous=link, **values)


def test_file_that_was_encrypted_anew_is_still_the_same_save() -> None:
    before = listed()
    assert Lineage([later_than(before)]).why_replaced(listed(b"rekeyed")) is None


def test_plain_file_of_other_content_is_not_the_same_save() -> None:
    before = listed()
    found = Lineage([later_than(before)]).why_replaced(listed(b"forged", cipher=None))
    assert found is not None
    assert found.startswith("net-2.ckpt was saved after another file of this name (commit 7")


def test_save_of_another_run_with_the_same_number_is_not_the_same() -> None:
    assert (
        Lineage([later_than(listed())]).why_replaced(listed(b"other", run_id="other")) is not None
    )


@pytest.mark.parametrize(
    "doubtful",
    [
        listed(b"other", sequence=9),
        listed(b"other", id=None),
        listed(b"other", path=Path("/runs/net-3.ckpt"), sequence=1),
    ],
    ids=["written later", "bare file", "another name"],
)
def test_file_that_no_link_speaks_of_is_not_contradicted(doubtful: Checkpoint) -> None:
    assert Lineage([later_than(listed()), listed()]).why_replaced(doubtful) is None


def test_file_that_is_contradicted_itself_accuses_nobody(tmp_path: Path) -> None:
    save_run(tmp_path / "a", [9, 10])
    save_run(tmp_path / "b", [9, 10, 11])
    put_back(tmp_path / "b", taken(tmp_path / "a/net-1_9.ckpt"))
    put_back(tmp_path / "b", taken(tmp_path / "a/net-1_10.ckpt"))
    assert set(statuses(tmp_path / "b").values()) == {
        api.Status.OK
    }  # the same bytes and times: the same ids
    save_run(tmp_path / "c", [8, 9, 10])
    put_back(tmp_path / "b", taken(tmp_path / "c/net-1_10.ckpt"))
    assert statuses(tmp_path / "b") == {9: api.Status.OK, 10: api.Status.DAMAGED, 11: api.Status.OK}


def test_files_of_one_commit_that_contradict_each_other_are_both_named() -> None:
    one = listed(b"1", path=Path("/runs/net-1.ckpt"))
    two = listed(b"2", path=Path("/runs/net-2.ckpt"))
    link = Link(name=one.name, sequence=6, run_id="run", id=OTHER_ID)
    back = Link(name=two.name, sequence=6, run_id="run", id=OTHER_ID)
    present = [replace(one, previous=back), replace(two, previous=link)]
    assert all(Lineage([]).why_replaced(checkpoint) is None for checkpoint in present)
    assert Lineage([present[1]]).why_replaced(present[0]) is not None
    assert Lineage([present[0]]).why_replaced(present[1]) is not None


def test_manifest_under_another_key_proves_nothing() -> None:
    later = later_than(listed(), state=api.State.UNVERIFIED)
    assert Lineage([later]).why_replaced(listed(b"other", sequence=1)) is None


@pytest.mark.parametrize(
    "unusable",
    [
        {"state": api.State.CORRUPT},
        {"state": api.State.UNVERIFIED},
        {"sequence": 0},
        {"id": None},
        {"run_id": None},
        {"series": "other"},
    ],
)
def test_next_checkpoint_names_only_what_is_known(unusable: dict[str, Any]) -> None:
    assert link_to_newest([listed(**unusable)], "net") is None


def test_resume_from_a_replaced_file_warns_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = taken(save_run(tmp_path / "a", [10])[0])
    first, _, newest = save_run(tmp_path / "b", [9, 10, 11])
    put_back(tmp_path / "b", old)
    first.unlink()
    flip(newest, 70)
    with CheckpointManager(first.parent, prefix="net") as manager:
        found = manager.resume()
    assert (found.step, [one.checkpoint.step for one in found.skipped]) == (10, [11])
    assert found.doubt is not None
    assert found.doubt in caplog.text


def test_resume_from_a_newest_file_of_another_run_warns_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = taken(save_run(tmp_path / "a", [9, 10, 11])[2])
    save_run(tmp_path / "b", [8, 10, 11])
    put_back(tmp_path / "b", newest)
    with CheckpointManager(tmp_path / "b", prefix="net") as manager:
        found = manager.resume()
    assert found.step == 11
    assert found.doubt is not None
    assert found.doubt.startswith("it was saved after a net-1_10.ckpt of commit 2, id ")
    assert f"may be of another run: {found.doubt}" in caplog.text


@pytest.mark.parametrize("event", EVERYDAY)
def test_resume_after_what_happens_every_day_has_no_doubt(tmp_path: Path, event: str) -> None:
    EVERYDAY[event](tmp_path)
    with CheckpointManager(tmp_path, prefix="net") as manager:
        assert manager.resume({"w": np.zeros(4)}).doubt is None


def test_checkpoint_fits_what_lies_before_it_unless_that_is_another_known_one() -> None:
    before = listed()
    later = later_than(before)
    assert foreign_predecessor(later, [before, later]) is None
    assert foreign_predecessor(before, [before, later]) is None
    assert foreign_predecessor(later, [listed(b"other", sequence=1), later]) is not None
    assert (
        foreign_predecessor(later, [listed(b"other", sequence=1, state=api.State.UNVERIFIED)])
        is None
    )


# The id: of everything that is fixed when it is saved, and nothing else.


@pytest.mark.parametrize(
    "change",
    [
        {"series": "other"},
        {"run_id": "other"},
        {"parent_run_ids": ()},
        {"step": 2},
        {"attempt": 1},
        {"sequence": 8},
        {"epoch": None},
        {"why": "end"},
        {"world_size": 2},
        {"previous": Link(name="net-0.ckpt", sequence=6, run_id="run", id=OTHER_ID)},
    ],
    ids=str,
)
def test_id_changes_with_everything_that_is_fixed(change: dict[str, Any]) -> None:
    assert replace(manifest(), **change).id != manifest().id


def test_id_changes_with_content_and_name() -> None:
    ids = {manifest().id, manifest(content=b"x").id, manifest("net-2.ckpt").id}
    assert len(ids) == 3


@pytest.mark.parametrize(
    "change", [{"pins": ()}, {"metrics": {}}, {"stats": {}}, {"replaces": manifest()}]
)
def test_id_stays_when_pins_metrics_and_figures_change(change: dict[str, Any]) -> None:
    assert replace(manifest(), **change).id == manifest().id


def test_id_is_this_one_for_ever() -> None:
    linked = replace(
        manifest(), previous=Link(name="net-0.ckpt", sequence=6, run_id="run", id=OTHER_ID)
    )
    assert linked.id == "91f58650ee6bb1a0a921e0991dce5b804c6313b289fd3787cfb1c8b83e5fd660"
    assert api.decode_manifest(api.encode_manifest(linked), path=PATH).id == linked.id


@pytest.mark.parametrize(
    "link",
    [
        1,
        {},
        {"name": "../x", "sequence": 1, "run_id": "r", "id": OTHER_ID},
        {"name": "x", "sequence": -1, "run_id": "r", "id": OTHER_ID},
        {"name": "x", "sequence": 1, "run_id": 1, "id": OTHER_ID},
        {"name": "x", "sequence": 1, "run_id": "r", "id": OTHER_ID[1:]},
        {"name": "x", "sequence": 1, "run_id": "r", "id": 5},
    ],
)
def test_link_that_is_none_is_refused(link: object) -> None:
    with pytest.raises(CorruptCheckpoint, match="not a valid manifest"):
        api.decode_manifest(changed(lambda document: document.update(previous=link)), path=PATH)


def test_manifest_without_link_reads_as_before() -> None:
    assert "previous" not in api.encode_manifest(manifest()).decode()
    assert api.decode_manifest(api.encode_manifest(manifest()), path=PATH).previous is None


# Known to the reader.


def test_step_that_was_reached_is_missing_when_all_are_older() -> None:
    found = [listed(step=30), listed(step=20)]
    assert Expected(step=30).missing(found) == []
    assert Expected(step=31).missing(found) == [
        "step 31 was reached, but the last one is of step 30"
    ]
    assert Expected(step=0).missing([]) == ["step 0 was reached, but no checkpoint is here"]


def test_checkpoint_counts_as_there_while_the_next_one_is() -> None:
    first = listed()
    second = later_than(first)
    for known in (first.id, str(first.id)[:16].upper()):
        assert Expected(id=known).missing([second]) == []
        assert Expected(id=known).missing([first]) == []
    assert Expected(id=second.id).missing([first]) == [
        f"checkpoint {str(second.id)[:16]} is not here, nor the one saved after it"
    ]
    assert len(Expected(id=OTHER_ID).missing([listed(id=None)])) == 1


@pytest.mark.parametrize("text", ["", "ab" * 7, "ab" * 33, "g" * 16])
def test_text_that_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        Expected(id=text)


def test_digest_in_the_id_is_that_of_the_file() -> None:
    assert manifest().file.digest == digest_of(BytesSource(b"content"))
