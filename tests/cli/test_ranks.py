# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr transform`, `ckptmgr unify`, `ckptmgr merge`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr import load_checkpoint, save_checkpoint
from ckptmgr.cli.exits import Exit
from ckptmgr.parallel.layout import read_layouts
from tests.cli.running import run, run_json

GOLDEN = Path(__file__).parent.parent / "golden" / "transform"
STRATEGIES = GOLDEN / "strategies"
SHARDED = GOLDEN / "dp2_mp2__to__dp2_mp4"
KEY_ENV = {"RUN_KEY": "00" * 32}


def test_transform_writes_the_files_of_all_ranks(tmp_path: Path) -> None:
    document = run_json(
        "transform",
        SHARDED / "src_ckpt",
        "-o",
        tmp_path / "out",
        "--from",
        STRATEGIES / "dp2_mp2.ckpt",
        "--to",
        STRATEGIES / "dp2_mp4.ckpt",
        "--prefix",
        "ck_",
    )
    files = [Path(item["path"]) for item in document["items"]]
    assert files == [tmp_path / "out" / f"rank_{rank}" / f"ck_{rank}.ckpt" for rank in range(8)]
    assert document["schema"] == "ckptmgr.transform/1"
    recorded = load_checkpoint(SHARDED / "dst_ckpt" / "rank_5" / "ck_5.ckpt")
    found = load_checkpoint(files[5])
    assert found.keys() == recorded.keys()
    for name, array in recorded.items():
        np.testing.assert_array_equal(found[name], array)


def whole_checkpoint(directory: Path) -> Path:
    (directory / "in" / "rank_0").mkdir(parents=True)
    key = bytes(32)
    save_checkpoint({"w": np.arange(4)}, directory / "in" / "rank_0" / "net.ckpt", enc_key=key)
    return directory / "in"


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_transform_encrypts_with_the_key_of_the_source_unless_told_not_to(
    plain: list[str], tmp_path: Path
) -> None:
    arguments: list[str | Path] = ["transform", whole_checkpoint(tmp_path), "-o", tmp_path / "out"]
    result = run(*arguments, *plain, "--key", "env:RUN_KEY", env=KEY_ENV)
    assert result.exit_code == Exit.DONE, result.stderr
    key = None if plain else bytes(32)
    values = load_checkpoint(tmp_path / "out" / "rank_0" / "net0.ckpt", dec_key=key)
    np.testing.assert_array_equal(values["w"], np.arange(4))


def test_transform_without_the_key_says_so(tmp_path: Path) -> None:
    result = run("transform", whole_checkpoint(tmp_path), "-o", tmp_path / "out")
    assert result.exit_code == Exit.KEY


def test_prefix_that_is_a_path_is_refused(tmp_path: Path) -> None:
    result = run("transform", SHARDED / "src_ckpt", "-o", tmp_path, "--prefix", "../x")
    assert result.exit_code == Exit.FAILED
    assert "--prefix starts a file name" in result.stderr


def test_slices_in_no_file_give_the_exit_code_of_what_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    source = SHARDED / "src_ckpt" / "rank_0" / "net.ckpt"
    (tmp_path / "rank_0" / "net.ckpt").write_bytes(source.read_bytes())
    strategy = STRATEGIES / "dp2_mp2.ckpt"
    result = run("transform", tmp_path, "-o", tmp_path / "out", "--from", strategy)
    assert result.exit_code == Exit.NOT_FOUND
    assert "bring the file of one of the ranks (1, 3)" in result.stderr


def test_unify_lists_what_it_wrote(tmp_path: Path) -> None:
    strategy = STRATEGIES / "dp2_mp2.ckpt"
    result = run("unify", SHARDED / "src_st", "-o", tmp_path, "--from", strategy)
    assert result.exit_code == Exit.DONE
    assert "part0.safetensors" in result.stdout
    assert "3 files" in result.stdout


def test_unify_of_encrypted_files_must_be_agreed_to(tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        "unify",
        whole_checkpoint(tmp_path),
        "-o",
        tmp_path / "out",
        "--key",
        "env:RUN_KEY",
    ]
    refused = run(*arguments, env=KEY_ENV)
    assert refused.exit_code == Exit.FAILED
    assert "add --plain" in refused.stderr
    assert not (tmp_path / "out").exists()
    done = run(*arguments, "--plain", env=KEY_ENV)
    assert done.exit_code == Exit.DONE, done.stderr
    assert list(load_checkpoint(tmp_path / "out" / "part0.safetensors")) == ["w"]


def test_merge_prints_the_path_only_when_quiet(tmp_path: Path) -> None:
    target = tmp_path / "merged.ckpt"
    result = run("merge", STRATEGIES / "pp2_mp2_stages", "-o", target, "-q")
    assert (result.exit_code, result.stdout) == (Exit.DONE, f"{target}\n")
    assert read_layouts(target) == read_layouts(STRATEGIES / "pp2_mp2.ckpt")
