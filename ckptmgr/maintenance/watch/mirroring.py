# SPDX-License-Identifier: Apache-2.0
"""Mirror of a watched directory: what waits for its upload, and the alarms about it. Pure.

The uploads themselves are made by an implementation of `Uploads`, in a thread of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ckptmgr.core.model import Checkpoint
from ckptmgr.maintenance.watch.alarms import Alarms, time_text
from ckptmgr.maintenance.watch.model import AlarmKey, Limits, Report, Seen

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadAttempt:
    """End of an attempt to mirror a checkpoint, or to list the mirror.

    Attributes:
        directory: The watched directory.
        address: The address of the checkpoint, or of the mirror.
        outcome: `uploaded`; `present`: it was there; `left out`: the policy of the mirror drops it;
            `refused`: another attempt would meet the same; `failed`: it is tried again; `listed`.
        checkpoint: The checkpoint; None when listing.
        problem: Why it failed; of an upload that did not, why retention there failed; else None.
        seconds: How long it took.
        removed: Checkpoints that the policy of the mirror removed there.
    """

    directory: Path
    address: str
    outcome: Literal["uploaded", "present", "left out", "refused", "failed", "listed"]
    checkpoint: Checkpoint | None = None
    problem: str | None = None
    seconds: float = 0.0
    removed: tuple[Checkpoint, ...] = ()


class Uploads(Protocol):
    """Uploads verified checkpoints of watched directories, in the background."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin; `wake` is called, in another thread, when an attempt has ended."""
        ...

    def want(self, directory: Path, checkpoints: Sequence[Checkpoint]) -> None:
        """Replace the checkpoints of a directory that are to be uploaded."""
        ...

    def ended(self) -> list[UploadAttempt]:
        """Return the attempts that ended since the last call."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether each thing to do has ended, or failed at least once."""
        ...

    def stop(self) -> None:
        """Give up the current upload; the next watch goes on with it."""
        ...


class MirrorState:
    """Uploads of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since: dict[_Key, tuple[float, Checkpoint]] = {}
        self._done: set[_Key] = set()
        self._refused: dict[_Key, str] = {}
        self._problem: str | None = None

    def want(self, whole: Iterable[Seen], at: float) -> list[Checkpoint]:
        """Take the verified checkpoints of the directory; return those to be uploaded."""
        found = {_key(one.checkpoint): one.checkpoint for one in whole}
        self._done &= found.keys()
        self._refused = {key: why for key, why in self._refused.items() if key in found}
        self._since = {
            key: (self._since[key][0] if key in self._since else at, one)
            for key, one in found.items()
            if key not in self._done and key not in self._refused
        }
        return [one for _, one in self._since.values()]

    def stays(self, one: Checkpoint) -> str | None:
        """Return why local retention must not remove a checkpoint, or None."""
        is_over = _key(one) in self._done or _key(one) in self._refused
        return None if is_over else "not mirrored yet"

    def took(self, at: float, upload: UploadAttempt) -> list[Report]:
        """Take the end of an attempt; return its reports."""
        one = upload.checkpoint
        self._problem = None if upload.outcome == "refused" else upload.problem
        pruned = [self._pruned(at, gone) for gone in upload.removed]
        if one is None or upload.outcome == "failed":
            return pruned
        self._since.pop(_key(one), None)
        if upload.outcome == "refused":
            self._refused[_key(one)] = upload.problem or ""
            return []
        self._done.add(_key(one))
        if upload.outcome != "uploaded":
            return []
        mirrored = Report(
            event="mirrored",
            at=at,
            directory=self._directory,
            message=f"{one.name} to {upload.address}",
            series=one.series,
            checkpoint=one,
            figures={"seconds": upload.seconds},
        )
        return [mirrored, *pruned]

    def _pruned(self, at: float, gone: Checkpoint) -> Report:
        return Report(
            event="pruned",
            at=at,
            directory=self._directory,
            message=f"{gone.path} for good",
            series=gone.series,
            checkpoint=gone,
        )

    def alarms(self, limits: Limits, at: float) -> Alarms:
        """Yield the alarms that stand."""
        if self._problem is not None:
            yield AlarmKey("mirror", ""), f"the mirror fails, and is tried again: {self._problem}"
        for (name, *_), problem in self._refused.items():
            yield AlarmKey("mirror", name), f"{name} is not mirrored: {problem}"
        waiting: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for since, one in self._since.values():
            waiting[one.series].append((since, one.name))
        for series, ones in waiting.items():
            since, name = min(ones)
            if at >= since + limits.mirror_within_s:
                count = f"{len(ones)} checkpoint{'' if len(ones) == 1 else 's'} of {series}"
                text = f"waiting for the upload: {count}, {name} since {time_text(since)}"
                yield AlarmKey("mirror", series), text

    def deadlines(self, limits: Limits) -> list[float]:
        """Return when the mirror will be behind, if nothing is uploaded until then."""
        return [since + limits.mirror_within_s for since, _ in self._since.values()]


def _key(one: Checkpoint) -> _Key:
    """Return the parts of a checkpoint besides its data of which a mirror gets each change."""
    return (
        one.name,
        one.id or "",
        repr((one.pins, one.tags, sorted(one.metrics.items()), one.opened_by)),
    )
