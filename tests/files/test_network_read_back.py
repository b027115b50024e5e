# SPDX-License-Identifier: Apache-2.0
"""`load_checkpoint(net=)` compares a PyTorch module with what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import StateMismatch, load_checkpoint, save_checkpoint

torch: Any = pytest.importorskip("torch")


class Scaled(torch.nn.Linear):  # type: ignore[misc]
    """Doubles the weights that it loads."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        scaled = {name: 2 * one for name, one in state.items()}
        super()._load_from_state_dict(scaled, prefix, *rest)


def test_module_whose_hook_changes_loaded_weights_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "net.ckpt"
    save_checkpoint(torch.nn.Linear(2, 1).state_dict(), path)
    with pytest.raises(StateMismatch, match=r"net\.ckpt.*other elements in weight, bias"):
        load_checkpoint(path, net=Scaled(2, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_weights_of_another_type_are_compared_as_they_were_converted(
    tmp_path: Path, dtype: str
) -> None:
    path = tmp_path / "net.safetensors"
    stored = {"weight": np.array([[1 / 3, np.nan]]), "bias": np.array([-0.0])}
    save_checkpoint(stored, path, format="safetensors")
    net = torch.nn.Linear(2, 1, dtype=getattr(torch, dtype))
    load_checkpoint(path, net=net)
    assert torch.equal(net.weight[0, 0], torch.tensor(1 / 3, dtype=net.weight.dtype))
    assert torch.isnan(net.weight[0, 1])


def test_empty_scalar_and_integer_buffers_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "net.ckpt"
    net = torch.nn.BatchNorm1d(3)
    net.register_buffer("none", torch.zeros(0))
    save_checkpoint(net.state_dict(), path)
    load_checkpoint(path, net=net)
