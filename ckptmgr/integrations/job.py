# SPDX-License-Identifier: Apache-2.0
"""The coordinator of the job that this process belongs to, where exactly one is possible.

| coordinator | condition |
|---|---|
| `torch_store.torchrun_coordinator` | `torchrun` has started this process |
| `torch_store.group_coordinator` | it has not, and `torch.distributed` is initialized |
| `jax_distributed.jax_coordinator` | `jax.distributed` is initialized |
| `mpi.mpi_coordinator` | the program has imported `mpi4py.MPI`, and is not alone |
| `mindspore_ranks.mindspore_coordinator` | `msrun` has started this process |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from ckptmgr.parallel.coordinator import KeyValueCoordinator

_WAYS = "start the program with torchrun, mpiexec or msrun, initialize jax.distributed, or meet in a SharedDirectory"


def job_coordinator(*, directory: str | os.PathLike[str] | None = None) -> KeyValueCoordinator:
    """Return the coordinator of the job that this process belongs to.

    Args:
        directory: A directory for the coordinator of engines without a better one, as MindSpore;
            all ranks see it, and no other job uses it.

    Raises:
        ValueError: There is no such job, or several coordinators are possible; names them.
    """
    found = [(name, module) for name, module, is_there in _ENGINES if is_there()]
    if not found:
        raise ValueError(f"nothing says that this process is one of many: {_WAYS}")
    if len(found) > 1:
        raise ValueError(
            f"the ranks could meet in several ways: call one of {', '.join(f'{name}()' for name, _ in found)}"
        )
    ((name, module),) = found
    if name == _IN_DIRECTORY and directory is None:
        raise ValueError(
            "ranks of MindSpore meet in a directory that all of them see: job_coordinator(directory=...)"
        )
    make = getattr(import_module(f"ckptmgr.integrations.{module}"), name)
    coordinator: KeyValueCoordinator = make(directory) if name == _IN_DIRECTORY else make()
    return coordinator


def _is_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_torch() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or _is_torchrun():
        return False
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _is_jax() -> bool:
    distributed = sys.modules.get("jax._src.distributed")
    return distributed is not None and distributed.global_state.client is not None


def _is_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.Get_size() > 1


def _is_mindspore() -> bool:
    return os.environ.get("MS_ROLE") == "MS_WORKER"


_IN_DIRECTORY = "mindspore_coordinator"
_ENGINES: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    ("torchrun_coordinator", "torch_store", _is_torchrun),
    ("group_coordinator", "torch_store", _is_torch),
    ("jax_coordinator", "jax_distributed", _is_jax),
    ("mpi_coordinator", "mpi", _is_mpi),
    (_IN_DIRECTORY, "mindspore_ranks", _is_mindspore),
)
