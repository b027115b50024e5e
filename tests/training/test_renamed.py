# SPDX-License-Identifier: Apache-2.0
"""`Resume(renamed=...)`: a checkpoint is restored under other names of the parts of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Resume, StateMismatch

OLD = {"encoder.*": "backbone.*"}


def save(directory: Path, state: object, step: int = 1, **config: Any) -> None:
    with CheckpointManager(directory, CheckpointConfig(**config)) as manager:
        manager.save(step, state)


def resume(directory: Path, state: object, renamed: dict[str, str]) -> object:
    with CheckpointManager(directory) as manager:
        return manager.resume(state, Resume(renamed=renamed)).state


def arrays(*names: str, size: int = 3) -> dict[str, np.ndarray]:
    return {name: np.full(size, i, np.float32) for i, name in enumerate(names, start=1)}


def zeros(*names: str, size: int = 3) -> dict[str, np.ndarray]:
    return {name: np.zeros(size, np.float32) for name in names}


@pytest.mark.parametrize("size", [3, 100_000], ids=["copied", "read in place"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_keys_are_restored_under_their_new_names(tmp_path: Path, size: int, format: str) -> None:
    save(tmp_path, {"model": arrays("encoder.0", "encoder.1", "head", size=size)}, 1, format=format)
    target = {"model": zeros("backbone.0", "backbone.1", "head", size=size)}
    resume(tmp_path, target, OLD)
    assert {name: one[0] for name, one in target["model"].items()} == {
        "backbone.0": 1,
        "backbone.1": 2,
        "head": 3,
    }


def test_module_of_torch_with_a_renamed_part_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")

    def built(name: str) -> dict[str, Any]:
        model = torch.nn.Module()
        model.add_module(name, torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
        model.add_module("head", torch.nn.Linear(3, 1))
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    old, new = built("encoder"), built("backbone")
    old["model"].head(old["model"].encoder(torch.ones(4, 3))).sum().backward()
    old["optimizer"].step()
    save(tmp_path, old)
    resume(tmp_path, new, OLD)
    for one, other in zip(
        old["model"].state_dict().values(), new["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    moments = [each["optimizer"].state_dict()["state"][0]["exp_avg"] for each in (old, new)]
    assert torch.equal(*moments)


@pytest.mark.parametrize(
    "renamed",
    [
        {"params/encoder/*": "params/backbone/*"},
        {"encoder/*": "backbone/*"},
        {"encoder/w": "backbone/w", "encoder/b": "backbone/b"},
    ],
)
def test_nested_keys_are_renamed(tmp_path: Path, renamed: dict[str, str]) -> None:
    save(tmp_path, {"params": {"encoder": arrays("w", "b"), "n": 5}})
    target = {"params": {"backbone": zeros("w", "b"), "n": 0}}
    resume(tmp_path, target, renamed)
    assert (target["params"]["backbone"]["b"][0], target["params"]["n"]) == (2, 5)  # type: ignore[index]


def test_several_stars_go_in_their_order(tmp_path: Path) -> None:
    save(tmp_path, arrays("h.0.attn.w", "h.1.attn.w"))
    target = zeros("layers.0.attention.w", "layers.1.attention.w")
    resume(tmp_path, target, {"h.*.attn.*": "layers.*.attention.*"})
    assert [one[0] for one in target.values()] == [1, 2]


def test_state_without_a_target_has_the_new_names(tmp_path: Path) -> None:
    save(tmp_path, {"model": arrays("encoder.0", "head")})
    found: Any = resume(tmp_path, None, OLD)
    assert list(found["model"]) == ["backbone.0", "head"]


def test_what_is_left_over_is_refused_as_ever(tmp_path: Path) -> None:
    save(tmp_path, {"model": arrays("encoder.0", "tail")})
    target = {"model": zeros("backbone.0", "head")}
    with pytest.raises(StateMismatch, match="tail"):
        resume(tmp_path, target, OLD)
    assert not target["model"]["backbone.0"].any()


def test_pattern_that_matches_nothing_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, {"model": arrays("head")})
    with pytest.raises(
        StateMismatch, match=r"no stored name is 'encoder\.\*'; there are model/head"
    ):
        resume(tmp_path, {"model": zeros("head")}, OLD)


def test_run_that_has_saved_under_the_new_names_resumes_with_the_same_option(
    tmp_path: Path,
) -> None:
    save(tmp_path, arrays("encoder.0"))
    state = zeros("backbone.0")
    for step in (2, 3):
        state["backbone.0"][:] = 0
        with CheckpointManager(tmp_path) as manager:
            assert manager.resume(state, Resume(renamed=OLD)).step == step - 1
            manager.save(step, state)
    assert state["backbone.0"][0] == 1


@pytest.mark.parametrize(
    ("renamed", "problem"),
    [
        ({"a": "b"}, "two values would be called 'b'"),
        ({"c/w": "d/w"}, "new names of one part"),
    ],
)
def test_names_that_collide_or_split_a_part_are_refused(
    tmp_path: Path, renamed: dict[str, str], problem: str
) -> None:
    save(tmp_path, {**arrays("a", "b"), "c": arrays("w", "v")})
    with pytest.raises(StateMismatch, match=problem):
        resume(tmp_path, {**zeros("a", "b"), "c": zeros("w", "v")}, renamed)


@pytest.mark.parametrize(
    ("renamed", "error"),
    [
        ({"a.*": "b"}, ValueError),
        ({"a": "b/c"}, ValueError),
        ({"": "b"}, ValueError),
        ([("a", "b")], TypeError),
        ({1: "b"}, TypeError),
    ],
)
def test_pairs_of_different_form_are_refused(renamed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="renamed"):
        Resume(renamed=renamed)


def test_read_back_compares_under_the_new_names(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")

    old, new = torch.nn.Sequential(), torch.nn.Sequential()
    old.add_module("encoder", torch.nn.Linear(2, 2))
    new.add_module("backbone", torch.nn.Linear(2, 2))
    new.load_state_dict = lambda state, **_: torch.nn.Module.load_state_dict(
        new, {name: one + 1 for name, one in state.items()}
    )
    save(tmp_path, {"model": old})
    with pytest.raises(StateMismatch, match=r"backbone\.weight"):
        resume(tmp_path, {"model": new}, OLD)
