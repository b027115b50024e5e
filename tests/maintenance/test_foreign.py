# SPDX-License-Identifier: Apache-2.0
"""Recognising the checkpoints of other tools: which are whole, and the defects of the others."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr import UnsafePrune, parse_policy
from ckptmgr.maintenance.foreign.check import verify_foreign
from ckptmgr.maintenance.foreign.listing import list_foreign, runs_below
from ckptmgr.maintenance.foreign.place import ForeignPlace
from ckptmgr.maintenance.prune import undo
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.foreign import any_run, deepspeed_run, golden_run, megatron_run, write_archive
from tests.support.pruning import carry_out, foreign_place, propose

NOW = datetime(2100, 1, 1, tzinfo=UTC)


def problems(directory: Path) -> dict[str, str | None]:
    found = list_foreign(api.OsFileSystem(), directory).checkpoints
    return {one.checkpoint.name: one.checkpoint.problem for one in found}


def tools(directory: Path) -> set[str]:
    return set(list_foreign(api.OsFileSystem(), directory).tools)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("tool", "name", "damage", "problem"),
    [
        (
            "transformers",
            "checkpoint-4",
            lambda d: write(d / "trainer_state.json", "{"),
            "not whole",
        ),
        (
            "transformers",
            "checkpoint-4",
            lambda d: write(d / "trainer_state.json", '{"global_step": 5}'),
            "of another step",
        ),
        (
            "transformers",
            "checkpoint-4",
            lambda d: (d / "model.safetensors").unlink(),
            "no weights",
        ),
        (
            "transformers",
            "checkpoint-4",
            lambda d: write(d / "model.safetensors.index.json", "[]"),
            "the weight_map of model.safetensors.index.json is missing",
        ),
        ("transformers", "tmp-checkpoint-8", Path.mkdir, "did not end"),
        ("torchtitan", "step-2", lambda d: (d / ".metadata").unlink(), "no .metadata"),
        ("orbax", "2", lambda d: write(d / "_CHECKPOINT_METADATA", "{"), "not whole"),
        (
            "orbax",
            "2",
            lambda d: write(d / "_CHECKPOINT_METADATA", '{"commit_timestamp_nsecs": null}'),
            "no time of commit",
        ),
        ("orbax", "3.orbax-checkpoint-tmp-7", Path.mkdir, "did not end"),
        (
            "deepspeed",
            "global_step20",
            lambda d: (d / "mp_rank_00_model_states.pt").unlink(),
            "no model_states.pt",
        ),
        (
            "deepspeed",
            "global_step20",
            lambda d: (d / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(),
            "rank 0 of mp_rank_00 is missing",
        ),
        (
            "megatron",
            "iter_0000200",
            lambda d: (d / "mp_rank_01/model_optim_rng.pt").unlink(),
            "mp_rank_01 is empty",
        ),
        ("megatron", "iter_0000400", Path.mkdir, "no ranks"),
        ("lightning", "epoch=3-step=8.ckpt", Path.touch, "an empty file"),
        (
            "lightning",
            "epoch=3-step=8.ckpt",
            lambda d: write(d / "__0_0.distcp", "x"),
            "no .metadata",
        ),
    ],
)
def test_checkpoint_that_is_not_whole_is_incomplete(
    tool: str, name: str, damage: Damage, problem: str, tmp_path: Path
) -> None:
    directory = any_run(tool, tmp_path / "run")
    damage(directory / name)
    found = problems(directory)
    assert problem in str(found.pop(name))
    assert set(found.values()) == {None}


def test_checkpoint_newer_than_the_tracker_is_incomplete(tmp_path: Path) -> None:
    assert "newer than" in str(problems(megatron_run(tmp_path, latest="200"))["iter_0000300"])


def test_release_of_megatron_is_what_its_tracker_names(tmp_path: Path) -> None:
    write_archive(tmp_path / "release/mp_rank_00/model_optim_rng.pt")
    write(tmp_path / "latest_checkpointed_iteration.txt", "release")
    (one,) = list_foreign(api.OsFileSystem(), tmp_path).checkpoints
    assert (one.checkpoint.has_step, one.named_by) == (
        False,
        ("latest_checkpointed_iteration.txt",),
    )


def test_distributed_checkpoint_of_megatron_is_whole(tmp_path: Path) -> None:
    golden_run("torchtitan-or-dcp", tmp_path / "dcp")
    (tmp_path / "dcp/step-1").rename(tmp_path / "iter_0000005")
    write_archive(tmp_path / "iter_0000005/common.pt")
    assert problems(tmp_path) == {"iter_0000005": None}
    assert tools(tmp_path) == {"megatron"}


def test_weights_of_the_hub_make_a_whole_checkpoint_of_torchtitan(tmp_path: Path) -> None:
    run = golden_run("transformers", tmp_path / "hf")
    folder = tmp_path / "run/step-5"
    folder.mkdir(parents=True)
    (run / "checkpoint-2/model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors"}}
    write(folder / "model.safetensors.index.json", json.dumps(index))
    assert problems(tmp_path / "run") == {"step-5": None}


def test_older_layout_of_orbax_without_a_note_of_the_commit_is_whole(tmp_path: Path) -> None:
    run = golden_run("orbax", tmp_path / "run")
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (run / "1" / name).unlink()
    assert problems(run)["1"] is None


def test_numbers_of_other_programs_are_not_taken_for_orbax(tmp_path: Path) -> None:
    run = golden_run("orbax", tmp_path / "run")
    write(run / "7/notes.txt", "x")
    assert set(problems(run)) == {"1", "2"}
    write(tmp_path / "else/2024/notes.txt", "x")
    assert not problems(tmp_path / "else")


def test_links_are_not_checkpoints(tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    (run / "step-3").symlink_to(run / "step-2")
    assert set(problems(run)) == {"step-1", "step-2"}


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = golden_run("transformers", tmp_path / "run")
    state = {
        "global_step": 4,
        "log_history": [{"step": 4, "eval_loss": "low", "eval_ok": True, "eval_f1": 0.5}, 7],
    }
    write(run / "checkpoint-4/trainer_state.json", json.dumps(state))
    by_name = {
        one.checkpoint.name: one.checkpoint.metrics
        for one in list_foreign(api.OsFileSystem(), run).checkpoints
    }
    assert by_name["checkpoint-4"] == {"eval_f1": 0.5}


def test_best_one_stays_protected_where_the_newest_is_not_whole(tmp_path: Path) -> None:
    run = golden_run("transformers", tmp_path / "run")
    (run / "checkpoint-6/model.safetensors").unlink()
    state = {"global_step": 4, "best_model_checkpoint": "elsewhere/checkpoint-2"}
    write(run / "checkpoint-4/trainer_state.json", json.dumps(state))
    found = list_foreign(api.OsFileSystem(), run).checkpoints
    assert [one.checkpoint.step for one in found if one.named_by] == [2, 4]


def test_text_that_is_too_large_or_none_is_no_note(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run")
    (run / "latest").write_bytes(b"\xff\xfe")
    (pointer,) = list_foreign(api.OsFileSystem(), run).pointers["deepspeed"]
    assert pointer.target is None


def test_runs_below_are_found_where_tools_put_them(tmp_path: Path) -> None:
    golden_run("lightning", tmp_path / "lightning_logs/version_0/checkpoints")
    write(tmp_path / ".cache/net-1_1.ckpt", "x")
    write(tmp_path / "own/net-1_1.ckpt", "x")
    write(tmp_path / "own/net-1_1.ckpt.manifest.json", "x")
    runs, is_all = runs_below(api.OsFileSystem(), tmp_path)
    found = [(run.path.name, run.count, run.tools) for run in runs]
    assert found == [("checkpoints", 3, ("lightning",)), ("own", 1, ())]
    assert is_all


def verified(directory: Path, name: str, fs: api.FileSystem | None = None) -> api.Verification:
    disk = api.OsFileSystem()
    found = list_foreign(disk, directory).checkpoints
    (one,) = [one for one in found if one.checkpoint.name == name]
    return verify_foreign(fs or disk, one)


@pytest.mark.parametrize(
    ("error", "status"), [(errno.EACCES, api.Status.UNREADABLE), (errno.EIO, api.Status.DAMAGED)]
)
def test_error_of_the_disk_is_damage_only_where_the_medium_failed(
    error: int, status: api.Status, tmp_path: Path
) -> None:
    run = golden_run("transformers", tmp_path / "run")
    disk = FailingDisk(api.OsFileSystem(), error=error, operation="open", call=1, is_lasting=True)
    answer = verified(run, "checkpoint-4", disk)
    assert answer.status is status
    assert (answer.obstacle is None) == (status is api.Status.DAMAGED)


def test_prune_stops_where_the_newest_cannot_be_read_now(tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    listing = list_foreign(api.OsFileSystem(), run)
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.EACCES, operation="open", call=1, is_lasting=True
    )
    with pytest.raises(PermissionError):
        propose(
            ForeignPlace(api.place(run, fs=disk), listing),
            parse_policy("last(1)"),
            now=NOW,
            found=[one.checkpoint for one in listing.checkpoints],
        )


def test_files_that_cannot_be_checked_are_named(tmp_path: Path) -> None:
    run = golden_run("transformers", tmp_path / "run")
    folder = run / "checkpoint-4"
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    (folder / "notes").write_text("x")
    (folder / ".metadata").touch()
    os.truncate(folder / ".metadata", (64 << 20) + 1)
    (folder / "big.json").touch()
    os.truncate(folder / "big.json", (64 << 20) + 1)
    with zipfile.ZipFile(folder / "scheduler.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(99))
    assert set(verified(run, "checkpoint-4").unchecked) == {
        "pickles, which are never opened",
        "other files",
        ".metadata of more than 64 MiB",
        "JSON of more than 64 MiB",
        "compressed records",
        "contents, for which the tool keeps no digest: structure only",
    }


def test_empty_archive_is_damage(tmp_path: Path) -> None:
    run = golden_run("transformers", tmp_path / "run")
    (run / "checkpoint-4/optimizer.pt").write_bytes(b"")
    answer = verified(run, "checkpoint-4")
    assert (answer.status, answer.problems) == (
        api.Status.DAMAGED,
        ("optimizer.pt: an empty file",),
    )


def test_plan_is_not_carried_out_in_another_directory(tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    store = api.place(run)
    proposal = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    (run / "step-2").rename(run / "step-3")
    outcome = carry_out(foreign_place(store), proposal)
    assert isinstance(outcome.failures[0], UnsafePrune)
    assert (run / "step-1").exists()


def test_trash_that_is_a_file_or_a_link_is_refused(tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    (run / ".ckptmgr-trash-foreign").touch()
    store = api.place(run)
    proposal = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    outcome = carry_out(foreign_place(store), proposal)
    assert isinstance(outcome.failures[0], UnsafePrune)
    assert (run / "step-1").exists()


def test_two_prunes_at_one_time_have_two_batches(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run")
    store = api.place(run)
    for keep in ("last(2)", "last(1)"):
        proposal = propose(foreign_place(store), parse_policy(keep), now=NOW)
        assert not carry_out(foreign_place(store), proposal).failures
    assert len(list((run / ".ckptmgr-trash-foreign").iterdir())) == 2


@pytest.mark.parametrize("operation", ["replace", "sync_directory"])
def test_disk_that_fails_in_a_prune_loses_nothing(operation: str, tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.EROFS, operation=operation, call=1, is_lasting=True
    )
    store = api.place(run, fs=disk)
    proposal = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    outcome = carry_out(foreign_place(store), proposal)
    assert outcome.failures
    trash = list((run / ".ckptmgr-trash-foreign").glob("*/step-1"))
    assert (run / "step-1").exists() != bool(trash)


def test_undo_that_the_disk_refuses_raises_and_can_be_repeated(tmp_path: Path) -> None:
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    store = api.place(run)
    proposal = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    carry_out(foreign_place(store), proposal)
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.EROFS, operation="replace", call=1, is_lasting=True
    )
    failing = api.place(run, fs=disk)
    with pytest.raises(OSError, match="Read-only"):
        undo(foreign_place(failing))
    undo(foreign_place(store))
    assert (run / "step-1").exists()


def test_folder_that_may_not_be_read_does_not_stop_the_search(tmp_path: Path) -> None:
    golden_run("torchtitan-or-dcp", tmp_path / "a/run")
    disk = FailingDisk(api.OsFileSystem(), error=errno.EACCES, operation="list", call=2)
    assert runs_below(disk, tmp_path) == ([], True)


def test_directory_whose_parent_may_not_be_read_is_listed(tmp_path: Path) -> None:
    disk = FailingDisk(api.OsFileSystem(), error=errno.EACCES, operation="list", call=2)
    assert list_foreign(disk, tmp_path).checkpoints == ()


def logged(*losses: float) -> list[dict[str, float]]:
    return [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses, start=1)]


def trainer_run(directory: Path, states: dict[int, dict[str, object]], *, at_s: float) -> Path:
    """Write checkpoints of a Trainer: the states by step, each a second after the one before."""
    golden = golden_run("transformers", directory / "golden")
    for number, (step, state) in enumerate(states.items()):
        place = directory / f"checkpoint-{step}"
        shutil.copytree(golden / "checkpoint-4", place)
        write(place / "trainer_state.json", json.dumps({"global_step": step, **state}))
        for file in place.iterdir():
            os.utime(file, (at_s + number, at_s + number))
    shutil.rmtree(golden)
    return directory


def kept_by(directory: Path, policy: str) -> set[str]:
    store = api.place(directory)
    proposal = propose(foreign_place(store), parse_policy(policy), now=NOW)
    return {one.name for one in proposal.kept}


@pytest.mark.parametrize(
    "path",
    [
        "out\\checkpoint-2",
        "C:\\runs\\out\\checkpoint-2\\",
        "./out/checkpoint-2/",
        "/other/machine/out/checkpoint-2",
        "\\\\server\\share\\checkpoint-2",
        "checkpoint-2",
    ],
)
def test_best_one_stays_wherever_the_training_ran(path: str, tmp_path: Path) -> None:
    note: dict[str, object] = {"best_model_checkpoint": path}
    run = trainer_run(tmp_path, {2: note, 4: note, 6: note}, at_s=1e9)
    assert kept_by(run, "last(1)") == {"checkpoint-2", "checkpoint-6"}


def test_best_step_is_a_note_where_it_was_saved(tmp_path: Path) -> None:
    run = trainer_run(tmp_path, {2: {}, 4: {}, 6: {"best_global_step": 2}}, at_s=1e9)
    assert kept_by(run, "last(1)") == {"checkpoint-2", "checkpoint-6"}
    state = {"global_step": 6, "best_global_step": 3}
    write(run / "checkpoint-6/trainer_state.json", json.dumps(state))
    assert kept_by(run, "last(1)") == {"checkpoint-6"}


@pytest.mark.parametrize(
    "note",
    ["out/checkpoint-9", "", "/", "out\x00/checkpoint-4\x00", "checkpoint-4\udc80", 4, ["x"]],
)
def test_note_of_a_trainer_that_names_nothing_stops_a_prune(note: object, tmp_path: Path) -> None:
    states: dict[int, dict[str, object]] = {4: {}, 6: {"best_model_checkpoint": note}}
    run = trainer_run(tmp_path, states, at_s=1e9)
    with pytest.raises(UnsafePrune, match="best_model_checkpoint of the Trainer") as caught:
        kept_by(run, "last(1)")
    assert caught.value.message.isprintable()


def test_note_of_an_earlier_state_of_the_same_run_is_superseded(tmp_path: Path) -> None:
    states: dict[int, dict[str, object]] = {
        4: {"log_history": logged(0.9, float("nan")), "best_model_checkpoint": "checkpoint-1"},
        6: {"log_history": logged(0.9, float("nan"), 0.5), "best_model_checkpoint": "checkpoint-6"},
    }
    assert kept_by(trainer_run(tmp_path, states, at_s=1e9), "last(1)") == {"checkpoint-6"}


def test_second_run_that_counts_from_the_beginning_keeps_its_best_and_its_newest(
    tmp_path: Path,
) -> None:
    first: dict[str, object] = {
        "log_history": logged(0.9, 0.8),
        "best_model_checkpoint": "checkpoint-60",
    }
    trainer_run(tmp_path, {40: first, 50: first, 60: first}, at_s=1e9)
    second: dict[str, object] = {
        "log_history": logged(0.7, 0.1),
        "best_model_checkpoint": "checkpoint-3",
    }
    trainer_run(tmp_path, {3: second, 5: second, 7: second, 9: second}, at_s=1.1e9)
    assert kept_by(tmp_path, "last(2)") == {f"checkpoint-{step}" for step in (3, 7, 9, 50, 60)}


@pytest.mark.parametrize("tool", ["deepspeed", "megatron"])
def test_last_keeps_the_newest_by_number_and_by_time_and_says_why(
    tool: str, tmp_path: Path
) -> None:
    run = any_run(tool, tmp_path / "run")
    oldest, middle, newest = sorted(path for path in run.iterdir() if path.is_dir())
    for path, at_s in ((oldest, 3e9), (middle, 1e9), (newest, 2e9)):
        for file in path.rglob("*.pt"):
            os.utime(file, (at_s, at_s))
    store = api.place(run)
    shown = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    assert [one.name for one in shown.dropped] == [middle.name]
    (reason,) = shown.plans[0].plan.verdicts[-1].reasons
    assert reason.detail == "last 1/1 by time, and the numbers have another order"


def test_damaged_newest_by_time_does_not_let_the_one_before_it_go(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run", steps=(10, 20, 30, 40), latest=40)
    for step, at_s in ((10, 4e9), (20, 3e9), (30, 1e9), (40, 2e9)):
        for file in (run / f"global_step{step}").iterdir():
            os.utime(file, (at_s, at_s))
    (run / "global_step10/mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04cut")
    for file in (run / "global_step10").iterdir():
        os.utime(file, (4e9, 4e9))
    assert kept_by(run, "last(1)") == {"global_step10", "global_step20", "global_step40"}


def test_directory_with_equal_times_keeps_the_newest_by_number_alone(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run")
    for file in run.rglob("*.pt"):
        os.utime(file, (1e9, 1e9))
    assert kept_by(run, "last(1)") == {"global_step30"}


NOTES = {"deepspeed": "latest", "megatron": "latest_checkpointed_iteration.txt"}


@pytest.mark.parametrize("tool", NOTES)
@pytest.mark.parametrize(
    "content",
    [
        b"global_step30\0",
        b"300\0",
        b"../run/global_step30",
        b"/etc/passwd",
        b"..",
        b".",
        b"latest",
        b"zero_to_fp32.py",
        b"\xef\xbb\xbfglobal_step30",
        b"\xef\xbb\xbf300",
        b"global_step30\nglobal_step20",
        b"\xed\xb2\x80",
        b"",
        b" \r\n",
        b"\x1b[31mglobal_step30",
        b"x" * 5000,
    ],
)
def test_note_that_is_no_name_of_a_checkpoint_stops_a_prune(
    tool: str, content: bytes, tmp_path: Path
) -> None:
    run = any_run(tool, tmp_path / "run")
    (run / NOTES[tool]).write_bytes(content)
    with pytest.raises(UnsafePrune, match=NOTES[tool]) as caught:
        kept_by(run, "last(1)")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("tool", NOTES)
@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink("global", path)])
def test_note_that_is_no_regular_file_stops_a_prune(
    plant: Callable[[Path], object], tool: str, tmp_path: Path
) -> None:
    run = any_run(tool, tmp_path / "run")
    (run / NOTES[tool]).unlink()
    plant(run / NOTES[tool])
    with pytest.raises(UnsafePrune, match="cannot be read"):
        kept_by(run, "last(1)")


def test_note_that_ends_as_on_windows_is_read(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run")
    (run / "latest").write_bytes(b"global_step30\r\n")
    assert kept_by(run, "last(1)") == {"global_step30"}


@pytest.mark.parametrize(
    ("target", "is_known"),
    [
        ("epoch=1-loss=0.015-step=4.ckpt", True),
        ("/old/machine/epoch=1-loss=0.015-step=4.ckpt", True),
        ("/old/machine/epoch=9-step=99.ckpt", False),
        ("/dev/null", False),
        ("../outside/epoch=1-loss=0.015-step=4.ckpt", False),
        ("last.ckpt", False),
    ],
)
def test_link_to_the_last_checkpoint_protects_one_here_or_stops_a_prune(
    target: str, is_known: bool, tmp_path: Path
) -> None:
    run = golden_run("lightning", tmp_path / "run")
    shutil.copytree(run, tmp_path / "outside")
    (run / "last.ckpt").unlink()
    (run / "last.ckpt").symlink_to(target)
    if is_known:
        assert "epoch=1-loss=0.015-step=4.ckpt" in kept_by(run, "last(1)")
        return
    with pytest.raises(UnsafePrune, match=r"last\.ckpt of PyTorch Lightning"):
        kept_by(run, "last(1)")


def test_universal_checkpoint_of_deepspeed_is_what_its_note_names(tmp_path: Path) -> None:
    run = deepspeed_run(tmp_path / "run")
    (run / "global_step20_universal/zero").mkdir(parents=True)
    (run / "latest_universal").write_text("global_step20_universal")
    assert kept_by(run, "last(1)") == {"global_step30"}
    assert (run / "global_step20_universal").is_dir()
