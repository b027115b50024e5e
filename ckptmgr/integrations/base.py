# SPDX-License-Identifier: Apache-2.0
"""The common part of the adapters of frameworks."""

from __future__ import annotations

import os
from typing import Any, Unpack

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.subjects import Resume
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.old_names import OldResume
from ckptmgr.training.options import resume_options
from ckptmgr.training.resume import Resumption


class FrameworkManager(CheckpointManager):
    """The manager of an adapter, `owner`, whose framework counts its batches, in one process.

    `resume` refuses what another number of processes saved: they divided the data otherwise, and
    the framework would go on at the batch of one of them.

    Attributes:
        how: How the run resumes, from the argument `resume` of the adapter.

    Raises:
        ValueError: There is a coordinator; others as `CheckpointManager`.
    """

    _needs_same_division = True

    def __init__(
        self,
        owner: str,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        resume: Resume | None = None,
        instead: str = "leave it out",
        **options: Any,
    ) -> None:
        ranks = options.get("ranks")
        if options.get("coordinator", getattr(ranks, "coordinator", None)) is not None:
            raise ValueError(
                f"coordinator= has no effect in {owner}, which saves runs of one process: {instead}"
            )
        old = {"start": options.pop("start")} if "start" in options else {}
        self.how = resume_options(owner, resume, old)
        self._owner = owner
        super().__init__(directory, config, **options)

    def resume(
        self, state: object = None, resume: Resume | None = None, **old: Unpack[OldResume]
    ) -> Resumption:
        """As `CheckpointManager.resume`, by default as the adapter was told."""
        return super().resume(state, resume if resume is not None or old else self.how, **old)
