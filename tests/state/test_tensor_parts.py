# SPDX-License-Identifier: Apache-2.0
"""Tensors that consist of parts are refused, with a way out that works: the class of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager, UnsupportedState

torch: Any = pytest.importorskip("torch")
PAGE = Path(__file__).parents[2] / "docs/training.md"


class Coded(torch.Tensor):  # type: ignore[misc]
    """A tensor of int8 codes and a scale, as a moment of an 8-bit optimizer is one."""

    codes: Any
    scale: Any

    @staticmethod
    def __new__(cls: Any, codes: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Any, scale: Any) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["codes", "scale"], [True, torch.float32]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: object, size: Any, stride: Any) -> Any:
        assert (context, size, stride) == ([True, torch.float32], (4,), (1,))
        return cls(**parts)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].codes, arguments[0].scale)
        raise NotImplementedError(str(function))


class Moments:
    """An object that holds such a tensor."""

    def __init__(self, first: int) -> None:
        codes = torch.arange(first, first + 4, dtype=torch.int8)
        self.held = Coded(codes, torch.full((1,), float(first)))

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"exp_avg": self.held, "step": 3}}, "groups": [{"lr": 0.1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["state"][0]["exp_avg"]


def with_parts() -> Any:
    """Return the class that the page shows."""
    block = re.search(
        r"^## Tensors that consist of parts$.*?^```python\n(.*?)^```$",
        PAGE.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)  # noqa: S102 - our own page
    return names["WithParts"]


def test_tensor_with_parts_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedState, match=r"\['exp_avg'\] is a Coded") as refused,
    ):
        manager.save(1, {"moments": Moments(1)})
    assert "WithParts" in str(refused.value.hint)


@pytest.mark.skipif(not PAGE.exists(), reason="needs the sources: the pages are not installed")
def test_class_of_the_page_saves_and_restores_the_parts(tmp_path: Path) -> None:
    wrapper, held = with_parts(), Moments(7)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"moments": wrapper(Moments(3), Coded)})
    with CheckpointManager(tmp_path) as manager:
        manager.resume({"moments": wrapper(held, Coded)})
    assert type(held.held) is Coded
    assert (held.held.codes.tolist(), held.held.scale.tolist()) == ([3, 4, 5, 6], [3.0])
