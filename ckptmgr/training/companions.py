# SPDX-License-Identifier: Apache-2.0
"""`Companion`: a part that only some runs have beside their saves, such as snapshots or a mirror."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.files.save.job import SaveFacts
    from ckptmgr.series.writer import SeriesWriter


class Companion:
    """A part of a run; a hook that is not overridden does nothing.

    A run makes a companion when its option is given, or when it is asked for, and calls:

    1. `step_ended`, after each step, before a policy is asked;
    2. `save_asked`, once the size of a state to be saved is known, before anything is written;
    3. `saved`, when a save returns, which may be in flight;
    4. `closing`, after the last save, before the lease is released.
    """

    def step_ended(self, step: int) -> None:
        """A step has ended."""

    def save_asked(self, writer: SeriesWriter, size_bytes: int) -> None:
        """A state of this size is to be saved by `writer`."""

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """A save has returned; its time is in `facts`."""

    def closing(self) -> None:
        """The saves have ended."""
