# SPDX-License-Identifier: Apache-2.0
"""Decide which arrays can be copied later, and detect a change before the copy.

| array | may wait | change detected by |
|---|---|---|
| of at most 64 KiB | no | |
| JAX array | yes: immutable | |
| NumPy array, C-contiguous, over `bytes` | yes: immutable | |
| any other NumPy array | no | |
| CPU torch tensor, memory known to torch only | yes | version counter; samples (contiguous) |
| anything else | no | |

* The version counter covers every change that torch counts: operations in place that have returned,
  on the tensor or any view of it. It does not cover writes through `.data`, through a NumPy view,
  by fused kernels, or by code that bypasses torch. Fused optimizers wait before their step as all
  others do.
* Memory that NumPy, another process or a buffer shares when the save begins is copied at once;
  `torch_values.is_change_counted` detects it. Undetected are views that are made and written to
  between the save and the update, views of tensors that a load made, and DLPack.
* Samples are about 128 words of 8 bytes, evenly spread, and the first and last word of each piece
  of 16 MiB of the copy. They detect an uncounted update of the whole tensor, before or during the
  copy, in whatever order both proceed. They prove nothing: an update of a few elements is detected
  only if it changes a sample.
* Read-only is no guarantee: its owner can make a NumPy array writable again, and views made earlier
  are still writable.
* Any other array is copied at once: that takes time and is always correct.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptmgr.engine.staged_state import COPY_PIECE_BYTES
from ckptmgr.formats.tensor import Tensor, flat_memory
from ckptmgr.state.arrays import array_bytes, jax_bytes
from ckptmgr.state.torch_memory import torch_bytes

if TYPE_CHECKING:
    import torch

# Copying this much takes about as long as describing a tensor; most running statistics, which
# change in the forward pass, are smaller.
_SMALL_BYTES = 64 << 10
_SAMPLES = 128
_WORD_BYTES = 8
_PIECE_WORDS = COPY_PIECE_BYTES // _WORD_BYTES


class Guarded(NamedTuple):
    """A tensor that may be copied later; its content must not change meanwhile.

    Attributes:
        tensor: The tensor.
        counted: A torch tensor with a version counter; None for an immutable array.
        version: The counter when the guard was made.
        sample: Some of its bytes, or None.
    """

    tensor: Tensor
    counted: torch.Tensor | None = None
    version: int = 0
    sample: bytes | None = None

    @property
    def is_immutable(self) -> bool:
        """Whether it may be read at any time, so that it needs no copy at all."""
        return self.counted is None

    def is_counted_as_changed(self) -> bool:
        """Return whether torch has counted a change."""
        return self.counted is not None and self.counted._version != self.version

    def differs_from(self, content: Callable[[], memoryview]) -> bool:
        """Return whether a content differs from the tensor in the samples."""
        return self.sample is not None and sample_of(content()) != self.sample


def guard(tensor: Tensor, *, changing: Container[int] = ()) -> Guarded | None:
    """Return the guard of a tensor until its copy; None when it must be copied at once.

    `changing` has the addresses of torch storages that change in the forward pass.
    """
    content = tensor.content
    if not isinstance(content, partial):
        return None
    of_kind = _GUARDS.get(content.func)
    return None if of_kind is None else of_kind(tensor, content.args[0], changing)


def sample_of(content: memoryview) -> bytes:
    """Return some words of a content of at least 8 bytes."""
    words = np.frombuffer(content, np.uint64, count=content.nbytes // _WORD_BYTES)
    # Odd, so that the samples of a matrix are not all in one column.
    spread = words[:: len(words) // _SAMPLES | 1].tobytes()
    last = content[-_WORD_BYTES:]
    if len(words) < _PIECE_WORDS:  # its first word is among the spread samples
        return b"".join((spread, last))
    firsts, lasts = words[::_PIECE_WORDS], words[_PIECE_WORDS - 1 :: _PIECE_WORDS]
    return b"".join((spread, firsts.tobytes(), lasts.tobytes(), last))


def _guard_numpy(tensor: Tensor, array: np.ndarray, changing: Container[int]) -> Guarded | None:
    if array.nbytes <= _SMALL_BYTES or not array.flags.c_contiguous:
        return None
    is_immutable = isinstance(_buffer_of(array), bytes)
    return Guarded(_pinned(tensor, flat_memory(array))) if is_immutable else None


def _guard_torch(tensor: Tensor, value: torch.Tensor, changing: Container[int]) -> Guarded | None:
    from ckptmgr.state.torch_values import is_change_counted

    if not value.is_cpu or value.nbytes <= _SMALL_BYTES or not is_change_counted(value):
        return None
    if value.untyped_storage().data_ptr() in changing:
        return None
    # A tensor of its own: the caller may assign other memory to a parameter.
    value = value.detach()
    sample = None
    if value.is_contiguous() and not value.is_conj() and not value.is_neg():
        view = torch_bytes(value)
        tensor, sample = _pinned(tensor, view), sample_of(view)
    else:
        tensor = Tensor(spec=tensor.spec, content=partial(torch_bytes, value))
    return Guarded(tensor, counted=value, version=value._version, sample=sample)


def _guard_jax(tensor: Tensor, value: Any, changing: Container[int]) -> Guarded | None:
    if tensor.spec.size_bytes <= _SMALL_BYTES:
        return None
    devices = value.devices()
    if len(devices) == 1 and all(device.platform == "cpu" for device in devices):
        # A view keeps the memory from being donated to a computation. Other devices have none;
        # there, reading a donated array raises an error.
        tensor = _pinned(tensor, jax_bytes(value))
    return Guarded(tensor)


_GUARDS: dict[Callable[..., object], Callable[[Tensor, Any, Container[int]], Guarded | None]] = {
    array_bytes: _guard_numpy,
    torch_bytes: _guard_torch,
    jax_bytes: _guard_jax,
}


def _pinned(tensor: Tensor, view: memoryview) -> Tensor:
    return Tensor(tensor.spec, lambda: view)


def _buffer_of(array: np.ndarray) -> object:
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base
