# SPDX-License-Identifier: Apache-2.0
"""Torch optimizers wait before their steps; buffers of modules are known."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from ckptmgr.engine.torch_hooks import buffers_of_modules, wait_before_steps  # noqa: E402 - only where there is torch


class Waiter:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def optimizer(kind: Any) -> Any:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=0.1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_waiter_is_called_before_each_step_until_it_is_unhooked(kind: Any) -> None:
    waiter = Waiter()
    stepper = optimizer(kind)
    unhook = wait_before_steps(waiter)
    stepper.step()
    stepper.step()
    assert waiter.waits == 2
    unhook()
    unhook()
    stepper.step()
    assert waiter.waits == 2


def test_waiter_that_is_gone_leaves_no_hook() -> None:
    hooks = import_module("torch.optim.optimizer")._global_optimizer_pre_hooks
    before = len(hooks)
    waiter = Waiter()
    wait_before_steps(waiter)
    assert len(hooks) == before + 1
    del waiter
    gc.collect()
    assert len(hooks) == before
    optimizer(torch.optim.SGD).step()


def test_hook_that_outlives_its_waiter_does_nothing() -> None:
    waiter = Waiter()
    wait_before_steps(waiter)
    hook = list(import_module("torch.optim.optimizer")._global_optimizer_pre_hooks.values())[-1]
    del waiter
    gc.collect()
    assert hook(None, (), {}) is None


def test_buffers_of_modules_are_found_anywhere_and_parameters_are_not() -> None:
    norm, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    found = buffers_of_modules({"a": [torch.nn.Sequential(norm), 3], "b": (other, {"c": None})})
    wanted = {
        buffer.untyped_storage().data_ptr()
        for module in (norm, other)
        for buffer in module.buffers()
    }
    assert found == wanted
    assert norm.weight.untyped_storage().data_ptr() not in found


def test_parts_of_a_sparse_buffer_are_found() -> None:
    module = torch.nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    parts = module.graph._indices(), module.graph._values()
    assert buffers_of_modules(module) == {part.untyped_storage().data_ptr() for part in parts}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffer_of_a_layout_without_storage_is_left_to_whoever_saves_it() -> None:
    module = torch.nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse_csr())
    assert buffers_of_modules([module]) == frozenset()
