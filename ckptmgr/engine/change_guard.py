# SPDX-License-Identifier: Apache-2.0
"""Which arrays can be copied later, and how it is noticed that one changed before it was.

| array | may wait | what notices a change |
|---|---|---|
| of at most 64 KiB | no | |
| JAX array | yes: nobody can change it | |
| NumPy array, C-contiguous, over `bytes` | yes: nobody can change it | |
| any other NumPy array | no | |
| torch tensor on the CPU whose memory only torch knows | yes | its version counter; samples, where it is contiguous |
| anything else | no | |

* The version counter misses nothing that torch counts: operations in place that have returned, on the tensor or any view of
  it. It does not count writes through `.data`, through a NumPy view, by fused kernels, or by code that goes past torch. Fused
  optimizers wait before their step as all others do.
* Memory that NumPy, another process or a buffer can change as well when the save begins is copied at once; `tree_torch.
  is_change_counted` finds it. What is left are views that are made and written to between the save and the update, views of
  tensors that a load made, and DLPack.
* Samples are about 128 words of 8 bytes, evenly spread, and the first and the last word of each piece of 16 MiB, as it is
  copied. They find an update of the whole tensor that was not counted, before the copy and in the middle of it, wherever the
  one overtakes the other. They vouch for nothing: an update of a few elements is found only if it hits a sample.
* Read-only is no promise: its owner can make a NumPy array writable again, and views made earlier are still writable.
* What may not wait is copied at once: that costs time, and is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptmgr.engine.staged_state import PIECE_BYTES
from ckptmgr.formats.tensor import Tensor, flat_memory
from ckptmgr.state.arrays import array_bytes, jax_bytes, torch_bytes

if TYPE_CHECKING:
    import torch

# Copying that much takes about as long as describing a tensor; most running statistics, which change in forward, are smaller.
_SMALL_BYTES = 64 << 10
_SAMPLES = 128
_WORD_BYTES = 8
_PIECE_WORDS = PIECE_BYTES // _WORD_BYTES


class Guarded(NamedTuple):
    """A tensor that may be copied later.

    Attributes:
        tensor: It; its content is what the caller must not change meanwhile.
        counted: A torch tensor with a version counter; None for what nobody can change.
        version: The counter when the guard was made.
        sample: Some of its bytes, or None.
    """

    tensor: Tensor
    counted: torch.Tensor | None = None
    version: int = 0
    sample: bytes | None = None

    @property
    def is_immutable(self) -> bool:
        """Whether it may be read at any time, so that it need not be copied at all."""
        return self.counted is None

    def is_counted_as_changed(self) -> bool:
        """Return whether torch has counted a change."""
        return self.counted is not None and self.counted._version != self.version

    def differs_from(self, content: Callable[[], memoryview]) -> bool:
        """Return whether bytes that should be the same differ in the samples."""
        return self.sample is not None and sample_of(content()) != self.sample


def guard(tensor: Tensor, *, changing: Container[int] = ()) -> Guarded | None:
    """Return how a tensor is guarded until it is copied; None when it must be copied at once.

    Args:
        tensor: Of a flattened state.
        changing: Addresses of torch storages that change in the forward pass.
    """
    content = tensor.content
    if not isinstance(content, partial):
        return None
    of_kind = _GUARDS.get(content.func)
    return None if of_kind is None else of_kind(tensor, content.args[0], changing)


def sample_of(content: memoryview) -> bytes:
    """Return some words of a content of at least 8 bytes."""
    words = np.frombuffer(content, np.uint64, count=content.nbytes // _WORD_BYTES)
    # Odd, so that the samples of a matrix do not all lie in one column.
    spread = words[:: len(words) // _SAMPLES | 1].tobytes()
    last = content[-_WORD_BYTES:]
    if len(words) < _PIECE_WORDS:  # its first word is among those that are spread
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
    # A tensor of its own: the caller may give a parameter other memory.
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
        # A view keeps the memory from being donated to a computation. Elsewhere there is none, and reading a donated
        # array is an error that says so.
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
