# SPDX-License-Identifier: Apache-2.0
"""PyTorch's changes of a state: optimizers in their steps, modules in the forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Waiter(Protocol):
    """A wait that must precede a change of the state."""

    def wait(self) -> None:
        """Return when the state may be changed."""
        ...


def wait_before_steps(waiter: Waiter) -> Callable[[], object]:
    """Call `waiter.wait` before every step of every optimizer of this process.

    All optimizers, because a state may hold the `state_dict()` of one instead of the optimizer.
    Without a copy in progress the wait costs nothing. Return a function that removes the hook; the
    hook also goes with `waiter`.
    """
    found = weakref.ref(waiter)

    def hook(optimizer: object, arguments: object, options: object) -> None:
        alive = found()
        if alive is not None:
            alive.wait()

    handle = register_optimizer_step_pre_hook(hook)
    unhook = weakref.finalize(waiter, handle.remove)
    unhook.atexit = False
    return unhook


def buffers_of_modules(state: object) -> frozenset[int]:
    """Return the addresses of the storages of all buffers of all modules in a nested state.

    Running statistics, codebooks and the like change in the forward pass, parameters do not.
    """
    found: set[int] = set()
    todo: list[Any] = [state]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.nn.Module):
            for buffer in value.buffers():
                found.update(part.untyped_storage().data_ptr() for part in _parts(buffer))
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, list | tuple):
            todo.extend(value)
    return frozenset(found)


def _parts(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with storage of a buffer; none for layouts that cannot be saved anyway."""
    if buffer.layout is torch.sparse_coo:
        return buffer._indices(), buffer._values()
    return (buffer,) if buffer.layout is torch.strided else ()
