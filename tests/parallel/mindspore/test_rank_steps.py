# SPDX-License-Identifier: Apache-2.0
"""The files of several ranks that are joined are of one training step, or an error names the ranks and their steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    KeyProblem,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.formats.strategy import OperatorStrategy, Strategy, StrategyLayout, encode_strategy
from ckptmgr.parallel import (
    LayoutError,
    MixedSteps,
    WrittenFiles,
    load_distributed_checkpoint,
    load_segmented_checkpoints,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from ckptmgr.parallel.mindspore.rank_steps import choose_step

Join = Callable[..., WrittenFiles]


def rows_over(path: Path, ranks: int) -> Path:
    """Write a strategy that cuts `w` by rows."""
    layout = StrategyLayout(name="w", device_matrix=(ranks,), tensor_maps=((0,),))
    operators = (OperatorStrategy(name="op", stage=0),)
    path.write_bytes(encode_strategy(Strategy(layouts=(layout,), operators=operators)))
    return path


def value_of(step: int) -> np.ndarray:
    return np.full(2, step)


def save_file(path: Path, number: int, **appended: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({"w": value_of(number)}, path, append_dict=appended)


def train(folder: Path, steps: Iterable[int], *, is_resumed: bool = False) -> None:
    """Save the steps of one rank, as a run of its own."""
    state = {"w": value_of(0)}
    with CheckpointManager(folder, prefix="net") as manager:
        if is_resumed:
            manager.resume(state)
        for step in steps:
            manager.save(step, {"w": value_of(step)})


def bare_files(directory: Path, names: Mapping[int, Sequence[str]]) -> Path:
    """Make the directories of ranks with files as MindSpore leaves them, without manifests.

    `w` holds the last number in the name.
    """
    for rank, found in names.items():
        folder = directory / f"rank_{rank}"
        for name in found:
            number = int(name.partition(".")[0].replace("_breakpoint", "").rpartition("_")[2])
            save_file(folder / name, number)
            (folder / f"{name}.manifest.json").unlink()
    return directory


def transformed(source: Path, target: Path, **more: object) -> WrittenFiles:
    strategy = rows_over(target.with_name("rows.ckpt"), 2)
    return transform_checkpoints(source, target, "net", strategy, **more)  # type: ignore[arg-type]


def unified(source: Path, target: Path, **more: object) -> WrittenFiles:
    strategy = rows_over(target.with_name("rows.ckpt"), 2)
    return unified_safetensors(source, strategy, target, **more)  # type: ignore[arg-type]


def rows_in(files: Sequence[Path]) -> list[int]:
    value = load_checkpoint(files[0])["w"]
    assert isinstance(value, np.ndarray)
    return [int(row) for row in value]


both = pytest.mark.parametrize("join", [transformed, unified])


@pytest.fixture
def died_at_20(tmp_path: Path) -> Path:
    """Return the directories of two ranks of which the second died while it saved step 20."""
    source = tmp_path / "in"
    train(source / "rank_0", [10, 20])
    train(source / "rank_1", [10, 20])
    # The manifest was published; the data did not get its name.
    (source / "rank_1" / "net-20.ckpt").unlink()
    return source


@both
def test_rank_that_died_while_saving_takes_all_ranks_back_to_the_step_before_and_the_result_says_so(
    join: Join, died_at_20: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = join(died_at_20, tmp_path / "out")
    assert rows_in(files) == [10, 10, 10, 10]
    assert files.step == "10"
    (note,) = files.notes
    assert "step 20 is newer, but not in rank_1" in note
    assert note in caplog.text


@both
def test_newest_step_of_all_ranks_is_taken_without_a_note(join: Join, tmp_path: Path) -> None:
    for rank in range(2):
        train(tmp_path / f"in/rank_{rank}", [9, 10])
    files = join(tmp_path / "in", tmp_path / "out")
    assert (rows_in(files), files.step, files.notes) == ([10] * 4, "10", ())


@both
@pytest.mark.parametrize("step", [10, "10", "010"])
def test_step_that_the_caller_names_is_taken(join: Join, step: int | str, tmp_path: Path) -> None:
    for rank in range(2):
        train(tmp_path / f"in/rank_{rank}", [10, 20])
    files = join(tmp_path / "in", tmp_path / "out", step=step)
    assert (rows_in(files), files.step, files.notes) == ([10] * 4, "10", ())


@both
def test_rank_without_the_named_step_is_left_out_and_what_it_alone_held_is_missing(
    join: Join, died_at_20: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointNotFound, match="a slice of 'w' is in no file"):
        join(died_at_20, tmp_path / "out", step=20)
    assert not (tmp_path / "out").exists()


def test_ranks_left_out_of_copies_are_named(died_at_20: Path, tmp_path: Path) -> None:
    copies = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((-1,),))
    strategy = tmp_path / "copies.ckpt"
    operators = (OperatorStrategy(name="op", stage=0),)
    strategy.write_bytes(encode_strategy(Strategy(layouts=(copies,), operators=operators)))
    files = transform_checkpoints(died_at_20, tmp_path / "out", "net", strategy, step=20)
    assert (rows_in(files), files.step) == ([20, 20], "20")
    assert files.notes == ("left out: rank_1 without step 20",)


@both
def test_ranks_without_a_common_step_are_refused_by_rank_and_step(
    join: Join, tmp_path: Path
) -> None:
    train(tmp_path / "in/rank_0", [20, 30])
    train(tmp_path / "in/rank_1", [10])
    with pytest.raises(
        MixedSteps, match=r"rank_0: step 30.*, 20.*; rank_1: step 10.*[\s\S]*--step"
    ) as caught:
        join(tmp_path / "in", tmp_path / "out")
    assert caught.value.ranks == (0, 1)
    assert not (tmp_path / "out").exists()


@both
def test_step_that_no_rank_has_is_not_found(join: Join, tmp_path: Path) -> None:
    for rank in range(2):
        train(tmp_path / f"in/rank_{rank}", [10])
    with pytest.raises(CheckpointNotFound, match=r"no rank has step 30: rank_0, rank_1: step 10"):
        join(tmp_path / "in", tmp_path / "out", step=30)


@pytest.mark.parametrize("step", ["x", "", "1_2_3", -1, True, "1.0"])
def test_what_is_no_step_is_refused(step: int | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="write a step"):
        transform_checkpoints(tmp_path, tmp_path / "out", "net", step=step)


@both
def test_files_of_mindspore_are_chosen_by_epoch_and_step_in_their_names(
    join: Join, tmp_path: Path
) -> None:
    names = {
        0: ["CKP-1_9.ckpt", "CKP-1_10.ckpt", "CKP-2_3.ckpt"],
        1: ["CKP-1_9.ckpt", "CKP-1_10.ckpt"],
    }
    source = bare_files(tmp_path / "in", names)
    files = join(source, tmp_path / "out")
    assert (rows_in(files), files.step) == ([10] * 4, "1_10")
    assert "step 2_3 is newer, but not in rank_1" in files.notes[0]
    assert rows_in(join(source, tmp_path / "out", step="1_9")) == [9] * 4


@both
def test_files_of_the_callback_are_found_by_global_step_as_well(join: Join, tmp_path: Path) -> None:
    for rank in range(2):
        for step in (40, 60):
            file = tmp_path / f"in/rank_{rank}/net-{step // 20}_20.ckpt"
            save_file(file, step, step_num=step, epoch_num=step // 20)
    files = join(tmp_path / "in", tmp_path / "out", step=40)
    assert (rows_in(files), files.step) == ([40] * 4, "40")


@both
def test_names_may_hold_the_rank(join: Join, tmp_path: Path) -> None:
    names = {rank: [f"net_rank{rank}-1_5.ckpt", f"net_rank{rank}-1_7.ckpt"] for rank in range(2)}
    files = join(bare_files(tmp_path / "in", names), tmp_path / "out")
    assert (rows_in(files), files.step) == ([7] * 4, "1_7")


@pytest.mark.parametrize("prefix", ["net_", "net-1_", "net-"])
def test_number_of_the_rank_at_the_end_of_names_is_no_step(prefix: str, tmp_path: Path) -> None:
    for rank in range(4):
        save_file(tmp_path / f"in/rank_{rank}/{prefix}{rank}.ckpt", rank)
    strategy = rows_over(tmp_path / "rows.ckpt", 4)
    files = transform_checkpoints(tmp_path / "in", tmp_path / "out", "net", strategy)
    assert (rows_in(files), files.step) == ([0, 0, 1, 1, 2, 2, 3, 3], None)


@both
def test_numbered_names_of_other_programs_are_matched_where_a_rank_has_several(
    join: Join, tmp_path: Path
) -> None:
    names = {0: ["model_9.ckpt", "model_10.ckpt"], 1: ["model_9.ckpt"]}
    files = join(bare_files(tmp_path / "in", names), tmp_path / "out")
    assert (rows_in(files), files.step) == ([9] * 4, "9")


@both
def test_restarted_run_of_one_rank_is_not_joined_with_the_run_before_of_another(
    join: Join, tmp_path: Path
) -> None:
    # Both died while they saved 1_20, rank_1 the first time, rank_0 after the restart.
    names = {
        0: ["CKP-1_10.ckpt", "CKP-1_20.ckpt"],
        1: ["CKP-1_10.ckpt", "CKP_1-1_20.ckpt"],
    }
    source = bare_files(tmp_path / "in", names)
    files = join(source, tmp_path / "out")
    assert (rows_in(files), files.step) == ([10] * 4, "1_10")
    assert "step 1_20 is newer" in files.notes[0]


@both
def test_same_step_of_runs_with_other_pasts_is_refused_unless_it_is_named(
    join: Join, tmp_path: Path
) -> None:
    train(tmp_path / "in/rank_0", [10, 20])
    train(tmp_path / "in/rank_1", [10])
    train(tmp_path / "in/rank_1", [20], is_resumed=True)  # rank_0 died before it saved 20 again
    with pytest.raises(
        MixedSteps, match=r"of different runs: rank_0: .* 0 times; rank_1: .* 1 time"
    ):
        join(tmp_path / "in", tmp_path / "out")
    assert rows_in(join(tmp_path / "in", tmp_path / "out", step=20)) == [20] * 4
    train(tmp_path / "in/rank_0", [], is_resumed=True)
    assert rows_in(join(tmp_path / "in", tmp_path / "out", step=10)) == [10] * 4


@both
def test_last_save_of_a_step_counts(join: Join, tmp_path: Path) -> None:
    for rank in range(2):
        with CheckpointManager(tmp_path / f"in/rank_{rank}", prefix="net") as manager:
            manager.save(10, {"w": value_of(1)})
            manager.save(10, {"w": value_of(2)})
    files = join(tmp_path / "in", tmp_path / "out")
    assert (rows_in(files), files.step) == ([2] * 4, "10")


@both
def test_two_series_of_all_ranks_at_one_step_are_refused(join: Join, tmp_path: Path) -> None:
    names = {rank: ["a-1_10.ckpt", "b-1_10.ckpt"] for rank in range(2)}
    source = bare_files(tmp_path / "in", names)
    for more in ({}, {"step": "1_10"}):
        with pytest.raises(LayoutError, match="equally likely"):
            join(source, tmp_path / "out", **more)


@both
def test_names_that_hide_the_steps_are_compared_by_manifest(join: Join, tmp_path: Path) -> None:
    for rank, step in enumerate((20, 10)):
        save_file(tmp_path / f"in/rank_{rank}/net.ckpt", step, step_num=step)
    with pytest.raises(MixedSteps, match="different steps: rank_1: step 10; rank_0: step 20"):
        join(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_says_its_step_so_that_what_an_interruption_leaves_is_refused(
    tmp_path: Path,
) -> None:
    for step in (10, 20):
        for rank in range(2):
            train(tmp_path / f"at_{step}/rank_{rank}", [step])
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    for step in (10, 20):
        transform_checkpoints(
            tmp_path / f"at_{step}", tmp_path / f"out_{step}", "net", strategy, strategy
        )
    # As a call leaves it that is killed between the files of two ranks, over an earlier result.
    shutil.rmtree(tmp_path / "out_10/rank_0")
    shutil.copytree(tmp_path / "out_20/rank_0", tmp_path / "out_10/rank_0")
    with pytest.raises(MixedSteps, match="rank_1: step 10; rank_0: step 20"):
        transformed(tmp_path / "out_10", tmp_path / "again")


def test_explicit_files_of_two_steps_are_refused(died_at_20: Path, tmp_path: Path) -> None:
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    files = {0: died_at_20 / "rank_0/net-20.ckpt", 1: died_at_20 / "rank_1/net-10.ckpt"}
    with pytest.raises(MixedSteps, match="rank_1: step 10; rank_0: step 20"):
        transform_checkpoint_by_rank(0, files, tmp_path / "out.ckpt", strategy)
    with pytest.raises(MixedSteps, match="rank_1: step 10; rank_0: step 20"):
        load_distributed_checkpoint(
            {"w": np.zeros(4)}, list(files.values()), train_strategy_filename=strategy
        )
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("name", ["latest.ckpt", "net-30.ckpt"])
def test_links_count_as_the_files_they_lead_to(name: str, died_at_20: Path, tmp_path: Path) -> None:
    for rank, step in enumerate((20, 10)):
        (died_at_20 / f"rank_{rank}" / name).symlink_to(f"net-{step}.ckpt")
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    files = {rank: died_at_20 / f"rank_{rank}" / name for rank in range(2)}
    with pytest.raises(MixedSteps, match="rank_1: step 10; rank_0: step 20"):
        transform_checkpoint_by_rank(0, files, tmp_path / "out.ckpt", strategy)
    if name == "latest.ckpt":
        assert rows_in(transformed(died_at_20, tmp_path / "out")) == [10] * 4
    else:
        with pytest.raises(MixedSteps, match="rank_1: step 10; rank_0: step 20"):
            transformed(died_at_20, tmp_path / "out")


def test_explicit_files_of_mindspore_of_two_steps_are_refused(tmp_path: Path) -> None:
    source = bare_files(tmp_path / "in", {0: ["CKP-1_20.ckpt"], 1: ["CKP-1_10.ckpt"]})
    strategy = rows_over(tmp_path / "rows.ckpt", 2)
    files = {0: source / "rank_0/CKP-1_20.ckpt", 1: source / "rank_1/CKP-1_10.ckpt"}
    with pytest.raises(MixedSteps, match="rank_1: step 1_10; rank_0: step 1_20"):
        transform_checkpoint_by_rank(0, files, tmp_path / "out.ckpt", strategy)


def test_segments_of_two_steps_are_refused(tmp_path: Path) -> None:
    save_checkpoint({"a": value_of(1)}, tmp_path / "first-1_10.ckpt")
    save_checkpoint({"b": value_of(1)}, tmp_path / "second-1_20.ckpt")
    with pytest.raises(MixedSteps, match="different steps"):
        load_segmented_checkpoints(str(tmp_path))


def test_unified_parts_of_two_steps_are_refused(tmp_path: Path) -> None:
    for step in (10, 20):
        for rank in range(2):
            train(tmp_path / f"at_{step}/rank_{rank}", [step])
        unified(tmp_path / f"at_{step}", tmp_path / f"out_{step}")
    name = "part0.safetensors"
    for suffix in ("", ".manifest.json"):
        shutil.copy(
            tmp_path / f"out_20/{name}{suffix}", tmp_path / f"out_10/part1.safetensors{suffix}"
        )
    manifest = tmp_path / "out_10/part1.safetensors.manifest.json"
    manifest.chmod(0o600)
    manifest.write_text(manifest.read_text().replace(name, "part1.safetensors"))
    (tmp_path / "out_10/param_name_map.json").unlink()
    with pytest.raises(MixedSteps, match="different steps"):
        load_distributed_checkpoint(
            {"w": np.zeros(4)}, format="safetensors", unified_safetensors_dir=tmp_path / "out_10"
        )


def test_whole_tensors_of_one_rank_leave_the_others_out_with_a_note(tmp_path: Path) -> None:
    for rank in range(2):
        train(tmp_path / f"in/rank_{rank}", [10])
    files = unified_safetensors(tmp_path / "in", None, tmp_path / "out")
    assert files.notes == (
        "read rank_0 only: no strategy says how the files of 1 other ranks are cut",
    )


def test_two_directories_of_one_rank_are_refused(tmp_path: Path) -> None:
    for folder in ("rank_0", "rank_00"):
        train(tmp_path / folder, [10])
    with pytest.raises(LayoutError, match="second directory of rank 0"):
        unified_safetensors(tmp_path, None, tmp_path / "out")


@given(st.dictionaries(st.integers(0, 5), st.sets(st.integers(1, 6), min_size=1), min_size=1))
def test_files_chosen_are_of_the_newest_common_step_or_of_none(steps: dict[int, set[int]]) -> None:
    files = {
        rank: [Path(f"rank_{rank}/net-3_{step}.ckpt") for step in sorted(own)]
        for rank, own in steps.items()
    }
    common = set.intersection(*steps.values())
    if all(own == {rank} for rank, own in steps.items()) and len(steps) > 1:
        assert choose_step(files).step is None
        return
    if not common:
        with pytest.raises(MixedSteps):
            choose_step(files)
        return
    chosen = choose_step(files)
    assert chosen.step == f"3_{max(common)}"
    assert {path.name for path in chosen.paths.values()} == {f"net-3_{max(common)}.ckpt"}
    assert bool(chosen.notes) == any(max(own) > max(common) for own in steps.values())


def test_newest_step_that_the_key_does_not_prove_is_left_out_and_said(tmp_path: Path) -> None:
    keys = bytes(16), bytes(range(16))
    source, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for key, place, steps in ((keys[0], source, (10, 20)), (keys[1], elsewhere, (30,))):
        for rank in range(2):
            config = CheckpointConfig(enc_key=key, keep="all")
            with CheckpointManager(place / f"rank_{rank}", config, prefix="net") as manager:
                for step in steps:
                    manager.save(step, {"w": value_of(step)})
    for rank in range(2):
        for path in (elsewhere / f"rank_{rank}").glob("net-30.*"):
            shutil.copy(path, source / f"rank_{rank}")
    # Damage in files that are not taken does not matter.
    manifest = source / "rank_0" / "net-10.ckpt.manifest.json"
    manifest.chmod(0o600)
    manifest.write_text("{")
    files = transformed(source, tmp_path / "out", dec_key=keys[0])
    assert (rows_in(files), files.step) == ([20] * 4, "20")
    assert [note.partition(":")[0] for note in files.notes[:2]] == [
        "left out rank_0/net-30.ckpt",
        "left out rank_1/net-30.ckpt",
    ]
    with pytest.raises(KeyProblem):
        transformed(elsewhere, tmp_path / "none", dec_key=keys[0])
