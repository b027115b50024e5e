# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prune`: the plan, the question, the deed, and its undoing."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ckptmgr import CkptmgrError
from ckptmgr.cli.policy_file import keep_in
from ckptmgr.core.shard_names import shard_name
from ckptmgr.io.files import CachedFile
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.cli.running import NOW_S, process_env, run, run_json, run_process
from tests.support import api
from tests.support.held import wait_until_asleep
from tests.support.saved import GOLDEN_FILES, KEY, flip, overwrite, save_run, tree_of

KEEP = "last(2) | best(2, loss, min) | every(4000)"
DAY_S = 86_400


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Eight checkpoints, the sixth damaged, the last without a metric."""
    directory = tmp_path / "runs"
    metrics = {1000 * i: {"loss": 1 / i} for i in range(1, 8)}
    save_run(directory, [1000 * i for i in range(1, 9)], metrics=metrics)
    overwrite(directory / "net-600_10.ckpt", b"cut")
    return directory


def steps(directory: Path) -> list[int]:
    """Return the steps in a directory."""
    return sorted(c.step for c in api.listed(directory))


PLAN = """\
{root}  8 checkpoints, 1.1 KiB   policy last(2) | best(2, loss, min) | every(4000)
 step 1k ···■■✗■■ 8k
         ■ keep  · drop  ✗ corrupt (does not count towards any rule)
      STEP     SAVED   SIZE    LOSS  STATE    WHY
keep  8000  17 h ago  144 B     n/a  ok       last 1/2; every 4k
keep  7000  18 h ago  144 B  0.1429  ok       last 2/2; best 1/2 loss=0.1429
keep  6000  19 h ago  144 B  0.1667  corrupt  not counted: corrupt: 3 bytes, but the manifest says 144
keep  5000  20 h ago  144 B     0.2  ok       best 2/2 loss=0.2
keep  4000  21 h ago  144 B    0.25  ok       every 4k
drop  3000  22 h ago  144 B  0.3333  ok       nearest: last (5th of 2), best (4th of 2), every 4k (3000 past 0)
drop  2000  23 h ago  144 B     0.5  ok       nearest: last (6th of 2), best (5th of 2), every 4k (2000 past 0)
drop  1000   1 d ago  144 B       1  ok       nearest: last (7th of 2), best (6th of 2), every 4k (1000 past 0)
would free 432 B; 5 stay (720 B)
"""


def test_dry_run_shows_the_plan_and_writes_nothing_at_all(runs: Path) -> None:
    before = tree_of(runs.parent)
    result = run("prune", runs, "--keep", KEEP, "--dry-run")
    assert (result.exit_code, result.stdout) == (0, PLAN.format(root=runs))
    assert tree_of(runs.parent) == before


def test_terminal_without_unicode_gets_an_ascii_timeline(runs: Path) -> None:
    shown = run("prune", runs, "--keep", KEEP, "--dry-run", charset="ascii").stdout
    assert " step 1k ...##x## 8k\n" in shown


def test_json_plan_has_reasons_and_nearest_misses(runs: Path) -> None:
    document = run_json("prune", runs, "--keep", KEEP, "--dry-run")
    assert document["schema"] == "ckptmgr.prune/1"
    best = next(item for item in document["items"] if item["step"] == 5000)
    assert (best["keep"], best["nearest"]) == (True, [])
    assert best["reasons"] == [
        {
            "rule": "best(2, loss, min)",
            "detail": "best 2/2 loss=0.2",
            "rank": 2,
            "of": 2,
            "value": 0.2,
        }
    ]
    assert [reason["rule"] for reason in document["items"][-1]["nearest"]] == [
        "last(2)",
        "best(2, loss, min)",
        "every(4000)",
    ]
    summary = document["summary"]
    assert (summary["kept"], summary["dropped"], summary["freed_bytes"]) == (5, 3, 432)
    assert (summary["is_done"], summary["removed"], summary["trash"]) == (False, [], None)


def test_quiet_dry_run_prints_what_would_go(runs: Path) -> None:
    result = run("prune", runs, "--keep", "last(7)", "--dry-run", "-q")
    assert result.stdout == ""
    result = run("prune", runs, "--keep", "last(6)", "--dry-run", "-q")
    assert result.stdout == f"{runs / 'net-100_10.ckpt'}\n"


def test_verbose_lists_the_files(runs: Path) -> None:
    shown = run("prune", runs, "--keep", "last(6)", "--dry-run", "-v").stdout
    assert "  net-100_10.ckpt  144 B\n" in shown


def test_check_exits_1_while_something_would_go(runs: Path) -> None:
    before = tree_of(runs)
    assert run("prune", runs, "--keep", "last(2)", "--check").exit_code == 1
    assert run("prune", runs, "--keep", "all", "--check").exit_code == 0
    assert tree_of(runs) == before


def test_nobody_to_ask_exits_13_and_changes_nothing(runs: Path) -> None:
    before = tree_of(runs)
    for extra in ({}, {"CKPTMGR_PRUNE_YES": "1", "CKPTMGR_YES": "1"}):
        result = run("prune", runs, "--keep", "last(2)", env=extra)
        assert (result.exit_code, "pass --yes" in result.stderr) == (13, True)
    assert tree_of(runs) == before


def test_nobody_to_ask_is_found_before_the_newest_is_read(tmp_path: Path) -> None:
    # Whoever reads it finds the damage, keeps the other one, and has nothing to ask.
    flip(save_run(tmp_path, [10, 20])[-1], 100)
    result = run("prune", tmp_path, "--keep", "last(1)")
    assert (result.exit_code, result.stdout) == (13, "")
    assert "stdin is not a terminal" in result.stderr
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes").exit_code == 0
    assert steps(tmp_path) == [10, 20]


def test_yes_moves_to_the_trash_and_undo_brings_back(runs: Path) -> None:
    before = {name: state[0] for name, state in tree_of(runs).items()}
    result = run("prune", runs, "--keep", KEEP, "--yes")
    assert result.exit_code == 0
    assert result.stdout.endswith(
        "moved 3 checkpoints, 432 B to .ckptmgr-trash/20260302T100000.000000Z\n"
    )
    assert "the first prune after the grace time frees the space" in result.stderr
    assert steps(runs) == [4000, 5000, 6000, 7000, 8000]
    asked = run("prune", runs, "--undo", "--dry-run")
    assert asked.stdout.endswith("3 checkpoints would be restored, 432 B\n")
    undone = run("prune", runs, "--undo")
    assert undone.stdout.endswith("net-300_10.ckpt  144 B\n3 checkpoints restored, 432 B\n")
    assert {name: state[0] for name, state in tree_of(runs).items()} == before


def test_undo_speaks_json_and_paths(runs: Path) -> None:
    run("prune", runs, "--keep", KEEP, "--yes")
    assert run_json("prune", runs, "--undo")["summary"] == {"is_done": True, "taken": []}
    run("prune", runs, "--keep", "last(6)", "--yes")
    assert run("prune", runs, "--undo", "-q").stdout == f"{runs / 'net-100_10.ckpt'}\n"


def test_undo_of_nothing_is_not_found(runs: Path) -> None:
    assert run("prune", runs, "--undo").exit_code == 10


def test_undo_keeps_a_newer_checkpoint_of_the_same_name(runs: Path) -> None:
    run("prune", runs, "--keep", "last(6)", "--yes")
    save_run(runs, [1000])
    result = run("prune", runs, "--undo")
    assert (result.exit_code, "stays in the trash" in result.stderr) == (3, True)


def test_undo_stands_alone(runs: Path) -> None:
    assert run("prune", runs, "--undo", "--keep", "all").exit_code == 2


def test_quiet_and_json_tell_what_was_removed(runs: Path) -> None:
    quiet = run("prune", runs, "--keep", "last(6)", "--yes", "-q")
    assert quiet.stdout == f"{runs / 'net-100_10.ckpt'}\n"
    summary = run_json("prune", runs, "--keep", "last(5)", "--yes")["summary"]
    assert (summary["is_done"], summary["removed"]) == (True, [str(runs / "net-200_10.ckpt")])
    assert summary["trash"] == str(runs / TRASH_NAME / "20260302T100000.000001Z")


def test_now_removes_at_once(runs: Path) -> None:
    result = run("prune", runs, "--keep", "last(6)", "--yes", "--now")
    assert result.stdout.endswith("removed 1 checkpoint, 144 B\n")
    assert not (runs / TRASH_NAME).exists()


def test_old_trash_goes_with_a_later_prune(runs: Path) -> None:
    run("prune", runs, "--keep", "last(6)", "--yes")
    later = NOW_S + DAY_S
    shown = run("prune", runs, "--keep", "all", "--dry-run", now_s=later).stdout
    assert "1 checkpoint, 144 B; would be removed for good\n" in shown
    assert "would be removed" not in run("prune", runs, "--keep", "all", "--dry-run").stdout
    result = run("prune", runs, "--keep", "all", "--yes", now_s=later)
    assert "note: removed 1 from the trash for good" in result.stderr
    assert not (runs / TRASH_NAME).exists()


def test_trash_that_holds_the_last_whole_one_stays_and_says_so(tmp_path: Path) -> None:
    (_, newest) = save_run(tmp_path, [10, 20])
    run("prune", tmp_path, "--keep", "last(1)", "--yes")
    flip(newest, 100)
    later = NOW_S + 2 * DAY_S
    shown = run("prune", tmp_path, "--keep", "last(1)", "--yes", now_s=later).stdout
    assert "stays, because outside the trash nothing whole of a run is left" in shown
    assert run("prune", tmp_path, "--undo").stdout.startswith("net-1_10.ckpt")


def test_grace_time_is_an_option(runs: Path) -> None:
    run("prune", runs, "--keep", "last(6)", "--yes")
    run("prune", runs, "--keep", "all", "--yes", "--grace", "0s")
    assert not (runs / TRASH_NAME).exists()
    assert run("prune", runs, "--keep", "all", "--grace", "soon").exit_code == 2


def test_nothing_to_do_asks_nobody(runs: Path) -> None:
    result = run("prune", runs, "--keep", "all")
    assert (result.exit_code, "would free 0 B; 8 stay" in result.stdout) == (0, True)


def test_policy_comes_from_the_directory(runs: Path) -> None:
    (runs / "ckptmgr.toml").write_text('keep = "last(6)"\n')
    assert run_json("prune", runs, "--dry-run")["summary"]["policy"] == "last(6)"
    assert run_json("prune", runs, "--dry-run", "--keep", "all")["summary"]["policy"] == "all"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no retention policy"),
        ("", "no retention policy"),
        ('kep = "last(2)"', "did you mean keep?"),
        ("other = 1", "known: keep"),
        ("keep = 3", "quotes included"),
        ('keep = ""', "the policy is empty"),
        ('keep = "lst(2)"', "did you mean 'last'?"),
        ("keep = ", "not valid TOML"),
        ("\xff", "not valid TOML"),
        ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
    ],
)
def test_missing_or_wrong_policy_is_refused(runs: Path, content: str | None, message: str) -> None:
    if content is not None:
        (runs / "ckptmgr.toml").write_text(content, encoding="latin-1")
    result = run("prune", runs, "--yes")
    assert (result.exit_code, message in result.stderr) == (2, True)
    assert len(steps(runs)) == 8


def test_policy_that_everybody_can_write_is_refused(runs: Path) -> None:
    config = runs / "ckptmgr.toml"
    config.write_text('keep = "last(1)"\n')
    config.chmod(0o666)
    result = run("prune", runs, "--yes", "--now")
    assert (result.exit_code, "by others (mode 0666)" in result.stderr) == (2, True)
    assert f"{config}: says what to keep" in result.stderr
    assert "pass --keep" in result.stderr
    assert len(steps(runs)) == 8
    config.chmod(0o664)
    assert run_json("prune", runs, "--dry-run")["summary"]["policy"] == "last(1)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_policy_of_another_user_than_the_owner_of_the_directory_is_refused(runs: Path) -> None:
    config = runs / "ckptmgr.toml"
    config.write_text('keep = "last(1)"\n')
    os.chown(config, 12_345, 12_345)
    result = run("prune", runs, "--yes", "--now")
    assert (result.exit_code, "belongs to another user (uid 12345)" in result.stderr) == (2, True)
    assert len(steps(runs)) == 8
    os.chown(runs, 12_345, 12_345)
    assert run_json("prune", runs, "--dry-run")["summary"]["policy"] == "last(1)"


def test_policy_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ckptmgr.toml")
    done = run_process("prune", tmp_path, "--yes")
    assert (done.returncode, b"not a regular file" in done.stderr) == (2, True)


@pytest.mark.parametrize("target", ["../policy.toml", "nowhere", "/dev/zero", "."])
@pytest.mark.parametrize("command", [("prune", "--yes"), ("config", "show"), ("watch", "--prune")])
def test_policy_that_is_a_link_is_refused(
    target: str, command: tuple[str, ...], runs: Path
) -> None:
    (runs.parent / "policy.toml").write_text('keep = "last(1)"\n')
    (runs / "ckptmgr.toml").symlink_to(target)
    result = run(*command, runs)
    assert (result.exit_code, "is a link, not a regular file" in result.stderr) == (2, True)
    assert f"{runs / 'ckptmgr.toml'}: says what to keep" in result.stderr
    assert len(steps(runs)) == 8


def test_policy_that_is_a_directory_is_refused(runs: Path) -> None:
    (runs / "ckptmgr.toml").mkdir()
    result = run("prune", runs, "--yes")
    assert (result.exit_code, "not a regular file" in result.stderr) == (2, True)


def test_policy_of_a_directory_that_a_link_leads_to_is_that_of_the_directory(runs: Path) -> None:
    (runs / "ckptmgr.toml").write_text('keep = "last(6)"\n')
    (runs.parent / "link").symlink_to(runs)
    assert run_json("prune", runs.parent / "link", "--dry-run")["summary"]["policy"] == "last(6)"


def test_policy_that_becomes_shorter_while_it_is_read_is_an_error_with_a_way_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ckptmgr.toml"
    path.write_text('keep = "last(1)"\n')
    with closing(CachedFile(path)) as file:
        os.truncate(path, 3)
        with pytest.raises(CkptmgrError, match="became shorter while it was read") as caught:
            keep_in(file, path)
    assert caught.value.hint == "run the command again"


def test_empty_policy_on_the_command_line_is_refused(runs: Path) -> None:
    assert run("prune", runs, "--keep", "", "--yes").exit_code == 2


def test_unsafe_policy_exits_13(runs: Path) -> None:
    result = run("prune", runs, "--keep", "last(1) | best(2, acc, max)", "--yes")
    assert (result.exit_code, "cannot rank" in result.stderr) == (13, True)
    assert len(steps(runs)) == 8


def test_missing_directory_exits_10(tmp_path: Path) -> None:
    assert run("prune", tmp_path / "no", "--keep", "all").exit_code == 10


def test_locked_series_exits_11_and_names_the_owner(runs: Path) -> None:
    with api.place(runs).lease("net"):
        result = run("prune", runs, "--keep", "last(2)", "--yes")
    assert result.exit_code == 11
    assert f"process {os.getpid()}" in result.stderr
    assert len(steps(runs)) == 8


def test_locked_series_does_not_stop_the_others(runs: Path) -> None:
    save_run(runs, [10, 20, 30], series="other")
    with api.place(runs).lease("net"):
        result = run("prune", runs, "--keep", "last(2)", "--yes", "--json")
    assert result.exit_code == 11
    assert json.loads(result.stderr.splitlines()[-1])["error"] == "StoreLocked"
    assert json.loads(result.stdout)["summary"]["removed"] == [str(runs / "other-1_10.ckpt")]


def test_several_series_are_shown_one_by_one_and_filtered(runs: Path) -> None:
    save_run(runs, [10, 20, 30], series="other")
    shown = run("prune", runs, "--keep", "last(2)", "--dry-run").stdout
    assert f"{runs} [net]  8 checkpoints" in shown
    assert f"{runs} [other]  3 checkpoints" in shown
    only = run("prune", runs, "--keep", "last(2)", "--dry-run", "--series", "other").stdout
    assert "policy last(2)   filter series=other\n" in only
    assert "[net]" not in only


def test_leftovers_are_not_reaped_where_nobody_can_be_asked(runs: Path) -> None:
    dead = runs / temp_name("net-8_8.ckpt", token="dead-1", series="net")
    dead.touch()
    result = run("prune", runs, "--keep", "all")
    assert (result.exit_code, "pass --yes" in result.stderr) == (13, True)
    assert dead.exists()


def test_file_of_a_rank_is_left_to_the_saves_of_its_run(runs: Path) -> None:
    name = shard_name("net-8_8", 0, world=2, attempt_id="0" * 16, format="safetensors")
    (runs / name).write_bytes(b"x")
    shown = run("prune", runs, "--keep", "all", "--dry-run").stdout
    assert f"{name}: what one rank saved for a checkpoint that is not there; stays;" in shown
    result = run("prune", runs, "--keep", "all")
    assert (result.exit_code, "pass --yes" in result.stderr) == (0, False)
    assert (runs / name).exists()


def test_leftovers_are_shown_and_reaped(runs: Path) -> None:
    (runs / "net-700_10.ckpt").unlink()
    dead = runs / temp_name("net-8_8.ckpt", token="dead-1", series="net")
    dead.touch()
    live = runs / temp_name("net-9_9.ckpt", token=ProcProcesses().token(), series="net")
    live.touch()
    shown = run("prune", runs, "--keep", "all", "--dry-run").stdout
    fate = "goes when it has been here for a day"
    assert f"net-700_10.ckpt: a manifest without its data file; {fate}\n" in shown
    assert f"{dead.name}: left by an interrupted save; would be cleaned up\n" in shown
    assert f"{live.name}: being written by a live process; stays\n" in shown
    result = run("prune", runs, "--keep", "all", "--yes")
    assert f"note: removed {dead.name}" in result.stderr
    assert (runs / "net-700_10.ckpt.manifest.json").exists()
    assert live.exists()


def test_bare_mindspore_directory_is_pruned_by_epoch_and_step(tmp_path: Path) -> None:
    for name in ("CKP-1_5.ckpt", "CKP-2_5.ckpt", "CKP-10_5.ckpt", "CKP-2_1.ckpt"):
        shutil.copy(GOLDEN_FILES / "slices_sync.ckpt", tmp_path / name)
    result = run("prune", tmp_path, "--keep", "last(2)", "--yes", "-q")
    assert result.stdout.split() == [str(tmp_path / f"CKP-{n}.ckpt") for n in ("2_1", "1_5")]
    run("prune", tmp_path, "--undo")
    assert len(steps(tmp_path)) == 4


def test_unreadable_manifest_shows_no_step_it_does_not_know(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    overwrite(tmp_path / "net-1_10.ckpt.manifest.json", b"{")
    shown = run("prune", tmp_path, "--keep", "last(1)", "--dry-run").stdout
    assert "keep     -" in shown
    (tmp_path / "net-2_10.ckpt").unlink()
    (tmp_path / "net-2_10.ckpt.manifest.json").unlink()
    shown = run("prune", tmp_path, "--keep", "last(1)", "--dry-run").stdout
    assert " step " not in shown


def test_newest_that_has_rotted_is_told_and_uses_no_slot(tmp_path: Path) -> None:
    paths = save_run(tmp_path, [10, 20, 30])
    flip(paths[-1], 100)
    shown = run("prune", tmp_path, "--keep", "last(1)", "--dry-run").stdout
    assert "corrupt  not counted: corrupt: the bytes 0..144 do not match the digest" in shown
    assert "would free 144 B; 2 stay" in shown


def test_long_history_is_drawn_in_groups(tmp_path: Path) -> None:
    content = (GOLDEN_FILES / "slices_sync.ckpt").read_bytes()
    for epoch in range(1, 91):
        (tmp_path / f"CKP-{epoch}_1.ckpt").write_bytes(content)
    shown = run("prune", tmp_path, "--keep", "last(1)", "--dry-run").stdout
    assert f" step 1 {'·' * 44}■ 90\n" in shown
    assert "(each for up to 2 checkpoints)" in shown


def test_encrypted_run_is_pruned_without_and_with_its_key(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], options=api.SaveOptions(key=KEY))
    assert run("prune", tmp_path, "--keep", "last(2)", "--yes").exit_code == 0
    env = {"CKPTMGR_KEY": KEY.raw.hex()}
    assert run("prune", tmp_path, "--keep", "last(1)", "--yes", env=env).exit_code == 0
    assert run("prune", tmp_path, "--undo", env=env).exit_code == 0
    items = run_json("ls", tmp_path, env=env)["items"]
    assert {item["state"] for item in items} == {"ok"}


class Terminal:
    """A command at a terminal: it asks, somebody answers."""

    def __init__(self, *arguments: str | Path, command: str = "prune") -> None:
        self._leader, terminal = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptmgr", command, *map(str, arguments)],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=terminal,
            env=process_env(NO_COLOR="1"),
            # Whoever starts the tests in the background has SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(terminal)

    def question(self) -> bytes:
        """Return the output up to the question."""
        shown = b""
        while b"[y/N]: " not in shown:
            shown += os.read(self._leader, 4096)
        return shown

    def answer(self, keys: bytes) -> tuple[int, bytes]:
        """Type and return the exit code and stdout."""
        os.write(self._leader, keys)
        stdout, _ = self._process.communicate(timeout=60)
        os.close(self._leader)
        return self._process.returncode, stdout

    def interrupt(self) -> int:
        """Press Ctrl-C and return the exit code."""
        wait_until_asleep(self._process.pid)  # a signal just before it waits is not heard
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=60)
        os.close(self._leader)
        return self._process.returncode

    def kill(self) -> None:
        """Kill the process while it waits."""
        self._process.kill()
        self._process.communicate(timeout=60)
        os.close(self._leader)


@pytest.mark.slow
def test_answer_decides_at_a_terminal(runs: Path) -> None:
    terminal = Terminal(runs, "--keep", "last(6)")
    assert b"Move 1 checkpoint to the trash? [y/N]: " in terminal.question()
    assert terminal.answer(b"n\n")[0] == 1
    assert len(steps(runs)) == 8
    terminal = Terminal(runs, "--keep", "last(6)", "--now")
    assert b"Remove 1 checkpoint for good? [y/N]: " in terminal.question()
    code, stdout = terminal.answer(b"y\n")
    assert (code, stdout.endswith(b"removed 1 checkpoint, 144 B\n")) == (0, True)


def test_interrupt_or_kill_at_the_question_changes_nothing(runs: Path) -> None:
    before = tree_of(runs)
    terminal = Terminal(runs, "--keep", "last(6)")
    terminal.question()
    assert terminal.interrupt() == 130
    terminal = Terminal(runs, "--keep", "last(6)")
    terminal.question()
    terminal.kill()
    assert tree_of(runs) == before


def test_checkpoint_saved_while_the_question_stands_stops_the_prune(runs: Path) -> None:
    terminal = Terminal(runs, "--keep", "last(6)")
    terminal.question()
    save_run(runs, [9000])
    assert terminal.answer(b"y\n")[0] == 13
    assert len(steps(runs)) == 9


def test_directory_that_is_replaced_at_the_question_is_not_pruned(
    runs: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs, other)
    before = tree_of(other)
    terminal = Terminal(runs, "--keep", "last(6)", "--now")
    terminal.question()
    runs.rename(tmp_path / "moved")
    runs.symlink_to(other)
    terminal.answer(b"y\n")
    assert tree_of(other) == before
    assert len(steps(tmp_path / "moved")) == 8


@pytest.mark.parametrize("is_trash", [False, True])
def test_trash_that_became_a_link_at_the_question_is_left_alone(
    runs: Path, tmp_path: Path, is_trash: bool
) -> None:
    assert run("prune", runs, "--keep", "last(6)", "--yes", now_s=0).exit_code == 0
    (batch,) = (runs / TRASH_NAME).iterdir()
    swapped = batch.parent if is_trash else batch
    shutil.copytree(swapped, tmp_path / "precious")
    before = tree_of(tmp_path / "precious")
    terminal = Terminal(runs, "--keep", "last(6)")
    assert b"Clean up?" in terminal.question()
    swapped.rename(tmp_path / "moved")
    swapped.symlink_to(tmp_path / "precious")
    assert terminal.answer(b"y\n")[0] != 0
    assert tree_of(tmp_path / "precious") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_trash_of_a_stranger_is_not_used(runs: Path) -> None:
    os.chown(runs, 12345, 12345)
    runs.chmod(
        0o1777
    )  # as /tmp: every user may add files there, and none may touch those of others
    (runs / TRASH_NAME).mkdir()
    os.chown(runs / TRASH_NAME, 777, 777)
    before = steps(runs)
    done = run("prune", runs, "--keep", "last(6)", "--yes")
    assert (done.exit_code, steps(runs)) == (2, before)
    assert f"{runs / TRASH_NAME}: belongs to user 777" in done.stderr


def test_typed_m_is_refused_and_read_in_a_configuration(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    for options in (("--keep", "within(30m)"), ("--keep", "last(1)", "--grace", "30m")):
        refused = run("prune", tmp_path, *options, "--dry-run")
        assert refused.exit_code == 2
        assert "m may mean minutes or months" in refused.stderr
    (tmp_path / "ckptmgr.toml").write_text('keep = "within(30m)"\n')
    assert "policy within(30min)" in run("prune", tmp_path, "--dry-run").stdout
