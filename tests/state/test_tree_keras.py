# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers of Keras are refused inside a plain state; `make kit` has the real ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ckptmgr import CheckpointManager, UnsupportedState
from ckptmgr.state.tree import flatten


class Model:
    """With torch, a model of Keras has the attributes of an `nn.Module`."""

    def state_dict(self) -> dict[str, int]:
        return {"w": 1}

    def load_state_dict(self, state: object) -> None: ...


class Optimizer:
    """One of Keras has no `state_dict`."""


@pytest.mark.parametrize("kind", [Model, Optimizer])
def test_object_of_keras_is_refused_with_path_and_way_out(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras = ModuleType("keras")
    vars(keras).update(Model=Model, Optimizer=Optimizer)
    monkeypatch.setitem(sys.modules, "keras", keras)
    said = rf"state\['net'\]\[0\] is a .*{kind.__name__}"
    with pytest.raises(UnsupportedState, match=said) as caught:
        CheckpointManager(tmp_path).resume({"net": [kind()]})
    assert "KerasCheckpoints" in str(caught.value)


def test_half_imported_keras_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    assert flatten({"net": Model()}).tensors == []
