# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch` beside real training runs: its reports, actions and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, save_checkpoint
from tests.cli.running import process_env, run
from tests.cli.watching import training, watching
from tests.support import api
from tests.support.saved import overwrite, save_run, tree_of

NEVER = ("--poll", "1d")  # each report comes from an event


def damage(path: Path) -> None:
    """Change one byte of a file; its size stays."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    overwrite(path, bytes(content))


def replace(path: Path, text: str) -> None:
    """Give a file another text at once; a reader sees the old one or the new one."""
    new = path.with_name("new.toml")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


@pytest.mark.slow
def test_each_save_of_a_run_is_reported_and_verified_by_the_events_of_its_renames(
    tmp_path: Path,
) -> None:
    with watching(tmp_path, *NEVER) as watch, training(tmp_path) as trainer:
        for step in (1, 2, 3):
            trainer.save(step)
            report = watch.until("verified")
            assert report["status"] == "ok"
            assert report["checkpoint"]["step"] == step
        assert watch.stop() == 0
    assert watch.names("saved") == [f"net-{step}.safetensors" for step in (1, 2, 3)]
    last = watch.reports[-1]
    assert (last["event"], last["message"]) == ("stopped", "by SIGTERM; no alarm stands")
    assert watch.errors == ""


def test_save_whose_events_were_lost_is_verified(fast_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 20_000:
        pytest.skip(f"the kernel keeps {limit} events here")
    with watching(fast_path, *NEVER) as watch:
        watch.child.send_signal(signal.SIGSTOP)
        for number in range(limit + 100):  # equal events in a row would be one
            os.close(os.open(fast_path / f"log-{number % 2}", os.O_WRONLY | os.O_CREAT))
        save_run(fast_path, [10])
        watch.child.send_signal(signal.SIGCONT)
        assert "events were lost" in watch.until("note")["message"]
        watch.until("verified", status="ok")
        assert watch.stop() == 0


def test_overwritten_names_and_saves_in_the_background_are_no_alarm(tmp_path: Path) -> None:
    config = CheckpointConfig(
        keep="last(2)",
        format="safetensors",
        async_save=True,
        back_pressure="coalesce",
        verify_after_write=True,
    )
    with watching(tmp_path, *NEVER) as watch:
        for size in (10, 20, 30):
            save_checkpoint({"w": np.ones(size)}, tmp_path / "same.ckpt")
        with CheckpointManager(tmp_path, config, prefix="net") as manager:
            for step in range(1, 7):
                manager.save(step, {"w": np.ones(1000)})
        save_run(tmp_path, [10], series="last")
        while "last-1_10.ckpt" not in watch.names("verified"):
            watch.until("verified", status="ok")
        assert watch.stop() == 0
    assert "alarm" not in [report["event"] for report in watch.reports]


def test_interrupt_ends_it_like_sigterm(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        assert watch.stop(signal.SIGINT) == 0
    assert watch.reports[-1]["message"] == "by Ctrl-C; no alarm stands"
    assert watch.errors == ""


def test_run_that_is_killed_is_an_alarm_and_the_exit_code_says_so(tmp_path: Path) -> None:
    with watching(tmp_path, "--poll", "1s") as watch, training(tmp_path) as trainer:
        trainer.save(1)
        watch.until("verified")
        trainer.kill()
        alarm = watch.until("alarm")
        assert alarm["alarm"] == "failed"
        assert f"process {trainer.pid}" in alarm["message"]
        assert watch.stop() == 1
    assert watch.reports[-1]["message"] == "by SIGTERM; 1 alarm standing"


def test_end_of_a_run_is_heard_of_and_is_no_alarm(tmp_path: Path) -> None:
    with watching(tmp_path, *NEVER, "--prune", "--keep", "last(1)") as watch:
        with training(tmp_path) as trainer:
            for step in (1, 2):
                trainer.save(step)
                watch.until("verified")
            trainer.close()
        watch.until("pruned")
        assert watch.stop() == 0
    assert [report["event"] for report in watch.reports].count("note") == 1
    assert watch.names("pruned") == ["net-1.safetensors"]


def test_live_run_keeps_what_its_own_retention_keeps(tmp_path: Path) -> None:
    with (
        training(tmp_path) as trainer,
        watching(tmp_path, *NEVER, "--prune", "--keep", "last(1)") as watch,
    ):
        for step in (1, 2):
            trainer.save(step)
            watch.until("verified")
        assert watch.stop() == 0
    notes = [report["message"] for report in watch.reports if report["event"] == "note"]
    assert notes == [
        f"process {trainer.pid} on {os.uname().nodename} writes net and applies its own retention:"
        " it is only verified here"
    ]
    assert len(list(tmp_path.glob("net-*.safetensors"))) == 2


def test_renamed_directory_is_an_alarm_and_a_new_one_is_followed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    save_run(runs, [10])
    with watching(runs, "--poll", "1s") as watch:
        watch.until("verified")
        runs.rename(tmp_path / "old")
        alarm = watch.until("alarm")
        assert (alarm["alarm"], alarm["directory"]) == ("directory", str(runs))
        assert alarm["message"].endswith("the directory is gone: removed, renamed or unmounted")
        runs.mkdir()
        watch.until("cleared", alarm="directory")
        with training(runs) as trainer:
            trainer.save(1)
            assert watch.until("verified")["checkpoint"]["step"] == 1
            trainer.close()
        assert watch.stop() == 0


def test_directory_that_comes_back_is_followed_between_two_polls(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with watching(runs, *NEVER) as watch:
        shutil.rmtree(runs)
        watch.until("alarm", alarm="directory")
        runs.mkdir()
        save_run(runs, [10])
        watch.until("verified", status="ok")
        assert watch.stop() == 0


def test_directory_that_is_removed_and_made_again_at_once_is_followed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with watching(runs, *NEVER) as watch:
        runs.rmdir()
        save_run(runs, [10])
        watch.until("verified", status="ok")
        save_run(runs, [20])
        watch.until("verified", status="ok")
        assert watch.stop() == 0


def test_damaged_file_is_an_alarm_until_it_is_removed(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    damage(first)
    with watching(tmp_path, "--poll", "1s") as watch:
        alarm = watch.until("alarm")
        assert alarm["alarm"] == "damaged"
        assert alarm["checkpoint"]["path"] == str(first)
        first.unlink()
        (tmp_path / api.manifest_name(first.name)).unlink()
        watch.until("cleared", alarm="damaged")
        assert watch.stop() == 0
    assert watch.names("verified")[0] == second.name


def test_file_that_is_damaged_in_place_is_found_without_a_rename(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    with watching(tmp_path, "--poll", "1s") as watch:
        watch.until("verified", status="ok")
        damage(path)
        watch.until("alarm", alarm="damaged")
        assert watch.stop() == 1


def test_damaged_checkpoint_goes_into_quarantine_when_no_run_writes_its_series(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as trainer:
        for step in (1, 2):
            trainer.save(step)
        damage(tmp_path / "net-1.safetensors")
        with watching(tmp_path, "--poll", "1s", "--quarantine") as watch:
            watch.until("alarm", alarm="damaged")
            watch.until("note", series="net")
            assert (tmp_path / "net-1.safetensors").exists()
            trainer.close()
            watch.until("quarantined")
            watch.until("cleared", alarm="damaged")
            assert watch.stop() == 0
    folder = next((tmp_path / ".ckptmgr-quarantine").iterdir())
    names = ["net-1.safetensors", "net-1.safetensors.manifest.json"]
    assert sorted(os.listdir(folder)) == names
    assert {path.name for path in tmp_path.glob("net-*")}.isdisjoint(names)


def test_last_checkpoint_is_not_moved_into_quarantine(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    damage(path)
    result = run("watch", tmp_path, "--once", "--quarantine")
    assert result.exit_code == 1
    assert "net-1_10.ckpt stays: " in result.stdout
    assert path.exists()


def test_saves_that_stop_are_an_alarm_that_the_next_save_ends(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    with watching(tmp_path, *NEVER, "--expect-every", "1h") as watch:
        assert watch.until("alarm")["alarm"] == "stopped"
        with training(tmp_path) as trainer:
            trainer.save(1)
            watch.until("cleared", alarm="stopped")
            trainer.close()
        assert watch.stop() == 0


def test_save_that_a_run_gives_up_is_an_alarm(tmp_path: Path) -> None:
    with watching(tmp_path, *NEVER) as watch, training(tmp_path) as trainer:
        trainer.save(1)
        watch.until("verified")
        resource = subprocess.run(
            ["prlimit", "--pid", str(trainer.pid), "--fsize=100000"],
            capture_output=True,
            check=False,
        )
        if resource.returncode != 0:
            pytest.skip("prlimit cannot limit another process here")
        assert trainer.save(2, numbers=1_000_000) != "done"
        alarm = watch.until("alarm")
        assert (alarm["alarm"], alarm["series"]) == ("failed", "net")
        assert alarm["message"] == "net: the save of net-2.safetensors was given up"
        trainer.save(3)
        watch.until("cleared", alarm="failed")
        assert watch.stop() == 0


def test_directory_that_may_not_be_read_is_an_alarm(tmp_path: Path) -> None:
    through: list[str] = []
    if os.geteuid() == 0:
        through = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        is_there = shutil.which("setpriv") is not None
        if not is_there or subprocess.run([*through, "true"], check=False).returncode != 0:
            pytest.skip("root may read everything, and setpriv cannot change that here")
    runs = tmp_path / "runs"
    runs.mkdir()
    with watching(runs, "--poll", "1s", through=through) as watch:
        runs.chmod(0)
        assert "Permission denied" in watch.until("alarm", alarm="directory")["message"]
        runs.chmod(0o700)
        watch.until("cleared")
        assert watch.stop() == 0


def test_restart_verifies_only_what_is_new(tmp_path: Path) -> None:
    runs, state = tmp_path / "runs", tmp_path / "state.json"
    save_run(runs, [10, 20])
    for steps, verified in ([], {"net-1_10.ckpt", "net-2_10.ckpt"}), ([30], {"net-3_10.ckpt"}):
        save_run(runs, steps)
        result = run("watch", runs, "--once", "--json", "--state", state)
        assert result.exit_code == 0, result.stderr
        reports = [json.loads(line) for line in result.stdout.splitlines()]
        paths = [r["checkpoint"]["path"] for r in reports if r["event"] == "verified"]
        assert {Path(path).name for path in paths} == verified
    assert state.stat().st_mode & 0o777 == 0o600


def test_state_of_a_watch_that_is_stopped_is_kept(tmp_path: Path) -> None:
    runs, state = tmp_path / "runs", tmp_path / "state.json"
    save_run(runs, [10])
    with watching(runs, "--state", state) as watch:
        watch.until("verified")
        watch.stop()
    result = run("watch", runs, "--once", "--json", "--state", state)
    assert '"verified"' not in result.stdout


def test_deeper_check_does_not_believe_a_weaker_one(tmp_path: Path) -> None:
    runs, state = tmp_path / "runs", tmp_path / "state.json"
    save_run(runs, [10])
    for level, is_verified in (("--quick", True), ("--quick", False), ("--deep", True)):
        result = run("watch", runs, "--once", "--json", level, "--state", state)
        assert ('"verified"' in result.stdout) is is_verified


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PK", "the state of a watch does not start with"),
        (b'{"schema": "other/1"}', "is not the state of a watch"),
        (b'{"schema": "ckptmgr.watch-state/1", "level": "full", "passed": {"a": 1}}', "is not the"),
    ],
)
def test_file_that_is_no_state_is_refused_and_stays(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    state = tmp_path / "state.json"
    state.write_bytes(content)
    result = run("watch", tmp_path, "--once", "--state", state)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert state.read_bytes() == content


def test_state_that_a_power_cut_emptied_is_begun_anew(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.touch()
    assert run("watch", tmp_path, "--once", "--state", state).exit_code == 0
    assert json.loads(state.read_bytes())["passed"] == {str(tmp_path): {}}


def test_state_that_another_user_could_write_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.touch()
    state.chmod(0o666)
    result = run("watch", tmp_path, "--once", "--state", state)
    assert result.exit_code == 2
    assert "another user could have written" in result.stderr


def test_state_that_cannot_be_written_is_said_once_and_the_watch_goes_on(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10])
    with watching(tmp_path / "runs", "--state", tmp_path / "none/state.json") as watch:
        assert "a restart will verify everything again" in watch.until("note")["message"]
        watch.until("verified")
        assert watch.stop() == 0
    assert [report["event"] for report in watch.reports].count("note") == 1


def test_program_is_run_for_each_alarm_with_facts_and_without_keys(tmp_path: Path) -> None:
    runs, heard = tmp_path / "runs", tmp_path / "heard"
    damage(save_run(runs, [10])[0])
    program = f"sh -c 'env | grep CKPTMGR >> {heard}; cat >> {heard}; echo noise'"
    key = {"CKPTMGR_KEY": "00" * 32}
    result = run(
        "watch", runs, "--once", "--json", "--allow-unencrypted", "--exec", program, env=key
    )
    assert result.exit_code == 1
    text = heard.read_text()
    assert "CKPTMGR_WATCH_EVENT=alarm\n" in text
    assert f"CKPTMGR_WATCH_DIRECTORY={runs}\n" in text
    assert "CKPTMGR_WATCH_ALARM=" in text
    assert "CKPTMGR_KEY=" not in text
    alarms = [line for line in result.stdout.splitlines() if '"alarm"' in line.partition(",")[2]]
    assert text.splitlines()[-1] in alarms
    assert "noise" not in result.stdout


def test_program_is_run_for_an_alarm_whose_message_is_longer_than_a_variable_may_be(
    tmp_path: Path,
) -> None:
    runs, heard = tmp_path / "runs", tmp_path / "heard"
    runs.mkdir()
    name = "A" * 200_000
    header = json.dumps({name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    (runs / "net-1_1.safetensors").write_bytes(data)
    program = f"sh -c 'env | grep CKPTMGR_WATCH_MESSAGE >> {heard}; cat >> {heard}'"
    result = run("watch", runs, "--once", "--exec", program)
    assert result.exit_code == 1
    assert result.stderr == ""
    variable, event = heard.read_text().splitlines()
    assert variable.endswith("AAA...")
    assert name in json.loads(event)["message"]


def test_program_gets_a_message_of_one_line_that_steers_no_terminal(tmp_path: Path) -> None:
    runs, heard = tmp_path / "runs", tmp_path / "heard"
    damage(save_run(runs, [10], series="a\nCKPTMGR_WATCH_ALARM=none\x1b[31m")[0])
    program = f"sh -c 'env | grep CKPTMGR_WATCH_ >> {heard}'"
    assert run("watch", runs, "--once", "--exec", program).exit_code == 1
    facts = dict(line.split("=", 1) for line in heard.read_text().splitlines())
    assert facts["CKPTMGR_WATCH_ALARM"] == "damaged"
    message = facts["CKPTMGR_WATCH_MESSAGE"]
    assert message.startswith(r"a\nCKPTMGR_WATCH_ALARM=none\x1b[31m-1_10.ckpt: ")


def test_program_is_run_for_an_alarm_whose_message_has_a_lone_surrogate(tmp_path: Path) -> None:
    runs, heard = tmp_path / "runs", tmp_path / "heard"
    save_run(runs, [10, 20])
    program = f"sh -c 'env | grep CKPTMGR_WATCH_MESSAGE >> {heard}'"
    keep = 'best(1, "\ud800", min)'
    result = run("watch", runs, "--once", "--prune", "--keep", keep, "--exec", program)
    assert result.exit_code == 1
    assert "\\ud800" in heard.read_text()


@pytest.mark.parametrize(
    ("script", "problem"),
    [("#!/bin/sh\nexit 1\n", "ended with status 1"), ("#!/nowhere/shell\n", "No such file")],
)
def test_program_that_fails_is_noted(tmp_path: Path, script: str, problem: str) -> None:
    program = tmp_path / "program"
    program.write_text(script)
    program.chmod(0o700)
    damage(save_run(tmp_path, [10])[0])
    result = run("watch", tmp_path, "--once", "--exec", str(program))
    assert result.exit_code == 1
    assert problem in result.stderr


def test_save_of_the_last_microsecond_of_the_calendar_does_not_end_a_watch(tmp_path: Path) -> None:
    manifest = tmp_path / api.manifest_name(save_run(tmp_path, [10])[0].name)
    document = json.loads(manifest.read_text()) | {"saved_at": "9999-12-31T23:59:59.999999+00:00"}
    overwrite(manifest, json.dumps(document).encode())
    result = run("watch", tmp_path, "--once")
    assert result.exit_code == 0
    assert "of 9999-12-31 23:59:59Z" in result.stdout


def test_series_that_no_file_name_can_hold_does_not_end_a_watch_that_prunes(tmp_path: Path) -> None:
    last = save_run(tmp_path, [10, 20, 30])[-1]
    manifest = api.manifest_of(last)
    document = json.loads(manifest.read_text()) | {"series": "\ud800"}
    overwrite(manifest, json.dumps(document).encode())
    damage(last)
    result = run("watch", tmp_path, "--once", "--prune", "--quarantine", "--keep", "last(1)")
    assert result.exit_code == 0
    assert "is not the name of a series" in result.stdout


def test_first_alarm_ends_a_watch_that_was_told_so(tmp_path: Path) -> None:
    damage(save_run(tmp_path, [10])[0])
    with watching(tmp_path, "--stop-on-alarm", "--poll", "1s") as watch:
        assert watch.wait() == 1
    assert watch.reports[-1]["event"] == "alarm"


def test_once_verifies_prunes_and_ends(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    (tmp_path / "ckptmgr.toml").write_text('keep = "last(1)"\n')
    (tmp_path / "ckptmgr.toml").chmod(0o600)
    result = run("watch", tmp_path, "--once", "--prune")
    assert result.exit_code == 0, result.stderr
    words = [line.split()[1:3] for line in result.stdout.splitlines()]
    assert ["pruned", "net-1_10.ckpt"] in words
    assert ["verified", "net-3_10.ckpt"] in words
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["net-3_10.ckpt"]
    assert len(list(tmp_path.glob(".ckptmgr-trash/*/*.ckpt"))) == 2


def test_watch_without_prune_changes_nothing(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    (tmp_path / "ckptmgr.toml").write_text('keep = "last(1)"\n')
    before = tree_of(tmp_path)
    assert run("watch", tmp_path, "--once").exit_code == 0
    assert tree_of(tmp_path) == before


def test_policy_that_vanishes_is_an_alarm_and_not_the_end(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    policy = tmp_path / "ckptmgr.toml"
    policy.write_text('keep = "last(5)"\n')
    policy.chmod(0o600)
    with watching(tmp_path, "--prune", "--poll", "1s") as watch:
        policy.unlink()
        alarm = watch.until("alarm", alarm="retention")
        assert "no retention policy" in alarm["message"]
        replace(policy, 'keep = "last(5)"\n')
        watch.until("cleared", alarm="retention")
        assert watch.stop() == 0


def test_policy_that_becomes_invalid_is_an_alarm(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    policy = tmp_path / "ckptmgr.toml"
    policy.write_text('keep = "last(5)"\n')
    policy.chmod(0o600)
    with watching(tmp_path, "--prune", "--poll", "1s") as watch:
        replace(policy, 'keep = "lost(5)"\n')
        assert "keep" in watch.until("alarm", alarm="retention")["message"]
        replace(policy, 'keep = "last(1)"\n')
        watch.until("pruned")
        watch.until("cleared", alarm="retention")
        assert watch.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["nowhere"], 10, "no such directory"),
        ([".", "--keep", "last(1)"], 2, "--keep and --grace need --prune"),
        ([".", "--grace", "1h"], 2, "--keep and --grace need --prune"),
        ([".", "--prune"], 2, "no retention policy"),
        ([".", "--prune", "--keep", "lost(1)"], 2, "did you mean 'last'?"),
        ([".", "--poll", "0s"], 2, "--poll must be longer than zero"),
        ([".", "--poll", "often"], 2, "is not a time"),
        ([".", "--exec", "'"], 2, "--exec: No closing quotation"),
        ([".", "--exec", " "], 2, "--exec names no program"),
        ([".", "--exec", "no-such-program --now"], 2, "--exec: no such program: no-such-program"),
        ([".", "--slow", "1"], 2, "slow"),
        ([], 2, "missing argument"),
    ],
)
def test_wrong_use_is_refused_with_a_way_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("watch", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert problem in result.stderr
    assert "hint:" in result.stderr or "did you mean" in result.stderr


def test_closed_pipe_ends_it_quietly(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    command = [sys.executable, "-m", "ckptmgr", "watch", str(tmp_path), "--once"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=process_env(), check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_key_proves_what_appears_and_what_it_does_not_prove_is_an_alarm(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    result = run("watch", tmp_path, "--once", "--json", env={"CKPTMGR_KEY": "00" * 32})
    assert result.exit_code == 1
    kinds = [json.loads(line)["alarm"] for line in result.stdout.splitlines()]
    assert "unproven" in kinds
