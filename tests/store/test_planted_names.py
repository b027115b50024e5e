# SPDX-License-Identifier: Apache-2.0
"""Manifests that name files which no run saves: they have nothing removed, moved, copied or counted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptmgr
from ckptmgr import CheckpointConfig, CheckpointManager, Mirror, UnsafePrune, UnsafeWrite
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.core.shard_names import is_checkpoint_name, parse_shard_name
from ckptmgr.objects.directory import data_key
from tests.cli.running import NOW_S, run
from tests.remote.buckets import new_url
from tests.support import api
from tests.support.planted import FOREIGN_NAMES, SHARD, describing, plant, plant_temp

CONTENT = b"print('my only copy')\n"


def train(directory: Path, *steps: int, **options: object) -> None:
    config = CheckpointConfig(**{"keep": "last(3)", **options})  # type: ignore[arg-type]
    state = {"w": np.zeros(8, np.float32)}
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.resume(state)
        for step in steps:
            manager.save(step, state)


def steps_in(directory: Path) -> list[int]:
    return sorted(one.step for one in api.listed(directory) if one.is_countable)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with the steps 10, 20 and 30 of a run."""
    train(tmp_path / "runs", 10, 20, 30)
    return tmp_path / "runs"


def act_prune(runs: Path) -> None:
    assert run("prune", runs, "--keep", "last(2)", "--yes", "--now").exit_code == 0


def act_run(runs: Path) -> None:
    train(runs, 40, 50, keep="last(1)")


def act_quarantine(runs: Path) -> None:
    assert run("verify", runs, "--quarantine", "--yes").exit_code in (0, 2)


def act_trash_and_undo(runs: Path) -> None:
    assert run("prune", runs, "--keep", "last(1)", "--yes").exit_code == 0
    assert run("prune", runs, "--undo").exit_code == 0


def act_watch(runs: Path) -> None:
    run("watch", runs, "--once", "--quarantine")


def act_report(runs: Path) -> None:
    assert run("report", runs, "-o", runs.parent / "page.html").exit_code == 0


def act_verify(runs: Path) -> None:
    assert run("verify", runs, "--deep").exit_code == 0


def act_rm(runs: Path) -> None:
    assert run("rm", "10", "--dir", runs, "--yes", "--now").exit_code == 0


def act_empty_trash(runs: Path) -> None:
    assert run("prune", runs, "--keep", "last(1)", "--yes").exit_code == 0
    later_s = NOW_S + 7 * 86_400
    assert run("prune", runs, "--keep", "last(1)", "--yes", now_s=later_s).exit_code == 0


def act_copy(runs: Path) -> None:
    url = new_url()
    assert run("copy", runs, url).exit_code == 0
    assert not [one.key for one in api.open_objects(url).list() if "net-" not in one.key]


ACTS = [
    act_prune,
    act_run,
    act_quarantine,
    act_trash_and_undo,
    act_watch,
    act_report,
    act_verify,
    act_rm,
    act_empty_trash,
    act_copy,
]


def notices_reads(directory: Path) -> bool:
    """Return whether the file system notes when a file is read."""
    probe = directory / "probe"
    probe.write_bytes(CONTENT)
    os.utime(probe, (0, time.time()))
    probe.read_bytes()
    return probe.stat().st_atime != 0


KINDS = ["file", "other size", "link", "link elsewhere", "pipe", "directory", "absent"]


def put(path: Path, kind: str) -> Path | None:
    """Put an entry of a kind in a place; return the file whose bytes must stay, if there is one."""
    outside = path.parent.parent / f"outside-{path.name}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind.startswith("link"):
        outside.write_bytes(CONTENT)
        path.symlink_to(outside if kind == "link" else "/dev/zero")
        return outside
    elif kind != "absent":
        path.write_bytes(CONTENT if kind == "file" else CONTENT * 2)
        return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__.removeprefix("act_"))
def test_planted_manifest_changes_no_answer_and_no_byte_outside_the_checkpoints(
    act: Callable[[Path], None], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path / "runs"
    train(model, 10, 20, 30)
    is_noticed = notices_reads(tmp_path)

    @settings(max_examples=12, deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from(FOREIGN_NAMES),
            st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 25, 99]), st.booleans()),
            min_size=1,
        )
    )
    def holds(planted: dict[str, tuple[str, int, bool]]) -> None:
        work = tmp_path_factory.mktemp("planted")
        alone, runs = (Path(shutil.copytree(model, work / name)) for name in ("alone", "runs"))
        watched: dict[Path, Path | None] = {}
        for name, (kind, step, is_temp) in planted.items():
            watched[runs / name] = put(runs / name, kind)
            if is_temp:
                plant_temp(runs, name, CONTENT)
            else:
                (runs / api.manifest_name(name)).write_bytes(
                    api.encode_manifest(describing(runs, name, CONTENT, step=step))
                )
        if "ckptmgr.toml" in planted:  # another rule holds for a policy
            (runs / "ckptmgr.toml").unlink(missing_ok=True) if (
                planted["ckptmgr.toml"][0] != "directory"
            ) else (runs / "ckptmgr.toml").rmdir()
            del watched[runs / "ckptmgr.toml"]
        before = {path: path.lstat().st_ino for path in watched if os.path.lexists(path)}
        for file in filter(None, watched.values()):
            os.utime(file, (0, time.time()))
        act(alone)
        act(runs)
        assert {path: path.lstat().st_ino for path in before} == before
        for file in filter(None, watched.values()):
            assert not is_noticed or file.stat().st_atime == 0, f"{file} was read"
            assert file.read_bytes() in (CONTENT, CONTENT * 2)
        assert steps_in(runs) == steps_in(alone)

    holds()


@given(st.text(max_size=6), st.sampled_from(["", ".py", ".bin", *DATA_SUFFIXES, ".shards"]))
def test_name_of_a_checkpoint_is_neither_hidden_nor_that_of_a_rank_nor_of_another_kind(
    stem: str, suffix: str
) -> None:
    name = stem + suffix
    if is_checkpoint_name(name):
        assert not name.startswith(".")
        assert name.endswith((*DATA_SUFFIXES, ".shards"))
        assert parse_shard_name(name) is None
    elif not name.startswith("."):
        assert not name.endswith((*DATA_SUFFIXES, ".shards"))


def test_copy_from_an_address_brings_no_file_of_another_kind(runs: Path, tmp_path: Path) -> None:
    url = new_url()
    assert run("copy", runs, url).exit_code == 0
    objects = api.open_objects(url)
    for name in FOREIGN_NAMES:
        manifest = describing(runs, name, CONTENT, step=99)
        objects.create(api.manifest_name(name), api.encode_manifest(manifest))
        objects.put(data_key(manifest, manifest.file), [CONTENT], len(CONTENT))
    target = tmp_path / "copy"
    assert run("copy", url, target).exit_code == 0
    assert steps_in(target) == [10, 20, 30]
    assert {one.name.split("-")[0] for one in target.iterdir()} == {"net"}
    for name in ("numpy.py", "ckptmgr.toml"):
        assert run("copy", f"{url}/{name}", target).exit_code != 0
        assert not (target / name).exists()


def test_resume_from_a_mirror_brings_no_file_of_another_kind(runs: Path, tmp_path: Path) -> None:
    url = new_url()
    assert run("copy", runs, url).exit_code == 0
    objects = api.open_objects(url)
    for name in FOREIGN_NAMES:
        manifest = describing(runs, name, CONTENT, step=99)
        objects.create(api.manifest_name(name), api.encode_manifest(manifest))
        objects.put(data_key(manifest, manifest.file), [CONTENT], len(CONTENT))
    target = tmp_path / "resumed"
    config = CheckpointConfig()
    with CheckpointManager(target, config, prefix="net", mirror=Mirror(url)) as manager:
        assert manager.resume({"w": np.ones(8, np.float32)}).step == 30
    assert [one.name for one in target.iterdir() if one.name in FOREIGN_NAMES] == []


def test_file_of_a_rank_in_a_manifest_of_its_own_stays_in_the_newest_checkpoint(
    tmp_path: Path, runs: Path
) -> None:
    plant(runs, SHARD, CONTENT, step=1)
    act_prune(runs)
    assert (runs / SHARD).read_bytes() == CONTENT
    assert steps_in(runs)[-2:] == [20, 30]


def test_single_file_under_another_name_is_loaded_and_verified_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    ckptmgr.save_state({"w": np.arange(3.0)}, path, format="safetensors")
    assert api.listed(tmp_path) == []
    state: Any = ckptmgr.load_state(path)
    np.testing.assert_array_equal(state["w"], np.arange(3.0))
    assert run("verify", path).exit_code == 0
    assert "checked manifest" in run("verify", path).stdout


def test_single_file_under_another_name_is_not_removed_by_name(tmp_path: Path, runs: Path) -> None:
    path = runs / "model.bin"
    ckptmgr.save_state({"w": np.arange(3.0)}, path, format="safetensors")
    refused = run("rm", path, "--yes")
    assert refused.exit_code != 0
    assert "by hand" in refused.stderr
    found = api.place(runs).look("model.bin")
    assert found is not None
    with api.place(runs).lease(found.series), pytest.raises(UnsafePrune, match="no run saves"):
        api.place(runs).remove([found])
    assert path.exists()


def test_file_of_another_kind_in_the_trash_stays_with_its_folder(runs: Path) -> None:
    assert run("prune", runs, "--keep", "last(2)", "--yes").exit_code == 0
    (batch,) = (runs / ".ckptmgr-trash").iterdir()
    (batch / "notes.txt").write_bytes(CONTENT)
    later_s = NOW_S + 7 * 86_400
    assert run("prune", runs, "--keep", "last(2)", "--yes", now_s=later_s).exit_code == 0
    assert [one.name for one in batch.iterdir()] == ["notes.txt"]


def test_download_of_a_name_of_another_kind_is_refused(tmp_path: Path) -> None:
    from ckptmgr.remote.download import download
    from tests.remote.buckets import directory_of, new_objects

    with pytest.raises(UnsafeWrite, match="is not downloaded"):
        download(directory_of(new_objects()), "train.py", api.place(tmp_path))
