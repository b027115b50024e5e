# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr transform`, `ckptmgr unify`, `ckptmgr merge`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager, load_checkpoint, save_checkpoint
from ckptmgr.cli.exits import Exit
from ckptmgr.formats.strategy import OperatorStrategy, Strategy, StrategyLayout, encode_strategy
from ckptmgr.parallel import read_layouts
from tests.cli.running import run, run_json
from tests.support import api

GOLDEN = Path(__file__).parent.parent / "golden" / "transform"
STRATEGIES = GOLDEN / "strategies"
SHARDED = GOLDEN / "dp2_mp2__to__dp2_mp4"
SIGNER = api.SigningKey(bytes(range(32)))
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


def two_ranks(directory: Path) -> Path:
    """Make directories of two ranks that hold equal values, of which only one has step 20."""
    for rank, steps in enumerate(((10, 20), (10,))):
        with CheckpointManager(directory / "in" / f"rank_{rank}", prefix="net") as manager:
            for step in steps:
                manager.save(step, {"w": np.full(2, step)})
    copies = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((-1,),))
    operators = (OperatorStrategy(name="op", stage=0),)
    strategy = encode_strategy(Strategy(layouts=(copies,), operators=operators))
    (directory / "copies.ckpt").write_bytes(strategy)
    return directory / "in"


@pytest.mark.parametrize("command", ["transform", "unify"])
def test_older_step_that_is_taken_is_said_beside_the_result(command: str, tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        command,
        two_ranks(tmp_path),
        "-o",
        tmp_path / "out",
        "--from",
        tmp_path / "copies.ckpt",
    ]
    result = run(*arguments)
    assert result.exit_code == Exit.DONE, result.stderr
    assert "note: took step 10, the newest of all ranks; step 20 is newer" in result.stderr
    assert "step 10, " in result.stdout
    summary = run_json(*arguments)["summary"]
    assert summary["step"] == "10"
    assert "step 20 is newer, but not in rank_1" in summary["notes"][0]


@pytest.mark.parametrize("command", ["transform", "unify"])
def test_step_option_takes_the_step_and_names_the_ranks_left_out(
    command: str, tmp_path: Path
) -> None:
    source, strategy = two_ranks(tmp_path), tmp_path / "copies.ckpt"
    arguments: list[str | Path] = [command, source, "-o", tmp_path / "out", "--from", strategy]
    summary = run_json(*arguments, "--step", "20")["summary"]
    assert (summary["step"], summary["notes"]) == ("20", ["left out: rank_1 without step 20"])
    result = run(*arguments, "--step", "latest")
    assert result.exit_code == Exit.FAILED
    assert "write 20, or 3_40" in result.stderr


@pytest.mark.parametrize("command", ["transform", "unify", "merge"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("empty", Exit.NOT_FOUND),
        ("plain", Exit.NOT_FOUND),
        ("empty_rank", Exit.NOT_FOUND),
        ("file", None),
        ("absent", None),
    ],
)
def test_place_without_files_of_ranks_is_a_clear_error_that_names_it(
    command: str, name: str, expected: Exit | None, tmp_path: Path
) -> None:
    for folder in ("empty", "plain", "empty_rank/rank_0"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("plain/notes.txt", "file"):
        (tmp_path / file).write_bytes(b"text")
    result = run(command, tmp_path / name, "-o", tmp_path / "out")
    assert result.exit_code in ((Exit.FAILED, Exit.NOT_FOUND) if expected is None else (expected,))
    assert str(tmp_path / name) in result.stderr
    assert "bug" not in result.stderr
    if command != "merge":
        assert "name the directory that holds a folder rank_N for each rank" in result.stderr
    assert not (tmp_path / "out").exists()


def test_strategies_of_both_kinds_and_empty_ones_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    for name in ("a.ckpt", "b.json"):
        (tmp_path / "both" / name).write_bytes(b"{}")
    empty = encode_strategy(Strategy(layouts=(), operators=(OperatorStrategy(name="op", stage=0),)))
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "a.ckpt").write_bytes(empty)
    for name, message in (("both", "all '.ckpt' or all '.json'"), ("void", "is empty")):
        result = run("merge", tmp_path / name, "-o", tmp_path / "out")
        assert result.exit_code == Exit.FAILED
        assert message in result.stderr
        assert "bug" not in result.stderr


def test_merge_prints_the_path_only_when_quiet(tmp_path: Path) -> None:
    target = tmp_path / "merged.ckpt"
    result = run("merge", STRATEGIES / "pp2_mp2_stages", "-o", target, "-q")
    assert (result.exit_code, result.stdout) == (Exit.DONE, f"{target}\n")
    assert read_layouts(target) == read_layouts(STRATEGIES / "pp2_mp2.ckpt")


def signed_ranks(directory: Path, *, key: bytes | None) -> list[str | Path]:
    """Make signed files of two ranks, and return what says where they are and how they are cut."""
    for rank in range(2):
        path = directory / "in" / f"rank_{rank}" / "net.ckpt"
        path.parent.mkdir(parents=True)
        save_checkpoint({"w": np.zeros(2)}, path, enc_key=key, signing_key=SIGNER)
    (directory / "sign.pem.pub").write_bytes(SIGNER.public_key.to_pem())
    (directory / "other.pem.pub").write_bytes(api.SigningKey(bytes(32)).public_key.to_pem())
    layout = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((0,),))
    operators = (OperatorStrategy(name="op", stage=0),)
    strategy = encode_strategy(Strategy(layouts=(layout,), operators=operators))
    (directory / "rows.ckpt").write_bytes(strategy)
    return [directory / "in", "-o", directory / "out", "--from", directory / "rows.ckpt"]


@pytest.mark.parametrize("command", ["transform", "unify"])
def test_public_key_refuses_what_it_did_not_sign(command: str, tmp_path: Path) -> None:
    arguments = [command, *signed_ranks(tmp_path, key=None)]
    refused = run(*arguments, "--public-key", tmp_path / "other.pem.pub")
    assert refused.exit_code == Exit.KEY
    assert not (tmp_path / "out").exists()
    done = run(*arguments, "--public-key", tmp_path / "sign.pem.pub")
    assert done.exit_code == Exit.DONE, done.stderr
    assert f"note: not proven by any key: the strategy in {tmp_path / 'rows.ckpt'}" in done.stderr
    (tmp_path / "in/rank_1/net.ckpt.manifest.json").unlink()
    unsigned = run(*arguments, "--public-key", tmp_path / "sign.pem.pub")
    assert unsigned.exit_code == Exit.REFUSED


def test_unproven_strategy_is_said_in_json_once(tmp_path: Path) -> None:
    arguments: list[str | Path] = ["transform", *signed_ranks(tmp_path, key=bytes(32))]
    arguments += ["--to", tmp_path / "rows.ckpt", "--key", "env:RUN_KEY"]
    notes = run_json(*arguments, env=KEY_ENV)["summary"]["notes"]
    assert len(notes) == 1
    assert "not proven by any key" in notes[0]
