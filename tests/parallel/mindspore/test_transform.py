# SPDX-License-Identifier: Apache-2.0
"""Checkpoints rewritten for another number of ranks: MindSpore's outputs, and no output where MindSpore's would be wrong."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckptmgr import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.core.regions import ByteRun
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.strategy import OperatorStrategy, Strategy, StrategyLayout, encode_strategy
from ckptmgr.formats.tensor import Item, MapTensors, tensor_from_array
from ckptmgr.parallel import (
    LayoutError,
    ParallelLayout,
    SliceMissing,
    rank_list_for_transform,
    read_layouts,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from ckptmgr.parallel.layout import whole
from ckptmgr.parallel.mindspore.outputs import write_file
from ckptmgr.parallel.mindspore.rank_files import OpenRankFiles, find_rank_files
from ckptmgr.parallel.mindspore.rank_steps import choose_step
from ckptmgr.parallel.mindspore.resharder import Resharder
from ckptmgr.parallel.mindspore.transform import reading_options
from tests.support import api

GOLDEN = Path(__file__).parents[2] / "golden" / "transform"
PAIRS = sorted(folder.name for folder in GOLDEN.glob("*__to__*"))
KEY = bytes(range(32))

Values = dict[str, np.ndarray]


def strategy_file(name: str) -> Path | None:
    return None if name == "full" else GOLDEN / "strategies" / f"{name}.ckpt"


def loaded(file: Path, dec_key: bytes | None = None) -> Values:
    values = load_checkpoint(file, dec_key=dec_key)
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def assert_same(found: Mapping[str, object], expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        value = found[name]
        assert isinstance(value, np.ndarray), name
        assert (value.dtype, value.shape) == (array.dtype, array.shape), name
        assert value.tobytes() == array.tobytes(), name


def newest_files(directory: Path, *, file_suffix: str | None = None) -> Mapping[int, Path]:
    """Return the file of every rank that a call without a step takes."""
    return choose_step(find_rank_files(directory, format="ckpt", file_suffix=file_suffix)).paths


def copied(pair: str, kind: str, directory: Path) -> Path:
    """Copy a recorded source to where a test may damage it."""
    target = directory / "source"
    shutil.copytree(GOLDEN / pair / f"src_{kind}", target)
    return target


@pytest.mark.parametrize(("kind", "suffix"), [("ckpt", "ckpt"), ("st", "safetensors")])
@pytest.mark.parametrize("pair", PAIRS)
def test_outputs_are_mindspores(pair: str, kind: str, suffix: str, tmp_path: Path) -> None:
    source, target = map(strategy_file, pair.split("__to__"))
    recorded = GOLDEN / pair / f"dst_{kind}"
    files = transform_checkpoints(
        GOLDEN / pair / f"src_{kind}", tmp_path, "ck_", source, target, output_format=suffix
    )
    names = {file.relative_to(recorded) for file in recorded.rglob(f"*.{suffix}")}
    assert {file.relative_to(tmp_path) for file in files} == names
    for name in names:
        assert_same(loaded(tmp_path / name), loaded(recorded / name))


@pytest.mark.parametrize("pair", PAIRS)
def test_one_rank_needs_only_the_files_mindspore_lists(pair: str, tmp_path: Path) -> None:
    source, target = map(strategy_file, pair.split("__to__"))
    recorded = sorted((GOLDEN / pair / "dst_ckpt").glob("rank_*/*.ckpt"))
    rank = len(recorded) - 1
    ranks = rank_list_for_transform(rank, source, target)
    files = {
        one: file for one, file in newest_files(GOLDEN / pair / "src_ckpt").items() if one in ranks
    }
    out = transform_checkpoint_by_rank(rank, files, tmp_path / "out.ckpt", source, target)
    expected = GOLDEN / pair / "dst_ckpt" / f"rank_{rank}" / f"ck_{rank}.ckpt"
    assert_same(loaded(out), loaded(expected))


@pytest.mark.parametrize(
    ("format", "extension"), [("ckpt", "ckpt"), ("safetensors", "safetensors.ckpe")]
)
def test_encrypted_source_becomes_encrypted_output(
    format: str, extension: str, tmp_path: Path
) -> None:
    pair = "dp2_mp2__to__dp2_mp4"
    for rank in range(4):
        values = loaded(GOLDEN / pair / "src_ckpt" / f"rank_{rank}" / "net.ckpt")
        (tmp_path / f"in/rank_{rank}").mkdir(parents=True)
        save_checkpoint(values, tmp_path / f"in/rank_{rank}/net", format=format, enc_key=KEY)
    source, target = map(strategy_file, pair.split("__to__"))
    arguments = (tmp_path / "in", tmp_path / "out", "ck_", source, target)
    with pytest.raises(KeyProblem):
        transform_checkpoints(*arguments, output_format=format)
    files = transform_checkpoints(*arguments, output_format=format, dec_key=KEY, enc_key=KEY)
    assert files[5].name == f"ck_5.{extension}"
    expected = GOLDEN / pair / "dst_ckpt" / "rank_5" / "ck_5.ckpt"
    assert_same(loaded(files[5], KEY), loaded(expected))


def test_encrypted_file_of_one_rank_gets_the_name_of_a_container(tmp_path: Path) -> None:
    source = GOLDEN / "full__to__dp2_mp2" / "src_ckpt" / "rank_0" / "net.ckpt"
    file = transform_checkpoint_by_rank(0, {0: source}, tmp_path / "out.safetensors", enc_key=KEY)
    assert file.name == "out.safetensors.ckpe"
    assert_same(loaded(file, KEY), loaded(source))


def test_deduplicated_files_are_joined_from_the_rank_that_saved_each_slice(tmp_path: Path) -> None:
    files = transform_checkpoints(
        GOLDEN / "dedup_dp2_mp2_src_st", tmp_path, "ck_", strategy_file("dp2_mp2")
    )
    recorded = GOLDEN / "dp2_mp2__to__full" / "dst_ckpt" / "rank_0" / "ck_0.ckpt"
    assert_same(loaded(files[0]), loaded(recorded))


def test_missing_file_does_no_harm_while_another_rank_has_a_copy(tmp_path: Path) -> None:
    source = copied("dp2_mp2__to__full", "ckpt", tmp_path)
    shutil.rmtree(source / "rank_1")
    (file,) = transform_checkpoints(source, tmp_path / "out", "ck_", strategy_file("dp2_mp2"))
    recorded = GOLDEN / "dp2_mp2__to__full" / "dst_ckpt" / "rank_0" / "ck_0.ckpt"
    assert_same(loaded(file), loaded(recorded))


def test_slice_that_nobody_has_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    source = copied("dp2_mp2__to__full", "ckpt", tmp_path)
    shutil.rmtree(source / "rank_1")
    shutil.rmtree(source / "rank_3")
    with pytest.raises(SliceMissing, match=r"'emb'|'w1'|'w2'") as caught:
        transform_checkpoints(source, tmp_path / "out", "ck_", strategy_file("dp2_mp2"))
    assert caught.value.ranks == (1, 3)
    assert not (tmp_path / "out").exists()


def test_strategy_of_another_run_is_refused_by_file_and_tensor(tmp_path: Path) -> None:
    source = copied("dp2_mp2__to__full", "ckpt", tmp_path)
    save_checkpoint({"emb": np.zeros((7, 4), np.float32)}, source / "rank_2" / "net.ckpt")
    (source / "rank_0" / "net.ckpt").unlink()
    with pytest.raises(LayoutError, match="'emb' is float32"):
        transform_checkpoints(source, tmp_path / "out", "ck_", strategy_file("dp2_mp2"))


def test_damaged_source_is_refused_and_the_output_is_absent(tmp_path: Path) -> None:
    source = copied("dp2_mp2__to__full", "ckpt", tmp_path)
    file = source / "rank_0" / "net.ckpt"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpoint, match=r"rank_0"):
        transform_checkpoints(source, tmp_path / "out", "ck_", strategy_file("dp2_mp2"))
    assert not list(tmp_path.rglob("ck_*"))


def test_sharded_files_without_a_strategy_are_refused_where_mindspore_takes_a_slice_for_the_whole(
    tmp_path: Path,
) -> None:
    with pytest.raises(LayoutError, match="no strategy says how they are cut"):
        transform_checkpoints(GOLDEN / "dp2_mp2__to__full" / "src_ckpt", tmp_path, "ck_")


def test_step_ten_is_newer_than_step_nine(tmp_path: Path) -> None:
    folder = tmp_path / "rank_0"
    folder.mkdir()
    for name in ("CKP-1_9.ckpt", "CKP-1_10.ckpt"):
        (folder / name).write_bytes(b"")
    assert newest_files(tmp_path)[0].name == "CKP-1_10.ckpt"


def test_equally_new_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rank_0"
    folder.mkdir()
    for name in ("a-1_9.ckpt", "b-1_9.ckpt"):
        (folder / name).write_bytes(b"")
    with pytest.raises(LayoutError, match=r"equally likely"):
        newest_files(tmp_path)


def test_suffix_picks_the_shortest_name_that_ends_so(tmp_path: Path) -> None:
    folder = tmp_path / "rank_0"
    folder.mkdir()
    for name in ("net-1_10.ckpt", "net-1_1.ckpt", "net-11_1.ckpt"):
        (folder / name).write_bytes(b"")
    found = newest_files(tmp_path, file_suffix="1_1")
    assert found[0].name == "net-1_1.ckpt"
    with pytest.raises(CheckpointNotFound, match="ends with '2_2'"):
        newest_files(tmp_path, file_suffix="2_2")


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rank_0x").mkdir()
    (tmp_path / "rank_1").write_bytes(b"")
    (tmp_path / "rank_2").mkdir()
    assert find_rank_files(tmp_path, format="ckpt") == {}


def written_strategy(path: Path, *layouts: StrategyLayout, stage: int = 0) -> Path:
    operators = (OperatorStrategy(name="op", stage=stage),)
    path.write_bytes(encode_strategy(Strategy(layouts=layouts, operators=operators)))
    return path


def rows(name: str, devices: int = 2) -> StrategyLayout:
    return StrategyLayout(name=name, device_matrix=(devices,), tensor_maps=((0,),))


def test_source_that_is_one_stage_of_the_target_gives_parts(tmp_path: Path) -> None:
    for rank in (2, 3):
        (tmp_path / f"in/rank_{rank}").mkdir(parents=True)
        save_checkpoint(
            {"w": np.arange(2 * rank, 2 * rank + 2)}, tmp_path / f"in/rank_{rank}/net.ckpt"
        )
    source = written_strategy(tmp_path / "s.ckpt", rows("w"), stage=1)
    target = written_strategy(tmp_path / "t.ckpt", rows("w"), rows("v"))
    files = transform_checkpoints(tmp_path / "in", tmp_path / "out", "p", source, target)
    assert [file.name for file in files] == ["p0_part1.ckpt", "p1_part1.ckpt"]
    assert loaded(files[1])["w"].tolist() == [6, 7]


def test_texts_and_values_in_no_strategy_come_from_the_rank_of_that_place(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"in/rank_{rank}").mkdir(parents=True)
        values = {"w": np.arange(2), "lr": np.float32(rank), "note": f"rank {rank}"}
        save_checkpoint(values, tmp_path / f"in/rank_{rank}/net.ckpt")
    strategy = written_strategy(tmp_path / "s.ckpt", rows("w"))
    files = transform_checkpoints(tmp_path / "in", tmp_path / "out", "p", strategy, strategy)
    second = load_checkpoint(files[1])
    assert (float(second["lr"]), second["note"]) == (1.0, "rank 1")


def test_map_parameter_cannot_be_carried_over(tmp_path: Path) -> None:
    part = tensor_from_array("m", np.zeros((1,), np.int32))
    items: list[Item] = [MapTensors(name="m", key=part, value=part, status=part)]
    write_file(tmp_path / "in/rank_0/net.ckpt", items, options=api.SaveOptions())
    strategy = written_strategy(tmp_path / "s.ckpt", rows("w", 1))
    with pytest.raises(UnsupportedCheckpoint, match="map parameter 'm'"):
        transform_checkpoints(tmp_path / "in", tmp_path / "out", "p", strategy)
    with pytest.raises(UnsupportedCheckpoint, match="'m' is no tensor"):
        transform_checkpoints(tmp_path / "in", tmp_path / "out", "p")


def test_every_element_type_keeps_its_bytes(tmp_path: Path) -> None:
    values = {
        "bf16": np.arange(8).astype(ml_dtypes.bfloat16).reshape(4, 2),
        "bool": np.array([[True, False], [False, True]] * 2),
        "f8": np.arange(8).astype(ml_dtypes.float8_e4m3fn).reshape(4, 2),
    }
    (tmp_path / "in/rank_0").mkdir(parents=True)
    save_checkpoint(values, tmp_path / "in/rank_0/net.safetensors", format="safetensors")
    columns = [
        StrategyLayout(name=name, device_matrix=(2,), tensor_maps=((-1, 0),)) for name in values
    ]
    target = written_strategy(tmp_path / "t.ckpt", *columns)
    files = transform_checkpoints(
        tmp_path / "in", tmp_path / "out", "p", None, target, output_format="safetensors"
    )
    assert_same(loaded(files[1]), {name: array[:, 1:].copy() for name, array in values.items()})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda d: transform_checkpoints(d, d, 5),  # type: ignore[arg-type]
            TypeError,
            "The ckpt_prefix should be a str.",
        ),
        (
            lambda d: transform_checkpoints(d, d, "../x"),
            ValueError,
            "ckpt_prefix contains '..' is not safe, please use a safe one.",
        ),
        (lambda d: transform_checkpoints(d, d, "p", process_num=0), ValueError, "process_num is 0"),
        (
            lambda d: transform_checkpoints(d, d, "p"),
            ValueError,
            "For 'transform_checkpoints', the 'src_checkpoints_dir' can not be empty.",
        ),
        (
            lambda d: transform_checkpoints(d, d, "p", output_format="x"),
            ValueError,
            "the output_format must be 'safetensors' or 'ckpt', but got x.",
        ),
        (
            lambda d: transform_checkpoint_by_rank(0, [], "x.ckpt"),  # type: ignore[arg-type]
            TypeError,
            "The checkpoint_files_map should be a dict.",
        ),
        (
            lambda d: transform_checkpoint_by_rank("0", {}, "x.ckpt"),  # type: ignore[arg-type]
            TypeError,
            "The rank_id should be a int.",
        ),
        (
            lambda d: transform_checkpoint_by_rank(0, {}, "x"),
            ValueError,
            "The save_checkpoint_file_name x should end with .ckpt",
        ),
        (
            lambda d: transform_checkpoint_by_rank(0, {0: "nope.ckpt"}, "x.ckpt"),
            ValueError,
            "Checkpoint file nope.ckpt in rank 0 not exits: ",
        ),
        (
            lambda d: transform_checkpoint_by_rank(0, {}, "x.ckpt"),
            ValueError,
            "None of the parameters in checkpoint file are in either src strategy or dst strategy.",
        ),
    ],
)
def test_unusable_arguments_give_mindspores_errors(
    call: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        call(tmp_path)
    assert message in str(caught.value)


def test_both_formats_in_one_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    for name in ("net.ckpt", "net.safetensors"):
        (tmp_path / "rank_0" / name).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot contain both ckpt file and safetensors file"):
        transform_checkpoints(tmp_path, tmp_path, "p")


def test_many_files_are_read_with_few_of_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.rank_files._OPEN_FILES", 1)
    pair = "dp4_mp2_opt4__to__dp2_mp2"
    source, target = map(strategy_file, pair.split("__to__"))
    files = transform_checkpoints(GOLDEN / pair / "src_ckpt", tmp_path, "ck_", source, target)
    assert_same(loaded(files[3]), loaded(GOLDEN / pair / "dst_ckpt/rank_3/ck_3.ckpt"))


def test_slices_of_large_tensors_are_read_across_windows_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.parallel.mindspore.rank_files._WINDOW_BYTES", 600)
    monkeypatch.setattr("ckptmgr.parallel.mindspore.rank_files._GAP_BYTES", 300)
    whole = np.arange(4096, dtype=np.int32).reshape(64, 64)
    (tmp_path / "in/rank_0").mkdir(parents=True)
    save_checkpoint({"w": whole}, tmp_path / "in/rank_0/net.ckpt")
    layout = StrategyLayout(name="w", device_matrix=(2, 32), tensor_maps=((1, 0),))
    target = written_strategy(tmp_path / "t.ckpt", layout)
    file = transform_checkpoint_by_rank(
        37, {0: tmp_path / "in/rank_0/net.ckpt"}, tmp_path / "o.ckpt", None, target
    )
    np.testing.assert_array_equal(loaded(file)["w"], whole[32:, 10:12])


@pytest.mark.slow
def test_memory_is_bounded_by_a_few_of_the_largest_tensors(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(40)]
    half = np.zeros((512, 256), np.float32)
    for rank in range(2):
        (tmp_path / f"in/rank_{rank}").mkdir(parents=True)
        save_checkpoint(dict.fromkeys(names, half), tmp_path / f"in/rank_{rank}/net.ckpt")
    columns = [StrategyLayout(name=n, device_matrix=(2,), tensor_maps=((-1, 0),)) for n in names]
    strategy = written_strategy(tmp_path / "s.ckpt", *columns)
    with OpenRankFiles(newest_files(tmp_path / "in")) as files:
        resharder = Resharder(files=files, source=read_layouts(strategy), target=None)
        image = build_ckpt_image(resharder.items(0))
        tracemalloc.start()
        try:
            size_bytes = sum(view.nbytes for view in image.views(0, image.size))
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    largest_bytes = 2 * half.nbytes
    assert size_bytes > len(names) * largest_bytes
    assert peak_bytes < 8 * largest_bytes


class CountingFile:
    """A file that counts the bytes that are read from it."""

    def __init__(self, file: api.InputFile, counts: list[int]) -> None:
        self._file = file
        self._counts = counts

    @property
    def size(self) -> int:
        return self._file.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._counts.append(buffer.nbytes)
        self._file.read_into(offset, buffer)

    def close(self) -> None:
        self._file.close()


class CountingFileSystem(api.OsFileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        return CountingFile(super().open(path, is_uncached=is_uncached), self.counts)


@pytest.mark.parametrize("dec_key", [None, KEY], ids=["plain", "sealed"])
def test_slice_costs_the_bytes_it_lies_in(dec_key: bytes | None, tmp_path: Path) -> None:
    whole_array = np.zeros((8, 1 << 19), np.float32)  # 16 MiB
    save_checkpoint({"w": whole_array}, tmp_path / "net.ckpt", enc_key=dec_key)
    for file in tmp_path.glob("*manifest*"):
        file.unlink()
    fs = CountingFileSystem()
    target = ParallelLayout(device_matrix=(8,), tensor_map=((0,), ()))
    options = reading_options(dec_key, "AES-GCM", allow_unsealed=False, allow_unencrypted=False)
    with OpenRankFiles({0: tmp_path / "net.ckpt"}, options, fs=fs) as files:
        tensor = Resharder(files=files, source=None, target=None).tensor("w", target, device=3)
        indexed_bytes = sum(fs.counts)
        assert tensor.content().nbytes == whole_array.nbytes // 8
    slice_bytes, two_blocks = whole_array.nbytes // 8, 8 << 20  # a block of the cipher holds 4 MiB
    assert sum(fs.counts) - indexed_bytes <= (slice_bytes if dec_key is None else two_blocks + 1024)


def test_table_of_several_fields_is_refused_where_mindspore_mixes_its_rows(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"in/rank_{rank}").mkdir(parents=True)
        save_checkpoint({"w": np.zeros((4, 2))}, tmp_path / f"in/rank_{rank}/net.ckpt")
    strategy = written_strategy(tmp_path / "s.ckpt", replace(rows("w"), field=2))
    with pytest.raises(LayoutError, match="'w' is an embedding table of 2 fields"):
        transform_checkpoints(tmp_path / "in", tmp_path / "out", "p", strategy)


def test_content_is_read_once_while_somebody_holds_it(tmp_path: Path) -> None:
    save_checkpoint({"w": np.arange(4)}, tmp_path / "net.ckpt")
    with OpenRankFiles({0: tmp_path / "net.ckpt"}) as files:
        tensor = Resharder(files=files, source=None, target=None).tensor("w", whole())
        held = tensor.content()
        assert tensor.content().obj is held.obj


def test_runs_are_read_across_the_pieces_of_a_tensor() -> None:
    file = GOLDEN.parent / "files" / "slices_sync.ckpt"
    with OpenRankFiles({0: file}) as files:
        cut = [e for e in files.file(0).entries.values() if len(getattr(e, "pieces", ())) > 2]
        assert cut
        for entry in cut:
            assert isinstance(entry, TensorEntry)
            content = files.read_array(0, entry.name).tobytes()
            first, second = entry.pieces[0].length, entry.pieces[1].length
            starts = (0, first - 3, first + 1, first + second - 2)
            target = bytearray(4 * 8)
            for index, start in enumerate(starts):
                run = ByteRun(start, 8 * index, 8)
                files.read_runs(0, entry.name, iter([run]), memoryview(target))
            assert bytes(target) == b"".join(content[start : start + 8] for start in starts)
            files.read_runs(0, entry.name, iter([]), memoryview(target))


def test_closed_file_is_opened_again(tmp_path: Path) -> None:
    save_checkpoint({"w": np.arange(3)}, tmp_path / "net.ckpt")
    files = OpenRankFiles({0: tmp_path / "net.ckpt"})
    with files:
        assert files.names() == files.names() == ("w",)
    assert files.read_array(0, "w").tolist() == [0, 1, 2]


def test_asking_for_what_is_not_there_names_it(tmp_path: Path) -> None:
    save_checkpoint({"w": np.zeros(2)}, tmp_path / "net.ckpt")
    with OpenRankFiles({0: tmp_path / "net.ckpt", 1: tmp_path / "gone.ckpt"}) as files:
        assert 0 in files
        with pytest.raises(CheckpointNotFound, match="holds no tensor 'v'"):
            files.read_array(0, "v")
        with pytest.raises(CheckpointNotFound, match="no file of rank 1"):
            files.file(1)
