# SPDX-License-Identifier: Apache-2.0
"""Arguments under their names of the last release."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Ranks,
    Resume,
    Snapshots,
    Stop,
    Trust,
)
from ckptmgr.training import old_names
from ckptmgr.training.options import System, resume_options, run_options
from tests.parallel.ranks import Meeting, Seat
from tests.support.options import SIGNER, WHOLE, OnlyProcess

SEAT, PROCESSES = Seat(Meeting(1), 0), OnlyProcess()
OLD: dict[str, tuple[Any, str, Any]] = {
    "allow_unsealed": (True, "trust", Trust(allow_unsealed=True)),
    "allow_unencrypted": (True, "trust", Trust(allow_unencrypted=True)),
    "trusted_keys": ([SIGNER.public_key], "trust", Trust(trusted_keys=[SIGNER.public_key])),
    "coordinator": (SEAT, "ranks", Ranks(SEAT)),
    "rank_timeout_s": (7.5, "ranks", Ranks(timeout_s=7.5)),
    "layout": (WHOLE, "ranks", Ranks(layout=WHOLE)),
    "keep_redundancy": (2, "ranks", Ranks(keep_redundancy=2)),
    "balance": ("round_robin", "ranks", Ranks(balance="round_robin")),
    "grace": (90, "stop", Stop(90)),
    "snapshot_steps": (10, "snapshots", Snapshots(10)),
    "clock": (time.monotonic, "system", System(clock=time.monotonic)),
    "fs": (None, "system", System()),
    "processes": (PROCESSES, "system", System(processes=PROCESSES)),
}
WARNS = "will go with the next release"
GIVEN = dict.fromkeys(("trust", "ranks", "stop", "snapshots"))


def test_every_old_name_is_tried_here() -> None:
    assert OLD.keys() == old_names.OldOptions.__annotations__.keys()
    assert old_names.OldResume.__annotations__.keys() == {"start", "allow_bare"}


@pytest.mark.parametrize("name", OLD)
def test_old_name_is_the_field_of_its_object_and_warns(name: str) -> None:
    value, argument, new = OLD[name]
    with pytest.warns(DeprecationWarning, match=f"^{name} of CheckpointManager will go with"):
        options = run_options("CheckpointManager", System(), {name: value}, **GIVEN)
    assert getattr(options, argument) == new


def test_old_names_together_warn_once_of_what_to_write(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=WARNS) as warned:
        manager = CheckpointManager(tmp_path, grace=90, snapshot_steps=2, snapshots=3)
    (warning,) = warned
    assert warning.filename == __file__
    assert str(warning.message).endswith(
        "write stop=Stop(grace=...), snapshots=Snapshots(every=..., most=...)"
    )
    manager.close()


def test_option_under_both_names_is_refused(tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match=WARNS),
        pytest.raises(TypeError, match=r"gets stop=, which holds grace, too"),
    ):
        CheckpointManager(tmp_path, stop=Stop(), grace=90)
    with pytest.raises(TypeError, match="gets a Resume, which holds start, too"):
        CheckpointManager(tmp_path).resume(None, Resume(), start="new")


def test_unknown_option_is_refused_with_a_similar_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="has no option 'snapshot'; did you mean 'snapshots'"):
        CheckpointManager(tmp_path, snapshot=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'grace'"):
        ModelCheckpoint("net", str(tmp_path), grace=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'bare'"):
        CheckpointManager(tmp_path).resume(bare=True)  # type: ignore[call-arg]


def test_subject_of_another_type_is_refused(tmp_path: Path) -> None:
    wrong: Any = 90
    with pytest.raises(TypeError, match="stop must be a Stop, but got int"):
        CheckpointManager(tmp_path, stop=wrong)
    with pytest.raises(TypeError, match="resume must be a Resume, but got int"):
        CheckpointManager(tmp_path).resume(None, wrong)


def test_old_resumption_does_the_same(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
        manager.save(1, {"w": np.ones(2)})
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.warns(DeprecationWarning, match=r"resume=Resume\(start=...\)"),
    ):
        assert manager.resume(start="new").is_fresh
    with pytest.warns(DeprecationWarning, match=WARNS):
        how = resume_options("resume", None, {"allow_bare": True})
    assert how == Resume(allow_bare=True)


def test_start_of_a_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="start='new' has no effect in a callback"):
        ModelCheckpoint("net", str(tmp_path)).resume(Resume(start="new"))
