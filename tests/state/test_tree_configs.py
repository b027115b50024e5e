# SPDX-License-Identifier: Apache-2.0
"""omegaconf's configurations in a state: plain values in the file, and never an interpolation from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, StateMismatch

omegaconf: Any = pytest.importorskip("omegaconf")
create = omegaconf.OmegaConf.create


def _saved(directory: Path, state: object) -> CheckpointManager:
    manager = CheckpointManager(directory, CheckpointConfig(), prefix="net")
    manager.save(1, state)
    return manager


def _config(**changed: object) -> Any:
    return create(
        {
            "lr": 0.1,
            "model": {"width": 8, "name": "net-${model.width}"},
            "steps": [1, 2],
            "data": "???",
            **changed,
        }
    )


def test_configuration_without_a_target_is_plain_and_not_resolved(tmp_path: Path) -> None:
    restored: Any = _saved(tmp_path, {"cfg": _config(), "w": np.ones(2)}).resume().state
    assert type(restored["cfg"]) is dict
    assert restored["cfg"] == {
        "lr": 0.1,
        "model": {"width": 8, "name": "net-${model.width}"},
        "steps": [1, 2],
        "data": "???",
    }


def test_configuration_is_restored_into_a_configuration(tmp_path: Path) -> None:
    manager = _saved(tmp_path, {"cfg": _config(lr=0.5, model={"width": 16, "name": None})})
    target = {"cfg": _config(model={"width": 1, "name": "old"}, steps=[1])}
    mine, model = target["cfg"], target["cfg"].model
    manager.resume(target)
    assert target["cfg"] is mine
    assert mine.model is model
    assert (mine.lr, model.width, model.name, list(mine.steps)) == (0.5, 16, None, [1, 2])


def test_interpolation_that_the_target_has_stays_one(tmp_path: Path) -> None:
    manager = _saved(tmp_path, [_config(model={"width": 16, "name": "net-${model.width}"})])
    target = [_config()]
    manager.resume(target)
    assert target[0].model.name == "net-16"


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": "${oc.env:HOME}"},
        {"steps": [1, 2, "${oc.env:HOME}"]},
        {"data": ["${oc.env:HOME}"]},
        {"data": {"a": [{"b": "${oc.env:HOME}"}]}},
    ],
    ids=["value", "element", "list", "nested"],
)
def test_checkpoint_never_brings_an_interpolation_into_a_configuration(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    target = {"cfg": _config(data=None)}
    manager = _saved(tmp_path, {"cfg": _config(**{"data": None, **changed})})
    with pytest.raises(StateMismatch, match=r"is an interpolation in the checkpoint, '\$\{oc.env"):
        manager.resume(target)
    assert target["cfg"] == _config(data=None)


def test_read_only_and_struct_configurations_are_filled(tmp_path: Path) -> None:
    manager = _saved(tmp_path, {"cfg": _config(lr=0.5)})
    mine = _config()
    omegaconf.OmegaConf.set_readonly(mine, True)
    omegaconf.OmegaConf.set_struct(mine, True)
    manager.resume({"cfg": mine})
    assert mine.lr == 0.5
    assert omegaconf.OmegaConf.is_readonly(mine)


def test_list_configuration_takes_the_length_of_the_stored_one(tmp_path: Path) -> None:
    manager = _saved(tmp_path, {"a": create([1, {"x": 2}]), "b": create([1, 2, 3])})
    target = {"a": create([0]), "b": create([9, 9, 9, 9])}
    manager.resume(target)
    assert (target["a"], target["b"]) == (create([1, {"x": 2}]), create([1, 2, 3]))


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"lr": 1}, r"\['cfg'\]\['model'\] is not in the checkpoint"),
        (_config(new=1), r"\['cfg'\]\['new'\] is only in the checkpoint"),
        (5, "is a dict of a configuration, stored is a int"),
    ],
    ids=["missing", "extra", "kind"],
)
def test_configuration_of_another_shape_is_named(
    tmp_path: Path, stored: object, problem: str
) -> None:
    manager = _saved(tmp_path, {"cfg": stored})
    with pytest.raises(StateMismatch, match=problem):
        manager.resume({"cfg": _config()})


def test_value_that_a_typed_configuration_refuses_is_named_and_changes_nothing(
    tmp_path: Path,
) -> None:
    manager = _saved(tmp_path, {"cfg": {"width": "wide"}, "w": np.ones(2)})
    typed = create({"width": omegaconf.IntegerNode(8)})
    target = {"cfg": typed, "w": np.zeros(2)}
    with pytest.raises(StateMismatch, match=r"cannot take the stored values: .*wide"):
        manager.resume(target)
    assert (typed.width, target["w"].tolist()) == (8, [0, 0])
