# SPDX-License-Identifier: Apache-2.0
"""JAX arrays come back on the devices on which the program put them, and as weak as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager

jnp: Any = pytest.importorskip("jax.numpy")

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from ckptmgr import CheckpointManager

def build():
    device = jax.devices()[1]
    return {
        "put": jax.device_put(jnp.arange(6.0), device),
        "key": jax.device_put(jax.random.key(3), device),
        "free": jnp.ones(2),
    }

with CheckpointManager(sys.argv[1]) as manager:
    manager.save(1, build())
state = build()
with CheckpointManager(sys.argv[1]) as manager:
    manager.resume(state)
print({name: (sorted(one.id for one in value.devices()), value.committed) for name, value in state.items()})
"""


def test_arrays_come_back_on_the_device_on_which_the_program_put_them(tmp_path: Path) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = {"put": ([1], True), "key": ([1], True), "free": ([0], False)}
    assert found.stdout.strip() == str(wanted)


@pytest.mark.parametrize(("saved", "built"), [(True, True), (True, False), (False, True)])
def test_weak_type_is_that_of_the_stored_array(tmp_path: Path, *, saved: bool, built: bool) -> None:
    def scalar(*, is_weak: bool) -> Any:
        return jnp.asarray(0.1) if is_weak else jnp.asarray(0.1, jnp.float32)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"rate": scalar(is_weak=saved)})
    state = {"rate": scalar(is_weak=built)}
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
    half = jnp.ones(1, jnp.bfloat16)
    assert (state["rate"] * half).dtype == (jnp.bfloat16 if saved else jnp.float32)
