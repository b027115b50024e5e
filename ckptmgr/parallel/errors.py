# SPDX-License-Identifier: Apache-2.0
"""Errors of layouts, and errors of collective saves, which all ranks raise."""

from __future__ import annotations

import errno as errno_names
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, SaveFailed
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.passing_errors import is_damage, may_be_whole, may_return
from ckptmgr.parallel.coordinator import RanksMissing, shown_ranks


class LayoutError(CkptmgrError, ValueError):
    """Report a layout that contradicts itself, the shape of its tensor, or its target layout."""


class SliceMissing(CheckpointNotFound):
    """Report a slice that no available file holds.

    Attributes:
        parameter: The tensor.
        ranks: The ranks with the slice; the file of any of them is enough.
    """

    def __init__(self, message: str, *, parameter: str, ranks: tuple[int, ...]) -> None:
        self.parameter = parameter
        self.ranks = ranks
        super().__init__(
            message, hint=f"bring the file of one of the ranks {ranks[:8]} and try again"
        )


class MixedSteps(LayoutError):
    """Report files of several ranks that are of different training steps or runs.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error of one rank, as other ranks get it.

    Attributes:
        rank: The rank.
        kind: Name of the class of the error.
        message: Its message.
        errno: Number of the error of the operating system, or None.
        is_damage: Whether stored bytes are damaged or gone.
        may_be_whole: Whether they may be whole, so that nothing older may take their place.
        may_return: Whether they may be whole elsewhere, or later.
        is_expected: Whether it is an error of checkpoints or of the disk, not of the program.
    """

    rank: int
    kind: str
    message: str
    errno: int | None = None
    is_damage: bool = False
    may_be_whole: bool = False
    may_return: bool = False
    is_expected: bool = False

    @classmethod
    def of(cls, error: Exception, *, rank: int) -> Failure:
        """Return the failure to send for an error."""
        return cls(
            rank=rank,
            kind=type(error).__name__,
            message=error.message if isinstance(error, CkptmgrError) else str(error),
            errno=_errno_of(error),
            is_damage=is_damage(error),
            may_be_whole=may_be_whole(error),
            may_return=may_return(error),
            is_expected=isinstance(error, (CkptmgrError, OSError)),
        )

    @classmethod
    def from_json(cls, value: Json, *, rank: int) -> Failure:
        """Return the failure that another rank sent."""
        fields = value if isinstance(value, Mapping) else {}
        number = fields.get("errno")
        return cls(
            rank=rank,
            kind=str(fields.get("kind", "Exception")),
            message=str(fields.get("message", value)),
            errno=number if isinstance(number, int) else None,
            is_damage=fields.get("is_damage") is True,
            may_be_whole=fields.get("may_be_whole") is True,
            may_return=fields.get("may_return") is True,
            is_expected=fields.get("is_expected") is True,
        )

    def to_json(self) -> Json:
        """Return it as it is sent; the receiver knows the rank."""
        return {name: value for name, value in asdict(self).items() if name != "rank"}

    def __str__(self) -> str:
        name = (
            "" if self.errno is None else f" [{errno_names.errorcode.get(self.errno, self.errno)}]"
        )
        return f"rank {self.rank}: {self.kind}{name}: {self.message}"


def _errno_of(error: BaseException | None) -> int | None:
    """Return the number of an error of the operating system, or of the one it explains."""
    if error is None:
        return None
    number = error.errno if isinstance(error, OSError) else None
    return _errno_of(error.__cause__) if number is None else number


class ResumeFailed(CkptmgrError):
    """Report that the ranks cannot resume together from any checkpoint; names a failing rank.

    Attributes:
        may_be_whole: Whether the disk of a rank does not give a checkpoint now that may be whole.
    """

    may_be_whole: bool = False


class RankFailed(SaveFailed):
    """Report a save that failed because a rank could not do its part; nothing was committed.

    Attributes:
        failures: The failure of each rank that failed.
        rank: The first of these ranks.
        errno: Number of its error of the operating system, or None.
    """

    def __init__(self, failures: Sequence[Failure], *, what: str) -> None:
        self.failures = tuple(failures)
        self.rank = failures[0].rank
        self.errno = failures[0].errno
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        super().__init__(
            f"{what}: {failures[0]}{more}",
            hint="the earlier checkpoints are intact; nothing was committed",
        )


def not_begun(
    missing: RanksMissing, step: int, elsewhere: Mapping[int, int], *, path: Path
) -> SaveFailed:
    """Return the error of a save of `step` to which some ranks did not come.

    `elsewhere` maps ranks that gave up waiting to the steps at which they waited.
    """
    present = shown_ranks(sorted(missing.found))
    others = [f"rank {rank} at step {other}" for rank, other in elsewhere.items() if other != step]
    gave_up = f"; gave up waiting before: {', '.join(others)}" if others else ""
    return SaveFailed(
        f"{missing.message}; {present} waited there to save step {step}{gave_up}",
        path=path,
        hint="all ranks save the same steps: give them the same save policy, and the same calls of step_end() and save(); "
        "else look at the logs of these ranks, and if they are only slow, give a longer timeout",
    )
