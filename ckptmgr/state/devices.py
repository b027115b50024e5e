# SPDX-License-Identifier: Apache-2.0
"""The memory of accelerators: where it lies, how it comes to the host, and copies that do not leave it.

The shortest wait for training is a copy on the device. It takes the place of staging in host memory; its bytes come to the
host when the writer asks for them. What is not copied there goes straight into the staging memory, without a tensor on the
host in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.state.items import Content, tensors_of


class DeviceMemory(Protocol):
    """The memory of accelerators, as one framework gives access to it."""

    def device_of(self, tensor: Tensor) -> Hashable | None:
        """Return the device whose memory holds a tensor; None for the host and for other frameworks' tensors."""
        ...

    def free_bytes(self, device: Hashable) -> int:
        """Return how many bytes a device has free now."""
        ...

    def copy(self, tensors: Sequence[Tensor]) -> list[Content]:
        """Copy tensors on their devices; return functions that bring the copies to the host.

        When this returns, the originals may change.
        """
        ...

    def copy_to_host(self, tensors: Sequence[Tensor], targets: Sequence[memoryview]) -> None:
        """Copy tensors of devices into host memory, one target of its size for each.

        When this returns, the originals may change.
        """
        ...

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """Wait until what the calling thread has asked of the devices of these tensors is done.

        Other threads have other streams: what they read is only then what the caller computed.
        """
        ...

    def lock(self, memory: memoryview) -> Callable[[], object] | None:
        """Lock host memory for copies from devices; return what unlocks it, or None where that cannot be done."""
        ...


def accelerators() -> DeviceMemory | None:
    """Return the CUDA devices that PyTorch uses in this process, or None; other accelerators copy as PyTorch does."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    from ckptmgr.state.torch_cuda import CudaMemory  # pragma: no cover - needs CUDA

    return CudaMemory()  # pragma: no cover - needs CUDA


def synchronize(items: Iterable[Item], memory: DeviceMemory | None) -> None:
    """Make sure that any thread may read tensors of accelerators; at once where there are none."""
    if memory is not None:
        memory.synchronize(tensor for item in items for tensor in tensors_of(item))


def copy_on_device(
    tensors: Sequence[Tensor], memory: DeviceMemory | None, *, share: float
) -> Mapping[int, Content]:
    """Copy what fits the share of each device's free memory, in the order given.

    Args:
        tensors: All tensors of a state.
        memory: The accelerators, or None.
        share: Share of the free bytes that the copies may take, in [0, 1].

    Returns:
        Contents of the copies, by index into `tensors`.
    """
    if memory is None or share == 0:
        return {}
    room: dict[Hashable, int] = {}
    chosen: list[int] = []
    for index, tensor in enumerate(tensors):
        device = memory.device_of(tensor)
        if device is None:
            continue
        if device not in room:
            room[device] = int(memory.free_bytes(device) * share)
        if tensor.spec.size_bytes <= room[device]:
            room[device] -= tensor.spec.size_bytes
            chosen.append(index)
    if not chosen:
        return {}
    contents = memory.copy([tensors[index] for index in chosen])
    return dict(zip(chosen, contents, strict=True))
