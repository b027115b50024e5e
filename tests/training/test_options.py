# SPDX-License-Identifier: Apache-2.0
"""Options of a configuration that a manager, a callback or the storage of DCP honours, or refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Ranks,
    UnsupportedState,
    load_checkpoint,
)
from ckptmgr.parallel import ParallelLayout
from tests.parallel.ranks import Meeting, Seat

LAYOUT = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}


def _manager(directory: Path, **config: Any) -> CheckpointManager:
    return CheckpointManager(directory, CheckpointConfig(**config), prefix="net")


@pytest.mark.parametrize(
    ("option", "value", "way_out"),
    [
        ("saved_network", {"w": np.zeros(2)}, "put the network into that"),
        ("remove_redundancy", True, "give a coordinator"),
        ("incremental", True, "every checkpoint holds all of them"),
        ("enable_redundance", True, "AITURBO"),
    ],
)
def test_manager_refuses_an_option_without_effect_by_name(
    tmp_path: Path, option: str, value: object, way_out: str
) -> None:
    with pytest.raises(
        ValueError, match=f"^{option} has no effect in CheckpointManager.*{way_out}"
    ):
        _manager(tmp_path, **{option: value})


@pytest.mark.parametrize("option", ["incremental", "enable_redundance"])
def test_callback_refuses_an_option_without_effect_by_name(tmp_path: Path, option: str) -> None:
    given: dict[str, Any] = {option: True}
    config = CheckpointConfig(**given)
    with pytest.raises(ValueError, match=f"^{option} has no effect in ModelCheckpoint"):
        ModelCheckpoint("net", str(tmp_path), config)


def test_options_at_their_defaults_are_taken_everywhere(tmp_path: Path) -> None:
    config = CheckpointConfig(incremental=False, enable_redundance=False)
    coordinator = Seat(Meeting(2), 0)
    CheckpointManager(tmp_path, config, ranks=Ranks(coordinator, layout=LAYOUT))
    ModelCheckpoint("net", str(tmp_path), config, ranks=Ranks(coordinator, layout=LAYOUT))


@pytest.mark.parametrize("surface", [CheckpointManager, ModelCheckpoint])
def test_integrated_save_together_with_a_layout_is_refused_with_the_way_to_whole_tensors(
    tmp_path: Path, surface: Any
) -> None:
    config = CheckpointConfig(integrated_save=True)
    place = {"prefix": "net", "directory": str(tmp_path), "config": config}
    with pytest.raises(ValueError, match=r"^integrated_save has no effect in .*load_checkpoint"):
        surface(**place, ranks=Ranks(Seat(Meeting(2), 0), layout=LAYOUT))


@pytest.mark.parametrize("value", [True, False])
def test_integrated_save_without_slices_is_taken(tmp_path: Path, value: bool) -> None:
    with _manager(tmp_path, integrated_save=value) as manager:
        manager.save(1, {"w": np.ones(2)})
    assert load_checkpoint(tmp_path / "net-1.ckpt")["w"].tolist() == [1, 1]


def test_append_info_is_stored_beside_the_state(tmp_path: Path) -> None:
    info: list[Any] = ["epoch_num", {"step_num": 1000, "lr": 0.5}]
    with _manager(tmp_path, append_info=info) as manager:
        manager.step_end(3, {"w": np.ones(2)}, epoch=2)
    held = load_checkpoint(tmp_path / "net-3.ckpt")
    assert (int(held["epoch_num"]), int(held["step_num"]), float(held["lr"])) == (2, 1003, 0.5)
    assert set(held) == {"w", "epoch_num", "step_num", "lr"}


@pytest.mark.parametrize("has_target", [True, False])
def test_state_with_append_info_is_resumed_without_it(tmp_path: Path, has_target: bool) -> None:
    with _manager(tmp_path, append_info=["step_num"], format="safetensors") as manager:
        manager.save(3, {"w": np.ones(2), "step": 3})
    state = {"w": np.zeros(2), "step": 0} if has_target else None
    with _manager(tmp_path, format="safetensors") as manager:
        restored = manager.resume(state).state
    assert isinstance(restored, dict)
    assert (restored["w"].tolist(), restored["step"]) == ([1, 1], 3)
    assert set(restored) == {"w", "step"}


def test_append_info_with_the_name_of_a_tensor_of_the_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match="'lr' is the name of a parameter and"):
        _manager(tmp_path, append_info=[{"lr": 1}]).save(1, {"lr": np.ones(1)})


def test_append_info_with_the_epoch_refuses_a_step_without_one(tmp_path: Path) -> None:
    manager = _manager(tmp_path, append_info=["epoch_num"])
    with pytest.raises(ValueError, match=r"append_info has 'epoch_num'.*epoch="):
        manager.step_end(1, {"w": np.ones(2)})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("exception_save", True),
        ("save_only_kept", True),
        ("save_when_measured", "loss"),
        ("append_info", ["step_num"]),
        ("saved_network", {"w": np.zeros(2)}),
        ("memory", "default"),
        ("back_pressure", "skip"),
        ("on_error", "warn"),
        ("incremental", True),
        ("enable_redundance", True),
        ("integrated_save", True),
    ],
)
def test_dcp_storage_refuses_an_option_without_effect_by_name(
    tmp_path: Path, option: str, value: Any
) -> None:
    pytest.importorskip("torch")
    from ckptmgr import memory_config
    from ckptmgr.integrations.dcp import StorageReader, StorageWriter

    given: dict[str, Any] = {option: memory_config.MemoryConfig() if option == "memory" else value}
    config = CheckpointConfig(keep="every(9)", **given)
    for storage in (StorageWriter, StorageReader):
        with pytest.raises(ValueError, match=f"^{option} has no effect in the storage of DCP"):
            storage(tmp_path, config)
