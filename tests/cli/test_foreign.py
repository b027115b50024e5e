# SPDX-License-Identifier: Apache-2.0
"""Commands in directories of other tools, and in folders above runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckptmgr.maintenance.foreign.layouts import LAYOUTS
from tests.cli.running import key_file, run, run_json
from tests.cli.schemas import run_with_schema
from tests.cli.test_prune import Terminal
from tests.support import api
from tests.support.foreign import (
    GOLDEN,
    TOOLS,
    any_run,
    deepspeed_run,
    golden_run,
    megatron_run,
    write_archive,
)
from tests.support.saved import overwrite, save_run, tree_of

LATER_S = 4_000_000_000.0


def states_in(directory: Path) -> list[tuple[int | None, str, str]]:
    items = run_json("ls", directory)["items"]
    return [(item["step"], item.get("tool"), item["state"]) for item in items]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def prune(directory: Path, keep: str, *options: str) -> int:
    return run("prune", directory, "--keep", keep, "--yes", *options, now_s=LATER_S).exit_code


def test_every_tool_of_the_tests_is_in_the_table() -> None:
    assert {layout.tool for layout in LAYOUTS} == {*TOOLS, "dcp"}


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("transformers", [2, 4, 6]),
        ("lightning", [4, 6, None]),
        ("torchtitan", [1, 2]),
        ("torchtitan-or-dcp", [1, 2]),
        ("orbax", [1, 2]),
        ("deepspeed", [10, 20, 30]),
        ("megatron", [100, 200, 300]),
    ],
)
def test_directory_of_a_tool_is_listed(
    tool: str, expected: list[int | None], tmp_path: Path
) -> None:
    directory = any_run(tool, tmp_path / "run")
    assert states_in(directory) == [(step, tool, "complete") for step in expected]


def test_list_names_tool_size_state_and_what_points_there(tmp_path: Path) -> None:
    directory = deepspeed_run(tmp_path / "run", latest=20)
    for folder in sorted(directory.glob("global_step*/*.pt")):
        os.utime(folder, (LATER_S - 7200, LATER_S - 7200))
    result = run("ls", directory, now_s=LATER_S)
    assert (
        result.stdout
        == """\
STEP    SAVED   SIZE  METRIC  FORMAT     CIPHER  STATE       TAGS
  10  2 h ago  912 B  -       deepspeed  -       complete    -
  20  2 h ago  912 B  -       deepspeed  -       complete    latest
  30  2 h ago  912 B  -       deepspeed  -       incomplete  -
global_step30: newer than latest says: the save did not end
3 checkpoints, 2.7 KiB, 2 complete, 1 incomplete
"""
    )


def test_folders_of_dcp_with_names_of_torchtitan_are_called_by_both_names(tmp_path: Path) -> None:
    plain = golden_run("torchtitan-or-dcp", tmp_path / "plain")
    titan = any_run("torchtitan", tmp_path / "titan")
    assert "torchtitan or plain torch.distributed.checkpoint" in run("inspect", plain).stderr
    assert "holds checkpoints of torchtitan (step-1, step-2)" in run("inspect", titan).stderr


def test_checkpoint_of_dcp_with_any_name_is_listed_without_a_step(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "dcp/alone", tmp_path / "run/alone")
    assert states_in(tmp_path / "run") == [(None, "dcp", "complete")]
    assert (
        "alone: no step in its name, so prune never touches it"
        in run("ls", tmp_path / "run").stdout
    )


def test_checkpoint_of_dcp_with_any_name_is_verified_without_a_step(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "dcp/alone", tmp_path / "run/alone")
    (item,) = run_with_schema("verify", tmp_path / "run")["items"]
    assert (item["format"], item["step"]) == ("dcp", None)
    line, _ = map(json.loads, run("verify", "--jsonl", tmp_path / "run").stdout.splitlines())
    assert line["step"] is None


def test_directory_that_is_one_checkpoint_is_listed_as_one(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    assert states_in(directory / "checkpoint-4") == [(4, "transformers", "complete")]


def test_own_files_beside_those_of_a_tool_are_listed_too(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    shutil.copy(directory / "checkpoint-6/model.safetensors", directory / "model.safetensors")
    assert [tool for _, tool, _ in states_in(directory)] == [None, *["transformers"] * 3]
    shown = run("ls", directory).stdout
    assert "unverified" in shown
    assert "4 checkpoints" in shown


def test_metrics_of_tools_are_listed(tmp_path: Path) -> None:
    for tool, name in (("transformers", "eval_loss"), ("lightning", "loss")):
        items = run_json("ls", golden_run(tool, tmp_path / tool))["items"]
        assert all(name in item["metrics"] for item in items if item["step"] is not None)


def test_quiet_list_prints_the_paths(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    assert run("ls", directory, "-q").stdout.split() == [str(directory / "1"), str(directory / "2")]


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("prune", "--keep", "last(1)")])
def test_folder_above_runs_is_refused_with_their_names(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    save_run(tmp_path / "runs/own", [10])
    golden_run("lightning", tmp_path / "runs/logs/version_0/checkpoints")
    result = run(command[0], tmp_path / "runs", *command[1:])
    assert result.exit_code == 10
    assert (
        "2 runs in folders below it: logs/version_0/checkpoints (3 checkpoints of PyTorch Lightning), "
        "own (1 checkpoint)" in result.stderr
    )
    assert f"ckptmgr ls -r {tmp_path / 'runs'} lists all" in result.stderr


def test_empty_directory_has_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    result = run("ls", tmp_path)
    assert (result.exit_code, result.stdout) == (0, "0 checkpoints, 0 B\n")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "{}"),
        ("export", "{}", "--hf", "-o", "out"),
        ("repair", "{}"),
        ("report", "{}"),
        ("rekey", "{}", "--key", "{key}", "--add", "{key}"),
        ("reencrypt", "{}", "--key", "{key}", "--to", "{key}"),
        ("convert", "{}", "--compression", "zstd"),
        ("sign", "{}", "--private-key", "{key}"),
        ("pin", "{}"),
        ("unpin", "{}"),
        ("inspect", "latest", "--dir", "{}"),
        ("watch", "{}", "--once"),
    ],
)
def test_command_that_cannot_handle_a_tool_names_it(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    key = key_file(tmp_path)
    result = run(*(part.format(directory, key=key) for part in command))
    assert result.exit_code in (2, 13)
    assert "the Trainer of Transformers" in result.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_undamaged_checkpoint_is_unverified_structure_only(tool: str, tmp_path: Path) -> None:
    document = run_json("verify", any_run(tool, tmp_path / "run"))
    assert set(document["summary"]["statuses"]) == {"unverified"}
    assert all("structure only" in item["unchecked"][-1] for item in document["items"])


@pytest.mark.parametrize(
    ("tool", "name", "problem"),
    [
        ("transformers", "checkpoint-4/model.safetensors", "model.safetensors"),
        ("transformers", "checkpoint-4/optimizer.pt", "no whole ZIP archive"),
        ("transformers", "checkpoint-4/config.json", "no JSON"),
        ("lightning", "epoch=1-loss=0.015-step=4.ckpt", "no whole ZIP archive"),
        ("torchtitan", "step-1/.metadata", "no pickle"),
        ("megatron", "iter_0000200/mp_rank_01/model_optim_rng.pt", "no whole ZIP archive"),
    ],
)
def test_file_that_is_cut_off_is_found(tool: str, name: str, problem: str, tmp_path: Path) -> None:
    directory = any_run(tool, tmp_path / "run")
    content = (directory / name).read_bytes()
    overwrite(directory / name, content[: len(content) // 2])
    result = run("verify", directory, "--quick")
    assert result.exit_code == 1
    assert problem in result.stdout


def test_changed_byte_in_an_archive_is_found_by_its_crc(tmp_path: Path) -> None:
    directory = golden_run("lightning", tmp_path / "run")
    path = directory / "epoch=1-loss=0.015-step=4.ckpt"
    content = bytearray(path.read_bytes())
    content[content.index(b"littlePK") + 2] ^= 1
    overwrite(path, bytes(content))
    assert run("verify", directory, "--quick").exit_code == 0
    result = run("verify", path)
    assert result.exit_code == 1
    assert "Bad CRC-32" in result.stdout


def test_archive_without_crc_is_named_as_not_checked(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "run/epoch=0-step=1.ckpt")
    content = path.read_bytes()
    for crc in (zipped_crcs := crcs_of(path)):
        content = content.replace(crc, bytes(4))
    assert len(zipped_crcs) == 2
    overwrite(path, content)
    (item,) = run_json("verify", path)["items"]
    assert "records without a CRC32" in item["unchecked"]


def crcs_of(path: Path) -> list[bytes]:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return [one.CRC.to_bytes(4, "little") for one in archive.infolist()]


def test_file_that_dcp_names_and_is_gone_is_found(tmp_path: Path) -> None:
    directory = golden_run("torchtitan-or-dcp", tmp_path / "run")
    (directory / "step-1/__0_0.distcp").unlink()
    result = run("verify", directory / "step-1")
    assert result.exit_code == 1
    assert "__0_0.distcp is missing" in result.stdout


def test_shard_that_the_index_names_and_is_gone_is_found(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (directory / "checkpoint-2/model.safetensors.index.json").write_text(json.dumps(index))
    result = run("verify", directory / "checkpoint-2")
    assert result.exit_code == 1
    assert "incomplete" in result.stdout
    assert "model-00001-of-00002.safetensors is missing" in result.stdout


def test_key_proves_nothing_of_another_tool(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    key = key_file(tmp_path)
    assert run("verify", directory, "--key", key).exit_code == 13
    assert run("verify", directory, "--key", key, "--allow-unencrypted").exit_code == 0
    before = tree_of(directory)
    refused = run("prune", directory, "--keep", "last(1)", "--yes", "--key", key)
    assert refused.exit_code == 13
    assert tree_of(directory) == before


@pytest.mark.parametrize(
    ("tool", "kept"),
    [
        ("transformers", ["checkpoint-4", "checkpoint-6"]),
        ("lightning", ["epoch=2-loss=0.006-step=6.ckpt", "last.ckpt"]),
        ("torchtitan", ["step-2"]),
        ("torchtitan-or-dcp", ["step-2"]),
        ("orbax", ["2"]),
        ("deepspeed", ["global_step30", "latest", "zero_to_fp32.py"]),
        ("megatron", ["iter_0000300", "latest_checkpointed_iteration.txt"]),
    ],
)
def test_prune_drops_whole_entries_and_undo_brings_them_back(
    tool: str, kept: list[str], tmp_path: Path
) -> None:
    directory = any_run(tool, tmp_path / "run")
    before = tree_of(directory)
    assert prune(directory, "last(1)") == 0
    assert names_in(directory) == kept
    assert run("prune", directory, "--undo").exit_code == 0
    after = tree_of(directory)
    assert {**after, str(directory): None} == {**before, str(directory): None}


def test_dry_run_changes_nothing(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    before = tree_of(tmp_path)
    result = run("prune", directory, "--keep", "last(1)", "--dry-run")
    assert "best_model_checkpoint points here" in result.stdout
    assert run("prune", directory, "--keep", "last(1)", "--check").exit_code == 1
    assert tree_of(tmp_path) == before


def test_what_trackers_point_at_stays(tmp_path: Path) -> None:
    deepspeed = deepspeed_run(tmp_path / "ds", latest=10)
    megatron = megatron_run(tmp_path / "mg", latest="100")
    lightning = golden_run("lightning", tmp_path / "pl")
    (lightning / "last.ckpt").unlink()
    (lightning / "last.ckpt").symlink_to("epoch=1-loss=0.015-step=4.ckpt")
    for directory in (deepspeed, megatron, lightning):
        before = names_in(directory)
        assert prune(directory, "last(1)") == 0
        assert names_in(directory) == before


def test_incomplete_ones_use_up_no_slot_and_stay(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    (directory / "checkpoint-6/trainer_state.json").unlink()
    (directory / "checkpoint-8").mkdir()
    assert prune(directory, "last(1)") == 0
    assert names_in(directory) == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def test_damaged_newest_does_not_let_an_older_one_go(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    overwrite(directory / "2/_CHECKPOINT_METADATA", b"{")
    assert prune(directory, "last(1)") == 0
    titan = golden_run("torchtitan-or-dcp", tmp_path / "titan")
    overwrite(titan / "step-2/.metadata", b"cut")
    assert prune(titan, "last(1)") == 0
    assert (names_in(directory), names_in(titan)) == (["1", "2"], ["step-1", "step-2"])


def test_names_that_are_not_understood_are_never_touched(tmp_path: Path) -> None:
    directory = deepspeed_run(tmp_path / "run")
    shutil.copytree(directory / "global_step10", directory / "before-the-crash")
    (directory / "notes").mkdir()
    assert prune(directory, "last(1)") == 0
    assert names_in(directory) == [
        "before-the-crash",
        "global_step30",
        "latest",
        "notes",
        "zero_to_fp32.py",
    ]


@pytest.mark.parametrize("text", ["", "global_step99"])
def test_tracker_that_names_nothing_stops_a_prune(text: str, tmp_path: Path) -> None:
    directory = deepspeed_run(tmp_path / "run")
    (directory / "latest").write_text(text)
    before = tree_of(directory)
    result = run("prune", directory, "--keep", "last(1)", "--yes")
    assert result.exit_code == 13
    assert "latest of DeepSpeed" in result.stderr
    assert tree_of(directory) == before


def test_prune_at_once_and_after_the_grace_time_frees_the_space(tmp_path: Path) -> None:
    at_once = golden_run("torchtitan-or-dcp", tmp_path / "one")
    assert prune(at_once, "last(1)", "--now") == 0
    later = golden_run("orbax", tmp_path / "two")
    assert prune(later, "last(1)") == 0
    result = run("prune", later, "--keep", "last(1)", "--yes", now_s=LATER_S + 90_000)
    assert "removed 1 from the trash for good" in result.stderr
    assert [path.name for path in at_once.iterdir()] == ["step-2"]
    assert [path.name for path in later.iterdir()] == ["2"]


def test_expired_trash_stays_while_nothing_whole_is_outside(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    assert prune(directory, "last(1)") == 0
    overwrite(directory / "2/_CHECKPOINT_METADATA", b"{")
    result = run("prune", directory, "--keep", "last(1)", "--yes", now_s=LATER_S + 90_000)
    assert "nothing whole of a run is left" in result.stdout
    assert run("prune", directory, "--undo").exit_code == 0
    assert names_in(directory) == ["1", "2"]


def test_undo_leaves_a_name_that_is_taken(tmp_path: Path) -> None:
    directory = golden_run("torchtitan-or-dcp", tmp_path / "run")
    assert prune(directory, "last(1)") == 0
    shutil.copytree(directory / "step-2", directory / "step-1")
    result = run("prune", directory, "--undo", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["summary"]["taken"] == ["step-1"]


def test_json_of_a_prune_and_its_undo(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    document = run_json("prune", directory, "--keep", "last(1)", "--yes")
    assert [(item["step"], item["keep"]) for item in document["items"]] == [(2, True), (1, False)]
    assert run("prune", directory, "--undo", "--dry-run").stdout.startswith("1  ")
    assert run("prune", directory, "--undo", "-q").stdout == f"{directory / '1'}\n"
    assert run("prune", directory, "--undo").exit_code == 10


def test_one_checkpoint_is_not_pruned_by_itself(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    result = run("prune", directory / "checkpoint-2", "--keep", "last(1)", "--yes")
    assert result.exit_code == 13
    assert f"ckptmgr prune {directory}" in result.stderr


@pytest.mark.parametrize(
    ("options", "left"),
    [(("--by-series",), ["2"]), (("--series", "orbax"), ["2"]), (("--series", "net"), ["1", "2"])],
)
def test_series_of_a_checkpoint_is_its_tool(
    options: tuple[str, ...], left: list[str], tmp_path: Path
) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    assert prune(directory, "last(1)", *options) == 0
    assert names_in(directory) == left


def test_prune_without_a_terminal_wants_yes(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    assert run("prune", directory, "--keep", "last(1)").exit_code == 13
    assert names_in(directory) == ["1", "2"]


def test_beside_own_checkpoints_those_of_a_tool_stay(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    save_run(directory, [10, 20])
    result = run("prune", directory, "--keep", "last(1)", "--yes")
    assert result.exit_code == 0
    assert "3 checkpoints of the Trainer of Transformers stay as they are" in result.stderr
    left = names_in(directory)
    assert "checkpoint-2" in left
    assert sum(name.endswith(".ckpt") for name in left) == 1


def test_best_policy_ranks_the_metrics_of_a_tool(tmp_path: Path) -> None:
    directory = golden_run("lightning", tmp_path / "run")
    assert prune(directory, "best(1, loss, max)") == 0
    assert names_in(directory) == [
        "epoch=1-loss=0.015-step=4.ckpt",
        "epoch=2-loss=0.006-step=6.ckpt",
        "last.ckpt",
    ]


def test_series_that_no_tool_has_is_an_empty_list(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    assert run_json("ls", directory, "--series", "net")["items"] == []
    assert len(run_json("ls", directory, "--series", "orbax")["items"]) == 2


def test_checkpoints_of_both_kinds_are_verified(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    save_run(directory, [10])
    assert run_json("verify", directory)["summary"]["statuses"] == {"ok": 1, "unverified": 2}


def test_other_files_stay_and_are_counted(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    shutil.copy(directory / "checkpoint-6/model.safetensors", directory / "model.safetensors")
    result = run("prune", directory, "--keep", "last(1)", "--yes")
    assert "1 file without a manifest beside them stay" in result.stderr
    assert (directory / "model.safetensors").exists()


def test_nothing_to_prune_changes_nothing(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    before = tree_of(directory)
    assert prune(directory, "last(5)") == 0
    assert tree_of(directory) == before


def test_selector_that_finds_nothing_among_own_ones_is_not_about_a_tool(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    save_run(directory, [10])
    assert run("inspect", "99", "--dir", directory).exit_code == 10


def test_damaged_checkpoint_of_a_tool_is_not_moved(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    overwrite(directory / "1/default/_METADATA", b"{")
    result = run("verify", directory, "--quarantine")
    assert result.exit_code == 1
    assert "1 stays: what another tool wrote is not moved" in result.stderr
    assert names_in(directory) == ["1", "2"]


@pytest.mark.slow
def test_answer_at_a_terminal_decides_about_a_tool(tmp_path: Path) -> None:
    directory = golden_run("orbax", tmp_path / "run")
    terminal = Terminal(directory, "--keep", "last(1)")
    assert b"Move 1 checkpoint to the trash? [y/N]: " in terminal.question()
    assert terminal.answer(b"n\n")[0] == 1
    assert names_in(directory) == ["1", "2"]
    terminal = Terminal(directory, "--keep", "last(1)", "--now")
    assert b"Remove 1 checkpoint for good? [y/N]: " in terminal.question()
    assert terminal.answer(b"y\n")[0] == 0
    assert names_in(directory) == ["2"]


def test_stats_show_no_step_where_the_name_has_none_and_count_the_trash(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "dcp/alone", tmp_path / "plain/alone")
    (item,) = run_json("stats", tmp_path / "plain")["items"]
    assert item["newest"]["step"] is None
    assert run("stats", tmp_path / "plain").stdout.splitlines()[1].split()[5] == "-"
    directory = golden_run("transformers", tmp_path / "run")
    assert run_json("stats", directory)["summary"]["trash_bytes"] == 0
    assert prune(directory, "last(1)") == 0
    assert run_json("stats", directory)["summary"]["trash_bytes"] > 40_000


def test_quiet_prune_prints_what_went(tmp_path: Path) -> None:
    directory = golden_run("transformers", tmp_path / "run")
    done = run("prune", directory, "--keep", "last(1)", "--yes", "-q", now_s=LATER_S)
    assert (done.exit_code, done.stdout.splitlines()) == (0, [str(directory / "checkpoint-2")])


def test_entry_that_cannot_be_moved_stays_and_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = any_run("torchtitan", tmp_path / "run")
    replace = api.OsFileSystem.replace

    def refused(disk: api.OsFileSystem, source: Path, target: Path) -> None:
        if source.name == "step-1":
            raise PermissionError(1, "Operation not permitted", str(source))
        replace(disk, source, target)

    monkeypatch.setattr(api.OsFileSystem, "replace", refused)
    result = run("prune", directory, "--keep", "last(1)", "--yes", now_s=LATER_S)
    assert result.exit_code == 2
    assert "Operation not permitted" in result.stderr
    assert names_in(directory) == ["step-1", "step-2"]
