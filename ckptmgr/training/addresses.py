# SPDX-License-Identifier: Apache-2.0
"""A run at the address of an object store: options without effect there are refused."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.subjects import Resume
from ckptmgr.config.surfaces import ADDRESS, check_surface
from ckptmgr.core.arguments import no_effect
from ckptmgr.core.names import check_directory, check_is_run
from ckptmgr.core.place import capabilities_at
from ckptmgr.core.trust import Trust
from ckptmgr.core.urls import is_url
from ckptmgr.parallel.team import Team

NO_BARE_FILES = (
    "allow_bare has no effect in an object store, where data without a manifest has no name; load_state(URL) loads a file "
    "of another tool by its own address"
)


def checked_place(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of a run, or its address as `UrlPath`.

    Raises:
        TypeError, ValueError, NotADirectoryError: It is neither.
    """
    if is_url(directory):
        from ckptmgr.objects.paths import checked_address

        address = checked_address(directory)
        check_is_run(address)
        return address
    return check_directory(directory)


def check_at_address(
    place: Path, config: CheckpointConfig, *, team: Team, has_mirror: bool
) -> None:
    """Raise ValueError for an option without effect in a run that saves to an address."""
    check_surface(config, ADDRESS)
    where = f"in a run that saves to {place}"
    if team.is_many:
        raise no_effect(
            "coordinator",
            where,
            "many ranks write one checkpoint; save into a directory that they share, and upload it beside the run with "
            "ckptmgr copy SEL URL",
        )
    if has_mirror:
        raise no_effect(
            "mirror",
            where,
            "every save is uploaded before it counts as saved; for copies beside a directory give the directory",
        )
    placement = team.placement
    if team.strategy is not None or (placement is not None and not placement.is_alone):
        raise no_effect(
            "context",
            where,
            "strategy files and rank folders are written into directories; save into one, and upload it with mirror=URL",
        )


def check_compared(how: Resume, place: Path, trust: Trust) -> None:
    """Raise ValueError for an option about steps that repeat, where those are not compared, or not proven."""
    if not capabilities_at(place).in_place:
        for name in {"on_difference", "tolerance"} & set(how.given):
            where = f"in a run that saves to {place}"
            raise no_effect(name, where, "no steps are recorded there, so none are compared")
    if how.on_difference == "raise" and (trust.keys is not None or trust.trusted_keys):
        raise ValueError(
            "on_difference='raise' is not for runs with keys: the record of the steps is not authenticated, so a forged one"
            " would stop the run; leave it out, and a difference is a warning"
        )
