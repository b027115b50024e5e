# SPDX-License-Identifier: Apache-2.0
"""CUDA memory as PyTorch gives access to it, for copies on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ckptmgr.formats.tensor import Tensor
from ckptmgr.leaves import torch_bytes
from ckptmgr.staging_items import Content


class CudaMemory:
    """The memory of all CUDA devices of this process."""

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the CUDA device of a torch tensor; None for any other tensor."""
        value = _torch_value(tensor)
        return value.device if value is not None and value.is_cuda else None

    def free_bytes(self, device: object) -> int:  # pragma: no cover - needs CUDA
        """Return how many bytes a device has free, without what PyTorch itself keeps cached."""
        free, _ = torch.cuda.mem_get_info(torch.device(str(device)))
        return int(free)

    def copy(self, tensors: Sequence[Tensor]) -> list[Content]:
        """Copy tensors on their devices; when this returns, the originals may change."""
        values = [value for tensor in tensors if (value := _torch_value(tensor)) is not None]
        copies = [value.detach().clone() for value in values]
        for device in {copy.device for copy in copies if copy.is_cuda}:
            # Another thread brings the copies to the host, on another stream.
            torch.cuda.current_stream(device).synchronize()  # pragma: no cover - needs CUDA
        return [partial(torch_bytes, copy) for copy in copies]


def _torch_value(tensor: Tensor) -> torch.Tensor | None:
    content = tensor.content
    if isinstance(content, partial) and content.func is torch_bytes:
        value: torch.Tensor = content.args[0]
        return value
    return None
