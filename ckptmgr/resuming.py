# SPDX-License-Identifier: Apache-2.0
"""What a run goes on from: the newest checkpoint that loads, on all ranks if there are many, and what was passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptmgr.chain import contradiction
from ckptmgr.loader import Value
from ckptmgr.model import Checkpoint
from ckptmgr.resume import Skipped, newest_first
from ckptmgr.series import SeriesWriter

_LOG = logging.getLogger(__name__)
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `ModelCheckpoint.resume` found.

    Attributes:
        checkpoint: The newest checkpoint that loads.
        values: Its content, name to array or string.
        skipped: Newer ones that were passed over, and why.
    """

    checkpoint: Checkpoint
    values: dict[str, Value]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(Generic[_Loaded]):
    """What `find_newest` found.

    Attributes:
        newest: The checkpoint and what it loaded to, or None.
        skipped: Newer ones that were passed over, and why.
        doubt: Why it is genuine, but probably an older one than its name had last; or None.
    """

    newest: tuple[Checkpoint, _Loaded] | None
    skipped: tuple[Skipped, ...]
    doubt: str | None = None


def find_newest(
    writer: SeriesWriter,
    is_own: Callable[[Checkpoint], bool],
    load: Callable[[Checkpoint], _Loaded],
    *,
    passed_over: Callable[[Sequence[Checkpoint]], list[Skipped]] = lambda present: [],
) -> Found[_Loaded]:
    """Return the newest checkpoint that loads; what is skipped, or doubtful, is logged.

    Args:
        writer: Of the run, which reads it with all its ranks.
        is_own: Which checkpoints of the directory come into question.
        load: Loads one; changes nothing yet.
        passed_over: Returns what else of the directory the user should hear of.

    Raises:
        KeyProblem, UnsupportedCheckpoint, OSError: Nothing loads, and not because all is damaged.
        ResumeFailed, RanksMissing: The ranks cannot go on together.
    """
    present: list[Checkpoint] = []

    def scan() -> list[Checkpoint]:
        present[:] = writer.store.scan()
        return newest_first([one for one in present if is_own(one)])

    checkpoint, loaded, skipped = writer.first_that_loads(scan, load)
    skipped = [*skipped, *passed_over(present)]
    for one in skipped:
        _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
    if checkpoint is None or loaded is None:
        return Found(newest=None, skipped=tuple(skipped))
    doubt = contradiction(checkpoint, present)
    if doubt is not None:
        _LOG.warning("%s may be an older file under this name: %s", checkpoint.path, doubt)
    return Found(newest=(checkpoint, loaded), skipped=tuple(skipped), doubt=doubt)
