# SPDX-License-Identifier: Apache-2.0
"""Where a run starts, or starts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ckptmgr.core.model import Checkpoint
from ckptmgr.series.candidates import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run starts.

    Attributes:
        step: The last step that is done; 0 for a fresh start.
        epoch: Epoch of the checkpoint, or None.
        state: The restored state: the object given to `resume`, filled in place where that is possible.
        checkpoint: What was loaded, or None for a fresh start.
        metrics: The metrics saved with it.
        skipped: Newer checkpoints that were passed over, and why.
        starts: How often a run has been started from this checkpoint without a newer one being saved, this one included.
        kept: What no rank has saved for this one, such as its random numbers when there are more ranks than before; it stays
            as it was.
        doubt: Why the checkpoint is genuine, but probably an older one than its name had here last, or of another run; or
            which newer one may come back, because its data is missing or the disk cannot read it; or None.
    """

    step: int
    state: object = field(repr=False)
    epoch: int | None = None
    checkpoint: Checkpoint | None = None
    metrics: Mapping[str, float]
    skipped: tuple[Skipped, ...] = ()
    starts: int = 1
    kept: tuple[str, ...] = ()
    doubt: str | None = None

    @classmethod
    def at(
        cls,
        checkpoint: Checkpoint,
        state: object,
        *,
        skipped: Sequence[Skipped],
        starts: int = 1,
        doubt: str | None = None,
        kept: Sequence[str] = (),
    ) -> Self:
        """Return where a run goes on whose state was restored from a checkpoint."""
        return cls(
            step=checkpoint.step,
            epoch=checkpoint.epoch,
            state=state,
            checkpoint=checkpoint,
            metrics=checkpoint.metrics,
            skipped=tuple(skipped),
            starts=starts,
            doubt=doubt,
            kept=tuple(kept),
        )

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was found to continue from."""
        return self.checkpoint is None
