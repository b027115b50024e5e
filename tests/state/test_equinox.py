# SPDX-License-Identifier: Apache-2.0
"""Modules of Equinox are refused, with a way out that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager, UnsupportedState

jax: Any = pytest.importorskip("jax")
eqx: Any = pytest.importorskip("equinox", reason="needs equinox: pip install equinox")


def test_module_is_refused_and_its_arrays_come_back_by_the_way_out(tmp_path: Path) -> None:
    saved, model = (eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(seed)) for seed in range(2))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedState, match=r"\['model'\] is a equinox") as refused,
    ):
        manager.save(1, {"model": saved})
    assert "arrays, static = eqx.partition(model, eqx.is_array)" in str(refused.value.hint)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": jax.tree.leaves(eqx.partition(saved, eqx.is_array)[0])})
    arrays, static = eqx.partition(model, eqx.is_array)
    with CheckpointManager(tmp_path) as manager:
        start: Any = manager.resume({"model": jax.tree.leaves(arrays)})
    model = eqx.combine(
        jax.tree.unflatten(jax.tree.structure(arrays), start.state["model"]), static
    )
    assert eqx.tree_equal(model, saved)
