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

from ckptmgr.parallel.coordinator import KeyValueCoordinator

_Place = str | os.PathLike[str] | None
_WAYS = "start the program with torchrun, mpiexec or msrun, initialize jax.distributed, or meet in a SharedDirectory"


def job_coordinator(*, directory: str | os.PathLike[str] | None = None) -> KeyValueCoordinator:
    """Return the coordinator of the job that this process belongs to.

    Args:
        directory: A directory for the coordinator of engines without a better one, as MindSpore;
            all ranks see it, and no other job uses it.

    Raises:
        ValueError: There is no such job, or several coordinators are possible; names them.
    """
    ways = {name: make for name, is_there, make in _ENGINES if is_there()}
    if not ways:
        raise ValueError(f"nothing says that this process is one of many: {_WAYS}")
    if len(ways) > 1:
        raise ValueError(
            f"the ranks could meet in several ways: call one of {', '.join(f'{name}()' for name in ways)}"
        )
    (make,) = ways.values()
    return make(directory)


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


def _torchrun(_: object) -> KeyValueCoordinator:
    from ckptmgr.integrations.torch_store import torchrun_coordinator

    return torchrun_coordinator()


def _torch(_: object) -> KeyValueCoordinator:
    from ckptmgr.integrations.torch_store import group_coordinator

    return group_coordinator()


def _jax(_: object) -> KeyValueCoordinator:
    from ckptmgr.integrations.jax_distributed import jax_coordinator

    return jax_coordinator()


def _mpi(_: object) -> KeyValueCoordinator:
    from ckptmgr.integrations.mpi import mpi_coordinator

    return mpi_coordinator()


def _mindspore(directory: _Place) -> KeyValueCoordinator:
    if directory is None:
        raise ValueError(
            "ranks of MindSpore meet in a directory that all of them see: job_coordinator(directory=...)"
        )
    from ckptmgr.integrations.mindspore_ranks import mindspore_coordinator

    return mindspore_coordinator(directory)


_Engine = tuple[str, Callable[[], bool], Callable[[_Place], KeyValueCoordinator]]
_ENGINES: tuple[_Engine, ...] = (
    ("torchrun_coordinator", _is_torchrun, _torchrun),
    ("group_coordinator", _is_torch, _torch),
    ("jax_coordinator", _is_jax, _jax),
    ("mpi_coordinator", _is_mpi, _mpi),
    ("mindspore_coordinator", _is_mindspore, _mindspore),
)
