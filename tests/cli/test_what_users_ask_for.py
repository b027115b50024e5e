# SPDX-License-Identifier: Apache-2.0
"""What users of other tools asked for, one test for each request, named by it.

The docstrings name the public threads: REPOSITORY NUMBER.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.cli.progress import ProgressLine
from ckptmgr.io.byte_counters import count_bytes
from ckptmgr.io.temp_names import temp_name
from tests.cli.running import run, run_json, run_process
from tests.cli.test_progress_line import Terminal, clock_of
from tests.cli.world import commands
from tests.support import api
from tests.support.foreign import golden_run
from tests.support.saved import KEY, OTHER_KEY, flip, items, save_run, tree_of

State = dict[str, np.ndarray]


def state_of(step: int) -> State:
    return {"weights": np.full(8, step, np.float32)}


def steps_in(directory: Path) -> list[int]:
    return [item["step"] for item in run_json("ls", directory)["items"]]


def saved(directory: Path, losses: dict[int, float | None], keep: str) -> list[int]:
    """Save with a policy, as a training loop does; return the steps that are there afterwards."""
    with CheckpointManager(directory, CheckpointConfig(keep=keep), prefix="net") as manager:
        for step, loss in losses.items():
            manager.save(step, state_of(step), metrics={} if loss is None else {"loss": loss})
    return steps_in(directory)


def test_best_and_latest_are_kept_together(tmp_path: Path) -> None:
    """See orbax 526: `best_fn` removed the newest checkpoint; both are wanted."""
    losses: dict[int, float | None] = {1: 0.1, 2: 0.9, 3: 0.8, 4: 0.7}
    assert saved(tmp_path, losses, "last(1) | best(1, loss, min)") == [1, 4]


def test_last_intact_checkpoint_is_never_dropped(tmp_path: Path) -> None:
    """See transformers 25129, 25136: a limit of 1 removed everything; the plan says why each one stays."""
    paths = save_run(tmp_path, [1, 2, 3])
    flip(paths[2], 40)
    shown = run("prune", tmp_path, "--keep", "last(1)", "--yes")
    assert shown.exit_code == 0
    rows = {
        line.split()[1]: line for line in shown.stdout.splitlines() if line[:4] in ("keep", "drop")
    }
    assert "not counted: corrupt: the bytes 0..144 do not match" in rows["3"]
    assert "last 1/1" in rows["2"]
    assert rows["1"].startswith("drop")
    assert run("verify", "2", "--dir", tmp_path).exit_code == 0


def test_best_checkpoint_of_the_trainer_is_not_dropped_for_the_last_one(tmp_path: Path) -> None:
    """See transformers 11748: best and last were swapped, and the last one was removed."""
    directory = golden_run("transformers", tmp_path / "run")
    shown = run("prune", directory, "--keep", "last(1)", "--yes").stdout
    assert "best_model_checkpoint points here" in shown
    assert steps_in(directory) == [4, 6]


def test_nan_never_ranks_and_is_shown_as_such(tmp_path: Path) -> None:
    """See Lightning 1008, 2636: one NaN froze the list of the best."""
    losses: dict[int, float | None] = {1: float("nan"), 2: 0.5, 3: 0.4, 4: float("nan"), 5: None}
    assert saved(tmp_path / "run", losses, "best(1, loss, min) | last(1)") == [3, 5]
    save_run(tmp_path / "all", [1, 2], metrics={1: {"loss": float("nan")}, 2: {"loss": 0.5}})
    save_run(tmp_path / "all", [3], metrics={3: {"loss": 0.6}})
    plan = run(
        "prune", tmp_path / "all", "--keep", "best(1, loss, min)|last(1)", "--dry-run"
    ).stdout
    (row,) = (line for line in plan.splitlines() if line.startswith("drop"))
    assert " n/a " in row
    assert "best (loss n/a)" in row


def test_best_is_known_when_everything_is_kept(tmp_path: Path) -> None:
    """See Lightning 2586, 3732: the best one was unknown when all were kept."""
    losses: dict[int, float | None] = {1: 0.5, 2: 0.1, 3: 0.4}
    assert saved(tmp_path, losses, "all") == [1, 2, 3]
    assert run_json("inspect", "best:loss:min", "--dir", tmp_path)["summary"]["step"] == 2
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all"), prefix="net") as manager:
        best = manager.best("loss")
        assert best is not None
        assert best.step == 2


def test_metric_that_arrives_after_the_save_ranks_then_and_the_limit_holds_meanwhile(
    tmp_path: Path,
) -> None:
    """See ms-swift 6392: a limit was ignored where evaluations came at other steps than saves."""
    config = CheckpointConfig(keep="last(2) | best(1, loss, min)")
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        for step in range(1, 9):
            manager.save(step, state_of(step))
        manager.wait()
        newest = [4, 5, 6, 7, 8]  # five, while nothing can be ranked
        assert [one.step for one in manager.checkpoints()] == newest
        manager.record(5, {"loss": 0.1})
        for step in (9, 10):
            manager.save(step, state_of(step))
    assert steps_in(tmp_path) == [5, 9, 10]


def test_metric_that_was_never_recorded_is_said_and_nothing_is_dropped(tmp_path: Path) -> None:
    """See ART 117, 300: retention read a file of metrics that was never written, and removed all but the last."""
    save_run(tmp_path, [1, 2, 3], metrics={1: {"loss": 0.1}})
    before = tree_of(tmp_path)
    result = run("prune", tmp_path, "--keep", "best(1, accuracy, max) | last(1)", "--yes")
    assert result.exit_code == 13
    assert "none of the 3 checkpoints of series 'net' has a number for 'accuracy'" in result.stderr
    assert "recorded: loss" in result.stderr
    assert tree_of(tmp_path) == before


def test_half_written_checkpoints_have_a_state_and_no_run_resumes_from_them(tmp_path: Path) -> None:
    """See transformers 35782, RLinf 1469, NeMo Automodel 3261: a resume took the newest, half-written one."""
    saved(tmp_path, {step: None for step in (1, 2, 3, 4)}, "all")
    newest, before = (tmp_path / f"net-{step}.ckpt" for step in (4, 3))
    newest.chmod(0o600)
    os.truncate(newest, 10)
    before.unlink()
    killed = temp_name("net-6.ckpt", token="0-0-0-0", series="net")
    (tmp_path / killed).write_bytes(b"half")
    (tmp_path / "theirs.ckpt").write_bytes((tmp_path / "net-1.ckpt").read_bytes())
    with api.place(tmp_path).publisher.new_file("net-5.ckpt", series="net", size_bytes=8):
        items_ = run_json("ls", tmp_path, "--all")["items"]
    states = {Path(item["path"]).name: item["state"] for item in items_}
    assert states["net-2.ckpt"] == "ok"
    assert states["net-4.ckpt"] == "corrupt"
    assert states["theirs.ckpt"] == "unverified"
    assert states["net-3.ckpt"] == "missing"
    assert states.pop(killed) == "leftover"
    assert "writing" in states.values()
    with CheckpointManager(tmp_path, CheckpointConfig(), prefix="net") as manager:
        resumed = manager.resume({"weights": np.zeros(8, np.float32)})
    assert resumed.step == 2


def test_plan_shows_policy_filters_reasons_near_misses_bytes_and_files(tmp_path: Path) -> None:
    """See borg 2886, 6791, 7511, restic 1876, 5393, 5749: which ones go, which ones stay, and why."""
    save_run(tmp_path, [1, 2, 3, 4], metrics={step: {"loss": step / 10} for step in (1, 2, 3, 4)})
    keep = "last(1) | best(1, loss, min)"
    shown = run("prune", tmp_path, "--keep", keep, "--filter", "step<3", "--dry-run", "-v").stdout
    lines = shown.splitlines()
    assert lines[0].startswith(f"{tmp_path}  4 checkpoints")
    assert lines[0].endswith(f"policy {keep}   filter step<3")
    rows = {line.split()[1]: line for line in lines if line[:4] in ("keep", "drop")}
    assert rows["4"].endswith("last 1/1; left out by --filter")
    assert rows["3"].endswith("left out by --filter")
    assert rows["2"].endswith("nearest: last (3rd of 1), best (2nd of 1)")
    assert rows["1"].endswith("best 1/1 loss=0.1")
    assert "  net-1_2.ckpt  144 B" in lines
    assert lines[-1] == "would free 144 B; 3 stay (432 B)"


@pytest.mark.parametrize("keep", ["", "   "])
def test_empty_policy_is_an_error(keep: str, tmp_path: Path) -> None:
    """See restic 1519: an empty policy kept nothing."""
    save_run(tmp_path, [1, 2])
    before = tree_of(tmp_path)
    result = run("prune", tmp_path, "--keep", keep, "--yes")
    assert (result.exit_code, "the policy is empty" in result.stderr) == (2, True)
    assert tree_of(tmp_path) == before
    with pytest.raises(ValueError, match="the policy is empty"):
        CheckpointConfig(keep=keep)


def test_dry_runs_write_nothing_however_often(tmp_path: Path) -> None:
    """See cass 488: dry runs let a ledger grow to 114 MB."""
    save_run(tmp_path, [1, 2, 3])
    before = tree_of(tmp_path)
    for _ in range(5):
        assert run("prune", tmp_path, "--keep", "last(1)", "--dry-run").exit_code == 0
    assert tree_of(tmp_path) == before


def test_keys_come_by_file_command_descriptor_or_variable_and_never_as_an_argument(
    tmp_path: Path,
) -> None:
    """See restic 4691, keycloak CVE-2017-15112: passwords on command lines are seen by all users."""
    sealed = api.SaveOptions(format="safetensors", key=KEY)
    save_run(tmp_path / "run", [1], options=sealed, content=items()[:2])
    secret, path = KEY.raw.hex(), tmp_path / "run.key"
    path.touch(mode=0o600)
    path.write_text(f"{secret}\n")
    line = ("verify", tmp_path / "run")
    for source in (f"file:{path}", f"cmd:cat {path}", "env:RUN_KEY"):
        assert run(*line, "--key", source, env={"RUN_KEY": secret}).exit_code == 0, source
    with path.open("rb") as file:
        assert run(*line, "--key", f"fd:{file.fileno()}").exit_code == 0
    assert run(*line, env={"CKPTMGR_KEY_FILE": str(path)}).exit_code == 0
    refused = run(*line, "--key", secret)
    assert refused.exit_code == 2
    assert "never the key itself (not shown)" in refused.stderr
    assert secret not in refused.output


def test_rotation_reencrypts_old_data_goes_on_after_a_stop_and_shows_the_id_of_the_key(
    tmp_path: Path,
) -> None:
    """See vault 5545, llm-gateway 2818: old data kept the old key; ciphertext without an id was lost."""
    runs = tmp_path / "run"
    sealed = api.SaveOptions(format="safetensors", key=KEY)
    first, *_ = save_run(runs, [1, 2, 3], options=sealed, content=items()[:2])
    keys = {"OLD": KEY.raw.hex(), "NEW": OTHER_KEY.raw.hex()}
    change = ("--key", "env:OLD", "--to", "env:NEW", "--yes")
    assert run("reencrypt", first, *change, env=keys).exit_code == 0  # and no further
    planned = run_json("reencrypt", runs, *change, "--dry-run", env=keys)["summary"]
    assert planned["planned"] == 2
    assert run("reencrypt", runs, *change, env=keys).exit_code == 0
    assert run("verify", runs, "--key", "env:NEW", env=keys).exit_code == 0
    assert run("verify", runs, "--key", "env:OLD", env=keys).exit_code == 12
    for step in (1, 2, 3):
        summary = run_json("inspect", str(step), "--dir", runs)["summary"]  # without a key
        assert summary["key_id"] == OTHER_KEY.key_id


def test_no_color_reaches_the_progress_and_nothing_is_animated_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See pip 11045, 13354, basic-memory 579: coloured bars with --no-color, animations in logs of CI."""
    save_run(tmp_path, [1])
    done = run_process("verify", str(tmp_path), FORCE_COLOR="1", CI="1")
    assert (done.returncode, done.stderr) == (0, b"")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = io.StringIO()
    shown = progress_on(log, clock_of(0, 5, 11, 12, 22), has_color=True)
    assert shown.count("\n") == 2  # one every 10 seconds
    assert "\x1b" not in shown
    assert "\r" not in shown
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[3" not in progress_on(Terminal(), clock_of(0, 2), has_color=False)


def progress_on(stream: io.StringIO, clock: Callable[[], float], *, has_color: bool) -> str:
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock, has_color=has_color):
        for _ in range(4):
            count_bytes("read", 10)
    return stream.getvalue()


def test_command_line_is_built_on_click_alone() -> None:
    """See elAPI 189, django-typer 297: programs on Typer broke when it took click into itself."""
    assert [name for name, _ in commands()]  # imports every command
    assert "typer" not in sys.modules
    assert any(line.startswith("click") for line in requires("ckptmgr") or ())
    assert not any(line.startswith("typer") for line in requires("ckptmgr") or ())
