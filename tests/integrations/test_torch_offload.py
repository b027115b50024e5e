# SPDX-License-Identifier: Apache-2.0
"""Saved tensors offloaded to the host or a disk: gradients stay bit-equal, budgets hold, nothing is left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from ckptmgr import (  # noqa: E402 - torch may be absent
    CheckpointConfig,
    CheckpointManager,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.config.memory import MemoryConfig  # noqa: E402
from ckptmgr.core.errors import StagingExhausted  # noqa: E402
from ckptmgr.engine.budget import Ledger  # noqa: E402
from ckptmgr.formats.tensor import Tensor  # noqa: E402
from ckptmgr.integrations.torch_offload import SavedTensorOffload  # noqa: E402
from ckptmgr.state.arrays import to_tensor  # noqa: E402
from ckptmgr.state.items import TensorPart  # noqa: E402
from ckptmgr.state.torch_cuda import CudaMemory  # noqa: E402
from tests.support.descriptors import nothing_stays_open  # noqa: E402
from tests.support.staging_memory import filled  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    with nothing_stays_open():
        yield
        gc.collect()


def config_of(directory: Path, **options: Any) -> MemoryConfig:
    values: dict[str, Any] = {
        "smallest_evictee_bytes": 0,
        "spill_directory": directory,
        "write_block_bytes": 100,
    }
    return MemoryConfig(**(values | options))


def strict(directory: Path, place: str) -> MemoryConfig:
    return config_of(directory, is_automatic=False, snapshot_place=place)


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.GELU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 16),
        torch.nn.LayerNorm(16),
        torch.nn.Softmax(dim=1),
    )


def gradients(forward: Callable[[Any], Any]) -> list[Any]:
    model = network()
    images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    forward(lambda: model(images)).square().sum().backward()
    return [images.grad, *(parameter.grad for parameter in model.parameters())]


def offloaded(offload: SavedTensorOffload, run: Callable[[], Any]) -> Any:
    with offload:
        return run()


@pytest.mark.parametrize("place", ["host", "disk"])
def test_gradients_with_offload_are_bit_equal(tmp_path: Path, place: str) -> None:
    offload = SavedTensorOffload(strict(tmp_path, place))
    plain = gradients(lambda run: run())
    found = gradients(partial(offloaded, offload))
    assert all(torch.equal(left, right) for left, right in zip(plain, found, strict=True))
    assert offload.offloaded_tensors > 5
    assert (offload.spilled_bytes > 0) == (place == "disk")
    assert list(tmp_path.iterdir()) == []


def test_offloaded_tensor_comes_back_with_its_strides(tmp_path: Path) -> None:
    seen = []

    class Keep(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            ctx.save_for_backward(tensor)
            return tensor.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            seen.append(ctx.saved_tensors[0])
            return gradient.expand(seen[-1].shape)

    tensors = [
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(5),
        torch.randn(()),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(1).expand(4),
        torch.randn(6)[::2],
        torch.zeros(0, 3),
    ]
    for place in ("host", "disk"):
        offload = SavedTensorOffload(strict(tmp_path, place))
        for tensor in tensors:
            with offload:
                total = Keep.apply(tensor.requires_grad_())
            total.backward(torch.ones_like(total))
            assert torch.equal(seen[-1], tensor)
            assert seen[-1].stride() == tensor.stride()
        assert offload.offloaded_tensors == 5


def test_parameters_and_small_tensors_stay_where_they_are(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    small = torch.randn(1, 64, requires_grad=True)
    with SavedTensorOffload(config_of(tmp_path, smallest_evictee_bytes=4096)) as offload:
        (small @ weight.t()).sum().backward()
    assert offload.offloaded_tensors == 0


@pytest.mark.slow
def test_memory_is_given_back_when_the_graph_is_gone(tmp_path: Path) -> None:
    for place in ("host", "disk"):
        config = strict(tmp_path, place)
        ledger = Ledger(config)
        with SavedTensorOffload(config, ledger=ledger):
            loss = (torch.ones(100, requires_grad=True) * 2).exp().sum()
        assert ledger.host_bytes + ledger.disk_bytes == 400
        loss.backward()
        del loss
        gc.collect()
        assert ledger.host_bytes == ledger.disk_bytes == 0


def test_automatic_offload_uses_the_host_first_and_then_the_disk(tmp_path: Path) -> None:
    config = config_of(tmp_path, host_budget_bytes=500)
    with SavedTensorOffload(config) as offload:
        first = (torch.ones(100, requires_grad=True) * 2).exp()
        assert offload.spilled_bytes == 0
        second = (torch.ones(100, requires_grad=True) * 2).exp()
    assert offload.spilled_bytes == 400
    (first + second).sum().backward()


def test_disk_space_is_used_again_once_all_tensors_are_gone(tmp_path: Path) -> None:
    config = config_of(tmp_path, is_automatic=False, snapshot_place="disk", disk_budget_bytes=1000)
    with SavedTensorOffload(config) as offload:
        for _ in range(5):
            (torch.ones(100, requires_grad=True) * 2).exp().sum().backward()
    assert offload.spilled_bytes == 2000


@pytest.mark.parametrize(
    "options",
    [
        {"is_automatic": False, "snapshot_place": "host"},
        {"is_automatic": True, "disk_budget_bytes": 100},
        {"is_automatic": True, "spill_directory": None},
    ],
)
def test_tensor_that_fits_nowhere_is_refused_with_the_figures(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    config = config_of(tmp_path, host_budget_bytes=100, **options)
    with (
        SavedTensorOffload(config),
        pytest.raises(StagingExhausted, match="saved tensor of 400 bytes does not fit: of 100"),
    ):
        (torch.ones(100, requires_grad=True) * 2).exp()


def test_failing_spill_gives_the_budget_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", broken)
    config = strict(tmp_path, "disk")
    ledger = Ledger(config)
    with (
        SavedTensorOffload(config, ledger=ledger),
        pytest.raises(StagingExhausted, match="No space"),
    ):
        (torch.ones(100, requires_grad=True) * 2).exp()
    assert ledger.disk_bytes == 0


def test_spill_directory_that_cannot_be_made_gives_the_budget_back(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = strict(tmp_path / "file", "disk")
    ledger = Ledger(config)
    with SavedTensorOffload(config, ledger=ledger), pytest.raises(FileExistsError):
        (torch.ones(100, requires_grad=True) * 2).exp()
    assert ledger.disk_bytes == 0


def test_failing_host_copy_gives_the_budget_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*sizes: int, **options: object) -> Any:
        raise RuntimeError("out of memory")

    config = strict(tmp_path, "host")
    ledger = Ledger(config)
    weights = torch.ones(100, requires_grad=True)
    with SavedTensorOffload(config, ledger=ledger):
        monkeypatch.setattr(torch, "empty", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            (weights * 2).exp()
    assert ledger.host_bytes == 0


def test_cuda_memory_of_tensors_on_the_host_is_none() -> None:
    memory = CudaMemory()
    assert memory.device_of(to_tensor("w", torch.ones(3))) is None
    assert memory.device_of(filled("w", 3)) is None


def test_cuda_memory_copy_is_independent_of_the_original() -> None:
    value = torch.arange(3, dtype=torch.uint8)
    (content,) = CudaMemory().copy([to_tensor("w", value)])
    value += 1
    assert bytes(content()) == b"\0\1\2"


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.ones(2, dtype=torch.float8_e5m2),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["strided", "bool", "scalar", "float8", "conj"],
)
def test_cuda_memory_brings_the_bytes_that_a_file_holds(value: Any) -> None:
    tensor = to_tensor("w", value)
    target = bytearray(tensor.spec.size_bytes)
    CudaMemory().copy_to_host([tensor], [memoryview(target)])
    assert target == tensor.content()


def test_cuda_memory_brings_no_arrays_of_others() -> None:
    with pytest.raises(TypeError, match="'w' is no torch tensor"):
        CudaMemory().copy_to_host([filled("w", 3)], [memoryview(bytearray(3))])


def test_cuda_memory_settles_tensors_of_the_host_at_once() -> None:
    whole = to_tensor("w", torch.ones(3))
    part = Tensor(spec=whole.spec, content=TensorPart(whole=whole, start=0, stop=4))
    CudaMemory().synchronize([whole, part, filled("a", 3)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_memory_locks_nothing_without_cuda() -> None:
    assert CudaMemory().lock(memoryview(bytearray(4096))) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("is_page_locked", [False, True])
def test_tensors_on_a_device_come_back_as_they_were_when_they_were_saved(
    tmp_path: Path, mode: Any, is_page_locked: bool
) -> None:
    value = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    memory = MemoryConfig(is_page_locked=is_page_locked)
    config = CheckpointConfig(async_save=mode, memory=memory)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"w": value})
        value += 1
    state = {"w": torch.zeros_like(value)}
    with CheckpointManager(tmp_path, config) as manager:
        assert manager.resume(state).step == 1
    assert torch.equal(state["w"] + 1, value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_save_of_what_another_stream_computes_has_the_result(tmp_path: Path) -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product = matrix
        for _ in range(20):
            product = product @ matrix / 64
        save_checkpoint({"w": product}, str(tmp_path / "w.ckpt"))
    loaded = load_checkpoint(str(tmp_path / "w.ckpt"))["w"]
    assert torch.equal(torch.from_numpy(loaded).cuda(), product)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_memory_of_tensors_on_a_device_has_free_bytes() -> None:
    memory = CudaMemory()
    device = memory.device_of(to_tensor("w", torch.ones(3, device="cuda")))
    assert device is not None
    assert memory.free_bytes(device) > 0
