# SPDX-License-Identifier: Apache-2.0
"""The public names: the errors in their docstrings can be caught, and their results print briefly."""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptmgr
from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    MemoryConfig,
    ModelCheckpoint,
    Resumed,
    Snapshots,
)
from tests.support.surface import Loop

_RAISES = re.compile(r"^Raises:\n((?:    .*\n|\n)*)", re.MULTILINE)
_NAMES = re.compile(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*):", re.MULTILINE)


def _documented(name: str) -> Iterator[object]:
    value = getattr(ckptmgr, name)
    yield value
    for member in vars(value).values() if inspect.isclass(value) else ():
        yield getattr(member, "__func__", getattr(member, "fget", member))


def _raised_by(name: str) -> set[str]:
    """Return the names in all Raises sections of a public name and its methods."""
    found: set[str] = set()
    for documented in _documented(name):
        text = inspect.cleandoc(getattr(documented, "__doc__", None) or "") + "\n"
        for section in _RAISES.findall(text):
            for names in _NAMES.findall(section):
                found.update(names.split(", "))
    return found


@pytest.mark.parametrize("name", [name for name in ckptmgr.__all__ if name != "__version__"])
def test_errors_that_a_public_docstring_names_are_importable(name: str) -> None:
    for error in _raised_by(name):
        kind = getattr(builtins, error, None) or getattr(ckptmgr, error)
        assert issubclass(kind, BaseException), error


def test_public_docstrings_name_errors_of_ours() -> None:
    raised = set().union(*(_raised_by(name) for name in ckptmgr.__all__))
    assert {"StateMismatch", "RanksMissing", "StoreFull", "KeyProblem"} <= raised


def test_every_public_name_is_listed_and_importable() -> None:
    assert dir(ckptmgr) == sorted(ckptmgr.__all__)
    for name in ckptmgr.__all__:
        assert getattr(ckptmgr, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'CheckpointManger'"):
        ckptmgr.CheckpointManger  # noqa: B018


def large_state() -> dict[str, Any]:
    return {f"layer.{i}.weight": np.arange(40.0) for i in range(300)}


def test_results_of_a_manager_with_a_large_state_print_briefly(tmp_path: Path) -> None:
    state = large_state()
    metrics = {f"metric {i}": 0.1 + i for i in range(50)}
    config = CheckpointConfig(keep="last(20)", memory=MemoryConfig())
    with CheckpointManager(tmp_path, config, snapshots=Snapshots(1)) as manager:
        for step in range(30):
            manager.step_end(step, {"n": step}, metrics=metrics)
        results: list[object] = [manager.latest(), manager.plan(), manager.forecast(state)]
        results.append(manager.save(29, state))
        manager.step_end(30, state, metrics=metrics)
        results += [manager.resume(state), manager, config, MemoryConfig()]
        for step in (31, 32):
            manager.step_end(step, state, metrics=metrics)
        results.append(manager.rollback(state))
    assert [one for one in results if len(repr(one)) >= 500] == []


def test_result_of_a_resumed_callback_prints_briefly(tmp_path: Path) -> None:
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint("net", str(tmp_path), CheckpointConfig(save_checkpoint_steps=1))

    Loop((callback(),), network=large_state() | {"w": np.zeros(4, np.float32)}).run(2)
    found = callback().resume()
    assert isinstance(found, Resumed)
    assert len(found.values) == 301
    assert repr(found) == (
        "Resumed(checkpoint='net-1_2.ckpt', step=2, epoch=1, values=301, skipped=[], kept=(), doubt=None)"
    )


def test_result_names_the_checkpoints_that_were_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all")) as manager:
        for step in range(8):
            manager.save(step, large_state())
        for damaged in sorted(tmp_path.glob("*.ckpt"))[1:]:
            damaged.chmod(0o600)
            damaged.write_bytes(damaged.read_bytes()[:-1])
        found = manager.resume(large_state())
    assert len(repr(found)) < 500
    assert "'ckpt-7.ckpt'" in repr(found)
