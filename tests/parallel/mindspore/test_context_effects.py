# SPDX-License-Identifier: Apache-2.0
"""Effects of parallel settings on managers, callbacks and tools, and the table of them in the docs."""

from __future__ import annotations

import ast
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ckptmgr.parallel
from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    RankFailed,
    Ranks,
    load_checkpoint,
)
from ckptmgr import save_checkpoint as save_file
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.strategy import Strategy, StrategyLayout, encode_strategy
from ckptmgr.parallel import (
    AutoParallelContext,
    LayoutError,
    ParallelLayout,
    SlicedParameter,
    get_auto_parallel_context,
    get_parameter_redundancy,
    load_distributed_checkpoint,
    merge_sliced_parameter,
    rank_list_for_transform,
    read_layouts,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    transform_checkpoint_by_rank,
    transform_checkpoints,
    unified_safetensors,
)
from tests.cli.running import run
from tests.parallel.mindspore.test_transform import GOLDEN, assert_same, loaded
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support.runs import callback_on, manager_on
from tests.support.surface import Loop, data_files

ROOT = Path(__file__).parents[3]
RECORDED: dict[str, Any] = json.loads(
    (ROOT / "tests" / "golden" / "auto_parallel_context.json").read_text()
)
STRATEGIES = GOLDEN / "strategies"
ROWS = ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))
COPIES = ParallelLayout(
    device_matrix=(2,), tensor_map=((), ()), shape=(4, 2), dtype=BY_NAME["float32"]
)
WHOLE = np.arange(8, dtype=np.float32).reshape(4, 2)

SET_CONTEXT = """
auto_tune_mode check_bprop compile_cache_path device_id device_target enable_compile_cache enable_dump enable_graph_kernel
enable_profiling enable_reduce_precision enable_sparse env_config_path grad_for_scalar graph_kernel_flags max_call_depth
max_device_memory mempool_block_size mode precompile_only print_file_path profiling_options pynative_synchronize
reserve_class_name_in_scope save_dump_path save_graphs save_graphs_path variable_memory_max_size
"""
SET_PS_CONTEXT = """
client_password config_file_path enable_ps enable_ssl scheduler_manage_port server_password
"""
NO_KEYS = *SET_CONTEXT.split(), *SET_PS_CONTEXT.split(), "fusion_threshold"
"""What MindSpore documents for other functions, and a key that 2.10 no longer has."""


@pytest.fixture(autouse=True)
def _unset() -> Iterator[None]:
    yield
    reset_auto_parallel_context()


def manager(directory: Path, **options: Any) -> CheckpointManager:
    return manager_on(directory, CheckpointConfig(), **options)


def callback(directory: Path, **options: Any) -> ModelCheckpoint:
    return callback_on("net", str(directory), CheckpointConfig(), **options)


Surface = Callable[..., CheckpointManager | ModelCheckpoint]
both_surfaces = pytest.mark.parametrize("surface", [manager, callback])


def strategy(path: Path, axes: tuple[int, ...] = (0, -1)) -> str:
    """Write the strategy file of a matrix whose rows are cut for two ranks; return its name."""
    layout = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=(axes,))
    path.write_bytes(encode_strategy(Strategy(layouts=(layout,))))
    return str(path)


def part(rank: int) -> np.ndarray:
    """Return the rows of a rank."""
    return WHOLE[2 * rank : 2 * rank + 2].copy()


def saved_by(
    directory: Path, world: int, state_of: Callable[[int], object], **options: Any
) -> list[CheckpointManager]:
    """Save step 1 by managers of all ranks."""
    meeting = Meeting(world)

    def one(rank: int) -> CheckpointManager:
        config = CheckpointConfig(**options.get("config", {}))
        others = {key: value for key, value in options.items() if key != "config"}
        with manager_on(directory, config, ranks=Ranks(Seat(meeting, rank)), **others) as ours:
            ours.save(1, state_of(rank))
        return ours

    return [outcome.must() for outcome in run_ranks(meeting, one)]


# device_num and global_rank


def test_manager_of_one_rank_of_several_saves_into_its_rank_directory(tmp_path: Path) -> None:
    for rank in range(2):
        context = AutoParallelContext(device_num=2, global_rank=rank)
        with manager(tmp_path, context=context) as ours:
            ours.save(1, {"w": part(rank)})
    assert data_files(tmp_path / "rank_1") == ["ckpt-1.ckpt"]
    unified_safetensors(tmp_path, strategy(tmp_path / "s.ckpt"), tmp_path / "whole")
    assert_same(loaded(tmp_path / "whole" / "part0.safetensors"), {"w": WHOLE})


@pytest.mark.parametrize("is_function", [False, True])
def test_callback_of_one_rank_of_several_saves_into_its_rank_directory(
    tmp_path: Path, is_function: bool
) -> None:
    set_auto_parallel_context(device_num=8, global_rank=3)
    directory: Any = (lambda _: str(tmp_path)) if is_function else str(tmp_path)
    Loop(callbacks=(ModelCheckpoint("net", directory, CheckpointConfig()),)).run(1)
    assert data_files(tmp_path / "rank_3") == ["net-1_1.ckpt"]
    assert data_files(tmp_path) == []


@both_surfaces
def test_directory_of_the_own_rank_is_taken_as_it_is(tmp_path: Path, surface: Surface) -> None:
    made = surface(tmp_path / "rank_3", context=AutoParallelContext(global_rank=3))
    if isinstance(made, CheckpointManager):
        assert made.directory == tmp_path / "rank_3"
    assert not (tmp_path / "rank_3" / "rank_3").exists()


@both_surfaces
def test_directory_of_another_rank_is_refused(tmp_path: Path, surface: Surface) -> None:
    with pytest.raises(ValueError, match=r"rank_5 is that of another rank: .* global_rank=3"):
        surface(tmp_path / "rank_5", context=AutoParallelContext(device_num=8, global_rank=3))


def test_rank_that_the_context_does_not_name_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_ID", "6")
    context = AutoParallelContext(device_num=8)
    assert manager(tmp_path, context=context).directory == tmp_path / "rank_6"


def test_several_ranks_without_a_number_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK_ID", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"device_num=8, but not which .* give global_rank"):
        manager(tmp_path, context=AutoParallelContext(device_num=8))


def test_rank_in_the_environment_beyond_the_devices_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_ID", "9")
    with pytest.raises(ValueError, match=r"RANK.* 9, .* device_num=8"):
        manager(tmp_path, context=AutoParallelContext(device_num=8))


@both_surfaces
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device_num": 8, "global_rank": 3}, "global_rank=3"),
        ({"device_num": 8, "global_rank": 1}, "device_num=8"),
        ({"global_rank": 2}, "global_rank=2"),
        ({"parallel_mode": "stand_alone"}, "parallel_mode='stand_alone'"),
    ],
)
def test_context_that_contradicts_the_coordinator_is_refused_by_name(
    tmp_path: Path, surface: Surface, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named}, but the coordinator (is rank 1 of 4|has 4)"):
        surface(
            tmp_path,
            coordinator=Seat(Meeting(4), 1),
            context=AutoParallelContext(**settings),
        )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"device_num": 4, "global_rank": 9}, "global_rank=9 is no rank of device_num=4"),
        ({"device_num": 8, "pipeline_stages": 3}, "device_num=8 cannot be divided"),
        ({"device_num": 8, "parallel_mode": "stand_alone"}, "contradicts device_num=8"),
        (
            {"pipeline_stages": 2, "parallel_mode": "data_parallel"},
            "contradicts pipeline_stages=2",
        ),
    ],
)
def test_context_that_contradicts_itself_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        manager(tmp_path, context=AutoParallelContext(**settings))


def test_ranks_with_a_coordinator_share_the_directory(tmp_path: Path) -> None:
    set_auto_parallel_context(device_num=2)
    saved_by(tmp_path, 2, lambda rank: {"w": WHOLE})
    assert (tmp_path / "ckpt-1.shards.manifest.json").exists()


def test_single_device_has_no_rank_directory(tmp_path: Path) -> None:
    assert manager(tmp_path, context=AutoParallelContext(device_num=1)).directory == tmp_path


@both_surfaces
@pytest.mark.parametrize(
    "settings", [{"device_num": 2, "global_rank": 0}, {"parallel_mode": "data_parallel"}]
)
def test_removing_redundancy_of_ranks_that_do_not_compare_is_refused(
    tmp_path: Path, surface: Surface, settings: dict[str, Any]
) -> None:
    kind = CheckpointManager if surface is manager else ModelCheckpoint
    with pytest.raises(ValueError, match="remove_redundancy without a coordinator"):
        kind(
            directory=str(tmp_path),
            config=CheckpointConfig(remove_redundancy=True),
            context=AutoParallelContext(**settings),
        )


def test_tools_refuse_files_of_ranks_beyond_the_devices(tmp_path: Path) -> None:
    context = AutoParallelContext(device_num=2, parallel_mode="data_parallel")
    for rank in range(3):
        (tmp_path / f"rank_{rank}").mkdir()
        save_file({"w": WHOLE}, tmp_path / f"rank_{rank}" / "net.ckpt")
    with pytest.raises(LayoutError, match=r"files of rank 2, .* device_num=2"):
        unified_safetensors(tmp_path, None, tmp_path / "out", context=context)


def test_rank_of_the_context_loads_its_own_slices(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        files.append(tmp_path / f"{rank}.ckpt")
        save_file({"w": part(rank)}, files[-1])
    file = strategy(tmp_path / "s.ckpt")
    network = {"w": np.zeros((2, 2), np.float32)}
    context = AutoParallelContext(global_rank=1, strategy_ckpt_load_file=file)
    load_distributed_checkpoint(network, files, file, context=context)
    assert network["w"].tolist() == WHOLE[2:].tolist()


def test_rank_of_the_context_has_its_pipeline_stage_in_the_redundancy() -> None:
    context = AutoParallelContext(device_num=4, global_rank=3, pipeline_stages=2)
    layout = ParallelLayout(device_matrix=(2,), tensor_map=((), ()))
    assert get_parameter_redundancy({"w": layout}, context=context) == {"w": ((2, 3),)}


# parallel_mode


@pytest.mark.parametrize("tool", ["unify", "transform", "one rank"])
def test_copies_of_data_parallel_ranks_are_joined_without_a_strategy(
    tmp_path: Path, tool: str
) -> None:
    set_auto_parallel_context(parallel_mode="data_parallel", device_num=2)
    for rank, name in enumerate("vw"):  # deduplicated: each rank has saved one parameter
        (tmp_path / f"rank_{rank}").mkdir()
        save_file({name: WHOLE}, tmp_path / f"rank_{rank}" / "net.ckpt")
    out = tmp_path / "out"
    if tool == "unify":
        found = unified_safetensors(tmp_path, None, out)[0]
    elif tool == "transform":
        found = transform_checkpoints(tmp_path, out, "net")[0]
    else:
        paths = {rank: tmp_path / f"rank_{rank}" / "net.ckpt" for rank in range(2)}
        found = transform_checkpoint_by_rank(0, paths, out / "net.ckpt")
    assert_same(loaded(found), {"v": WHOLE, "w": WHOLE})


def test_slices_of_data_parallel_ranks_are_not_merged() -> None:
    with pytest.raises(ValueError, match="parallel_mode='data_parallel'"):
        merge_sliced_parameter(
            [SlicedParameter("w", WHOLE)] * 2,
            context=AutoParallelContext(parallel_mode="data_parallel"),
        )


def test_layout_that_cuts_is_refused_in_mode_data_parallel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"parallel_mode='data_parallel', .* cuts 'w'"):
        manager(
            tmp_path,
            coordinator=Seat(Meeting(2), 0),
            layout={"w": ROWS},
            context=AutoParallelContext(parallel_mode="data_parallel"),
        )


# pipeline_stages


@both_surfaces
def test_strategy_file_of_another_number_of_stages_is_refused(
    tmp_path: Path, surface: Surface
) -> None:
    file = str(STRATEGIES / "dp2_mp2.ckpt")
    context = AutoParallelContext(pipeline_stages=2, strategy_ckpt_load_file=file)
    with pytest.raises(ValueError, match=r"has 1 pipeline stage.* pipeline_stages=2; merge_pipe"):
        surface(tmp_path, context=context)
    with pytest.raises(LayoutError, match=r"has 1 pipeline stage.* pipeline_stages=2"):
        rank_list_for_transform(0, context=context)


# enable_parallel_optimizer and its configuration


def sharded_context(threshold_kib: int = 0) -> AutoParallelContext:
    return AutoParallelContext(
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": threshold_kib},
    )


@pytest.mark.parametrize("remove_redundancy", [False, True])
def test_ranks_that_hold_copies_hold_shards_with_the_parallel_optimizer(
    tmp_path: Path, remove_redundancy: bool
) -> None:
    saved_by(
        tmp_path,
        2,
        lambda rank: {"w": part(rank)},
        layout={"w": COPIES},
        context=sharded_context(),
        config={"remove_redundancy": remove_redundancy},
    )
    found = load_checkpoint(tmp_path / "ckpt-1.shards")
    assert np.array_equal(np.asarray(found["w"]), WHOLE)


@pytest.mark.parametrize(
    "context",
    [
        sharded_context(threshold_kib=1),
        AutoParallelContext(enable_parallel_optimizer=True),
        AutoParallelContext(enable_parallel_optimizer=False),
        AutoParallelContext(enable_parallel_optimizer=True, parallel_mode="data_parallel"),
        AutoParallelContext(enable_parallel_optimizer=True, optimizer_weight_shard_size=3),
    ],
)
def test_small_tensors_and_copies_that_cannot_be_divided_stay_whole(
    tmp_path: Path, context: AutoParallelContext
) -> None:
    saved_by(tmp_path, 2, lambda _: {"w": WHOLE}, layout={"w": COPIES}, context=context)
    assert np.array_equal(np.asarray(load_checkpoint(tmp_path / "ckpt-1.shards")["w"]), WHOLE)


def test_shards_are_as_many_as_the_context_says() -> None:
    layout = ParallelLayout(
        device_matrix=(4,), tensor_map=((), ()), shape=(4, 2), dtype=BY_NAME["float32"]
    )
    context = sharded_context()
    assert get_parameter_redundancy({"w": layout}, 0, context=context) == {
        "w": ((0,), (1,), (2,), (3,))
    }
    context.set(optimizer_weight_shard_size=2)
    assert get_parameter_redundancy({"w": layout}, 0, context=context) == {"w": ((0, 2), (1, 3))}
    context.set(parallel_optimizer_config={"optimizer_weight_shard_size": 4})
    assert len(get_parameter_redundancy({"w": layout}, 0, context=context)["w"]) == 1


def test_shard_group_of_a_layout_tuple_gets_its_size_from_the_context() -> None:
    value = ([4], [-1, -1], [1, 2], 0, True, "4-group", [4, 2])
    context = sharded_context()
    context.set(optimizer_weight_shard_size=2)
    assert get_parameter_redundancy({"w": value}, 0, context=context) == {"w": ((0, 2), (1, 3))}
    with pytest.raises(LayoutError, match="whose size is not known"):
        get_parameter_redundancy({"w": value}, 0)


def test_shape_without_a_dtype_is_refused_as_the_threshold_needs_it() -> None:
    layout = ParallelLayout(device_matrix=(2,), tensor_map=((), ()), shape=(4, 2))
    with pytest.raises(ValueError, match=r"no dtype, .* parallel_optimizer_threshold=0"):
        get_parameter_redundancy(
            {"w": layout}, 0, context=AutoParallelContext(enable_parallel_optimizer=True)
        )


def test_strategy_file_with_shards_contradicts_a_context_without_them(tmp_path: Path) -> None:
    file = str(STRATEGIES / "dp2_mp2_opt2.ckpt")
    context = AutoParallelContext(strategy_ckpt_load_file=file, enable_parallel_optimizer=False)
    with pytest.raises(ValueError, match="enable_parallel_optimizer=False"):
        manager(tmp_path, context=context)


def test_shards_of_a_layout_are_kept() -> None:
    layout = ParallelLayout(device_matrix=(4,), tensor_map=((), ()), opt_shard_size=2)
    context = AutoParallelContext(enable_parallel_optimizer=True, optimizer_weight_shard_size=4)
    assert get_parameter_redundancy({"w": layout}, 0, context=context) == {"w": ((0, 2), (1, 3))}


# strategy files


@pytest.mark.parametrize("key", ["strategy_ckpt_load_file", "strategy_ckpt_config"])
def test_strategy_file_of_the_context_cuts_the_state_of_a_manager(tmp_path: Path, key: str) -> None:
    file = strategy(tmp_path / "s.ckpt")
    value = {"load_file": file} if key == "strategy_ckpt_config" else file
    saved_by(
        tmp_path,
        2,
        lambda rank: {"w": part(rank)},
        context=AutoParallelContext(**{key: value}),
    )
    assert np.array_equal(np.asarray(load_checkpoint(tmp_path / "ckpt-1.shards")["w"]), WHOLE)


def test_strategy_file_of_the_context_cuts_the_network_of_a_callback(tmp_path: Path) -> None:
    set_auto_parallel_context(strategy_ckpt_load_file=strategy(tmp_path / "s.ckpt"))
    meeting = Meeting(2)

    def one(rank: int) -> bool:
        ours = ModelCheckpoint(
            "net", str(tmp_path), CheckpointConfig(), ranks=Ranks(Seat(meeting, rank))
        )
        network = {"w": part(rank)}
        params = SimpleNamespace(
            cur_step_num=1, cur_epoch_num=1, batch_num=1, train_network=network
        )
        context: Any = SimpleNamespace(original_args=lambda: params)
        ours.begin(context)
        ours.step_end(context)
        ours.end(context)
        return True

    for outcome in run_ranks(meeting, one):
        outcome.must()
    found = load_checkpoint(tmp_path / "net-1_1.shards")
    assert np.array_equal(np.asarray(found["w"]), WHOLE)


def test_strategy_file_beside_another_layout_is_refused(tmp_path: Path) -> None:
    file = strategy(tmp_path / "s.ckpt")
    context = AutoParallelContext(strategy_ckpt_load_file=file)
    seat = Seat(Meeting(2), 0)
    manager(tmp_path, coordinator=seat, layout=read_layouts(file), context=context)
    with pytest.raises(ValueError, match=r"layout differs .*strategy_ckpt_load_file"):
        manager(tmp_path, coordinator=seat, layout={"v": ROWS}, context=context)


def test_strategy_file_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    context = AutoParallelContext(strategy_ckpt_load_file=strategy(tmp_path / "s.ckpt"))
    with pytest.raises(ValueError, match="is for 2 ranks, but there are 4"):
        manager(tmp_path, coordinator=Seat(Meeting(4), 0), context=context)
    context.set(device_num=4, global_rank=0)
    with pytest.raises(ValueError, match="is for 2 ranks, but there are 4"):
        callback(tmp_path, context=context)


def test_tools_read_the_strategy_file_of_the_context(tmp_path: Path) -> None:
    file = STRATEGIES / "dp2_mp2.ckpt"
    source = GOLDEN / "dp2_mp2__to__full"
    context = AutoParallelContext(strategy_ckpt_load_file=str(file))
    transform_checkpoints(source / "src_ckpt", tmp_path / "by context", "net", context=context)
    transform_checkpoints(source / "src_ckpt", tmp_path / "by name", "net", file)
    expected = loaded(tmp_path / "by name" / "rank_0" / "net0.ckpt")
    assert_same(loaded(tmp_path / "by context" / "rank_0" / "net0.ckpt"), expected)
    unified_safetensors(source / "src_st", None, tmp_path / "one", context=context)
    assert loaded(tmp_path / "one" / "part0.safetensors").keys() == read_layouts(file).keys()
    assert rank_list_for_transform(0, context=context) == rank_list_for_transform(0, file)


def test_slices_are_merged_by_the_strategy_file_of_the_context(tmp_path: Path) -> None:
    file = strategy(tmp_path / "s.ckpt", (-1, 0))
    slices = [SlicedParameter("w", WHOLE[:, :1]), SlicedParameter("w", WHOLE[:, 1:])]
    set_auto_parallel_context(strategy_ckpt_load_file=file)
    assert np.array_equal(merge_sliced_parameter(slices).data, WHOLE)


def test_source_strategy_that_is_given_replaces_the_context(tmp_path: Path) -> None:
    set_auto_parallel_context(device_num=2, strategy_ckpt_load_file="nowhere.ckpt")
    source = GOLDEN / "dp2_mp2__to__full" / "src_ckpt"
    files = transform_checkpoints(source, tmp_path, "net", STRATEGIES / "dp2_mp2.ckpt")
    assert [file.name for file in files] == ["net0.ckpt"]


@pytest.mark.parametrize("name", ["strategy.ckpt", "strategy.json"])
@pytest.mark.parametrize("key", ["strategy_ckpt_save_file", "strategy_ckpt_config"])
def test_strategy_file_is_written_beside_the_checkpoints(
    tmp_path: Path, name: str, key: str
) -> None:
    layout = {"w": ROWS, "v": ParallelLayout(device_matrix=(2,), tensor_map=((), ()))}
    saved_by(
        tmp_path,
        2,
        lambda rank: {"w": part(rank), "v": WHOLE},
        layout=layout,
        context=AutoParallelContext(
            **{key: {"save_file": name} if key == "strategy_ckpt_config" else name}
        ),
    )
    assert read_layouts(tmp_path / name) == layout


def test_strategy_file_beside_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    context = AutoParallelContext(strategy_ckpt_save_file="strategy.ckpt")
    saved_by(tmp_path, 2, lambda rank: {"w": part(rank)}, layout={"w": ROWS}, context=context)
    assert (tmp_path / "strategy.ckpt").is_file()
    assert "1 checkpoint (full): 1 ok" in run("verify", tmp_path).stdout


@both_surfaces
def test_strategy_file_of_ranks_that_save_alone_is_beside_their_directories(
    tmp_path: Path, surface: Surface
) -> None:
    file = strategy(tmp_path / "s.ckpt")
    context = AutoParallelContext(
        device_num=2,
        global_rank=1,
        strategy_ckpt_load_file=file,
        strategy_ckpt_save_file="strategy.json",
    )
    made = surface(tmp_path / "run", context=context)
    if isinstance(made, CheckpointManager):
        with made:
            made.save(1, {"w": WHOLE[2:]})
            made.save(2, {"w": WHOLE[2:]})
    else:
        Loop(callbacks=(made,)).run(2)
    assert (tmp_path / "run" / "strategy.json").read_bytes().startswith(b"{")
    assert read_layouts(tmp_path / "run" / "strategy.json") == read_layouts(file)
    assert "strategy.json" not in data_files(tmp_path / "run" / "rank_1")


@pytest.mark.parametrize(
    "name",
    ["dp2_mp2_opt2", "dp4_mp2_opt2", "dp4_opt4", "mp8", "nested_2x2x2", "pp2_shared_dp2_mp2"],
)
def test_layouts_are_written_as_mindspore_writes_them(tmp_path: Path, name: str) -> None:
    recorded = read_layouts(STRATEGIES / f"{name}.ckpt")
    # MindSpore takes a shard without a stride for none, so the stride is written.
    layout = {key: replace(one, opt_shard_step=0) for key, one in recorded.items()}
    with manager(
        tmp_path,
        coordinator=Seat(Meeting(1), 0),
        layout=layout,
        context=AutoParallelContext(strategy_ckpt_save_file="s.ckpt"),
    ) as ours:
        held = {key: one.tensor_map for key, one in layout.items() if 0 in one.stages}
        ours.save(1, {key: np.zeros((1,) * len(axes)) for key, axes in held.items()})
    assert read_layouts(tmp_path / "s.ckpt") == recorded


def test_strategy_file_that_cannot_be_written_fails_the_save_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    context = AutoParallelContext(strategy_ckpt_save_file="file/s.ckpt")
    with pytest.raises(RankFailed, match="rank 0: NotADirectoryError"):
        saved_by(tmp_path, 2, lambda rank: {"w": part(rank)}, layout={"w": ROWS}, context=context)
    assert not (tmp_path / "ckpt-1.shards.manifest.json").exists()


def test_strategy_file_to_write_without_a_strategy_is_refused(tmp_path: Path) -> None:
    context = AutoParallelContext(strategy_ckpt_save_file="s.ckpt")
    with pytest.raises(ValueError, match=r"strategy_ckpt_save_file='s.ckpt': nothing says how"):
        manager(tmp_path, context=context)


def test_layout_that_no_strategy_file_can_express_is_refused(tmp_path: Path) -> None:
    layout = ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()), ranks=(1, 0))
    with pytest.raises(ValueError, match=r"strategy_ckpt_save_file: .* express the layout of 'w'"):
        manager(
            tmp_path,
            coordinator=Seat(Meeting(2), 0),
            layout={"w": layout},
            context=AutoParallelContext(strategy_ckpt_save_file="s.ckpt"),
        )


def test_merging_on_save_is_refused_beside_a_strategy_file(tmp_path: Path) -> None:
    context = AutoParallelContext(strategy_ckpt_load_file=strategy(tmp_path / "s.ckpt"))
    config = CheckpointConfig(integrated_save=True)
    with pytest.raises(ValueError, match="integrated_save has no effect"):
        CheckpointManager(tmp_path, config, ranks=Ranks(Seat(Meeting(2), 0)), context=context)


# the context of the process


def test_unset_context_changes_nothing(tmp_path: Path) -> None:
    set_auto_parallel_context(device_num=8, global_rank=3)
    assert get_auto_parallel_context("device_num") == 8
    reset_auto_parallel_context()
    assert get_auto_parallel_context("device_num") == 1
    assert manager(tmp_path).directory == tmp_path
    manager(tmp_path, coordinator=Seat(Meeting(4), 1))


def test_given_context_replaces_that_of_the_process(tmp_path: Path) -> None:
    set_auto_parallel_context(device_num=8, global_rank=3)
    assert manager(tmp_path, context=AutoParallelContext()).directory == tmp_path


def test_context_of_the_process_is_that_of_all_its_threads() -> None:
    thread = threading.Thread(target=lambda: set_auto_parallel_context(device_num=8))
    thread.start()
    thread.join()
    assert get_auto_parallel_context("device_num") == 8


def test_bad_setting_leaves_the_context_of_the_process_as_it_was() -> None:
    set_auto_parallel_context(device_num=8)
    with pytest.raises(ValueError, match="zzz is not recognized"):
        set_auto_parallel_context(device_num=4, zzz=1)
    assert get_auto_parallel_context("device_num") == 8


@both_surfaces
def test_context_of_another_type_is_refused(tmp_path: Path, surface: Surface) -> None:
    with pytest.raises(TypeError, match="context must be an AutoParallelContext"):
        surface(tmp_path, context={"device_num": 8})


# the tables


def documented(kind: str) -> set[str]:
    """Return the keys of the tables in the docs whose second column is `effect` or `why`."""
    keys: set[str] = set()
    is_wanted = False
    for line in (ROOT / "docs" / "mindspore.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| key"):
            is_wanted = cells[2].startswith(kind)
        elif line.startswith("| `") and is_wanted:
            keys |= set(re.findall(r"`(\w+)`", cells[1]))
        elif not line.startswith("|"):
            is_wanted = False
    return keys


HONOURED = documented("effect")
NOT_APPLICABLE = documented("why")
PROBES: Mapping[str, Callable[..., None]] = {
    "device_num": test_manager_of_one_rank_of_several_saves_into_its_rank_directory,
    "enable_parallel_optimizer": test_ranks_that_hold_copies_hold_shards_with_the_parallel_optimizer,
    "global_rank": test_rank_of_the_context_loads_its_own_slices,
    "optimizer_weight_shard_size": test_shards_are_as_many_as_the_context_says,
    "parallel_mode": test_copies_of_data_parallel_ranks_are_joined_without_a_strategy,
    "parallel_optimizer_config": test_small_tensors_and_copies_that_cannot_be_divided_stay_whole,
    "pipeline_stages": test_rank_of_the_context_has_its_pipeline_stage_in_the_redundancy,
    "strategy_ckpt_config": test_strategy_file_is_written_beside_the_checkpoints,
    "strategy_ckpt_load_file": test_strategy_file_of_the_context_cuts_the_state_of_a_manager,
    "strategy_ckpt_save_file": test_strategy_file_is_written_beside_the_checkpoints,
}


OTHER_VALUES = {
    "all_reduce_fusion_config": [3, 9],
    "communi_parallel_mode": "no_group_parallel",
    **dict.fromkeys(
        ("auto_parallel_new_interface", "auto_pipeline", "force_fp32_communication"), True
    ),
    **dict.fromkeys(
        ("gradient_fp32_sync", "init_param_in_compile", "pipeline_result_broadcast"), False
    ),
}
"""Values of keys that do not apply and that no recorded call sets alone."""


def test_key_with_a_documented_effect_has_a_test_of_it() -> None:
    assert PROBES.keys() == HONOURED


@pytest.mark.parametrize(
    "key",
    sorted({*RECORDED["settable"], *RECORDED["gettable"], *NO_KEYS}),
)
def test_key_has_a_documented_effect_or_a_reason_for_none(key: str) -> None:
    assert (key in HONOURED) != (key in NOT_APPLICABLE)


def test_settings_of_devices_and_servers_do_not_exist_here() -> None:
    for name in ("set_context", "get_context", "set_ps_context", "get_ps_context"):
        assert not hasattr(ckptmgr.parallel, name)
    for key in NO_KEYS:
        with pytest.raises(ValueError, match=f"keyword {key} is not recognized"):
            set_auto_parallel_context(**{key: 1})


def test_settings_that_do_not_apply_change_no_checkpoint(tmp_path: Path) -> None:
    context, used = AutoParallelContext(), set[str]()
    for case in RECORDED["cases"]:
        settings = ast.literal_eval(case["set"]) if "set" in case else {}
        if settings and settings.keys() <= NOT_APPLICABLE and case["result"][0] == "ok":
            context.set(**settings)
            used |= settings.keys()
    for key in set(RECORDED["settable"]) & NOT_APPLICABLE - used:
        context.set(**{key: OTHER_VALUES[key]})
    contents = []
    for name, one in (("with", context), ("without", None)):
        with manager(tmp_path / name, clock=lambda: 1.0, context=one) as ours:
            ours.save(1, {"w": WHOLE})
        contents.append((tmp_path / name / "ckpt-1.ckpt").read_bytes())
    assert contents[0] == contents[1]
