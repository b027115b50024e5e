# SPDX-License-Identifier: Apache-2.0
"""Check that a file system accepts the file names of a series, before the training starts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckptmgr.core.names import breakpoint_name, checkpoint_name, step_name
from ckptmgr.core.shard_names import SET_FORMAT, new_attempt_id, set_stem, shard_name
from ckptmgr.io.leases import LEASE_SUFFIX
from ckptmgr.store.manifest.codec import manifest_name

# The largest numbers expected of a run. Beyond them only this early check loses its meaning.
_STEP = 10**12 - 1
_EPOCH = 10**9 - 1
_ATTEMPT = 9999
_RESTART = "_9999"
_USUAL_LIMIT = 255


def check_name_lengths(
    directory: Path, series: str, *, extension: str, has_epochs: bool, world: int | None
) -> None:
    """Raise unless the file system accepts the longest name that a file of a series may have.

    The directory need not exist yet. With `has_epochs` the names contain an epoch, as those of a
    callback do; `world` is how many ranks save together, or None for one process.

    Raises:
        ValueError: A name is too long; names the limit.
    """
    limit = _longest_of(directory)
    longest = max(
        _names(series, extension, has_epochs=has_epochs, world=world),
        key=lambda name: len(os.fsencode(name)),
    )
    too_many = len(os.fsencode(longest)) - limit
    if too_many > 0:
        room = len(os.fsencode(series)) - too_many
        raise ValueError(
            f"the prefix {series!r} is too long: files of this series may get names like {longest!r}, and the file system of"
            f" {directory} takes {limit} bytes; use a prefix of at most {max(0, room)} bytes"
        )


def _names(series: str, extension: str, *, has_epochs: bool, world: int | None) -> Iterator[str]:
    """Yield the longest name of each kind. Temporary names are shortened where necessary."""
    yield f".{series}{LEASE_SUFFIX}"
    yield f".{series}.starts"
    yield f".{series}.save_now"
    format = extension if world is None else SET_FORMAT
    if has_epochs:
        series += _RESTART  # the series of a run that finds files of its prefix
        yield manifest_name(breakpoint_name(series, _EPOCH, step_in_epoch=_STEP, format=extension))
        attempt = 0 if world is None else _ATTEMPT
        name = checkpoint_name(series, _EPOCH, step_in_epoch=_STEP, format=format, attempt=attempt)
    else:
        name = step_name(series, _STEP, attempt=_ATTEMPT, format=format)
    yield manifest_name(name)
    if world is not None:
        attempt_id = new_attempt_id(0)
        yield shard_name(
            set_stem(name), world - 1, world=world, attempt_id=attempt_id, format=extension
        )


def _longest_of(directory: Path) -> int:
    """Return how many bytes a file name may have in a directory."""
    place = directory
    with contextlib.suppress(OSError):
        while not place.exists():
            place = place.parent
        return os.pathconf(place, "PC_NAME_MAX")
    return _USUAL_LIMIT
