# SPDX-License-Identifier: Apache-2.0
"""Accelerator memory: copies on the device, and copies to the host.

A copy on the device holds up training the least. It replaces staging in host memory; its bytes are
copied to the host when the writer uses them. Other tensors are copied straight into staging memory,
without a host tensor in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.state.items import TensorContent, tensors_of


class DeviceMemory(Protocol):
    """The memory of one framework's accelerators."""

    def device_of(self, tensor: Tensor) -> Hashable | None:
        """Return the device of a tensor; None for the host and for other frameworks' tensors."""
        ...

    def free_bytes(self, device: Hashable) -> int:
        """Return how many bytes a device has free now."""
        ...

    def copy(self, tensors: Sequence[Tensor]) -> list[TensorContent]:
        """Copy tensors on their devices; return functions that copy the copies to the host.

        When this returns, the originals may change.
        """
        ...

    def copy_to_host(self, tensors: Sequence[Tensor], targets: Sequence[memoryview]) -> None:
        """Copy each tensor into a target of its size; then the originals may change."""
        ...

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """Wait for the work that the calling thread has queued on the devices of these tensors.

        Other threads have other streams and would read the tensors before the work is done.
        """
        ...

    def lock(self, memory: memoryview) -> Callable[[], object] | None:
        """Page-lock host memory for copies from devices; return the unlock function, or None."""
        ...


def accelerators() -> DeviceMemory | None:
    """Return the CUDA devices of PyTorch, or None; other accelerators use PyTorch's own copies."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    from ckptmgr.state.torch_cuda import CudaMemory  # pragma: no cover - needs CUDA

    return CudaMemory()  # pragma: no cover - needs CUDA


def synchronize(items: Iterable[Item], memory: DeviceMemory | None) -> None:
    """Wait until any thread may read the tensors of accelerators; return at once without them."""
    if memory is not None:
        memory.synchronize(tensor for item in items for tensor in tensors_of(item))


def copy_on_device(
    tensors: Sequence[Tensor], memory: DeviceMemory | None, *, share: float
) -> Mapping[int, TensorContent]:
    """Copy the tensors that fit a share (0 to 1) of each device's free memory, in the order given.

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
