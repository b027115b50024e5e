# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr diff`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    save_checkpoint,
    save_state,
)
from ckptmgr.maintenance.diff_sides import open_side
from tests.cli.running import key_file, process_env, run
from tests.cli.schemas import run_with_schema
from tests.maintenance.test_repair import saved as save_ranks
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, flip, save_run

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def state(lr: float = 0.1, **net: Any) -> dict[str, Any]:
    return {"net": {"w": W, **net}, "optimizer": {"lr": lr, "names": ["a", "b"]}}


def save(directory: Path, *states: dict[str, Any], **config: Any) -> Path:
    """Save one state for each step from 1 on; return the directory."""
    with CheckpointManager(directory, CheckpointConfig(**config), prefix="net") as manager:
        for step, one in enumerate(states, 1):
            manager.save(step, one)
    return directory


def test_same_steps_of_one_state_exit_0_with_one_line(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", state(), state())
    answer = run("diff", "1", "2", "--dir", runs)
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert answer.stdout == (
        f"A  {runs}/net-1.ckpt  step 1\nB  {runs}/net-2.ckpt  step 2\n1 tensor: 1 same\n"
    )


def test_each_kind_of_difference_is_a_row_and_exits_1(tmp_path: Path) -> None:
    changed = W.copy()
    changed[1, 1] += 2
    changed[2, 3] = np.nan
    a = state(shaped=np.ones(3), typed=np.ones(2, np.float32), gone=np.zeros(()), kept=np.ones(5))
    b = state(0.2, shaped=np.ones(4), typed=np.ones(2, np.float16), new=W, kept=np.ones(5))
    b["net"]["w"] = changed
    runs = save(tmp_path / "runs", a, b)
    answer = run("diff", "1", "2", "--dir", runs)
    assert (answer.exit_code, answer.stderr) == (1, "")
    assert answer.stdout.splitlines()[2:] == [
        "CHANGE   NAME          A               B             DIFFER  ABS     REL  NORM    NAN",
        "changed  net/w         float32 3x4     float32 3x4  2 of 12    2  0.2857     2  0 → 1",
        "shape    net/shaped    float64 3       float64 4          -    -       -     -      -",
        "dtype    net/typed     float32 2       float16 2     0 of 2    0       0     0      -",
        "removed  net/gone      float64 scalar  -                  -    -       -     -      -",
        "added    net/new       -               float32 3x4        -    -       -     -      -",
        "value    optimizer/lr  0.1             0.2                -    -       -     -      -",
        "6 tensors: 1 added, 1 removed, 1 shape, 1 dtype, 1 changed, 1 same; 1 value differs;"
        " largest change 2 in net/w; norm 2; 0 → 1 NaN",
    ]
    plain = run("diff", "1", "2", "--dir", runs, "--summary", charset="ascii").stdout.splitlines()
    assert (len(plain), plain[2].endswith("; 0 -> 1 NaN")) == (3, True)
    assert run("diff", "1", "2", "--dir", runs, "-v").stdout.count("\nsame  ") == 1
    names = ["net/w", "net/shaped", "net/typed", "net/gone", "net/new", "optimizer/lr"]
    assert run("diff", "1", "2", "--dir", runs, "-q").stdout.split() == names
    assert run("diff", "1", "2", "--dir", runs, "-0").stdout.split("\0")[:-1] == names


def test_json_has_the_figures_of_every_difference(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", state(), state(0.5, new=W) | {"net": {"w": W + 1, "new": W}})
    document = run_with_schema("diff", "1", "2", "--dir", runs, code=1)
    (item,) = document["items"]
    assert [item["a"]["step"], item["b"]["step"], item["is_same"]] == [1, 2, False]
    changed, added, value = item["differences"]
    assert changed["elements"] | {"max_rel": 0, "relative_norm": 0} == {
        "elements": 12,
        "differing": 12,
        "max_abs": 1.0,
        "max_rel": 0,
        "norm": pytest.approx(12**0.5),
        "relative_norm": 0,
        **dict.fromkeys(("nan_a", "nan_b", "inf_a", "inf_b"), 0),
    }
    assert changed["elements"]["relative_norm"] == pytest.approx(12**0.5 / np.linalg.norm(W))
    assert (added["change"], added["a"]) == ("added", None)
    assert added["b"] == {"dtype": "float32", "shape": [3, 4]}
    assert value == {
        "name": "optimizer/lr",
        "change": "value",
        "a": "0.1",
        "b": "0.5",
        "elements": None,
    }
    summary = run_with_schema("diff", "1", "2", "--dir", runs, "--summary", code=1)
    assert summary["items"][0]["differences"] == []
    assert summary["items"][0]["tensors"]["changed"] == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [((), 1), (("--atol", "0.02"), 0), (("--rtol", "0.01"), 0), (("--rtol", "0.0001"), 1)],
)
def test_tolerance_takes_small_changes_of_tensors_and_numbers(
    tmp_path: Path, options: tuple[str, ...], code: int
) -> None:
    runs = save(tmp_path / "runs", state(1.0) | {"k": 3}, state(1.001) | {"k": 3, "net": {"w": W * 1.001}})  # fmt: skip
    assert run("diff", "1", "2", "--dir", runs, *options).exit_code == code


def test_values_that_are_no_floats_have_no_tolerance(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", {"step": 5, "note": "a"}, {"step": 6, "seed": 1})
    answer = run("diff", "1", "2", "--dir", runs, "--atol", "9")
    assert [line.split() for line in answer.stdout.splitlines()[3:]] == [
        *(["value", "step", "5", "6"], ["value", "note", "'a'", "-"], ["value", "seed", "-", "1"]),
        ["0", "tensors;", "3", "values", "differ"],
    ]


def test_place_of_the_data_loaders_is_compared(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(), prefix="net") as manager:
        for step, _ in enumerate(manager.batches([1, 2, 3]), 1):
            manager.save(step, state())
    assert run("diff", "1", "2", "--dir", tmp_path, "-q").stdout == "ckptmgr.data\n"


def test_set_that_is_removed_after_the_listing_is_not_found(tmp_path: Path) -> None:
    found = save_ranks(tmp_path)
    (tmp_path / f"{found.name}.manifest.json").unlink()
    with pytest.raises(CheckpointNotFound), open_side(api.place(tmp_path), found, api.reading()):
        pass


def test_directories_are_compared_step_by_step(tmp_path: Path) -> None:
    a = save(tmp_path / "a", state(), state(), state())
    b = save(tmp_path / "b", state(), state(0.2), format="safetensors")
    answer = run("diff", a, b)
    assert answer.exit_code == 1
    assert answer.stdout.splitlines()[-3:] == [
        "1 tensor: 1 same; 1 value differs",
        f"A  {a}/net-3.ckpt  step 3  only in A",
        "3 steps: 1 the same, 1 differ, 1 only in A",
    ]
    assert run("diff", b, a, "-q").stdout.splitlines() == [
        *(f"{b}/net-2.safetensors", f"{a}/net-2.ckpt", f"{a}/net-3.ckpt"),
    ]
    document = run_with_schema("diff", b, a, code=1)
    assert [item["a"] is None for item in document["items"]] == [False, False, True]
    assert document["summary"] | {"atol": 0, "rtol": 0} == {
        **{"is_same": False, "count": 3, "same": 1, "only_a": 0, "only_b": 1},
        **{"atol": 0, "rtol": 0},
    }
    assert run("diff", a, a).exit_code == 0


def test_series_of_directories_are_compared_by_name(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1)):
        save_run(tmp_path / folder, [10 * seed], series="net")
        save_run(tmp_path / folder, [10 * seed, 20], series="other")
    both = (tmp_path / "a", tmp_path / "b")
    assert run("diff", *both).stdout.endswith("3 steps: 3 the same, 0 differ\n")
    assert run("diff", *both, "--series", "other").stdout.endswith("2 steps: 2 the same, 0 differ\n")  # fmt: skip


def test_mindspore_file_is_compared_with_one_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    weights = {"w": np.array([1, 2, 3], np.float32), "b": np.array([0.5], np.float32)}
    ours = tmp_path / "mindspore.ckpt"
    save_checkpoint(weights, ours, manifest=False, crc_check=True)
    theirs = tmp_path / "model.safetensors"
    save_torch({f"model.{name}": torch.from_numpy(one).bfloat16() for name, one in weights.items()}, theirs)  # fmt: skip
    answer = run("diff", ours, theirs, "--other-only", "model", "-v")
    assert answer.exit_code == 1
    assert "dtype   w     float32 3  bfloat16 3  0 of 3    0    0     0" in answer.stdout
    assert "2 tensors: 2 dtype" in answer.stdout
    assert f"{theirs} is not verified" in answer.stderr
    assert str(ours) not in answer.stderr  # its CRC32 was checked


def test_mindspores_own_files_are_the_same_in_both_ways_of_writing() -> None:
    files = (GOLDEN_FILES / "ckpt_all_dtypes.ckpt", GOLDEN_FILES / "ckpt_all_dtypes_async.ckpt")
    assert run("diff", *files).exit_code == 0


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_encrypted_checkpoints_are_compared_under_two_keys(tmp_path: Path, format: str) -> None:
    a = save(tmp_path / "a", state(), state(0.3), enc_key=KEY.raw, format=format)
    b = save(tmp_path / "b", state(), enc_key=OTHER_KEY.raw, format=format)
    keys = {"ONE": KEY.raw.hex(), "TWO": OTHER_KEY.raw.hex()}
    command = ("diff", "1", "1", "--dir", a, "--other-dir", b, "--key", "env:ONE")
    assert run(*command, "--other-key", "env:TWO", env=keys).exit_code == 0
    assert run(*command, env=keys).exit_code in (12, 13)
    assert run("diff", "1", "2", "--dir", a, "--key", "env:ONE", env=keys).exit_code == 1
    literal = run(*command, "--other-key", keys["TWO"], env=keys)
    assert (literal.exit_code, keys["TWO"] in literal.output) == (2, False)


def test_plain_file_is_refused_with_a_key_unless_allowed(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", state(), enc_key=KEY.raw)
    save_file({"w": W}, tmp_path / "model.safetensors")
    command = ("diff", "1", tmp_path / "model.safetensors", "--dir", runs, "--only", "net", "--other-only", "v")  # fmt: skip
    key = ("--key", key_file(tmp_path))
    assert run(*command, *key).exit_code == 13
    assert run(*command, *key, "--allow-unencrypted").exit_code == 2  # no part v
    named = save_state({"net": {"w": W}}, tmp_path / "b.safetensors", manifest=False).path
    allowed = ("diff", "1", named, "--dir", runs, "--only", "net", *key, "--allow-unencrypted")
    assert run(*allowed).exit_code == 0


def test_step_that_only_a_name_states_is_refused_with_a_key(tmp_path: Path) -> None:
    path = save_state(state(), tmp_path / "net-1_5.ckpt", enc_key=KEY.raw, manifest=False).path
    key = ("--key", key_file(tmp_path))
    assert run("diff", "5", "5", "--dir", tmp_path, *key).exit_code == 13
    assert run("diff", path, path, *key).exit_code == 0


def test_checkpoint_of_ranks_is_compared_with_one_file(tmp_path: Path) -> None:
    weights = np.arange(30_000, dtype=np.float32).reshape(300, 100)
    save_ranks(tmp_path / "ranks")
    whole = save_state({"w": weights, "scale": np.float64(2.5)}, tmp_path / "whole.ckpt").path
    same = run("diff", "1", whole, "--dir", tmp_path / "ranks")
    assert (same.exit_code, "tensors only" in same.stderr) == (0, True)
    weights[299, 99] += 1
    other = save_state({"w": weights, "scale": np.float64(2.5)}, tmp_path / "other.ckpt").path
    assert "1 of 30000" in run("diff", "1", other, "--dir", tmp_path / "ranks").stdout
    save_ranks(tmp_path / "own", own=True)
    assert "own (rank 3)" in run("diff", "1", "1", "--dir", tmp_path / "own", "-v").stdout


def test_damage_is_trouble_and_no_difference(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", state(), state())
    flip(runs / "net-2.ckpt", 100)
    answer = run("diff", "1", runs / "net-2.ckpt", "--dir", runs)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "do not match the digest" in answer.stderr
    as_json = json.loads(run("diff", "1", "2", "--dir", runs, "--json").stderr)
    assert (as_json["code"], as_json["error"]) == (2, "ChecksumMismatch")
    assert as_json["path"] == str(runs / "net-2.ckpt")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("1", "9"), 10, "no checkpoint is '9'"),
        (("1", "2", "--other-dir", "nowhere"), 10, "no such directory"),
        (("1", "2", "--atol", "nan"), 2, "--atol is no tolerance"),
        (("1", "2", "--rtol", "-1"), 2, "--rtol is no tolerance"),
        (("1", "2", "--only", ""), 2, "--only is empty"),
        (("1", "2", "--only", "nets"), 2, "no tensors of a part 'nets'; its parts are 'net'"),
        (("1", "."), 2, "names 2 checkpoints"),
    ],
)
def test_unusable_argument_is_trouble_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    save(tmp_path, state(), state())
    monkeypatch.chdir(tmp_path)
    answer = run("diff", *arguments)
    assert (answer.exit_code, answer.stdout) == (code, "")
    assert message in answer.stderr


def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    runs = save(tmp_path / "runs", state(), state(0.2))
    command = f"{sys.executable} -m ckptmgr diff 1 2 --dir {runs} | :; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=process_env(), capture_output=True, check=False)  # fmt: skip
    assert done.returncode in (1, 141)
    assert done.stderr == b""


_PEAK = """
import sys
from ckptmgr.cli import main
try:
    main()
finally:
    status = open("/proc/self/status").read()
    print(status.partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


def peak_mib(*arguments: str | Path) -> int:
    """Return the peak memory of a comparison that finds one difference, in MiB."""
    command = [sys.executable, "-c", _PEAK, "diff", *map(str, arguments)]
    done = subprocess.run(command, env=process_env(), capture_output=True, check=False)
    assert (done.returncode, b"1 of " in done.stdout) == (1, True), done.stderr
    return int(done.stderr.split()[-1]) >> 10


@pytest.mark.slow
def test_memory_of_a_comparison_is_that_of_a_window(tmp_path: Path) -> None:
    key = key_file(tmp_path)

    def pair(name: str, size_mib: int, **config: Any) -> list[Path]:
        values, files = np.zeros(size_mib << 18, np.float32), []
        for side in ("a", "b"):
            path = tmp_path / f"{side}-{name}"
            files.append(save_state({"w": values}, path, **config).path)
            values[-1] = 1
        return files

    plain = peak_mib(*pair("s.safetensors", 1))
    large = peak_mib(*pair("l.ckpt", 48))
    sealed = peak_mib(*pair("l.safetensors.ckpe", 48, enc_key=KEY.raw), "--key", key)
    # Two windows of 4 MiB, and of each file the digest range or segment that is being read; whole
    # tensors would take 96 MiB, and twice that as float64.
    assert max(large, sealed) - plain < 60


def test_help_says_what_the_exit_codes_mean() -> None:
    shown = " ".join(run("diff", "--help").stdout.split())
    assert "exit 0 if they are the same, 1 if not, 2 and more for trouble" in shown
