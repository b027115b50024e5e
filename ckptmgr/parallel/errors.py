# SPDX-License-Identifier: Apache-2.0
"""Errors about how tensors are laid out over ranks."""

from __future__ import annotations

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError


class LayoutError(CkptmgrError, ValueError):
    """Report a layout that contradicts itself, the shape of its tensor, or the layout it is to become."""


class SliceMissing(CheckpointNotFound):
    """Report a slice that no available file holds.

    Attributes:
        parameter: The tensor.
        ranks: The ranks any one of which would do.
    """

    def __init__(self, message: str, *, parameter: str, ranks: tuple[int, ...]) -> None:
        self.parameter = parameter
        self.ranks = ranks
        super().__init__(
            message, hint=f"bring the file of one of the ranks {ranks[:8]} and try again"
        )


class MixedSteps(LayoutError):
    """Report files of several ranks that are not one checkpoint: they are of different training steps or runs.

    Attributes:
        ranks: The ranks that were compared.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        super().__init__(
            message,
            hint="give files of one step; of whole directories step= (CLI: --step) takes the step that is named,"
            " and leaves out ranks without it",
        )
