# SPDX-License-Identifier: Apache-2.0
"""States that are saved and loaded through PyTorch DCP, by the same and by other numbers of ranks."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")
dcp: Any = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import (  # noqa: E402 - only where there is torch
    CheckpointException,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

from ckptmgr import Ranks  # noqa: E402
from ckptmgr.config.config import CheckpointConfig  # noqa: E402
from ckptmgr.core.errors import (  # noqa: E402
    CheckpointNotFound,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    SaveFailed,
    StoreFull,
    StoreLocked,
    UnsupportedState,
)
from ckptmgr.core.model import State  # noqa: E402
from ckptmgr.crypto.keys.signing import SigningKey  # noqa: E402
from ckptmgr.files.load.shard_pieces import PIECES, read_index  # noqa: E402
from ckptmgr.files.serialization import load_checkpoint  # noqa: E402
from ckptmgr.formats.safetensors_file import build_safetensors_image  # noqa: E402
from ckptmgr.integrations.dcp import (  # noqa: E402
    LoadPlanner,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from ckptmgr.integrations.dcp import run as dcp_run  # noqa: E402
from ckptmgr.integrations.dcp.dedup import LEAST_CHUNK_BYTES  # noqa: E402
from ckptmgr.integrations.dcp.planners import decode_object, encode_python_object  # noqa: E402
from ckptmgr.io.filesystem import OsFileSystem  # noqa: E402
from ckptmgr.observe.events import Event  # noqa: E402
from ckptmgr.state.paths import StateMismatch  # noqa: E402
from ckptmgr.store.store import Store  # noqa: E402
from ckptmgr.training.manager import CheckpointManager  # noqa: E402
from tests.cli.running import run, run_json  # noqa: E402
from tests.integrations.dcp.dcp_ranks import CountingDisk, Cut, cut, load, save  # noqa: E402
from tests.parallel.ranks import Meeting, Seat  # noqa: E402
from tests.support.failingdisk import FailingDisk  # noqa: E402

KEY = bytes(range(32))
CONFIGS = {
    "plain": CheckpointConfig(),
    "compressed": CheckpointConfig(format="safetensors", compression="zstd"),
    "both": CheckpointConfig(format="safetensors", compression="zstd", enc_key=KEY),
    "encrypted": CheckpointConfig(enc_key=KEY),
    "SM4": CheckpointConfig(enc_key=KEY[:16], enc_mode="SM4-CBC"),
}


@pytest.fixture(autouse=True)
def _each_test_is_a_process() -> Iterator[None]:
    yield
    for one in list(dcp_run._runs.values()):
        dcp_run.end_run(one.place)


@pytest.fixture(autouse=True)
def _one_process_is_enough() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def names(directory: Path) -> list[str]:
    """Return the names in a directory, without the lease."""
    return sorted(one.name for one in directory.iterdir() if not one.name.endswith(".lease"))


def cause_of(error: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """Return what rank 0 has told all ranks."""
    found: BaseException = error.value.failures[0][0]
    return found


def trained() -> tuple[Any, Any]:
    """Return a model and its optimizer after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=random.random())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "counts": {0: "zero", 1: [1, 2.5, None]},
        "history": np.arange(300.0),
        "complex": torch.arange(4).to(torch.complex128) * 1j,
        "float8": torch.arange(4).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_state_of_one_process_comes_back_equal(tmp_path: Path, config: CheckpointConfig) -> None:
    model, optimizer = trained()
    saved = state_of(model, optimizer)
    writer = StorageWriter(tmp_path, config, step=3, epoch=1, metrics={"loss": 0.5})
    dcp.save(saved, storage_writer=writer, planner=SavePlanner())
    assert writer.checkpoint is not None
    assert (writer.checkpoint.name, writer.checkpoint.epoch) == ("ckpt-3.shards", 1)

    state: dict[str, Any] = state_of(*trained())
    state["counts"], state["history"] = {0: "", 1: []}, np.zeros(1)
    for name in ("complex", "flags"):
        state[name].zero_()
    reader = StorageReader(tmp_path, config)
    dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    assert reader.checkpoint is not None
    assert (reader.checkpoint.step, reader.checkpoint.metrics) == (3, {"loss": 0.5})
    assert state["counts"] == saved["counts"]
    assert state["rng"]["python"] == saved["rng"]["python"]
    assert state["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert np.array_equal(state["history"], saved["history"])
    for name in ("complex", "flags", "empty"):
        assert torch.equal(state[name], saved[name])
    assert torch.equal(state["float8"].view(torch.uint8), saved["float8"].view(torch.uint8))
    for name, tensor in saved["model"].items():
        assert torch.equal(state["model"][name], tensor)
    for number, one in saved["optimizer"]["state"].items():
        assert torch.equal(state["optimizer"]["state"][number]["exp_avg"], one["exp_avg"])


@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    saved_by=st.integers(1, 4),
    loaded_by=st.integers(1, 5),
    dimensions=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    name=st.sampled_from(sorted(CONFIGS)),
)
def test_cut_tensor_is_loaded_by_any_number_of_ranks_cut_anyhow(
    shape: list[int],
    saved_by: int,
    loaded_by: int,
    dimensions: tuple[int, int],
    name: str,
) -> None:
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    one, other = (dimension % len(shape) for dimension in dimensions)
    config = CONFIGS[name]
    with tempfile.TemporaryDirectory() as directory:
        writers = [StorageWriter(directory, config, step=1) for _ in range(saved_by)]
        save(
            writers,
            [
                {"w": cut(whole, rank, saved_by, dimension=one), "rank": [rank]}
                for rank in range(saved_by)
            ],
        )
        readers = [StorageReader(directory, config) for _ in range(loaded_by)]
        states: list[dict[str, Any]] = [
            {
                "w": cut(torch.zeros_like(whole), rank, loaded_by, dimension=other),
                "rank": None,
            }
            for rank in range(loaded_by)
        ]
        load(readers, states)
        writers[0].close()
    for rank, state in enumerate(states):
        assert torch.equal(state["w"].local, cut(whole, rank, loaded_by, dimension=other).local)
        assert state["rank"] in [[one] for one in range(saved_by)]  # DCP takes one


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_only_the_ranges_that_are_needed_are_read(tmp_path: Path, name: str) -> None:
    rows = 18 << 10  # of 4 KiB: 36 MiB for each rank
    whole = torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024)
    save(
        [StorageWriter(tmp_path, CONFIGS[name], step=1) for _ in range(2)],
        [{"w": cut(whole, rank, 2), "small": torch.ones(2)} for rank in range(2)],
    )
    disk = CountingDisk()
    part = Cut.of(torch.zeros(8, 1024, dtype=torch.int32), (rows - 8, 0), whole.size())
    load([StorageReader(tmp_path, CONFIGS[name], fs=disk)], [{"w": part}])
    assert torch.equal(part.local, whole[-8:])
    for file in names(tmp_path)[:2]:  # the range of the header, and that of the index or the rows
        assert disk.read_bytes[file] < 25 << 20


def test_tensors_of_other_types_layouts_and_places_are_filled(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    writer = StorageWriter(tmp_path, step=1)
    dcp.save({"a": whole, "b": whole, "c": whole}, storage_writer=writer)
    shared = torch.zeros(4, 6)
    state = {"a": torch.zeros(6, 4, dtype=torch.float64).T, "b": shared, "c": shared.view(4, 6)}
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    for tensor in state.values():
        assert torch.equal(tensor.float(), whole)


def test_buffers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptmgr.integrations.dcp import loading as dcp_loading

    monkeypatch.setattr(dcp_loading, "_BUFFERED_BYTES", 100)
    saved = {f"w{number}": torch.full((8,), float(number)) for number in range(9)}
    dcp.save(saved, storage_writer=StorageWriter(tmp_path, step=1))
    state = {name: torch.zeros(8, dtype=torch.float64) for name in saved}
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert [state[f"w{n}"][0].item() for n in range(9)] == list(range(9))


def test_names_that_files_reserve_can_be_saved(tmp_path: Path) -> None:
    odd = ["format", "__metadata__", "ckptmgr.dcp", "~index", "w", "w~@1", "~format", "a/b", "é"]
    saved = {name: torch.full((1,), float(number)) for number, name in enumerate(odd)}
    saved["objects"] = ["format"]
    dcp.save(saved, storage_writer=StorageWriter(tmp_path, step=1), planner=SavePlanner())
    state: dict[str, Any] = {name: torch.zeros(1) for name in odd} | {"objects": None}
    dcp.load(state, storage_reader=StorageReader(tmp_path), planner=LoadPlanner())
    assert [state[name].item() for name in odd] == list(range(len(odd)))


def test_newest_whole_checkpoint_is_loaded_unless_told_another_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer = StorageWriter(tmp_path, step=step, prefix="net")
        dcp.save({"w": torch.full((2,), float(step))}, storage_writer=writer)
    (tmp_path / next(n for n in names(tmp_path) if n.startswith("net-3.0"))).unlink()

    def loaded(checkpoint_id: str | None = None, step: int | None = None) -> float:
        state = {"w": torch.zeros(2)}
        reader = StorageReader(tmp_path, prefix="net", step=step)
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
        return float(state["w"][0].item())

    assert loaded() == loaded("latest") == 2
    assert loaded(step=1) == loaded("1") == loaded("net-1") == loaded("net-1.shards") == 1
    assert loaded(str(tmp_path / "net-1.shards.manifest.json")) == 1
    ids = {one.step: one.id for one in CheckpointManager(tmp_path, prefix="net").checkpoints()}
    assert loaded(f"id:{(ids[1] or '')[:8]}") == 1
    with pytest.raises(CheckpointException) as error:
        loaded("3")
    assert isinstance(cause_of(error), CorruptCheckpoint)
    with pytest.raises(ValueError, match="is not in"):
        loaded("elsewhere/net-1")


def test_wrong_key_is_an_error_and_no_missing_checkpoint(tmp_path: Path) -> None:
    own, other = (CheckpointConfig(enc_key=bytes([one]) * 16) for one in (1, 2))
    state = {"w": torch.ones(3)}
    with StorageWriter(tmp_path, own, step=1) as writer:
        save([writer], [state])
    for step in (None, 1):
        with pytest.raises(KeyProblem, match="under key"):
            load([StorageReader(tmp_path, other, step=step)], [state])


def test_stranger_that_claims_a_later_step_is_passed_over_and_no_damage(tmp_path: Path) -> None:
    own, other = (CheckpointConfig(enc_key=bytes([one]) * 16) for one in (1, 2))
    for folder, config, steps in (("a", own, (1, 2)), ("b", other, (1, 2, 3))):
        for step in steps:
            with StorageWriter(tmp_path / folder, config, step=step) as writer:
                save([writer], [{"w": torch.full((3,), step)}])
    for path in (tmp_path / "b").glob("ckpt-3*"):
        path.rename(tmp_path / "a" / path.name)
    found = {"w": torch.zeros(3, dtype=torch.int64)}
    load([StorageReader(tmp_path / "a", own)], [found])
    assert found["w"].tolist() == [2, 2, 2]
    with pytest.raises(KeyProblem):
        load([StorageReader(tmp_path / "a", own, step=3)], [found])


def test_step_of_a_save_can_come_as_checkpoint_id(tmp_path: Path) -> None:
    with StorageWriter(tmp_path, prefix="net") as writer:
        for checkpoint_id in ("1", "net-2", tmp_path / "net-3", str(tmp_path / "net-4.shards")):
            dcp.save({"w": torch.ones(1)}, checkpoint_id=checkpoint_id, storage_writer=writer)
            assert writer.checkpoint is not None
        assert sorted(c.step for c in Store(tmp_path).scan()) == [1, 2, 3, 4]
        for wrong in ("other-5", "net", "net-5-r1"):
            with pytest.raises(ValueError, match="neither a step"):
                writer.reset(wrong)


def test_metadata_name_the_checkpoint_the_save_and_the_load(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, step=500)
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=SavePlanner())
    reader = StorageReader(tmp_path)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert meta.checkpoint_id == str(tmp_path / "ckpt-500.shards")
    assert writer.checkpoint is not None
    assert meta.save_id == writer.checkpoint.id is not None
    reader.reset()
    again = reader.read_metadata().storage_meta
    assert again is not None
    assert again.save_id == meta.save_id
    assert again.load_id != meta.load_id


def test_stream_in_a_state_comes_back_with_its_position(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(3), stream)
    state = {"w": torch.ones(2), "iterator": stream}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, step=1), planner=SavePlanner())
    found = {"w": torch.zeros(2), "iterator": io.BytesIO()}
    dcp.load(found, storage_reader=StorageReader(tmp_path), planner=LoadPlanner())
    assert found["iterator"].getvalue() == stream.getvalue()
    assert found["iterator"].tell() == stream.tell()


def test_second_save_of_a_step_has_another_name(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        writer = StorageWriter(tmp_path, step=5)
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        assert writer.checkpoint is not None
        found.append(writer.checkpoint.name)
    assert found == ["ckpt-5.shards", "ckpt-5-r1.shards"]


def test_retention_counts_the_run_also_after_a_restart_that_loads(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="last(2)")

    def save_steps(*steps: int) -> list[int]:
        for step in steps:
            writer = StorageWriter(tmp_path, config, step=step)
            dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        StorageWriter(tmp_path).close()  # the process ends
        return sorted(c.step for c in Store(tmp_path).scan())

    assert save_steps(1, 2, 3) == [2, 3]
    manifest = Store(tmp_path).read_manifest("ckpt-3.shards")
    assert manifest is not None
    assert manifest.keep == "last(2)"
    assert save_steps(4) == [2, 3, 4]  # another run: files of others are not its own
    reader = StorageReader(tmp_path)
    dcp.load({"w": torch.ones(1)}, storage_reader=reader)
    assert save_steps(5) == [2, 3, 4, 5]  # the one that was resumed from stays
    dcp.load({"w": torch.ones(1)}, storage_reader=StorageReader(tmp_path))
    assert save_steps(6, 7) == [2, 3, 5, 6, 7]


def test_full_disk_of_one_rank_leaves_no_checkpoint_and_the_next_save_removes_the_rest(
    tmp_path: Path,
) -> None:
    small = FailingDisk(OsFileSystem(), space_bytes=100)
    states = [{"w": cut(torch.ones(6), rank, 3)} for rank in range(3)]

    def writers(step: int, *, of_last: FailingDisk | None) -> list[StorageWriter]:
        return [
            StorageWriter(tmp_path, step=step, fs=of_last if rank == 2 else None)
            for rank in range(3)
        ]

    save(writers(1, of_last=None), states)
    with pytest.raises(StoreFull):
        save(writers(2, of_last=small), states)
    assert len([name for name in names(tmp_path) if name.startswith("ckpt-2.")]) == 2
    save(writers(2, of_last=None), states)
    assert {c.name: c.state for c in Store(tmp_path).scan()} == {
        "ckpt-1.shards": State.OK,
        "ckpt-2.shards": State.OK,
    }


def test_run_that_keeps_fewer_now_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    disk = FailingDisk(OsFileSystem(), space_bytes=8 << 20)
    state = {"w": torch.ones(1 << 18)}

    def save_step(step: int, keep: str) -> None:
        writer = StorageWriter(tmp_path, CheckpointConfig(keep=keep), step=step, fs=disk)
        dcp.save(state, storage_writer=writer)

    step = 1
    with contextlib.suppress(CheckpointException):
        for step in range(1, 20):
            save_step(step, "last(50)")
    assert 1 < step < 19
    for one in list(dcp_run._runs.values()):  # the next process
        dcp_run.end_run(one.place)
    dcp.load(state, storage_reader=StorageReader(tmp_path, fs=disk))
    for more in range(3):
        save_step(step + more, "last(2)")
    whole = [c.step for c in Store(tmp_path).scan() if c.state is State.OK]
    assert sorted(whole) == [step - 1, step + 1, step + 2]


def failed(work: Any) -> BaseException:
    """Return what rank 0 has told all ranks about a save or load that must fail."""
    with pytest.raises(CheckpointException) as error:
        work()
    return cause_of(error)


def test_planners_that_pickle_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "step": 7}
    refused = failed(lambda: dcp.save(state, storage_writer=StorageWriter(tmp_path, step=1)))
    assert isinstance(refused, UnsupportedState)
    assert "DefaultSavePlanner has pickled 'step'" in str(refused)
    assert names(tmp_path) == []
    writer = StorageWriter(tmp_path, step=1)
    dcp.save(state, storage_writer=writer, planner=SavePlanner())
    refused = failed(lambda: dcp.load(state, storage_reader=StorageReader(tmp_path)))
    assert "DefaultLoadPlanner would unpickle" in str(refused)


def test_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, step=1)
    state = {"w": torch.ones(1), "odd": [1, print]}
    refused = failed(lambda: dcp.save(state, storage_writer=writer, planner=SavePlanner()))
    assert "'odd': state[1] is a builtin_function_or_method" in str(refused)


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.zeros(1, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensor_without_plain_content_is_named(tmp_path: Path, tensor: Any) -> None:
    writer = StorageWriter(tmp_path, step=1)
    refused = failed(lambda: dcp.save({"w": tensor}, storage_writer=writer))
    assert "that is sparse, quantized, or has its content elsewhere" in str(refused)
    assert names(tmp_path) == []


def test_tensor_with_content_elsewhere_is_named(tmp_path: Path) -> None:
    class Wrapping(SavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return torch.Tensor._make_subclass(Wrapper, object)

    def dispatch(cls: Any, *_: object) -> None:
        raise AssertionError("somebody looked into it")

    Wrapper = type("Wrapper", (torch.Tensor,), {"__torch_dispatch__": classmethod(dispatch)})
    writer = StorageWriter(tmp_path, step=1)
    state = {"w": torch.ones(2)}
    refused = failed(lambda: dcp.save(state, storage_writer=writer, planner=Wrapping()))
    assert "'w' is a Wrapper that is sparse, quantized, or has its content" in str(refused)


def test_part_of_a_tensor_is_not_saved_alone(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, step=1)
    with pytest.raises(SaveFailed, match="'w' has 4 elements, but its pieces have 2"):
        save([writer], [{"w": cut(torch.ones(4), 0, 2)}])


def test_planner_that_gives_other_tensors_than_planned_is_refused(tmp_path: Path) -> None:
    class Odd(SavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            return object.double() if object.dim() else None

    writer = StorageWriter(tmp_path, step=1)
    refused = failed(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Odd()))
    assert "'w' is float64[2], but is planned as float32[2]" in str(refused)
    refused = failed(lambda: dcp.save({"w": torch.ones(())}, storage_writer=writer, planner=Odd()))
    assert "is planned as a tensor, but is none" in str(refused)


def test_planner_with_data_of_its_own_is_refused(tmp_path: Path) -> None:
    class Odd(SavePlanner):
        def create_local_plan(self) -> Any:
            return replace(super().create_local_plan(), planner_data=[1])

        def create_global_plan(self, all_plans: Any) -> Any:
            return all_plans, None

    writer = StorageWriter(tmp_path, step=1)
    refused = failed(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Odd()))
    assert "the data of the planner are a list, not paths" in str(refused)


def test_flat_states_are_loaded_into_flat_states(tmp_path: Path) -> None:
    planner = SavePlanner(flatten_state_dict=False)
    state = {"w": torch.ones(2), "n": {"deep": 1}}
    dcp.save(state, storage_writer=StorageWriter(tmp_path, step=1), planner=planner)
    found: dict[str, Any] = {"w": torch.zeros(2), "n": None}
    loader = LoadPlanner(flatten_state_dict=False)
    dcp.load(found, storage_reader=StorageReader(tmp_path), planner=loader)
    assert loader.state_dict["n"] == {"deep": 1}
    assert found["w"].tolist() == [1, 1]


def test_plans_can_be_cached(tmp_path: Path) -> None:
    for step in (1, 2):
        state = {"w": torch.full((2,), float(step)), "step": step}
        dcp.save(
            state,
            storage_writer=StorageWriter(tmp_path, step=step),
            planner=SavePlanner(enable_plan_caching=True),
        )
    for step in (1, 2):
        found: dict[str, Any] = {"w": torch.zeros(2), "step": None}
        reader = StorageReader(tmp_path, step=step)
        dcp.load(found, storage_reader=reader, planner=LoadPlanner())
        assert (found["w"].tolist(), found["step"]) == ([step, step], step)
    for step in (3, 4):
        stock = DefaultSavePlanner(enable_plan_caching=True)
        writer = StorageWriter(tmp_path, step=step)

        def save_again(stock: Any = stock, writer: StorageWriter = writer) -> None:
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=stock)

        if step == 3:
            save_again()
        else:
            assert "leaves out what has not changed" in str(failed(save_again))


def test_damage_is_found_before_anything_is_loaded_from_it(tmp_path: Path) -> None:
    writers = [StorageWriter(tmp_path, step=1) for _ in range(2)]
    save(writers, [{"w": cut(torch.ones(4000), rank, 2)} for rank in range(2)])
    state = {"w": torch.zeros(4000)}
    for name in names(tmp_path)[:2]:
        path = tmp_path / name
        good = path.read_bytes()
        for position in (20, len(good) // 2, len(good) - 1):
            path.chmod(0o600)
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            damage = failed(lambda: dcp.load(state, storage_reader=StorageReader(tmp_path)))
            assert isinstance(damage, CorruptCheckpoint), (name, position)
        path.write_bytes(good)
    dcp.load(state, storage_reader=StorageReader(tmp_path))
    assert state["w"].sum() == 4000


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}

    def refusal(directory: Path, **options: Any) -> str:
        reader = StorageReader(directory, **options)
        told = failed(lambda: dcp.load(state, storage_reader=reader))
        assert isinstance(told, CkptmgrError)
        return f"{type(told).__name__}: {told}"

    assert refusal(tmp_path / "none").startswith("CheckpointNotFound: ")
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    assert "FileSystemWriter, which holds pickles" in refusal(tmp_path / "stock")
    with CheckpointManager(tmp_path / "single") as manager:
        manager.save(1, {"w": np.ones(2)})
    assert "UnsupportedCheckpoint: " in refusal(tmp_path / "single")
    ranks = Seat(Meeting(1), 0)
    with CheckpointManager(tmp_path / "ranks", ranks=Ranks(ranks)) as manager:
        manager.save(1, {"w": np.ones(2)})
    assert "was not saved through torch" in refusal(tmp_path / "ranks")
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "e", CONFIGS["encrypted"], step=1))
    assert refusal(tmp_path / "e").startswith("KeyProblem: ")
    other = CheckpointConfig(enc_key=b"x" * 32)
    assert refusal(tmp_path / "e", config=other).startswith("KeyProblem: ")
    assert refusal(tmp_path / "e", step=9).startswith("CheckpointNotFound: ")
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "p", step=1))
    assert refusal(tmp_path / "p", config=other).startswith("UnprovenCheckpoint: ")
    reader = StorageReader(tmp_path / "p", other, allow_unencrypted=True)
    dcp.load(state, storage_reader=reader)


def test_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    class Odd(LoadPlanner):
        def transform_tensor(self, read_item: Any, tensor: Any) -> Any:
            return tensor[:1]

    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, step=1))
    state = {"w": torch.zeros(2)}
    reader = StorageReader(tmp_path)
    told = failed(lambda: dcp.load(state, storage_reader=reader, planner=Odd()))
    assert isinstance(told, StateMismatch)
    assert "'w' takes [1] where [2] are stored" in str(told)


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    readers = []
    for step in (1, 2):
        writer = StorageWriter(tmp_path, step=step)
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
        readers.append(StorageReader(tmp_path, step=step))
    with pytest.raises(CheckpointNotFound, match=r"rank 1 would load ckpt-2.shards, but rank 0"):
        load(readers, [{"w": torch.ones(1)}] * 2)


def test_save_that_takes_too_long_is_not_committed(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, step=1, timeout_s=0.0)
    told = failed(lambda: dcp.save({"w": torch.ones(1)}, storage_writer=writer))
    assert isinstance(told, SaveFailed)
    assert "too late" in str(told)
    assert names(tmp_path) == []


def test_save_that_another_one_overtook_is_not_committed(tmp_path: Path) -> None:
    class Overtaken(StorageWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            dcp.save({"w": torch.ones(1)}, storage_writer=StorageWriter(tmp_path, step=2))
            super().finish(metadata, results)

    told = failed(
        lambda: dcp.save({"w": torch.ones(1)}, storage_writer=Overtaken(tmp_path, step=1))
    )
    assert "another save of this series was begun" in str(told)
    assert [c.name for c in Store(tmp_path).scan()] == ["ckpt-2.shards"]


def test_save_in_which_a_rank_writes_less_than_planned_is_not_committed(tmp_path: Path) -> None:
    class Forgetful(SavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            return replace(new_plan, items=new_plan.items[1:])

    writer = StorageWriter(tmp_path, step=1)
    told = failed(
        lambda: dcp.save({"w": torch.ones(1)}, storage_writer=writer, planner=Forgetful())
    )
    assert "no rank has written 'w'" in str(told)
    assert names(tmp_path) == []


def test_another_process_cannot_write_the_series(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(2)})
        writer = StorageWriter(tmp_path, step=2)
        told = failed(lambda: dcp.save({"w": torch.ones(1)}, storage_writer=writer))
        assert isinstance(told, StoreLocked)
    dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    assert sorted(c.name for c in Store(tmp_path).scan()) == ["ckpt-1.ckpt", "ckpt-2.shards"]


def test_background_save_by_a_thread(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000), "step": 1}
    writer = StorageWriter(tmp_path, CONFIGS["encrypted"], step=1)
    future = dcp.async_save(state, storage_writer=writer, planner=SavePlanner())
    state["w"].zero_()
    future.result()
    found: dict[str, Any] = {"w": torch.zeros(1000), "step": None}
    reader = StorageReader(tmp_path, CONFIGS["encrypted"])
    dcp.load(found, storage_reader=reader, planner=LoadPlanner())
    assert (found["w"].sum().item(), found["step"]) == (1000, 1)


def test_commit_that_may_not_be_durable_is_an_error(tmp_path: Path) -> None:
    states = [{"w": torch.ones(1)}]
    disk = FailingDisk(OsFileSystem())
    save([StorageWriter(tmp_path / "a", step=1, fs=disk)], states)
    syncs = disk.calls.count("sync_directory")
    disk = FailingDisk(OsFileSystem(), operation="sync_directory", call=syncs)
    with pytest.raises(SaveFailed, match="may not be durable"):
        save([StorageWriter(tmp_path / "b", step=1, fs=disk)], states)
    assert [c.state for c in Store(tmp_path / "b").scan()] == [State.OK]


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave it out of the config"):
        StorageWriter(tmp_path, CheckpointConfig(async_save=True))
    with pytest.raises(TypeError, match="prefix"):
        StorageWriter(tmp_path, prefix=lambda _: "x")  # type: ignore[arg-type]
    with pytest.raises(KeyProblem):
        StorageWriter(tmp_path, CheckpointConfig(enc_key=b"x"))
    writer = StorageWriter(tmp_path)
    told = failed(lambda: dcp.save({"w": torch.ones(1)}, storage_writer=writer))
    assert "nobody said which step" in str(told)
    writer.reset("1")
    with pytest.raises(ValueError, match="use_collectives"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(SaveFailed, match="before it was begun"):
        writer.finish(Metadata({}), [])
    with pytest.raises(CheckpointNotFound, match="comes first"):
        StorageReader(tmp_path).prepare_local_plan(LoadPlan([]))
    assert StorageWriter.validate_checkpoint_id("1")
    assert StorageReader.validate_checkpoint_id("1")
    assert StorageReader(tmp_path).checkpoint is None
    assert StorageReader(tmp_path, step=3).checkpoint_id.endswith("ckpt: 3")


def test_writer_that_travels_to_another_process_stays_in_its_run(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1)}, storage_writer=StorageWriter(tmp_path, step=1))
    StorageWriter(tmp_path).close()
    dcp.load({"w": torch.ones(1)}, storage_reader=StorageReader(tmp_path))
    config = CheckpointConfig(keep="last(1)")
    writer = StorageWriter(tmp_path, config, step=2)
    dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    travelling = writer.__getstate__()
    writer.close()  # the state is put together in a process that has no run yet
    there = StorageWriter.__new__(StorageWriter)
    there.__setstate__(travelling)
    there.reset("3")
    dcp.save({"w": torch.ones(1)}, storage_writer=there)
    first, third = sorted(Store(tmp_path).scan(), key=lambda c: c.step)
    assert [first.step, third.step] == [1, 3]  # the origin of the resume stays, step 2 was ours
    assert copy.copy(StorageWriter(tmp_path / "none", step=1)).checkpoint_id.endswith(
        "ckpt-1.shards"
    )


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_tensors_can_be_read_without_torch_by_any_number_of_ranks(
    tmp_path: Path, name: str
) -> None:
    whole = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    odd = torch.arange(6).to(torch.complex128)
    states = [
        {"model": {"w": cut(whole, rank, 3, dimension=1), "odd": cut(odd, rank, 3)}}
        for rank in range(3)
    ]
    save([StorageWriter(tmp_path, CONFIGS[name], step=1) for _ in range(3)], states)
    found: Any = CheckpointManager(tmp_path, CONFIGS[name]).load(1)
    assert np.array_equal(found["model.w"], whole.numpy())
    assert np.array_equal(found["model.odd"].reshape(-1).view(np.complex128), odd.numpy())


def test_index_with_unknown_element_type_or_of_other_ranks_is_refused(tmp_path: Path) -> None:
    class Odd(StorageWriter):
        changes: ClassVar[dict[bytes, bytes]] = {}

        def prepare_global_plan(self, plans: Any) -> Any:
            planned = super().prepare_global_plan(plans)
            for old, new in self.changes.items():
                index = planned[0].storage_data["index"]
                planned[0].storage_data["index"] = index.replace(old, new)
            return planned

    for step, (old, new, message) in enumerate(
        [
            (b"float32", b"float33", "torch has no element type"),
            (b'"world":1', b'"world":2', "the index is of 2 files, but there are 1"),
            (b'"version":1', b'"version":9', "upgrade ckptmgr"),
            (b'"w":[', b'"v":[', "'v' is not in the file"),
            (b"[2],[[0,[0],[2]", b"[3],[[0,[0],[3]", "has 8 bytes, but the index says 12"),
        ]
    ):
        Odd.changes = {old: new}
        dcp.save({"w": torch.ones(2)}, storage_writer=Odd(tmp_path, step=step))
        name, size = ("v" if b"v" in new else "w"), (3 if b"3]" in new else 2)
        reader, state = StorageReader(tmp_path, step=step), {name: torch.ones(size)}
        told = failed(lambda reader=reader, state=state: dcp.load(state, storage_reader=reader))
        assert isinstance(told, CkptmgrError)
        assert message in str(told)


def test_value_that_is_damaged_is_named() -> None:
    for data in (b"", b"x" * 100, build_safetensors(), encode_python_object("v", [1, 2])[:-1]):
        with pytest.raises(CorruptCheckpoint, match="the value of 'epoch' is damaged"):
            decode_object("epoch", data)
    assert decode_object("epoch", encode_python_object("epoch", {"a": [1.5]})) == {"a": [1.5]}


def build_safetensors() -> bytes:
    image = build_safetensors_image([])
    return b"".join(image.views(0, image.size))


@pytest.mark.parametrize("name", ["plain", "encrypted"])
def test_commands_work_on_what_dcp_saved(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        writers = [StorageWriter(tmp_path, CONFIGS[name], step=step) for _ in range(2)]
        save(writers, [{"w": cut(torch.ones(4), rank, 2), "epoch": 1} for rank in range(2)])
    StorageWriter(tmp_path).close()
    env = {"CKPTMGR_KEY": KEY.hex()} if name == "encrypted" else {}
    listed = run_json("ls", tmp_path, env=env)["items"]
    assert [(one["step"], one["state"]) for one in listed] == [(1, "ok"), (2, "ok")]
    verified = run("verify", tmp_path / "ckpt-2.shards", env=env)
    assert verified.exit_code == 0, verified.stderr
    whole = run_json("inspect", tmp_path / "ckpt-2.shards", env=env)["items"]
    assert {one["name"]: one["shape"] for one in whole}["w"] == [4]
    shard = next(one for one in names(tmp_path) if one.startswith("ckpt-2.1-of-2"))
    inspected = run("inspect", tmp_path / shard, "--allow-unsealed", env=env)
    assert "w~@2" in inspected.stdout, inspected.stderr
    pruned = run("prune", tmp_path, "--keep", "last(1)", "--yes", env=env)
    assert pruned.exit_code == 0, pruned.stderr
    assert [c.name for c in Store(tmp_path).scan()] == ["ckpt-2.shards"]


def test_planner_may_read_one_piece_for_several_names(tmp_path: Path) -> None:
    class Twice(LoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            second = [
                replace(item, dest_index=MetadataIndex("other", item.dest_index.offset))
                for item in plan.items
            ]
            return LoadPlan([*plan.items, *second])

        def lookup_tensor(self, index: Any) -> Any:
            return others if index.fqn == "other" else super().lookup_tensor(index)

    dcp.save({"w": torch.arange(4.0)}, storage_writer=StorageWriter(tmp_path, step=1))
    state, others = {"w": torch.zeros(4)}, torch.zeros(4)
    dcp.load(state, storage_reader=StorageReader(tmp_path), planner=Twice())
    assert state["w"].tolist() == others.tolist() == [0, 1, 2, 3]


def test_plans_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    class Elsewhere(LoadPlanner):
        def create_local_plan(self) -> Any:
            (item,) = super().create_local_plan().items
            return LoadPlan([replace(item, storage_index=MetadataIndex("v", (0,)))])

    class Empty(SavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            return replace(plan, items=[replace(one, tensor_data=None) for one in plan.items])

        def create_global_plan(self, all_plans: Any) -> Any:
            return all_plans, None

    state = {"w": torch.ones(2)}
    writer = StorageWriter(tmp_path, step=1)
    told = failed(lambda: dcp.save(state, storage_writer=writer, planner=Empty()))
    assert "says nothing about the tensor 'w'" in str(told)
    dcp.save(state, storage_writer=writer)
    reader = StorageReader(tmp_path)
    told = failed(lambda: dcp.load(state, storage_reader=reader, planner=Elsewhere()))
    assert isinstance(told, CheckpointNotFound)


def test_run_goes_on_with_another_key_and_removes_only_what_that_proves(tmp_path: Path) -> None:
    keep = "last(1)"
    for step, key in enumerate((None, KEY, b"y" * 32, b"y" * 32)):
        config = CheckpointConfig(enc_key=key, keep=keep)
        writer = StorageWriter(tmp_path, config, step=step)
        dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    assert sorted(c.step for c in Store(tmp_path).scan()) == [0, 1, 3]


def test_signatures_are_made_and_asked_for(tmp_path: Path) -> None:
    signing, other = SigningKey.generate(), SigningKey.generate()
    config = CheckpointConfig(signing_key=signing)
    dcp.save({"w": torch.ones(1)}, storage_writer=StorageWriter(tmp_path, config, step=1))
    state = {"w": torch.zeros(1)}
    trusting = StorageReader(tmp_path, trusted_keys=[signing.public_key])
    dcp.load(state, storage_reader=trusting)
    assert state["w"].item() == 1
    wary = StorageReader(tmp_path, trusted_keys=[other.public_key])
    assert isinstance(failed(lambda: dcp.load(state, storage_reader=wary)), CkptmgrError)


def test_observers_hear_of_saves_loads_and_removals(tmp_path: Path) -> None:
    heard: list[tuple[str, str | None]] = []

    def observe(event: Event) -> None:
        heard.append((event.name, event.error_type))

    config, state = CheckpointConfig(keep="last(1)"), {"w": torch.ones(2)}

    def save_step(step: int, **options: Any) -> None:
        writer = StorageWriter(tmp_path, config, step=step, observe=observe, **options)
        dcp.save(state, storage_writer=writer)

    save_step(1)
    save_step(2)
    dcp.load(state, storage_reader=StorageReader(tmp_path, observe=observe))
    failed(lambda: save_step(3, timeout_s=0.0))
    full = FailingDisk(OsFileSystem(), space_bytes=10)
    failed(lambda: save_step(4, fs=full))
    saved = [("save.started", None), ("save.durable", None)]
    assert heard == [
        *saved,
        *saved,
        ("prune", None),
        ("load", None),
        ("save.started", None),
        ("save.failed", "SaveFailed"),
        ("save.started", None),
        ("save.failed", "StoreFull"),
    ]


def test_observers_hear_of_a_save_that_another_rank_could_not_finish(tmp_path: Path) -> None:
    heard: list[str] = []
    full = FailingDisk(OsFileSystem(), space_bytes=10)
    first = StorageWriter(tmp_path, step=1, observe=lambda event: heard.append(event.name))
    states = [{"w": cut(torch.ones(4), rank, 2)} for rank in range(2)]
    with pytest.raises(StoreFull):
        save([first, StorageWriter(tmp_path, step=1, fs=full)], states)
    assert heard == ["save.started"]
    first.close()
    assert heard == ["save.started", "save.failed"]


@settings(max_examples=6)
@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=6),
    world=st.integers(2, 5),
    own=st.integers(0, 300),
)
def test_what_all_ranks_have_is_written_once_and_evenly(
    sizes: list[int], world: int, own: int
) -> None:
    replicated = {f"w{n}": torch.rand(size, 1024) for n, size in enumerate(sizes)}
    states: list[dict[str, Any]] = [
        {**replicated, "scalar": torch.tensor(3.0), "rank": rank, "none": torch.zeros(0, 2)}
        for rank in range(world)
    ]
    states[0]["own"] = torch.rand(own, 1024)  # only rank 0 has it
    with tempfile.TemporaryDirectory() as directory:
        writers = [StorageWriter(directory, step=1) for _ in range(world)]
        save(writers, states)
        (checkpoint,) = Store(Path(directory)).scan()
        written = [(Path(directory) / name).stat().st_size for name in checkpoint.shards]
        found: dict[str, Any] = {
            name: torch.zeros_like(one) if name != "rank" else None
            for name, one in states[0].items()
        }
        load([StorageReader(directory)], [found])
        writers[0].close()
    assert found["rank"] == 0
    assert all(torch.equal(found[name], states[0][name]) for name in states[0] if name != "rank")
    total = sum(one.nbytes for one in replicated.values()) + states[0]["own"].nbytes
    even = max(total / world, states[0]["own"].nbytes)
    assert max(written) <= 1.02 * even + LEAST_CHUNK_BYTES + 10_000
    assert sum(written) <= total + world * 10_000


def test_large_table_among_small_tensors_is_written_by_all_ranks(tmp_path: Path) -> None:
    state = {"table": torch.rand(40_000, 256)} | {f"w{n}": torch.rand(1000) for n in range(20)}
    writers = [StorageWriter(tmp_path / "rows", step=1) for _ in range(4)]
    save(writers, [state] * 4)
    stock = [SavePlanner(dedup_save_to_lowest_rank=True) for _ in range(4)]
    save([StorageWriter(tmp_path / "whole", step=1) for _ in range(4)], [state] * 4, stock)

    def imbalance(name: str) -> float:
        sizes = [one.stat().st_size for one in (tmp_path / name).glob("*.safetensors")]
        return max(sizes) * len(sizes) / sum(sizes)

    assert imbalance("rows") < 1.06  # chunks of 1 MiB are 10 % of an even share here
    assert imbalance("whole") > 3.9
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    load([StorageReader(tmp_path / "rows")], [found])
    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_tensor_that_ranks_have_differently_is_that_of_the_lowest_rank_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = [
        {
            "stats": torch.full((1 << 20,), float(rank)),
            "shape": torch.zeros(4) if rank == 0 else torch.zeros(2, 2),
            "type": torch.zeros(2, dtype=torch.int32 if rank else torch.int64),
            "kind": torch.ones(1) if rank == 0 else "none",
            "late": torch.full((1 << 20,), float(rank)),
            "same": torch.arange(1 << 20),
        }
        for rank in range(4)
    ]
    del states[0]["late"]
    save([StorageWriter(tmp_path, step=1) for _ in range(4)], states)
    assert "different tensors under 'kind', 'late', 'shape', 'stats', 'type'" in caplog.text
    found = load_checkpoint(tmp_path / "ckpt-1.shards")
    assert set(found["stats"]) == {0}
    assert set(found["late"]) == {1}
    assert (found["shape"].shape, found["type"].dtype) == ((4,), np.int64)
    assert (found["same"] == np.arange(1 << 20)).all()


@pytest.mark.parametrize("planner", [SavePlanner, DefaultSavePlanner])
def test_index_says_compared_only_when_the_ranks_have_the_same(
    tmp_path: Path, planner: Callable[[], Any]
) -> None:
    def is_compared(step: int, *states: dict[str, Any]) -> bool:
        save(
            [StorageWriter(tmp_path, step=step) for _ in states],
            states,
            [planner() for _ in states],
        )
        path = tmp_path / next(name for name in names(tmp_path) if name.startswith(f"ckpt-{step}."))
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return read_index(header["__metadata__"][PIECES], path="").is_compared

    compares = planner is SavePlanner
    assert is_compared(1, {"w": torch.ones(2)}, {"w": torch.ones(2)}) == compares
    assert not is_compared(2, {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    whole = [
        {"w": cut(torch.ones(4), 0, 1)} for _ in range(2)
    ]  # it says itself that it is the same
    assert not is_compared(3, *whole)
    assert (
        is_compared(4, {"w": cut(torch.ones(4), 0, 2)}, {"w": cut(torch.ones(4), 1, 2)}) == compares
    )


def test_ranks_that_begin_to_differ_are_noticed_with_cached_plans(tmp_path: Path) -> None:
    for step, values in ((1, (1.0, 1.0)), (2, (2.0, 3.0))):
        states = [{"w": torch.full((1 << 20,), value)} for value in values]
        planners = [SavePlanner(enable_plan_caching=True) for _ in states]
        for rank, planner in enumerate(planners):
            planner._cached_plans_key = f"rank {rank}"
        save([StorageWriter(tmp_path, step=step) for _ in states], states, planners)
        assert set(load_checkpoint(tmp_path / f"ckpt-{step}.shards")["w"]) == {values[0]}


def test_tensors_that_share_memory_take_what_is_equal_there_and_nothing_else(
    tmp_path: Path,
) -> None:
    whole = torch.arange(6.0)
    tied = torch.nn.Parameter(torch.ones(3))
    for step, second in ((1, whole[2:].clone()), (2, torch.full((4,), 9.0))):
        state = {"a": whole[:4].clone(), "b": second, "c": tied, "d": tied.clone()}
        writer = StorageWriter(tmp_path, CONFIGS["plain"], step=step)
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    memory, both = torch.zeros(6), torch.zeros(3)
    target = {"a": memory[:4], "b": memory[2:], "c": both, "d": both}
    reader = StorageReader(tmp_path, CONFIGS["plain"], step=1)
    dcp.load(target, storage_reader=reader, planner=LoadPlanner())
    assert (memory.tolist(), both.tolist()) == (whole.tolist(), [1.0] * 3)
    reader = StorageReader(tmp_path, CONFIGS["plain"], step=2)
    with pytest.raises(CheckpointException) as error:
        dcp.load(target, storage_reader=reader, planner=LoadPlanner())
    assert isinstance(cause_of(error), StateMismatch)
    assert "'b' overlaps 'a' in memory" in str(cause_of(error))
    assert memory.tolist() == whole.tolist()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_one_error_at_any_call_never_leads_to_an_older_checkpoint(
    tmp_path: Path, error: int
) -> None:
    for step in (1, 2):
        save([StorageWriter(tmp_path, step=step)], [{"w": torch.full((4,), float(step))}])
    counting = FailingDisk(OsFileSystem())
    load([StorageReader(tmp_path, fs=counting)], [{"w": torch.zeros(4)}])
    for call in range(1, len(counting.calls) + 1):
        state = {"w": torch.zeros(4)}
        load(
            [StorageReader(tmp_path, fs=FailingDisk(OsFileSystem(), error=error, call=call))],
            [state],
        )
        assert state["w"].tolist() == [2.0] * 4, call


def test_manifest_that_cannot_be_read_now_is_an_error_and_no_older_checkpoint(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save([StorageWriter(tmp_path, step=step)], [{"w": torch.zeros(4)}])
    failing = FailingDisk(
        OsFileSystem(), error=errno.EMFILE, operation="open", call=2, is_lasting=True
    )
    with pytest.raises(OSError, match="Too many open files"):
        load([StorageReader(tmp_path, fs=failing)], [{"w": torch.zeros(4)}])


def test_newest_whose_manifest_is_lost_is_told_and_stays_until_a_newer_one_is_whole(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        save([StorageWriter(tmp_path, step=step)], [{"w": torch.full((4,), float(step))}])
    (tmp_path / "ckpt-2.shards.manifest.json").unlink()
    reader, state = StorageReader(tmp_path), {"w": torch.zeros(4)}
    load([reader], [state])
    assert state["w"].tolist() == [1.0] * 4
    (skipped,) = reader.skipped
    assert (skipped.checkpoint.name, skipped.checkpoint.step) == ("ckpt-2.shards", 2)
    assert "no manifest" in skipped.reason
    save([StorageWriter(tmp_path, step=3)], [{"w": torch.full((4,), 3.0)}])
    load([reader], [state])
    assert (state["w"].tolist(), reader.skipped) == ([3.0] * 4, ())


def test_newest_of_which_a_file_is_missing_is_passed_over_and_told(tmp_path: Path) -> None:
    for step in (1, 2):
        save([StorageWriter(tmp_path, step=step)], [{"w": torch.full((4,), float(step))}])
    next(tmp_path.glob("ckpt-2.0-of-1.*")).unlink()
    reader, state = StorageReader(tmp_path), {"w": torch.zeros(4)}
    load([reader], [state])
    assert state["w"].tolist() == [1.0] * 4
    assert [one.checkpoint.name for one in reader.skipped] == ["ckpt-2.shards"]
    assert reader.doubt is not None
    assert "ckpt-2.0-of-1." in reader.doubt


def test_run_that_was_not_loaded_warns_and_the_older_one_stays_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1000, 100):
        with StorageWriter(tmp_path, step=step) as writer:
            dcp.save({"w": torch.full((2,), float(step))}, storage_writer=writer)
            own = {"w": torch.zeros(2)}
            dcp.load(own, storage_reader=StorageReader(tmp_path))
            assert own["w"][0].item() == step  # in the process of the run, its own
    (warning,) = (one.getMessage() for one in caplog.records if "not resumed" in one.getMessage())
    assert warning.endswith(
        "load it before the first step; to begin beside it on purpose, give another prefix"
    )
    later = {"w": torch.zeros(2)}
    dcp.load(later, storage_reader=StorageReader(tmp_path))
    assert later["w"][0].item() == 1000


def test_files_of_all_ranks_and_their_manifest_have_the_chosen_mode(tmp_path: Path) -> None:
    config = CheckpointConfig(file_mode=0o640)
    runs = tmp_path / "runs"
    dcp.save({"w": torch.zeros(3)}, storage_writer=StorageWriter(runs, config, step=1))
    loaded = {"w": torch.ones(3)}
    dcp.load(loaded, storage_reader=StorageReader(runs, config))  # which begins the run anew
    dcp.save({"w": torch.zeros(3)}, storage_writer=StorageWriter(runs, config, step=2))
    modes = {oct((runs / name).stat().st_mode & 0o777) for name in names(runs)}
    assert len(names(runs)) == 4
    assert modes == {"0o640"}
    assert runs.stat().st_mode & 0o777 == 0o750
