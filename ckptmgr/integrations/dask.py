# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Dask pyright takes this file for it)
"""Verify directories of many checkpoints with Dask: threads, processes, or a cluster.

```
found = ckptmgr.integrations.dask.verify("/data/runs", parts=64, scheduler="processes")
```
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import dask

from ckptmgr.maintenance.fleet import (
    FleetVerification,
    Lines,
    PartToVerify,
    combined,
    parts_of,
    verify_part,
)

__all__ = ["FleetVerification", "verify"]


def verify(
    place: str | os.PathLike[str],
    *,
    parts: int | None = None,
    level: str = "full",
    series: str | None = None,
    key: str | None = None,
    public_keys: Sequence[str | os.PathLike[str]] = (),
    allow_unencrypted: bool = False,
    allow_unsealed: bool = False,
    **options: Any,
) -> FleetVerification:
    """Verify the checkpoints of a directory by the workers of Dask.

    Each part is a task of Dask. When a worker dies and Dask gives the whole computation up, each
    part is computed by itself; one that fails again is named in `failed`.

    Args:
        place: Directory that all workers see; or an address such as `s3://bucket/runs`.
        parts: Number of tasks. None for two for each CPU of this machine; name more for a cluster.
        level: `quick`, `full` or `deep`.
        series: Only this series.
        key: Source of the key, which each worker reads: `env:NAME`, `file:/run/secrets/key` or
            `cmd:COMMAND`. Never the key itself: Dask stores the arguments of tasks.
        public_keys: Files of public keys whose signatures count, on each worker.
        allow_unencrypted: With a key: accept plain files, too.
        allow_unsealed: With a key: accept encrypted files that are not proven as a whole.
        options: As for `dask.compute`, such as `scheduler`: `"threads"`, `"processes"`, or a
            client of `dask.distributed`; without it Dask decides.

    Raises:
        TypeError, ValueError: An argument is wrong; or `key` holds the bytes of a key.
        CkptmgrError, OSError: All parts failed; the error of the first one.
    """
    tasks = parts_of(
        place,
        2 * (os.cpu_count() or 1) if parts is None else parts,
        level=level,
        series=series,
        key=key,
        public_keys=public_keys,
        allow_unencrypted=allow_unencrypted,
        allow_unsealed=allow_unsealed,
    )
    delayed = [dask.delayed(_attempt)(task) for task in tasks]
    try:
        outcomes = list(dask.compute(*delayed, **options))
    except Exception:
        outcomes = [_alone(one, options) for one in delayed]
    return combined(tasks, outcomes)


def _attempt(task: PartToVerify) -> Lines | Exception:
    """Return an error instead of raising it, which would end the other parts, too."""
    try:
        return verify_part(task)
    except Exception as error:
        return error


def _alone(delayed: Any, options: dict[str, Any]) -> Lines | Exception:
    try:
        (outcome,) = dask.compute(delayed, **options)
    except Exception as error:
        return error
    found: Lines | Exception = outcome
    return found
