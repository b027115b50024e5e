# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the given keys do not prove: they are shown, but decide nothing."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    Resume,
    UnprovenCheckpoint,
    load_checkpoint,
    open_checkpoint,
)
from tests.cli.running import run, run_json
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import overwrite

KEY, OTHER_KEY = bytes(range(16)), bytes(range(16, 32))
_HUGE = 2**64 - 1


def train(
    directory: Path,
    steps: range,
    *,
    key: bytes | None = KEY,
    prefix: str = "net",
    keep: str = "all",
) -> None:
    """Save some steps of a run whose state is its step."""
    config = CheckpointConfig(enc_key=key, keep=keep, save_checkpoint_steps=1)
    with CheckpointManager(directory, config, prefix=prefix) as manager:
        for step in steps:
            manager.step_end(step, {"w": np.full(3, step)}, metrics={"loss": 1.0 / step})


def key_source(directory: Path, key: bytes = KEY) -> str:
    """Return the option that names a key."""
    path = directory / f"{key.hex()[:6]}.key"
    path.touch(mode=0o600)
    path.write_text(f"hex:{key.hex()}")
    return f"file:{path}"


def add_other_key(runs: Path) -> None:
    """Add a newer checkpoint of the series that another key authenticates."""
    _add(runs, OTHER_KEY)


def add_plain(runs: Path) -> None:
    """Add a newer plain checkpoint of the series with a plain manifest."""
    _add(runs, None)


def add_bare(runs: Path) -> None:
    """Add a newer data file without a manifest."""
    _add(runs, None)
    (runs / api.manifest_name("net-900.ckpt")).unlink()


def _add(runs: Path, key: bytes | None) -> None:
    elsewhere = runs.parent / "elsewhere"
    train(elsewhere, range(900, 901), key=key)
    manifest = elsewhere / api.manifest_name("net-900.ckpt")
    if key is None:
        document = json.loads(manifest.read_text()) | {"sequence": 1000}
        overwrite(manifest, json.dumps(document).encode())
    for path in elsewhere.glob("net-*"):
        shutil.copy(path, runs)


STRANGERS = pytest.mark.parametrize("add", [add_other_key, add_plain, add_bare])
Add = Callable[[Path], None]


@STRANGERS
def test_stranger_in_the_directory_displaces_no_proven_checkpoint_in_prune(
    tmp_path: Path, add: Add
) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    add(runs)
    arguments = (
        "prune",
        runs,
        "--keep",
        "last(1)",
        "--yes",
        "--now",
        "--key",
        key_source(tmp_path),
    )
    shown = run_json(*arguments)
    assert shown["summary"]["dropped"] == 2
    assert sorted(path.name for path in runs.glob("net-*.ckpt")) == ["net-3.ckpt", "net-900.ckpt"]
    assert run("prune", runs, "--keep", "last(1)", "--dry-run").exit_code == 0


def test_prune_counts_what_the_key_does_not_prove(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    add_other_key(runs)
    (runs / api.manifest_name("net-1.ckpt")).unlink()
    arguments = ("prune", runs, "--keep", "last(1)", "--dry-run", "--key", key_source(tmp_path))
    assert run_json(*arguments)["summary"]["unproven"] == {"other-key": 1, "unproven": 1}
    shown = run(*arguments).stdout
    assert "1 checkpoint other-key: no rule counts it" in shown


@STRANGERS
def test_last_proven_checkpoint_stays_beside_a_stranger(tmp_path: Path, add: Add) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 2))
    add(runs)
    arguments = ("prune", runs, "--keep", "every(900)", "--yes", "--now")
    result = run(*arguments, "--key", key_source(tmp_path))
    assert (runs / "net-1.ckpt").exists()
    assert result.exit_code in (0, 13)


@STRANGERS
def test_stranger_is_not_handed_out_by_a_manager(tmp_path: Path, add: Add) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    add(runs)
    config = CheckpointConfig(enc_key=KEY)
    with CheckpointManager(runs, config, prefix="net") as manager:
        latest, best = manager.latest(), manager.best("loss")
        assert latest is not None
        assert best is not None
        assert (latest.step, best.step) == (3, 3)
        assert manager.resume().step == 3


def test_stranger_of_the_same_step_is_not_loaded_by_its_step(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    train(tmp_path / "other", range(1, 4), key=OTHER_KEY)
    for suffix in ("", api.MANIFEST_SUFFIX):
        shutil.copy(tmp_path / "other" / f"net-3.ckpt{suffix}", runs / f"net-3_1.ckpt{suffix}")
    text = (
        (runs / f"net-3_1.ckpt{api.MANIFEST_SUFFIX}")
        .read_text()
        .replace("net-3.ckpt", "net-3_1.ckpt")
    )
    overwrite(runs / f"net-3_1.ckpt{api.MANIFEST_SUFFIX}", text.encode())
    with CheckpointManager(runs, CheckpointConfig(enc_key=KEY), prefix="net") as manager:
        assert isinstance(loaded := manager.load(3), dict)
        assert loaded["w"][0] == 3


@STRANGERS
def test_stranger_is_not_latest_on_the_command_line(tmp_path: Path, add: Add) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    add(runs)
    source = key_source(tmp_path)
    shown = run_json("inspect", "latest", "--dir", runs, "--key", source)
    assert shown["summary"]["step"] == 3
    states = {
        item["path"][-12:]: item["state"] for item in run_json("ls", runs, "--key", source)["items"]
    }
    expected = "other-key" if add is add_other_key else "unproven"
    assert states["net-900.ckpt"] == expected


@STRANGERS
def test_retention_after_a_save_counts_no_stranger(tmp_path: Path, add: Add) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4))
    add(runs)
    config = CheckpointConfig(enc_key=KEY, keep="last(2)", save_checkpoint_steps=1)
    with CheckpointManager(runs, config, prefix="net") as manager:
        assert manager.resume().step == 3
        manager.save(4, {"w": np.full(3, 4)})
    assert sorted(path.name for path in runs.glob("net-*.ckpt")) == [
        "net-3.ckpt",
        "net-4.ckpt",
        "net-900.ckpt",
    ]


@pytest.mark.parametrize("key", [KEY, None], ids=["key", "no key"])
@pytest.mark.parametrize("field", ["sequence", "attempt"])
def test_largest_number_in_an_unproven_manifest_stops_no_save(
    tmp_path: Path, key: bytes | None, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 4), key=key)
    train(tmp_path / "other", range(4, 5), key=None)
    for path in (tmp_path / "other").glob("net-4.*"):
        shutil.copy(path, runs)
    manifest = runs / api.manifest_name("net-4.ckpt")
    document = json.loads(manifest.read_text())
    document[field] = _HUGE
    overwrite(manifest, json.dumps(document).encode())
    config = CheckpointConfig(enc_key=key, keep="all")
    with (
        caplog.at_level(logging.WARNING),
        CheckpointManager(runs, config, prefix="net") as manager,
    ):
        for step in (4, 4, 5):
            manager.save(step, {"w": np.full(3, step)})
        saved = [c for c in manager.checkpoints() if c.why == "manual"]
    assert [(c.step, c.sequence) for c in saved] == [(4, 4), (4, 5), (5, 6)]
    assert [c.attempt for c in saved] in ([0, 1, 0], [1, 2, 0])
    assert "is ignored" in caplog.text


def test_key_that_changed_without_rekey_does_not_restart_the_numbering(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4), key=KEY)
    train(tmp_path, range(4, 6), key=OTHER_KEY)
    with CheckpointManager(tmp_path, prefix="net") as manager:
        found = manager.checkpoints()
    assert [(c.step, c.sequence) for c in found] == [(n, n) for n in range(1, 6)]


@pytest.mark.parametrize("load", [load_checkpoint, open_checkpoint])
def test_manifest_whose_authentication_was_stripped_is_refused_with_a_key(
    tmp_path: Path, load: Callable[..., object]
) -> None:
    train(tmp_path, range(1, 2))
    manifest = tmp_path / api.manifest_name("net-1.ckpt")
    document = json.loads(manifest.read_text())
    del document["auth"]
    overwrite(manifest, json.dumps(document).encode())
    with pytest.raises(UnprovenCheckpoint, match="not authenticated"):
        load(tmp_path / "net-1.ckpt", dec_key=KEY)
    assert load(tmp_path / "net-1.ckpt", dec_key=KEY, allow_unsealed=True) is not None


def test_swapped_names_without_manifests_are_unproven(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 3))
    for path in runs.glob(f"*{api.MANIFEST_SUFFIX}"):
        path.unlink()
    (runs / "net-1.ckpt").rename(runs / "x")
    (runs / "net-2.ckpt").rename(runs / "net-1.ckpt")
    (runs / "x").rename(runs / "net-2.ckpt")
    source = key_source(tmp_path)
    checked = run("verify", runs, "--key", source, "--json")
    assert checked.exit_code == 13
    answer = json.loads(checked.stdout)
    assert {item["status"] for item in answer["items"]} == {"unproven"}
    assert run("inspect", "latest", "--dir", runs, "--key", source).exit_code == 10
    shown = run("inspect", runs / "net-2.ckpt", "--key", source).stdout
    assert "unproven" in shown


@pytest.mark.parametrize("allow", [{"allow_unsealed": True}, {"allow_unencrypted": True}])
def test_sealed_file_beside_plain_manifest_needs_permission_only_to_be_unsealed(
    tmp_path: Path, allow: dict[str, bool]
) -> None:
    train(tmp_path, range(1, 2))
    manifest = tmp_path / api.manifest_name("net-1.ckpt")
    document = json.loads(manifest.read_text())
    del document["auth"]
    overwrite(manifest, json.dumps(document).encode())
    config = CheckpointConfig(enc_key=KEY)
    with manager_on(tmp_path, config, prefix="net", **allow) as manager:
        assert manager.resume().step == 1


def test_plain_file_needs_permission_to_be_unencrypted(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train(runs, range(1, 2), key=None)
    path, source = runs / "net-1.ckpt", key_source(tmp_path)
    for command in (("verify", path), ("inspect", path), ("decrypt", path, "-o", tmp_path / "out")):
        refused = run(*command, "--key", source, "--allow-unsealed")
        assert refused.exit_code == 13, command
        assert "--allow-unencrypted" in refused.output
    for command in (("verify", path), ("inspect", path)):
        assert run(*command, "--key", source, "--allow-unencrypted").exit_code == 0


def without_manifests(runs: Path) -> None:
    """Save a run and remove its manifests."""
    train(runs, range(1, 4))
    for path in runs.glob(f"*{api.MANIFEST_SUFFIX}"):
        path.unlink()


def test_resume_with_a_key_refuses_to_start_over_beside_files_without_manifests(
    tmp_path: Path,
) -> None:
    without_manifests(tmp_path)
    with (
        CheckpointManager(tmp_path, CheckpointConfig(enc_key=KEY), prefix="net") as manager,
        pytest.raises(UnprovenCheckpoint, match=r'start="new"'),
    ):
        manager.resume({"w": np.zeros(3)})


def test_resume_starts_anew_where_the_caller_says_so(tmp_path: Path) -> None:
    without_manifests(tmp_path)
    state = {"w": np.zeros(3)}
    with CheckpointManager(tmp_path, CheckpointConfig(enc_key=KEY), prefix="net") as manager:
        assert manager.resume(state, Resume(start="new")).step == 0
        manager.save(1, state)
        assert manager.resume(state).step == 1
    assert (tmp_path / "net-3.ckpt").exists()


def test_run_that_starts_anew_removes_nothing_of_the_runs_before(tmp_path: Path) -> None:
    train(tmp_path, range(1, 4))
    config = CheckpointConfig(enc_key=KEY, keep="last(1)")
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        assert manager.resume(None, Resume(start="new")).is_fresh
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)})
        assert [c.step for c in manager.checkpoints()] == [1, 2, 3, 2]


def test_start_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match="start must be"),
    ):
        manager.resume(None, Resume(start="latest"))  # type: ignore[arg-type]
