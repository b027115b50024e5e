# SPDX-License-Identifier: Apache-2.0
"""A module is restored into another wrapping of it: torch.compile, DDP, or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager, StateMismatch

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")  # by torch.compile itself


class Distributed(torch.nn.Module):  # type: ignore[misc]
    """Names its parameters as DistributedDataParallel does, which needs a process group."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "none": lambda net: net,
    "compiled": torch.compile,
    "distributed": Distributed,
    "both": lambda net: torch.compile(Distributed(net)),
    "both, inside out": lambda net: Distributed(torch.compile(net)),
}
by_wrapping = pytest.mark.parametrize("wrapping", WRAPPINGS)


def net(value: float) -> Any:
    made: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    torch.nn.init.constant_(made[0].weight, value)
    return made


@by_wrapping
@pytest.mark.parametrize("stored", WRAPPINGS)
def test_state_of_one_wrapping_is_restored_into_another(
    tmp_path: Path, stored: str, wrapping: str
) -> None:
    saved, inner = net(3.0), net(0.0)
    saved[0].weight.requires_grad = False
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"net": WRAPPINGS[stored](saved)})
    with CheckpointManager(tmp_path) as manager:
        manager.resume({"net": WRAPPINGS[wrapping](inner)})
    assert torch.equal(inner[0].weight, saved[0].weight)
    assert not inner[0].weight.requires_grad


def test_names_of_another_module_are_still_refused(tmp_path: Path) -> None:
    average: Any = torch.optim.swa_utils.AveragedModel(net(1.0))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"net": average})
        with pytest.raises(StateMismatch, match=r"\['n_averaged'\] is only in the checkpoint"):
            manager.resume({"net": net(0.0)})
