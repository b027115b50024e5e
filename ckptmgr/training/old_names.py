# SPDX-License-Identifier: Apache-2.0
"""Arguments under their names of the last release: they do the same for one release, and warn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ckptmgr.config.checks import check_options
from ckptmgr.config.subjects import Resume, Snapshots, Stop
from ckptmgr.core.trust import Trust
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.leases import Processes
from ckptmgr.parallel.team import Ranks
from ckptmgr.training.options import System

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.signing import PublicKey
    from ckptmgr.parallel.coordinator import Coordinator
    from ckptmgr.parallel.dedup import Balance
    from ckptmgr.parallel.layout import ParallelLayout


class OldRanks(TypedDict, total=False):
    """Those of `ModelCheckpoint`."""

    coordinator: Coordinator | None
    rank_timeout_s: float
    layout: Mapping[str, ParallelLayout] | None
    keep_redundancy: int
    balance: Balance
    clock: Callable[[], float]
    fs: FileSystem | None
    processes: Processes | None


class OldOptions(OldRanks, total=False):
    """Those of `CheckpointManager`, which also takes a number as `snapshots`."""

    allow_unsealed: bool
    allow_unencrypted: bool
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey]
    snapshot_steps: int | None
    grace: float | None


class OldResume(TypedDict, total=False):
    """Those of `resume`."""

    start: Literal["newest", "new"]
    allow_bare: bool


_NEW: Mapping[str, tuple[str, type[Any], str]] = {
    "allow_unsealed": ("trust", Trust, "allow_unsealed"),
    "allow_unencrypted": ("trust", Trust, "allow_unencrypted"),
    "trusted_keys": ("trust", Trust, "trusted_keys"),
    "coordinator": ("ranks", Ranks, "coordinator"),
    "rank_timeout_s": ("ranks", Ranks, "timeout_s"),
    "layout": ("ranks", Ranks, "layout"),
    "keep_redundancy": ("ranks", Ranks, "keep_redundancy"),
    "balance": ("ranks", Ranks, "balance"),
    "grace": ("stop", Stop, "grace"),
    "snapshot_steps": ("snapshots", Snapshots, "every"),
    "snapshots": ("snapshots", Snapshots, "most"),
    "clock": ("system", System, "clock"),
    "fs": ("system", System, "fs"),
    "processes": ("system", System, "processes"),
    "start": ("resume", Resume, "start"),
    "allow_bare": ("resume", Resume, "allow_bare"),
}
"""Old name to the argument, its class, and the field."""


def joined(
    owner: str, given: Mapping[str, object], old: Mapping[str, Any], system: System
) -> tuple[dict[str, object], System]:
    """Return the arguments of `owner` and its system, with those of `old` in their objects.

    Raises:
        TypeError: It has no such option, or gets one under both names.
    """
    found, values = dict(given), dict(old)
    if isinstance(given.get("snapshots"), int):
        values["snapshots"], found["snapshots"] = given["snapshots"], None
    known = [name for name, (argument, *_) in _NEW.items() if argument in (*given, "system")]
    check_options(owner, values, options=known, parameters=given)
    for argument, fields in _by_argument(owner, values).items():
        if argument == "system":
            system = replace(system, **fields)
            continue
        if found[argument] is not None:
            raise TypeError(f"{owner} gets {argument}=, which holds {', '.join(fields)}, too")
        kind = next(kind for name, kind, _ in _NEW.values() if name == argument)
        found[argument] = kind(**fields)
    return found, system


def joined_resume(owner: str, given: Resume | None, old: Mapping[str, Any]) -> Resume:
    """Return how to resume; raises as `joined` and `Resume`."""
    check_options(owner, old, options=("start", "allow_bare"), parameters=("resume",))
    if given is not None:
        raise TypeError(f"{owner} gets a Resume, which holds {', '.join(old)}, too")
    return Resume(**_by_argument(owner, old)["resume"])


def _by_argument(owner: str, old: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return argument to field to value, and warn."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in old.items():
        argument, _, field = _NEW[name]
        found.setdefault(argument, {})[field] = value
    names = {argument: kind.__name__ for argument, kind, _ in _NEW.values()}
    new = [
        f"{argument}={names[argument]}({', '.join(f'{field}=...' for field in fields)})"
        for argument, fields in found.items()
        if argument != "system"
    ]
    instead = f"write {', '.join(new)}" if new else "it was for tests"
    warnings.warn(
        f"{', '.join(old)} of {owner} will go with the next release: {instead}",
        DeprecationWarning,
        stacklevel=5,
    )
    return found
