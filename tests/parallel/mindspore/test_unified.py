# SPDX-License-Identifier: Apache-2.0
"""All ranks joined into whole tensors, and loaded from there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointNotFound, CorruptCheckpoint, open_checkpoint, save_checkpoint
from ckptmgr.formats.strategy import Strategy, StrategyLayout, encode_strategy
from ckptmgr.formats.tensor import Item, MapTensors, tensor_from_array
from ckptmgr.parallel import (
    LayoutError,
    ParallelLayout,
    SliceMissing,
    load_distributed_checkpoint,
    load_segmented_checkpoints,
    read_layouts,
    unified_safetensors,
)
from ckptmgr.parallel.mindspore.outputs import write_file
from ckptmgr.parallel.mindspore.slices import region_of
from tests.parallel.mindspore.test_transform import GOLDEN, KEY, assert_same, loaded, strategy_file
from tests.support import api

RECORDED: dict[str, Any] = json.loads((GOLDEN / "other_functions.json").read_text())
WHOLE = {**loaded(GOLDEN / "full__to__dp2_mp2" / "src_st" / "rank_0" / "net.safetensors")}
UNIFIED = GOLDEN / "unified_dp2_mp2"
HYPER = {"global_step", "lr"}


def source_of(name: str) -> Path:
    (pair, *_) = sorted(GOLDEN.glob(f"{name}__to__*"))
    return pair / "src_st"


def own_slices(name: str, rank: int) -> dict[str, np.ndarray]:
    layouts = read_layouts(GOLDEN / "strategies" / f"{name}.ckpt")
    return {
        key: array[tuple(slice(*one) for one in region_of(layouts[key], rank, array.shape))].copy()
        if key in layouts
        else array
        for key, array in WHOLE.items()
    }


@pytest.mark.parametrize("name", ["dp2_mp2", "dp2_mp2_opt2", "dp4_mp2_opt4", "pp2_dp2_mp2"])
def test_unified_files_are_mindspores(name: str, tmp_path: Path) -> None:
    unified_safetensors(source_of(name), strategy_file(name), tmp_path)
    recorded = RECORDED[f"unified {name} redundant"]
    files = {file.name for file in tmp_path.iterdir() if "manifest" not in file.name}
    assert sorted(files) == recorded["files"]
    assert json.loads((tmp_path / "param_name_map.json").read_text()) == recorded["map"]
    found = {
        **loaded(tmp_path / "part0.safetensors"),
        **loaded(tmp_path / "hyper_param.safetensors"),
    }
    assert_same(found, WHOLE)


def test_unified_tensors_are_those_of_mindspores_file(tmp_path: Path) -> None:
    unified_safetensors(source_of("dp2_mp2"), strategy_file("dp2_mp2"), tmp_path)
    for name in ("part0.safetensors", "hyper_param.safetensors"):
        assert_same(loaded(tmp_path / name), loaded(UNIFIED / name))
        with open_checkpoint(tmp_path / name) as ours, open_checkpoint(UNIFIED / name) as theirs:
            assert ours.metadata == theirs.metadata == {"format": "ms"}


@pytest.mark.parametrize("merge_with_redundancy", [True, False])
def test_deduplicated_source_needs_no_argument(merge_with_redundancy: bool, tmp_path: Path) -> None:
    source = GOLDEN / "dedup_dp2_mp2_src_st"
    unified_safetensors(source, strategy_file("dp2_mp2"), tmp_path, merge_with_redundancy)
    assert_same(loaded(tmp_path / "part0.safetensors"), loaded(UNIFIED / "part0.safetensors"))


def test_names_are_filtered_and_changed_as_asked(tmp_path: Path) -> None:
    def choose(name: str) -> bool | str:
        return False if name == "bias" else f"new.{name}"

    unified_safetensors(
        source_of("dp2_mp2"), strategy_file("dp2_mp2"), tmp_path, choice_func=choose
    )
    recorded = RECORDED["unified choice_func filter+rename"]["map"]
    assert json.loads((tmp_path / "param_name_map.json").read_text()) == recorded
    assert set(loaded(tmp_path / "hyper_param.safetensors")) == HYPER


def test_two_parameters_of_one_new_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two parameters the name 'x'"):
        unified_safetensors(
            source_of("dp2_mp2"), strategy_file("dp2_mp2"), tmp_path, choice_func=lambda _: "x"
        )


def test_parts_are_dealt_out_to_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.unified.PART_BYTES", 600)
    arguments = (source_of("dp2_mp2"), strategy_file("dp2_mp2"), tmp_path)
    first = unified_safetensors(*arguments, split_dst_file=(1, 2))
    second = unified_safetensors(*arguments, split_dst_file=(2, 2))
    assert [file.name for file in second] == ["part2.safetensors"]
    assert [file.name for file in first][:2] == ["part0.safetensors", "part1.safetensors"]
    parts = [loaded(file) for file in (*first[:2], *second)]
    found = {name: array for part in parts for name, array in part.items()}
    assert_same(found, loaded(UNIFIED / "part0.safetensors"))
    weights = json.loads((tmp_path / "param_name_map.json").read_text())["weight_map"]
    for number, part in enumerate(parts):
        assert {weights[name] for name in part} == {f"part{number}.safetensors"}


def test_gradients_of_an_accumulation_are_left_out(tmp_path: Path) -> None:
    layouts = [
        StrategyLayout(name=name, device_matrix=(1,), tensor_maps=((-1,),))
        for name in ("w", "accu_grads.w", "empty")
    ]
    strategy = tmp_path / "s.ckpt"
    strategy.write_bytes(encode_strategy(Strategy(layouts=tuple(layouts))))
    (tmp_path / "rank_0").mkdir()
    values = {"w": np.zeros(0), "accu_grads.w": np.zeros(0), "empty": np.zeros(0)}
    save_checkpoint(values, tmp_path / "rank_0" / "net.safetensors", format="safetensors")
    unified_safetensors(tmp_path, strategy, tmp_path / "out")
    assert set(loaded(tmp_path / "out" / "part0.safetensors")) == {"w", "empty"}
    assert not (tmp_path / "out" / "hyper_param.safetensors").exists()


def test_whole_tensors_without_a_strategy_are_taken_as_they_are(tmp_path: Path) -> None:
    unified_safetensors(source_of("full"), None, tmp_path)
    assert_same(loaded(tmp_path / "part0.safetensors"), WHOLE)


@pytest.mark.parametrize("split", [(0, 2), (3, 2)])
def test_machine_that_is_none_is_refused(split: tuple[int, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="counts machines from 1"):
        unified_safetensors(source_of("full"), None, tmp_path, split_dst_file=split)


def test_source_that_is_a_file_is_refused_with_mindspores_message(tmp_path: Path) -> None:
    (tmp_path / "net").write_bytes(b"")
    with pytest.raises(ValueError, match="the 'src_dir' can not be a file") as caught:
        unified_safetensors(tmp_path / "net", None, tmp_path)
    assert f"ValueError: {caught.value}" == RECORDED["unified src_dir is file"]


def test_slice_in_no_file_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(source_of("dp2_mp2"), source)
    for rank in (1, 3):
        shutil.rmtree(source / f"rank_{rank}")
    with pytest.raises(SliceMissing):
        unified_safetensors(source, strategy_file("dp2_mp2"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unified_files_become_the_files_of_ranks(tmp_path: Path) -> None:
    load_distributed_checkpoint(
        None,
        predict_strategy=strategy_file("dp2_mp4"),
        format="safetensors",
        unified_safetensors_dir=UNIFIED,
        dst_safetensors_dir=tmp_path,
    )
    recorded = RECORDED["load_distributed_checkpoint unified -> dp2_mp4 rank files"]["files"]
    files = sorted(tmp_path.glob("rank_*/*.safetensors"))
    assert [str(file.relative_to(tmp_path)) for file in files] == recorded
    for rank in (0, 5):
        found = loaded(tmp_path / f"rank_{rank}" / "net.safetensors")
        assert_same(found, own_slices("dp2_mp4", rank))


def test_one_rank_of_unified_files_is_written_alone(tmp_path: Path) -> None:
    load_distributed_checkpoint(
        None,
        predict_strategy=strategy_file("pp2_dp2_mp2"),
        format="safetensors",
        unified_safetensors_dir=UNIFIED,
        dst_safetensors_dir=tmp_path,
        rank_id=5,
        output_format="ckpt",
    )
    (file,) = tmp_path.glob("rank_*/*.ckpt")
    assert file.parent.name == "rank_5"
    assert set(loaded(file)) == {"w2", "norm", "bias"} | HYPER


def test_unified_files_load_into_a_network_under_its_own_names() -> None:
    network = {"mine": np.zeros((8, 16), np.float32)}
    load_distributed_checkpoint(
        network,
        format="safetensors",
        unified_safetensors_dir=UNIFIED,
        name_map={"mine": "w1"},
    )
    np.testing.assert_array_equal(network["mine"], WHOLE["w1"])


def test_rank_of_this_process_is_loaded_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "3")
    values = load_distributed_checkpoint(
        None,
        predict_strategy=read_layouts(GOLDEN / "strategies" / "dp2_mp4.ckpt"),
        format="safetensors",
        unified_safetensors_dir=UNIFIED,
        return_param_dict=True,
    )
    assert isinstance(values, dict)
    assert_same(values, own_slices("dp2_mp4", 3))


@pytest.mark.parametrize("name", ["dp2_mp2", "dp4_mp2_opt4", "pp2_dp2_mp2"])
def test_files_of_all_ranks_load_into_a_network(name: str) -> None:
    pair = source_of(name).parent
    files = sorted((pair / "src_ckpt").glob("rank_*/*.ckpt"))
    network = {key: np.zeros_like(array) for key, array in WHOLE.items() if key not in HYPER}
    done = load_distributed_checkpoint(
        network, [str(file) for file in files], train_strategy_filename=strategy_file(name)
    )
    assert done is True
    assert_same(network, {key: WHOLE[key] for key in network})


def test_files_of_all_ranks_load_for_another_layout() -> None:
    files = sorted((source_of("dp2_mp2").parent / "src_ckpt").glob("rank_*/*.ckpt"))
    layout = {"w1": ((2,), (-1, 0), (8, 8), 0, True, "", (8, 16))}
    values = load_distributed_checkpoint(
        None,
        files,
        predict_strategy=layout,
        train_strategy_filename=strategy_file("dp2_mp2"),
        rank_id=1,
        return_param_dict=True,
    )
    assert isinstance(values, dict)
    np.testing.assert_array_equal(values["w1"], WHOLE["w1"][:, 8:])


def test_encrypted_files_and_texts_are_loaded(tmp_path: Path) -> None:
    save_checkpoint({"w": np.arange(4), "note": "hi"}, tmp_path / "net.ckpt", enc_key=KEY)
    strategy = tmp_path / "s.ckpt"
    layout = StrategyLayout(name="w", device_matrix=(1,), tensor_maps=((-1,),))
    strategy.write_bytes(encode_strategy(Strategy(layouts=(layout,))))
    values = load_distributed_checkpoint(
        None,
        [tmp_path / "net.ckpt"],
        train_strategy_filename=strategy,
        dec_key=KEY,
        return_param_dict=True,
    )
    assert isinstance(values, dict)
    assert (values["note"], list(values["w"])) == ("hi", [0, 1, 2, 3])


PREFIX = "load_distributed_checkpoint"


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        ({"format": "x"}, f"{PREFIX} format=x"),
        ({"format": "safetensors"}, f"{PREFIX} safetensors no unified dir"),
        (
            {"format": "safetensors", "unified_safetensors_dir": UNIFIED},
            f"{PREFIX} safetensors no network no dst",
        ),
        (
            {"format": "safetensors", "checkpoint_filenames": ["a"]},
            f"{PREFIX} safetensors+checkpoint_filenames",
        ),
        (
            {"checkpoint_filenames": ["nope.ckpt"], "return_param_dict": True},
            f"{PREFIX} ckpt bad file",
        ),
    ],
)
def test_unusable_arguments_give_mindspores_errors(
    arguments: dict[str, Any], recorded: str
) -> None:
    with pytest.raises(ValueError, match="load_distributed_checkpoint") as caught:
        load_distributed_checkpoint(None, **arguments)
    assert f"ValueError: {caught.value}" == RECORDED[recorded]


def test_key_is_not_in_the_message_that_refuses_it() -> None:
    with pytest.raises(ValueError, match="dec_key must be None") as caught:
        load_distributed_checkpoint(None, format="safetensors", dec_key=b"0123456789abcdef")
    assert "0123456789abcdef" not in str(caught.value)


def test_wrong_number_of_files_is_refused_with_mindspores_message() -> None:
    files = sorted((source_of("dp2_mp2").parent / "src_ckpt").glob("rank_*/*.ckpt"))[:3]
    with pytest.raises(ValueError, match="Load_distributed") as caught:
        load_distributed_checkpoint({}, files, train_strategy_filename=strategy_file("dp2_mp2"))
    assert f"ValueError: {caught.value}" == RECORDED[f"{PREFIX} 3 files for 4 devices"]


@pytest.mark.parametrize("network", [None, {}])
def test_source_without_network_or_strategy_is_refused(network: object) -> None:
    with pytest.raises(ValueError, match=r"'network' can not|'train_strategy_filename' is needed"):
        load_distributed_checkpoint(network)


def test_missing_part_and_damaged_map_are_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"format": "safetensors", "unified_safetensors_dir": tmp_path}
    with pytest.raises(CheckpointNotFound, match="no safetensors files"):
        load_distributed_checkpoint({}, **arguments)
    shutil.copy(UNIFIED / "hyper_param.safetensors", tmp_path)
    (tmp_path / "param_name_map.json").write_text('{"weight_map": {"w": "part0.safetensors"}}')
    with pytest.raises(CheckpointNotFound, match=r"part0\.safetensors.*is missing"):
        load_distributed_checkpoint({}, **arguments)
    (tmp_path / "param_name_map.json").write_text('{"weight_map": 5}')
    with pytest.raises(CorruptCheckpoint, match="param_name_map"):
        load_distributed_checkpoint({}, **arguments)


def test_parts_of_a_checkpoint_are_joined(tmp_path: Path) -> None:
    save_checkpoint({"b": np.array([2]), "s": "x"}, tmp_path / "p0.ckpt")
    save_checkpoint({"a": np.array([1]), "s": "x"}, tmp_path / "p1.ckpt")
    network = {"a": np.zeros(1, np.int64)}
    found = load_segmented_checkpoints(str(tmp_path), network)
    assert (list(found), network["a"].tolist()) == (["b", "s", "a"], [1])


def test_parts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    save_checkpoint({"step": np.array([1])}, tmp_path / "p0.ckpt")
    save_checkpoint({"step": np.array([2])}, tmp_path / "p1.ckpt")
    with pytest.raises(LayoutError, match=r"p1\.ckpt: 'step' has another value"):
        load_segmented_checkpoints(str(tmp_path))


def test_directory_without_parts_gives_nothing(tmp_path: Path) -> None:
    assert load_segmented_checkpoints(str(tmp_path)) == RECORDED["segmented empty dir"]


def test_other_things_than_a_directory_are_refused_with_mindspores_messages(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"The ckpt_file_dir should be a str\."):
        load_segmented_checkpoints(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"doesn't exist\. Or it's not a directory"):
        load_segmented_checkpoints(str(tmp_path / "zz"))


def test_map_parameters_in_several_parts_may_be_equal(tmp_path: Path) -> None:
    part = tensor_from_array("m", np.ones((1,), np.int32))
    items: list[Item] = [MapTensors(name="m", key=part, value=part, status=part)]
    for name in ("p0.ckpt", "p1.ckpt"):
        write_file(tmp_path / name, items, options=api.SaveOptions())
    assert list(load_segmented_checkpoints(str(tmp_path))) == ["m"]


def test_single_unified_file_needs_no_map(tmp_path: Path) -> None:
    shutil.copy(UNIFIED / "part0.safetensors", tmp_path)
    network = {"norm": np.zeros(16, np.float32)}
    load_distributed_checkpoint(network, format="safetensors", unified_safetensors_dir=tmp_path)
    np.testing.assert_array_equal(network["norm"], WHOLE["norm"])


def unify_values(directory: Path, values: dict[str, float]) -> None:
    """Unify parameters of these values into `directory`/unified, in parts of 64 bytes."""
    source = directory / "rank_0" / "net.safetensors"
    source.parent.mkdir(exist_ok=True)
    arrays = {name: np.full(16, value, np.float32) for name, value in values.items()}
    save_checkpoint(arrays, source, format="safetensors")
    unified_safetensors(directory, None, directory / "unified")


def unified_values(directory: Path) -> dict[str, float]:
    values = load_distributed_checkpoint(
        None, format="safetensors", unified_safetensors_dir=directory, return_param_dict=True
    )
    assert isinstance(values, dict)
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return {name: float(array.flat[0]) for name, array in arrays.items()}


def test_parts_of_an_older_unify_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.unified.PART_BYTES", 64)
    unify_values(tmp_path, {f"w{n:02}": 1 for n in range(12)})
    newer = {"w08": 2.0, "w09": 2.0, "w10": 2.0}
    unify_values(tmp_path, newer)
    assert len(list((tmp_path / "unified").glob("part*.safetensors"))) == 12
    assert unified_values(tmp_path / "unified") == newer


def test_unify_that_fails_leaves_the_earlier_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.unified.PART_BYTES", 64)
    old = {f"w{n}": 1.0 for n in range(3)}
    unify_values(tmp_path, old)
    before = {file.name for file in (tmp_path / "unified").iterdir()}
    source = tmp_path / "rank_0" / "net.safetensors"
    save_checkpoint({n: np.full(16, 2.0, np.float32) for n in old}, source, format="safetensors")
    content = bytearray(source.read_bytes())
    content[-1] ^= 1  # the last tensor, when others are written already
    source.chmod(0o600)
    source.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        unified_safetensors(tmp_path, None, tmp_path / "unified")
    assert {file.name for file in (tmp_path / "unified").iterdir()} == before
    assert unified_values(tmp_path / "unified") == old


def test_unify_that_is_cut_off_while_files_get_their_names_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.unified.PART_BYTES", 64)
    values = {f"w{n}": 1.0 for n in range(3)}
    unify_values(tmp_path, values)
    obstacle = tmp_path / "unified" / "part1.safetensors"
    obstacle.unlink()
    obstacle.mkdir()
    with pytest.raises(IsADirectoryError):
        unify_values(tmp_path, {name: 2.0 for name in values})
    obstacle.rmdir()
    with pytest.raises(CheckpointNotFound, match="unify was interrupted: run it again"):
        unified_values(tmp_path / "unified")
    unify_values(tmp_path, {name: 3.0 for name in values})
    assert set(unified_values(tmp_path / "unified").values()) == {3.0}


def test_parameter_comes_from_the_part_that_the_map_names(tmp_path: Path) -> None:
    for name, value in (("part0", 1), ("part1", 2), ("hyper_param", 3)):
        arrays = {key: np.full(1, value) for key in ("w", name)}
        save_checkpoint(arrays, tmp_path / f"{name}.safetensors", format="safetensors")
    weights = {"part0": "part0.safetensors", "w": "part1.safetensors"}
    (tmp_path / "param_name_map.json").write_text(json.dumps({"weight_map": weights}))
    assert unified_values(tmp_path) == {"part0": 1, "w": 2, "hyper_param": 3}


def test_parameter_that_is_not_in_its_part_is_an_error(tmp_path: Path) -> None:
    shutil.copy(UNIFIED / "part0.safetensors", tmp_path)
    (tmp_path / "param_name_map.json").write_text('{"weight_map": {"x": "part0.safetensors"}}')
    with pytest.raises(CheckpointNotFound, match=r"part0\.safetensors.*holds no parameter 'x'"):
        unified_values(tmp_path)


def test_unlisted_values_of_an_older_unify_are_removed(tmp_path: Path) -> None:
    unified_safetensors(source_of("dp2_mp2"), strategy_file("dp2_mp2"), tmp_path)
    assert set(unified_values(tmp_path)) >= HYPER
    written = unified_safetensors(
        source_of("full"), None, tmp_path, choice_func=lambda n: n == "w1"
    )
    assert [file.name for file in written] == ["part0.safetensors", "param_name_map.json"]
    assert set(unified_values(tmp_path)) == {"w1"}
    assert not list(tmp_path.glob("hyper_param*"))


def test_layout_of_another_rank_count_than_its_own_is_refused() -> None:
    mixed = {
        "w1": ParallelLayout(device_matrix=(2,), tensor_map=((0,), ())),
        "w2": ParallelLayout(device_matrix=(4,), tensor_map=((0,), ())),
    }
    with pytest.raises(LayoutError, match="laid out over"):
        load_distributed_checkpoint(
            {}, predict_strategy=mixed, format="safetensors", unified_safetensors_dir=UNIFIED
        )


def test_staging_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    precious, target = tmp_path / "precious", tmp_path / "out"
    for folder in (precious, target):
        folder.mkdir()
    (precious / "file").write_bytes(b"precious")
    (target / ".unify-1-of-1.tmp").symlink_to(precious)
    with pytest.raises(NotADirectoryError):
        unified_safetensors(source_of("dp2_mp2"), strategy_file("dp2_mp2"), target)
    assert [path.name for path in precious.iterdir()] == ["file"]
