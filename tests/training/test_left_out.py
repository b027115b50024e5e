# SPDX-License-Identifier: Apache-2.0
"""What objects of a state hold and their `state_dict()` leaves out is a list beside the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from tests.cli.running import key_file, run, run_json


class Part:
    """An object of a program, with one stored array and others."""

    __slots__ = ("__dict__", "slot")

    def __init__(self, **held: Any) -> None:
        self.weights = np.ones(3)
        self.__dict__.update(held)

    @property
    def trap(self) -> object:
        raise AssertionError("a property was read")

    def __getattr__(self, name: str) -> object:
        if name in ("state_dict", "load_state_dict", "_fields") or name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(f"{name} was asked for")

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def left_out(directory: Path, state: object) -> list[str]:
    """Save a state; return what `inspect` says is left out."""
    with CheckpointManager(directory) as manager:
        manager.save(1, state)
    found: list[str] = run_json("inspect", "latest", "--dir", directory, "--left-out")["summary"][
        "left_out"
    ]
    return found


def test_array_that_an_object_does_not_store_is_named_with_its_shape(tmp_path: Path) -> None:
    part = Part(cache=np.zeros((2, 4), np.float32), names=["a"], best=[{"w": np.arange(5)}])
    vars(Part)["slot"].__set__(part, np.zeros(2, bool))
    assert sorted(left_out(tmp_path, {"part": part})) == [
        "part.best[0]['w']: int64[5]",
        "part.cache: float32[2, 4]",
        "part.slot: bool[2]",
    ]


def test_array_that_is_stored_elsewhere_is_not_named(tmp_path: Path) -> None:
    shared = np.arange(4.0)
    assert left_out(tmp_path, {"part": Part(other=shared, n=3), "shared": shared}) == []


def test_object_that_is_held_by_another_one_is_looked_at_once(tmp_path: Path) -> None:
    inner = Part(cache=np.zeros(7))
    vars(inner)["me"] = inner
    assert left_out(tmp_path, {"part": Part(a=inner, b=[inner])}) == ["part.a.cache: float64[7]"]


def test_modules_of_torch_name_their_transient_buffers(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)
            self.register_buffer("mask", torch.zeros(3, 3), persistent=False)
            self.register_buffer("scale", torch.ones(5))
            self.hidden = [torch.nn.Linear(4, 1, bias=False)]
            self.running = torch.zeros(6)

    assert sorted(left_out(tmp_path, {"net": Net()})) == [
        "net.hidden[0].weight: torch.float32[1, 4]",
        "net.mask: torch.float32[3, 3]",
        "net.running: torch.float32[6]",
    ]


def test_plain_run_of_torch_leaves_nothing_out(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")

    class Ema:
        def __init__(self, model: Any) -> None:
            self.model = model
            self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state["shadow"]

    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 4),
        torch.nn.LSTM(4, 4, batch_first=True),
    )
    head = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.TransformerEncoderLayer(4, 2)
    )
    parameters = [*model.parameters(), *head.parameters()]
    state: dict[str, Any] = {"model": model, "head": head, "ema": Ema(head)}
    state["average"] = torch.optim.swa_utils.AveragedModel(head)
    for name, one in {
        "adam": torch.optim.AdamW(parameters, amsgrad=True, foreach=True),
        "sgd": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }.items():
        head(model[0](torch.ones(2, 4, dtype=torch.long))[:, 0]).sum().backward()
        one.step()
        state[name] = one
        state[f"{name} schedule"] = torch.optim.lr_scheduler.SequentialLR(
            one,
            [
                torch.optim.lr_scheduler.LinearLR(one),
                torch.optim.lr_scheduler.CosineAnnealingLR(one, 10),
            ],
            milestones=[5],
        )
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(state["sgd"])
    state["scaler"] = torch.amp.GradScaler("cpu")
    assert left_out(tmp_path, state) == []


def test_resume_says_what_is_left_out(tmp_path: Path) -> None:
    part = Part(cache=np.zeros((2, 4)))
    left_out(tmp_path, {"part": part})
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume({"part": Part()})
    assert start.notes == (
        "objects of the state hold what no checkpoint has: part.cache: float64[2, 4]",
    )


def test_names_of_what_is_left_out_are_encrypted(tmp_path: Path) -> None:
    config = CheckpointConfig(enc_key=b"\x01" * 32, format="safetensors")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"part": Part(secret=np.zeros(2))})
    assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    refused = run("inspect", "latest", "--dir", tmp_path, "--left-out")
    assert "no key was given" in refused.stderr
    key = key_file(tmp_path / "..", hex_digits="01" * 32)
    shown = run("inspect", "latest", "--dir", tmp_path, "--left-out", "--key", key)
    assert "part.secret: float64[2]" in shown.stdout


def test_state_without_objects_has_no_list(tmp_path: Path) -> None:
    assert left_out(tmp_path, {"w": np.ones(3)}) == []
    assert run("inspect", "latest", "--dir", tmp_path, "--left-out").stdout == (
        "0 arrays of objects of the state not stored\n"
    )
