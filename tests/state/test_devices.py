# SPDX-License-Identifier: Apache-2.0
"""Copies on a device instead of the host; the device is one whose memory is a dictionary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from ckptmgr import MemoryConfig
from ckptmgr.engine.staging import StagingPool
from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.devices import accelerators, copy_on_device, synchronize
from ckptmgr.state.items import TensorContent, tensors_in
from tests.support.staging_memory import filled, values


class DictDevice:
    """Tensors whose name starts with a device's name live there."""

    def __init__(self, free: dict[str, int]) -> None:
        self.free = free
        self.copied: list[str] = []
        self.brought: list[str] = []
        self.settled: list[str] = []
        self.locked_bytes: list[int] = []

    def device_of(self, tensor: Tensor) -> Hashable | None:
        name = tensor.spec.name.split(".")[0]
        return name if name in self.free else None

    def free_bytes(self, device: Hashable) -> int:
        return self.free[str(device)]

    def copy(self, tensors: Sequence[Tensor]) -> list[TensorContent]:
        self.copied += [tensor.spec.name for tensor in tensors]
        copies = [np.frombuffer(bytes(tensor.content()), np.uint8) for tensor in tensors]
        return [lambda copy=copy: copy.data for copy in copies]  # type: ignore[misc]

    def copy_to_host(self, tensors: Sequence[Tensor], targets: Sequence[memoryview]) -> None:
        for tensor, target in zip(tensors, targets, strict=True):
            self.brought.append(tensor.spec.name)
            target[:] = bytes(tensor.content())

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        self.settled += [tensor.spec.name for tensor in tensors]

    def lock(self, memory: memoryview) -> Callable[[], object] | None:
        size = memory.nbytes
        self.locked_bytes.append(size)
        return lambda: self.locked_bytes.remove(size)


class LocklessDevice(DictDevice):
    def lock(self, memory: memoryview) -> Callable[[], object] | None:
        return None


def test_hbm_ratio_is_the_share_of_free_device_memory_that_copies_take() -> None:
    device = DictDevice({"gpu0": 100, "gpu1": 10})
    state = [filled(name, 30) for name in ("gpu0.a", "host.b", "gpu0.c", "gpu1.d")]
    config = MemoryConfig(device_copy_share=0.5)
    with StagingPool(config, device=device) as pool:
        staged = pool.stage(state)
        assert device.copied == ["gpu0.a"]
        assert values(staged.items) == values(state)
        assert staged.size_bytes == 120
        staged.release()


def test_hbm_ratio_1_leaves_the_host_alone_when_all_fits() -> None:
    device = DictDevice({"gpu": 60})
    with StagingPool(MemoryConfig(device_copy_share=1.0), device=device) as pool:
        staged = pool.stage([filled("gpu.a", 30), filled("gpu.b", 30)])
        assert pool.ledger.host_bytes == 0
        staged.release()


def test_copy_on_the_device_ends_with_its_release_or_discard() -> None:
    device = DictDevice({"gpu": 60})
    config = MemoryConfig(device_copy_share=1.0, wipe="each_buffer")
    with StagingPool(config, device=device) as pool:
        staged = pool.stage([filled("gpu.a", 30), filled("gpu.b", 30)])
        staged.discard(tensors_in(staged.items)[0])
        staged.release()
        for item in staged.items:
            assert isinstance(item, Tensor)
            with pytest.raises(ValueError, match="after its release"):
                item.content()


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_without_a_share_that_fits_nothing_is_copied_on_the_device(share: float) -> None:
    device = DictDevice({"gpu": 60})
    assert copy_on_device([filled("gpu.a", 30)], device, share=share) == {}
    assert device.copied == []


def test_shared_pool_makes_no_copies_on_the_device() -> None:
    device = DictDevice({"gpu": 60})
    config = MemoryConfig(device_copy_share=1.0)
    with StagingPool(config, is_shared=True, device=device) as pool:
        pool.stage([filled("gpu.a", 30)]).release()
    assert device.copied == []


def test_failing_device_copy_leaves_the_pool_usable() -> None:
    class Broken(DictDevice):
        def copy(self, tensors: Sequence[Tensor]) -> list[TensorContent]:
            raise RuntimeError("device lost")

    config = MemoryConfig(device_copy_share=1.0, allocation="arena")
    with StagingPool(config, device=Broken({"gpu": 60})) as pool:
        with pytest.raises(RuntimeError, match="device lost"):
            pool.stage([filled("gpu.a", 30)])
        pool.stage([filled("host.a", 30)]).release()


@pytest.mark.parametrize("is_shared", [False, True])
def test_tensors_of_a_device_go_straight_into_staging_memory(is_shared: bool) -> None:
    device = DictDevice({"gpu": 0})
    state = [filled("gpu.small", 30), filled("host.a", 30), filled("gpu.large", 3 << 20)]
    with StagingPool(MemoryConfig(), is_shared=is_shared, device=device) as pool:
        staged = pool.stage(state)
        assert device.brought == ["gpu.small", "gpu.large"]
        assert values(staged.items) == values(state)
        staged.release()


def test_locked_staging_memory_is_locked_for_the_device_until_the_pool_is_closed() -> None:
    device = DictDevice({"gpu": 0})
    with StagingPool(MemoryConfig(is_page_locked=True), device=device) as pool:
        pool.stage([filled("gpu.a", 30)]).release()
        assert len(device.locked_bytes) == 1
    assert device.locked_bytes == []


def test_locked_staging_memory_is_locked_by_the_system_where_the_device_refuses() -> None:
    device = LocklessDevice({"gpu": 0})
    before = locked_kib()
    config = MemoryConfig(is_page_locked=True, allocation="exact")
    with StagingPool(config, device=device) as pool:
        staged = pool.stage([filled("gpu.a", 30)])
        assert locked_kib() > before
        staged.release()
    assert locked_kib() == before


def test_forked_child_leaves_the_device_lock_to_its_parent() -> None:
    device = DictDevice({"gpu": 0})
    pool = StagingPool(MemoryConfig(is_page_locked=True), device=device)
    pool.stage([filled("gpu.a", 30)]).release()
    pool.forget_parent()
    assert len(device.locked_bytes) == 1


def test_settle_names_all_tensors_of_all_items() -> None:
    device = DictDevice({})
    synchronize([filled("a", 1), filled("b", 1)], device)
    assert device.settled == ["a", "b"]


def test_accelerators_are_none_while_torch_has_not_used_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert accelerators() is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # still being imported
    assert accelerators() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert accelerators() is None


def locked_kib() -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmLck"))
    return int(line.split()[1])
