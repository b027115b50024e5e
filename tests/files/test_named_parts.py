# SPDX-License-Identifier: Apache-2.0
"""Parts of a saved state: `only=`, networks that do not fit, and tensors of a framework."""

from __future__ import annotations

import io
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    KeyProblem,
    ModelCheckpoint,
    PackedArray,
    Ranks,
    StateMismatch,
    UnsupportedCheckpoint,
    UnsupportedState,
    load_checkpoint,
    load_state,
    open_checkpoint,
    save_checkpoint,
    save_state,
)
from ckptmgr.parallel import ParallelLayout
from ckptmgr.state.part import part_of
from ckptmgr.state.paths import TreeError
from tests.parallel.ranks import Meeting, Seat
from tests.support.saved import flip
from tests.support.surface import Loop

torch = pytest.importorskip("torch")

KEY = bytes(range(16))


class Point(NamedTuple):
    x: int
    y: np.ndarray


def training(seed: int = 0) -> dict[str, Any]:
    """Return a state with a network, its optimizer after a step, and plain values."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    history = [0.5, 0.25]
    return {
        "net": net,
        "opt": optimizer,
        "numbers": np.arange(6.0),
        "rng": np.random.default_rng(seed),
        "history": history,
        "again": history,
        "when": (1, {"a": b"x"}),
    }


def is_equal(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.fixture(params=["ckpt", "safetensors", "encrypted"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CheckpointManager, Path, Any]:
    key = KEY if request.param == "encrypted" else None
    format = "safetensors" if request.param == "encrypted" else request.param
    manager = CheckpointManager(tmp_path, CheckpointConfig(format=format, enc_key=key))
    state = training()
    with manager:
        manager.save(7, state)
    newest = manager.latest()
    assert newest is not None
    return manager, newest.path, state


def test_manager_loads_a_part_into_a_state_that_has_only_that_part(
    saved: tuple[CheckpointManager, Path, Any],
) -> None:
    manager, _, state = saved
    net = training(1)["net"]
    found = manager.load("latest", {"net": net}, only="net")
    assert isinstance(found, dict)
    assert found["net"] is net
    assert is_equal(net, state["net"])


def test_manager_loads_several_parts_as_new_objects(
    saved: tuple[CheckpointManager, Path, Any],
) -> None:
    found = saved[0].load(7, only=["history", "again", "numbers", "when"])
    assert isinstance(found, dict)
    assert list(found) == ["history", "again", "numbers", "when"]
    assert found["history"] is found["again"] == [0.5, 0.25]
    assert found["numbers"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["when"] == (1, {"a": b"x"})


def test_load_state_takes_a_part(saved: tuple[CheckpointManager, Path, Any]) -> None:
    _, path, state = saved
    key = KEY if ".ckpe" in path.suffixes or path.suffix == ".ckpe" else None
    target = {"rng": np.random.default_rng(5), "net": training(1)["net"]}
    load_state(path, target, only=["net", "rng"], dec_key=key)
    assert is_equal(target["net"], state["net"])
    assert target["rng"].bit_generator.state == state["rng"].bit_generator.state


def test_load_checkpoint_fills_a_network_with_its_part_of_a_manager_file(
    saved: tuple[CheckpointManager, Path, Any],
) -> None:
    _, path, state = saved
    key = KEY if path.suffix == ".ckpe" else None
    net = training(1)["net"]
    values = load_checkpoint(path, net=net, only="net", dec_key=key)
    assert is_equal(net, state["net"])
    assert set(values) == set(net.state_dict())


def test_part_is_loaded_beside_a_damaged_one(tmp_path: Path) -> None:
    state = {"net": {"w": np.arange(3.0)}, "big": {"b": np.zeros(40 << 20, np.uint8)}}
    path = save_state(state, tmp_path / "x.safetensors").path
    flip(path, path.stat().st_size // 2)  # the digest range in the middle of three
    assert load_state(path, only="net")["net"]["w"].tolist() == [0, 1, 2]  # type: ignore[index]
    assert load_checkpoint(path, only="net")["w"].tolist() == [0, 1, 2]
    with pytest.raises(CorruptCheckpoint):
        load_state(path, only="big")


def test_part_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    save_state({"net": {"w": np.ones(2)}, "step": 3}, tmp_path / "x.ckpt")
    with pytest.raises(StateMismatch, match=r"x\.ckpt: .*no part 'nett'; its parts are 'net', 'step'"):  # fmt: skip
        load_state(tmp_path / "x.ckpt", only="nett")
    with pytest.raises(StateMismatch, match="no tensors of a part 'nett'; its parts are 'net'"):
        load_checkpoint(tmp_path / "x.ckpt", only="nett")


def test_lone_tensor_is_a_part_under_its_own_name(tmp_path: Path) -> None:
    path = save_state({"net": {"w": np.ones(2)}, "ema": np.ones(3)}, tmp_path / "x.ckpt").path
    assert load_checkpoint(path, only="ema")["ema"].tolist() == [1, 1, 1]
    assert load_state(path, only="ema")["ema"].tolist() == [1, 1, 1]  # type: ignore[index]
    with pytest.raises(StateMismatch, match="its parts are 'ema', 'net'"):
        load_checkpoint(path, only="other")


def test_part_that_shares_all_its_tensors_is_listed(tmp_path: Path) -> None:
    shared = np.arange(3.0)
    save_state({"net": {"w": shared}, "ema": {"w": shared}}, tmp_path / "x.safetensors")
    with pytest.raises(StateMismatch, match="its parts are 'ema', 'net'"):
        load_checkpoint(tmp_path / "x.safetensors", only="other")


def test_tensors_of_a_new_state_come_back_in_their_kind(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"t": torch.ones(2, dtype=torch.bfloat16), "a": np.ones(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        found: Any = manager.load(1)
    assert found["t"].dtype == torch.bfloat16
    assert type(found["a"]) is np.ndarray


@pytest.mark.parametrize(("only", "error"), [("", ValueError), ([], ValueError), (3, TypeError)])
def test_unusable_part_is_refused(tmp_path: Path, only: Any, error: type[Exception]) -> None:
    save_state({"w": np.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(error, match="only"):
        load_state(tmp_path / "x.ckpt", only=only)
    with pytest.raises(error, match="only"):
        load_checkpoint(tmp_path / "x.ckpt", only=only)


def test_load_checkpoint_takes_one_part(tmp_path: Path) -> None:
    save_state({"w": np.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(TypeError, match="one part"):
        load_checkpoint(tmp_path / "x.ckpt", only=["a", "b"])  # type: ignore[arg-type]


def test_state_that_is_no_dict_has_no_parts(tmp_path: Path) -> None:
    save_state([np.ones(2)], tmp_path / "x.ckpt")
    with pytest.raises(StateMismatch, match="this state is no dict"):
        load_state(tmp_path / "x.ckpt", only="a")


def test_file_of_a_callback_has_no_parts(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=1)
    Loop(callbacks=(ModelCheckpoint("net", str(tmp_path), config),), batch_num=10).run(1)
    with pytest.raises(UnsupportedCheckpoint, match="so it has no parts"):
        CheckpointManager(tmp_path, prefix="net").load(1, only="w")


def test_only_goes_with_neither_into_nor_a_choice(tmp_path: Path) -> None:
    save_state({"net": {"w": np.ones(2)}}, tmp_path / "x.ckpt")
    chosen: tuple[dict[str, Any], ...] = ({"into": {"w": np.ones(2)}}, {"specify_prefix": "w"})
    for options in chosen:
        with pytest.raises(ValueError, match="'only' says what is loaded"):
            load_checkpoint(tmp_path / "x.ckpt", only="net", **options)


def test_tied_weights_of_two_parts_come_with_each(tmp_path: Path) -> None:
    shared = np.arange(3.0)
    save_state({"net": {"w": shared}, "ema": {"w": shared}}, tmp_path / "x.safetensors")
    for part in ("net", "ema"):
        values = load_checkpoint(tmp_path / "x.safetensors", only=part)
        assert values["w"].tolist() == [0, 1, 2]
        assert load_state(tmp_path / "x.safetensors", only=part)[part]["w"].tolist() == [0, 1, 2]  # type: ignore[index]


def test_part_of_a_checkpoint_of_many_ranks_is_loaded(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))
    with manager:
        manager.save(1, {"net": {"w": np.arange(3.0)}, "step": 1})
    found = CheckpointManager(tmp_path).load("latest", only="net")
    assert found["net"]["w"].tolist() == [0, 1, 2]  # type: ignore[index]
    newest = manager.latest()
    assert newest is not None
    assert load_checkpoint(newest.path, only="net")["w"].tolist() == [0, 1, 2]
    with pytest.raises(StateMismatch, match="no tensors of a part 'opt'"):
        load_checkpoint(newest.path, only="opt")


def test_part_of_a_state_of_slices_is_refused(tmp_path: Path) -> None:
    layout = {"net/w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}
    manager = CheckpointManager(tmp_path, ranks=Ranks(Seat(Meeting(2), 0), layout=layout))
    with CheckpointManager(tmp_path) as whole:
        whole.save(1, {"net": {"w": np.arange(4.0)}})
    with pytest.raises(UnsupportedState, match="only has no effect on a state that holds slices"):
        manager.load(1, {"net": {"w": np.zeros(2)}}, only="net")


def test_network_that_does_not_fit_is_refused_with_every_difference(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    save_checkpoint({"weight": np.zeros((2, 4), np.float32), "more": np.ones(1)}, tmp_path / "x.ckpt")  # fmt: skip
    before = net.weight.detach().clone()
    with pytest.raises(StateMismatch) as caught:
        load_checkpoint(tmp_path / "x.ckpt", net=net)
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert text.startswith(f"{tmp_path / 'x.ckpt'}: the checkpoint does not fit this network")
    assert "'bias' is not in the checkpoint" in text
    assert "'weight' is float32[2, 3], stored is float32[2, 4]" in text
    assert "'more' is only in the checkpoint" in text
    assert torch.equal(net.weight, before)


def test_network_beside_a_manager_file_is_told_of_its_part(
    saved: tuple[CheckpointManager, Path, Any],
) -> None:
    _, path, _ = saved
    key = KEY if path.suffix == ".ckpe" else None
    with pytest.raises(StateMismatch, match="load its part with only='net'"):
        load_checkpoint(path, net=training(1)["net"], dec_key=key)


def test_mapping_of_which_the_file_has_no_name_is_refused(tmp_path: Path) -> None:
    save_state({"net": {"w": np.ones(2)}}, tmp_path / "x.ckpt")
    with pytest.raises(StateMismatch, match="only='net'"):
        load_checkpoint(tmp_path / "x.ckpt", net={"w": np.zeros(2)})


def test_strict_load_refuses_another_type_for_a_module(tmp_path: Path) -> None:
    save_checkpoint(torch.nn.Linear(3, 2), tmp_path / "x.ckpt")
    half = torch.nn.Linear(3, 2).bfloat16()
    with pytest.raises(StateMismatch, match=r"is bfloat16\[2, 3\], stored is float32\[2, 3\]"):
        load_checkpoint(tmp_path / "x.ckpt", net=half, strict_load=True)
    load_checkpoint(tmp_path / "x.ckpt", net=half)


def test_module_without_its_batch_count_is_loaded_as_by_torch(tmp_path: Path) -> None:
    values = {n: v for n, v in torch.nn.BatchNorm1d(3).state_dict().items() if v.shape}
    save_checkpoint(values, tmp_path / "x.ckpt")
    load_checkpoint(tmp_path / "x.ckpt", net=torch.nn.BatchNorm1d(3))


def test_lazy_module_takes_the_shapes_of_the_file(tmp_path: Path) -> None:
    saved_net = torch.nn.Linear(3, 2)
    save_checkpoint(saved_net, tmp_path / "x.ckpt")
    lazy = torch.nn.LazyLinear(2)
    load_checkpoint(tmp_path / "x.ckpt", net=lazy)
    assert torch.equal(lazy.weight, saved_net.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_torch_tensors_come_back_for_torch(tmp_path: Path, dtype: Any) -> None:
    values = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype), "0d": torch.tensor(1.0).to(dtype)}  # fmt: skip
    save_checkpoint(values, tmp_path / "x.safetensors", format="safetensors")
    found = load_checkpoint(tmp_path / "x.safetensors", framework="pt")
    with open_checkpoint(tmp_path / "x.safetensors", framework="pt") as reader:
        for one in (found, reader.read_tensors(), {n: reader.read(n) for n in values}):
            assert {n: t.dtype for n, t in one.items()} == dict.fromkeys(values, dtype)
            assert all(torch.equal(one[n].float(), values[n].float()) for n in values)
        assert reader.read("w", rows=slice(1, 2)).shape == (1, 2)


def test_jax_arrays_come_back_for_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    save_checkpoint({"w": np.ones(2, ml_dtypes.bfloat16)}, tmp_path / "x.ckpt")
    found = load_checkpoint(tmp_path / "x.ckpt", framework="jax")["w"]
    assert isinstance(found, jax.Array)
    assert found.dtype == jax.numpy.bfloat16


def test_type_that_jax_would_change_in_silence_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    save_checkpoint({"w": np.ones(2, np.float64)}, tmp_path / "x.ckpt")
    with pytest.raises(UnsupportedCheckpoint, match="'w' is float64, which JAX would make float32"):
        load_checkpoint(tmp_path / "x.ckpt", framework="jax")


def test_texts_stay_texts_in_every_framework(tmp_path: Path) -> None:
    save_checkpoint({"w": np.ones(2)}, tmp_path / "x.ckpt", append_dict={"who": "me"})
    assert load_checkpoint(tmp_path / "x.ckpt", framework="pt")["who"] == "me"


def test_unknown_framework_is_refused(tmp_path: Path) -> None:
    save_checkpoint({"w": np.ones(2)}, tmp_path / "x.ckpt")
    for load in (load_checkpoint, open_checkpoint):
        with pytest.raises(ValueError, match="framework must be 'np', 'pt' or 'jax'"):
            load(tmp_path / "x.ckpt", framework="tf")  # type: ignore[arg-type]


def test_framework_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    save_checkpoint({"w": np.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="'into' has the framework of its arrays"):
        load_checkpoint(tmp_path / "x.ckpt", into={"w": np.ones(2)}, framework="pt")
    with pytest.raises(ValueError, match="mmap gives read-only NumPy arrays"):
        open_checkpoint(tmp_path / "x.ckpt", framework="pt", mmap=True)


def test_part_of_an_encrypted_file_needs_the_key(tmp_path: Path) -> None:
    save_state({"net": {"w": np.ones(2)}}, tmp_path / "x.safetensors", enc_key=KEY)
    path = next(
        p for p in tmp_path.iterdir() if p.name.startswith("x") and "manifest" not in p.name
    )
    with pytest.raises(KeyProblem):
        load_state(path, only="net")


def test_parts_of_every_kind_of_value_are_cut_at_their_borders(tmp_path: Path) -> None:
    indices, values = torch.tensor([[0, 1]]), torch.ones(2)
    state = {
        "sparse": torch.sparse_coo_tensor(indices, values, (2,), check_invariants=False),
        "point": Point(1, np.ones(2)),
        "queue": deque([1, 2], maxlen=3),
        "bytes": b"x" * 10_000,
        "empty": {},
        "last": "end",
        3: "no name",
    }
    save_state(state, tmp_path / "x.ckpt")
    for name in ("point", "queue", "bytes", "empty", "last"):
        found = load_state(tmp_path / "x.ckpt", only=name)
        assert isinstance(found, dict)
        assert list(found) == [name]
    assert load_state(tmp_path / "x.ckpt", only=["last", "queue"]) == {
        "last": "end",
        "queue": deque([1, 2], maxlen=3),
    }
    sparse = load_state(tmp_path / "x.ckpt", only="sparse")["sparse"]  # type: ignore[index]
    assert sparse.to_dense().tolist() == [1, 1]


def test_packed_elements_are_refused_for_a_framework(tmp_path: Path) -> None:
    packed = PackedArray(dtype="F4", shape=(2,), data=np.ones(1, np.uint8))
    save_checkpoint({"w": packed}, tmp_path / "x.safetensors", format="safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="'w' has packed elements"):
        load_checkpoint(tmp_path / "x.safetensors", framework="pt")


def test_bytes_io_that_does_not_fit_a_module_is_refused_without_a_path() -> None:
    content = io.BytesIO(safetensors.numpy.save({"a": np.ones(2)}))
    with pytest.raises(StateMismatch, match=r"^the checkpoint does not fit this network"):
        load_checkpoint(content, net=torch.nn.Linear(3, 2), format="safetensors")


def test_load_refuses_damaged_skeleton_in_a_part() -> None:
    for skeleton in ('{"version":1,"nodes":[]}', '{"version":1,"nodes":["a",1,[]]}'):
        with pytest.raises(StateMismatch, match="this state is no dict"):
            part_of(skeleton, ["a"])
    with pytest.raises(StateMismatch, match="this state is no dict"):
        part_of('{"version":1,"nodes":["a",{"namedtuple":3},{"namedtuple":3}]}', ["b"])
    for root in ('{"dict":9}', '{"dict":-1}', '{"dict":"x"}'):
        with pytest.raises(TreeError, match="a namedtuple has no name and fields"):
            part_of(f'{{"version":1,"nodes":["a",{{"namedtuple":3}},{root}]}}', ["b"])


@pytest.mark.parametrize("is_module", [False, True])
def test_part_of_a_bare_state_dict_is_an_entry_of_it(tmp_path: Path, is_module: bool) -> None:
    net = torch.nn.Linear(2, 2)
    save_state(net if is_module else net.state_dict(), tmp_path / "x.safetensors")
    part = load_state(tmp_path / "x.safetensors", only="weight")
    assert isinstance(part, dict)
    assert list(part) == ["weight"]
    assert torch.equal(part["weight"], net.weight)


def test_part_of_a_counter_is_a_count(tmp_path: Path) -> None:
    save_state(Counter(a=1, b=2), tmp_path / "x.safetensors")
    assert load_state(tmp_path / "x.safetensors", only="b") == Counter(b=2)


def test_part_of_an_ordered_dict_that_came_from_torch_keeps_no_metadata(tmp_path: Path) -> None:
    save_state(torch.nn.Linear(2, 2).state_dict(), tmp_path / "x.safetensors")
    part = load_state(tmp_path / "x.safetensors", only=["bias", "weight"])
    assert list(part) == ["bias", "weight"]  # type: ignore[call-overload]
    assert not hasattr(part, "_metadata")
