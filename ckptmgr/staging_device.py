# SPDX-License-Identifier: Apache-2.0
"""Copies on the device: the shortest wait for training is a copy that does not leave the accelerator.

Such a copy takes the place of staging in host memory; its bytes come to the host when the writer asks for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

from ckptmgr.formats.tensor import Tensor
from ckptmgr.staging_items import Content


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
