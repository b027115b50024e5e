# SPDX-License-Identifier: Apache-2.0
"""What rank 0 offers at the begin of a save, what the ranks vote with, and the manifest that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.model import Link
from ckptmgr.core.shard_names import SET_FORMAT, shard_name
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.parallel.coordinator import Json, RanksOutOfStep
from ckptmgr.series.writer import Place
from ckptmgr.store.manifest.codec import FileEntry, Manifest, entry_from_document, entry_to_document
from ckptmgr.store.manifest.fields import link_from_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A save as rank 0 begins it, the same on all ranks.

    Attributes:
        stem: Name of the checkpoint without suffix.
        attempt_id: Fences this attempt off from all others.
        format: What follows the dot in the names of the files.
        sequence: Order of commits in the directory.
        attempt: Which save of the step it is.
        at: When it was asked for, in seconds since 1970.
        run_id: The run.
        previous: The checkpoint of the series that was newest before, or None.
    """

    stem: str
    attempt_id: str
    format: str
    sequence: int
    attempt: int
    at: float
    run_id: str
    previous: Link | None = None

    @classmethod
    def from_json(cls, value: Json) -> Offer:
        """Return what rank 0 offers.

        Raises:
            RanksOutOfStep: It is no offer.
        """
        try:
            if not isinstance(value, Mapping):
                raise TypeError(f"{value!r} is no offer")
            return cls(
                stem=str(value["stem"]),
                attempt_id=str(value["attempt_id"]),
                format=str(value["format"]),
                sequence=_integer(value["sequence"]),
                attempt=_integer(value["attempt"]),
                at=float(_integer_or_float(value["at"])),
                run_id=str(value["run_id"]),
                previous=link_from_document(value["previous"]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RanksOutOfStep(f"rank 0 runs another version: {error}") from error

    def to_json(self) -> Json:
        """Return it as it travels."""
        return asdict(self)

    @property
    def place(self) -> Place:
        """Where the save comes."""
        return Place(self.sequence, self.attempt, self.previous)

    @property
    def set_name(self) -> str:
        """Name of the checkpoint."""
        return f"{self.stem}.{SET_FORMAT}"

    def file_name(self, rank: int, *, world: int) -> str:
        """Return the name of the file of a rank."""
        return shard_name(
            self.stem, rank, world=world, attempt_id=self.attempt_id, format=self.format
        )

    def applied_to(self, facts: SaveFacts) -> SaveFacts:
        """Return what a rank knows about the save, as rank 0 sees it."""
        return replace(facts, attempt=self.attempt, at=self.at)


def vote_of(manifest: Manifest) -> Json:
    """Return what a rank says about the file that it has made durable."""
    return {"file": entry_to_document(manifest.file), "stats": dict(manifest.stats)}


def whole(draft: Manifest, votes: Sequence[Json]) -> Manifest:
    """Return the manifest of all files; each figure is that of the rank where it was largest.

    Args:
        draft: What rank 0 knows about the save.
        votes: By rank.

    Raises:
        RanksOutOfStep: A vote is none.
        SaveFailed: The ranks do not encrypt alike.
    """
    entries = tuple(_entry(vote, rank) for rank, vote in enumerate(votes))
    for rank, entry in enumerate(entries):
        if (entry.cipher, entry.key_id) != (entries[0].cipher, entries[0].key_id):
            raise SaveFailed(
                f"rank {rank} encrypts with {entry.cipher}, key {entry.key_id}, but rank 0 with "
                f"{entries[0].cipher}, key {entries[0].key_id}",
                hint="give all ranks the same key and mode",
            )
    stats: dict[str, float] = {}
    for vote in votes:
        for name, value in _stats(vote).items():
            stats[name] = max(value, stats.get(name, value))
    return replace(draft, file=entries[0], shards=entries, world_size=len(entries), stats=stats)


def chosen_series(answers: Sequence[Json]) -> str:
    """Return the series that rank 0 has chosen.

    Args:
        answers: By rank: its prefix, and what it has chosen, which counts on rank 0.

    Raises:
        RanksOutOfStep: The ranks have not the same prefix, or one says something else.
    """
    said = [answer if isinstance(answer, list) and answer else [answer] for answer in answers]
    for rank, (prefix, *_) in enumerate(said):
        if prefix != said[0][0]:
            raise RanksOutOfStep(
                f"rank {rank} saves under the prefix {prefix!r}, but rank 0 under {said[0][0]!r}",
                hint="give all ranks the same prefix and directory; their files have their numbers in their names",
            )
    series = said[0][-1]
    if len(said[0]) == 1 or not isinstance(series, str):
        raise RanksOutOfStep(f"rank 0 runs another version: {series!r} is no series")
    return series


def _entry(vote: Json, rank: int) -> FileEntry:
    try:
        return entry_from_document(vote["file"])  # type: ignore[call-overload, index, arg-type]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RanksOutOfStep(f"rank {rank} runs another version: {error!r}") from error


def _stats(vote: Json) -> dict[str, float]:
    stats = vote.get("stats") if isinstance(vote, Mapping) else None
    if not isinstance(stats, Mapping):
        return {}
    return {name: float(v) for name, v in stats.items() if isinstance(v, (int, float))}


def _integer(value: Json) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


def _integer_or_float(value: Json) -> int | float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value
