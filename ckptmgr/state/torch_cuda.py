# SPDX-License-Identifier: Apache-2.0
"""CUDA memory, through PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.items import TensorContent, TensorPart
from ckptmgr.state.torch_memory import torch_bytes

_PORTABLE = 1  # cudaHostRegisterPortable


class CudaMemory:
    """The memory of all CUDA devices of this process."""

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the CUDA device of a torch tensor; None for any other tensor."""
        value = _torch_value(tensor)
        return value.device if value is not None and value.is_cuda else None

    def free_bytes(self, device: object) -> int:  # pragma: no cover - needs CUDA
        """Return the free bytes of a device, without those in PyTorch's cache."""
        free, _ = torch.cuda.mem_get_info(torch.device(str(device)))
        return int(free)

    def copy(self, tensors: Sequence[Tensor]) -> list[TensorContent]:
        """Copy tensors on their devices; when this returns, the originals may change."""
        values = [value for tensor in tensors if (value := _torch_value(tensor)) is not None]
        copies = [value.detach().clone() for value in values]
        for device in {copy.device for copy in copies if copy.is_cuda}:
            # Another thread copies them to the host, on another stream.
            torch.cuda.current_stream(device).synchronize()  # pragma: no cover - needs CUDA
        return [partial(torch_bytes, copy) for copy in copies]

    def copy_to_host(self, tensors: Sequence[Tensor], targets: Sequence[memoryview]) -> None:
        """Copy tensors straight into host memory; when this returns, the originals may change.

        All copies start before the first wait: a copy into page-locked memory takes no CPU time.
        """
        for tensor, target in zip(tensors, targets, strict=True):
            value = _torch_value(tensor)
            if value is None:
                raise TypeError(f"{tensor.spec.name!r} is no torch tensor")
            host = torch.frombuffer(target, dtype=torch.uint8).view(value.dtype)
            host.view(value.shape).copy_(value.detach(), non_blocking=True)
        self.synchronize(tensors)

    def synchronize(self, tensors: Iterable[Tensor]) -> None:
        """Wait for the work that this thread has queued on the devices of these tensors."""
        for device in {value.device for tensor in tensors for value in _values_under(tensor)}:
            torch.cuda.current_stream(device).synchronize()  # pragma: no cover - needs CUDA

    def lock(self, memory: memoryview) -> Callable[[], object] | None:
        """Register host memory with CUDA, for all its contexts; None where CUDA refuses."""
        address = np.frombuffer(memory, np.uint8).ctypes.data
        with contextlib.suppress(RuntimeError, AssertionError):  # torch without CUDA, no driver
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)) == 0:
                return partial(runtime.cudaHostUnregister, address)  # pragma: no cover - needs CUDA
        return None


def _values_under(tensor: Tensor) -> tuple[torch.Tensor, ...]:
    """Return the CUDA tensor that a tensor is, or is a part of."""
    whole = tensor.content.whole if isinstance(tensor.content, TensorPart) else tensor
    value = _torch_value(whole)
    return (value,) if value is not None and value.is_cuda else ()


def _torch_value(tensor: Tensor) -> torch.Tensor | None:
    content = tensor.content
    if isinstance(content, partial) and content.func is torch_bytes:
        value: torch.Tensor = content.args[0]
        return value
    return None
