# SPDX-License-Identifier: Apache-2.0
"""Proposing a prune and carrying out exactly that."""

from __future__ import annotations

import errno
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckptmgr import CheckpointNotFound, StoreLocked, UnsafePrune, parse_policy
from ckptmgr.events import Event
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.prune import Proposal, undo
from ckptmgr.observe import observers as observe
from ckptmgr.store.applied import Applied
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.faults.training import ModelProcesses
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.pruning import carry_out, propose
from tests.support.saved import KEY, OTHER_KEY, flip, items, overwrite, save_run, tree_of

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
LAST_TWO = parse_policy("last(2)")


def proposal(directory: Path, policy: str = "last(2)", *, now: datetime = NOW) -> Proposal:
    """Return the plan of a prune of a directory."""
    return propose(api.place(directory), parse_policy(policy), now=now)


def prune(directory: Path, policy: str = "last(2)", *, now: datetime = NOW) -> Applied:
    """Prune a directory."""
    return carry_out(api.place(directory), proposal(directory, policy, now=now))


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory."""
    return sorted(c.step for c in api.listed(directory) if c.is_countable)


def bare_files(directory: Path, *names: str) -> bytes:
    """Write the same whole checkpoint under all names, as MindSpore does, and return it."""
    (saved,) = save_run(directory / "saved", [10])
    for name in names:
        (directory / name).write_bytes(saved.read_bytes())
    return saved.read_bytes()


def test_proposal_changes_nothing(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    before = tree_of(tmp_path)
    assert [c.step for c in proposal(tmp_path).dropped] == [10]
    assert tree_of(tmp_path) == before


def test_each_series_is_planned_by_itself(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10, 20, 30], series=series)
    found = proposal(tmp_path)
    assert [one.series for one in found.plans] == [("a",), ("b",)]
    assert [c.step for c in found.kept] == [30, 20, 30, 20]
    filtered = propose(api.place(tmp_path), LAST_TWO, now=NOW, series="b")
    assert [c.series for c in filtered.dropped] == ["b"]


def test_dropped_ones_go_to_one_batch_of_the_trash(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10, 20, 30], series=series)
    outcome = prune(tmp_path)
    assert [c.name for c in outcome.removed] == ["a-1_10.ckpt", "b-1_10.ckpt"]
    (batch,) = DirectoryTrash(api.place(tmp_path)).batches()
    assert batch.path == outcome.batch
    assert steps(tmp_path) == [20, 20, 30, 30]
    assert [c.name for c in undo(api.place(tmp_path)).restored] == ["a-1_10.ckpt", "b-1_10.ckpt"]
    assert len(steps(tmp_path)) == 6


def test_at_once_leaves_no_trash(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    outcome = carry_out(api.place(tmp_path), proposal(tmp_path), at_once=True)
    assert (len(outcome.removed), outcome.batch, outcome.failures) == (1, None, [])
    assert not (tmp_path / TRASH_NAME).exists()
    with pytest.raises(CheckpointNotFound, match="trash is empty"):
        undo(api.place(tmp_path))


def test_bare_files_are_ordered_by_epoch_and_step_of_their_names(tmp_path: Path) -> None:
    bare_files(tmp_path, "CKP-2_1.ckpt", "CKP-10_1.ckpt", "CKP-2_5.ckpt", "CKP-1_5.ckpt")
    assert {c.name for c in proposal(tmp_path).kept} == {"CKP-10_1.ckpt", "CKP-2_5.ckpt"}


def test_damaged_ones_use_no_slot_and_stay(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    overwrite(tmp_path / "net-3_10.ckpt", b"cut")
    found = proposal(tmp_path)
    assert not found.dropped
    assert {c.step: c.state for c in found.kept}[30] is api.State.CORRUPT


def test_newest_has_rotted_so_the_one_before_it_stays(tmp_path: Path) -> None:
    paths = save_run(tmp_path, [10, 20, 30])
    flip(paths[-1], 100)
    found = proposal(tmp_path, "last(1)")
    assert [c.step for c in found.dropped] == [10]
    assert {c.step: c.state for c in found.kept} == {30: api.State.CORRUPT, 20: api.State.OK}
    assert "do not match the digest" in (found.kept[0].problem or "")
    carry_out(api.place(tmp_path), found)
    assert steps(tmp_path) == [20, 30]  # 30 is found damaged only when it is read


@pytest.mark.parametrize("kept_bytes", [0, 40])
def test_newest_bare_file_is_cut_so_the_one_before_it_stays(
    tmp_path: Path, kept_bytes: int
) -> None:
    content = bare_files(tmp_path, "net-1_10.ckpt", "net-2_10.ckpt")
    (tmp_path / "net-3_10.ckpt").write_bytes(content[:kept_bytes])
    assert [c.name for c in proposal(tmp_path, "last(1)").dropped] == ["net-1_10.ckpt"]


def test_all_are_damaged_so_all_stay(tmp_path: Path) -> None:
    for path in save_run(tmp_path, [10, 20, 30]):
        flip(path, 100)
    assert not proposal(tmp_path, "last(1)").dropped


def test_newest_has_a_damaged_header_which_its_key_finds(tmp_path: Path) -> None:
    options = api.SaveOptions(key=KEY, format="safetensors")
    newest = save_run(tmp_path, [10, 20, 30], options=options, content=items()[:2])[-1]
    for copy in (0, 4096):
        flip(newest, copy + 70)  # the digests leave both copies out
    store = api.place(tmp_path, keys=KEY)
    found = propose(store, parse_policy("last(1)"), now=NOW)
    assert [c.step for c in found.dropped] == [10]
    assert "header was changed" in (found.kept[0].problem or "")


def test_newest_has_the_header_of_another_file_so_its_key_does_not_open_it(tmp_path: Path) -> None:
    content = items()[:2]
    options = api.SaveOptions(key=KEY, format="safetensors")
    newest = save_run(tmp_path / "run", [10, 20, 30], options=options, content=content)[-1]
    options = api.SaveOptions(key=OTHER_KEY, format="safetensors")
    (other,) = save_run(tmp_path / "other", [30], options=options, content=content)
    overwrite(newest, other.read_bytes()[:8192] + newest.read_bytes()[8192:])
    store = api.place(tmp_path / "run", keys=KEY)
    found = propose(store, parse_policy("last(1)"), now=NOW)
    assert [c.step for c in found.dropped] == [10]


def test_plain_files_and_other_keys_are_left_alone_with_a_key(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    save_run(tmp_path, [10, 20], series="sealed", options=api.SaveOptions(key=OTHER_KEY))
    store = api.place(tmp_path, keys=KEY)
    found = propose(store, parse_policy("last(1)"), now=NOW)
    assert found.dropped == ()
    assert {c.state for c in found.kept} == {api.State.UNPROVEN, api.State.OTHER_KEY}
    lenient = api.place(tmp_path, keys=KEY, allow_unencrypted=True)
    found = propose(lenient, parse_policy("last(1)"), now=NOW)
    assert [c.step for c in found.dropped] == [10, 10]


class BadSectors(api.OsFileSystem):
    """A disk that lists one file and does not give its content."""

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        """Return an open file."""
        if path.name == "net-3_10.ckpt":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().open(path, is_uncached=is_uncached)


def test_newest_cannot_be_read_so_the_one_before_it_stays(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    found = propose(api.place(tmp_path, fs=BadSectors()), parse_policy("last(1)"), now=NOW)
    assert [c.step for c in found.dropped] == [10]


def test_files_of_torch_are_pruned_by_their_names(tmp_path: Path) -> None:
    for name in ("net-1_10.ckpt", "net-2_10.ckpt"):
        (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(100))
    assert [c.name for c in proposal(tmp_path, "last(1)").dropped] == ["net-1_10.ckpt"]


def test_nothing_is_read_when_nothing_would_go(tmp_path: Path) -> None:
    paths = save_run(tmp_path, [10, 20])
    flip(paths[-1], 100)
    assert {c.state for c in proposal(tmp_path, "last(2)").kept} == {api.State.OK}


def test_nan_metrics_do_not_count_as_a_change(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], metrics={10: {"loss": math.nan}, 30: {"loss": math.nan}})
    assert [c.step for c in prune(tmp_path).removed] == [10]


def test_changed_directory_stops_that_series(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    shown = proposal(tmp_path)
    save_run(tmp_path, [40])
    outcome = carry_out(api.place(tmp_path), shown)
    (failure,) = outcome.failures
    assert isinstance(failure, UnsafePrune)
    assert "changed after its plan" in str(failure)
    assert (outcome.removed, steps(tmp_path)) == ([], [10, 20, 30, 40])


def test_pin_between_plan_and_deed_is_honoured(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    shown = proposal(tmp_path)
    store = api.place(tmp_path)
    (oldest,) = shown.dropped
    with store.lease("net"):
        store.change_pins(oldest, lambda _: (api.Pin(name="paper"),))
    assert carry_out(store, shown).failures
    assert steps(tmp_path) == [10, 20, 30]


def test_locked_series_is_left_alone_and_the_others_are_not(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10, 20, 30], series=series)
    store = api.place(tmp_path)
    with store.lease("a"):
        outcome = carry_out(store, proposal(tmp_path))
    (failure,) = outcome.failures
    assert isinstance(failure, StoreLocked)
    assert "process" in str(failure)
    assert [c.series for c in outcome.removed] == ["b"]


def test_trash_is_emptied_by_a_prune_after_the_grace_time(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    prune(tmp_path)
    assert not proposal(tmp_path, now=NOW + timedelta(hours=23)).expired
    late = NOW + timedelta(hours=24)
    assert not proposal(tmp_path, now=late).is_empty
    outcome = prune(tmp_path, now=late)
    assert outcome.notes == ["removed 1 from the trash for good"]
    assert not (tmp_path / TRASH_NAME).exists()
    assert proposal(tmp_path, now=late).is_empty


@pytest.mark.parametrize("series", ["net", "other"])
def test_trash_stays_while_nothing_whole_is_left_outside(tmp_path: Path, series: str) -> None:
    save_run(tmp_path, [10, 20, 30])
    save_run(tmp_path, [10], series="other")
    prune(tmp_path)
    for path in tmp_path.glob("net-*.ckpt"):
        flip(path, 100)
    late = NOW + timedelta(hours=24)
    found = propose(api.place(tmp_path), LAST_TWO, now=late, series=series)
    assert (len(found.expired), len(found.spared), found.is_empty) == (0, 1, True)
    carry_out(api.place(tmp_path), found)
    assert [c.step for c in undo(api.place(tmp_path)).restored] == [10]


def test_trash_goes_when_an_older_one_outside_is_whole(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    prune(tmp_path)
    flip(tmp_path / "net-3_10.ckpt", 100)
    late = NOW + timedelta(hours=24)
    assert len(proposal(tmp_path, "last(3)", now=late).expired) == 1


def test_newest_is_read_once_for_the_policy_and_the_trash(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    prune(tmp_path)
    heard: list[Event] = []
    observe.register(heard.append)
    found = proposal(tmp_path, "last(1)", now=NOW + timedelta(hours=24))
    observe.unregister(heard.append)
    assert (len(found.dropped), len(found.expired)) == (1, 1)
    assert [(event.name, event.step) for event in heard] == [("verify", 30)]


def test_leftovers_of_dead_writers_are_reaped_with_a_note() -> None:
    model, directory = ModelDisk(), Path("/runs")
    save_run(directory, [10, 20], fs=model)
    temp = directory / temp_name("net-9_9.ckpt", token=ModelProcesses(model).token(), series="net")
    model.create(temp, mode=0o600).close()
    after = model.restart()
    after.process += 1
    store = api.place(directory, fs=after, processes=ModelProcesses(after))
    shown = propose(store, LAST_TWO, now=NOW)
    assert ([c.state for c in shown.leftovers], shown.is_empty) == ([api.State.LEFTOVER], False)
    outcome = carry_out(store, shown)
    assert outcome.notes == [f"removed {temp.name}, left by an interrupted save"]
    assert after.status(temp) is None


def test_file_being_written_is_shown_and_stays(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    temp = tmp_path / temp_name("net-9_9.ckpt", token=ProcProcesses().token(), series="net")
    temp.touch()
    shown = proposal(tmp_path)
    assert ([c.state for c in shown.leftovers], shown.is_empty) == ([api.State.WRITING], True)
    assert not carry_out(api.place(tmp_path), shown).notes
    assert temp.exists()


def test_manifest_that_lost_its_data_to_the_trash_is_not_reaped(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    prune(tmp_path)
    (batch,) = DirectoryTrash(api.place(tmp_path)).batches()
    manifest = batch.path / api.manifest_name("net-1_10.ckpt")
    manifest.rename(tmp_path / manifest.name)
    assert prune(tmp_path).failures == []
    assert manifest.exists()


@pytest.mark.parametrize("at_once", [False, True])
def test_file_that_cannot_be_removed_is_named(at_once: bool) -> None:
    model, directory = ModelDisk(), Path("/runs")
    save_run(directory, [10, 20, 30, 40], fs=model)
    operation = "unlink" if at_once else "replace"
    failing = FailingDisk(model, error=errno.EIO, operation=operation, call=1)
    store = api.place(directory, fs=failing, processes=ModelProcesses(model))
    outcome = carry_out(store, propose(store, LAST_TWO, now=NOW), at_once=at_once)
    assert len(outcome.failures) == 1
    assert [c.step for c in outcome.removed] == [10]


def test_trash_that_cannot_be_emptied_is_named() -> None:
    model, directory = ModelDisk(), Path("/runs")
    save_run(directory, [10, 20, 30], fs=model)
    store = api.place(directory, fs=model, processes=ModelProcesses(model))
    carry_out(store, propose(store, LAST_TWO, now=NOW))
    failing = FailingDisk(model, error=errno.EROFS, operation="unlink", call=1)
    store = api.place(directory, fs=failing, processes=ModelProcesses(model))
    shown = propose(store, LAST_TWO, now=NOW + timedelta(days=2))
    outcome = carry_out(store, shown)
    assert [type(failure) for failure in outcome.failures] == [OSError]


def test_undo_that_is_only_asked_about_changes_nothing(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    prune(tmp_path)
    before = tree_of(tmp_path)
    undone = undo(api.place(tmp_path), is_dry=True)
    assert [c.path for c in undone.restored] == [tmp_path / "net-1_10.ckpt"]
    assert tree_of(tmp_path) == before


def test_prune_without_key_keeps_authenticated_manifests_as_they_are(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], options=api.SaveOptions(key=KEY))
    prune(tmp_path)
    undo(api.place(tmp_path))
    strict = api.place(tmp_path, keys=KEY)
    assert {c.state for c in strict.scan()} == {api.State.OK}


def test_fresh_plan_must_be_the_shown_one_in_every_detail(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    shown = proposal(tmp_path)
    (one,) = shown.plans
    forged = replace(one.plan, verdicts=tuple(reversed(one.plan.verdicts)))
    outcome = carry_out(api.place(tmp_path), replace(shown, plans=(replace(one, plan=forged),)))
    assert isinstance(outcome.failures[0], UnsafePrune)
