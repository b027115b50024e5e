# SPDX-License-Identifier: Apache-2.0
"""The proposal of rank 0 for a save, the votes of the ranks, and the manifest made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.model import Link
from ckptmgr.core.shard_names import SET_FORMAT, new_attempt_id, set_stem, shard_name
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.coordinator import RanksOutOfStep
from ckptmgr.series.writer import SavePosition
from ckptmgr.store.manifest.codec import FileEntry, Manifest, entry_from_document, entry_to_document
from ckptmgr.store.manifest.fields import link_from_document


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProposal:
    """A save as rank 0 begins it, the same on all ranks."""

    stem: str  # of the name of the checkpoint
    attempt_id: str  # fences this attempt off from all others
    format: str  # extension of the file names
    sequence: int  # order of commits in the directory
    attempt: int  # among the saves of the step
    at: float  # seconds since 1970
    run_id: str
    previous: Link | None = None

    @classmethod
    def for_save(
        cls,
        name: str,
        place: SavePosition,
        *,
        format: str,
        run_id: str,
        at: float,
        now: float,
        timeout_s: float,
    ) -> SaveProposal:
        """Return the proposal of a save that may be committed within `timeout_s` from `now`."""
        return cls(
            stem=set_stem(name),
            attempt_id=new_attempt_id(now + 2 * timeout_s),
            format=format,
            sequence=place.sequence,
            attempt=place.attempt,
            at=at,
            run_id=run_id,
            previous=place.previous,
        )

    @classmethod
    def from_json(cls, value: Json) -> SaveProposal:
        """Return the proposal that rank 0 sent.

        Raises:
            RanksOutOfStep: It is no proposal.
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
        """Return it as it is sent."""
        return asdict(self)

    @property
    def place(self) -> SavePosition:
        """The position of the save in its series."""
        return SavePosition(self.sequence, self.attempt, self.previous)

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
        """Return the facts of a rank about the save with the attempt and time of rank 0."""
        return replace(facts, attempt=self.attempt, at=self.at)


def vote_of(manifest: Manifest) -> Json:
    """Return the vote of a rank for the file that it has made durable."""
    health = {} if manifest.health is None else {"health": manifest.health}
    return {"file": entry_to_document(manifest.file), "stats": dict(manifest.stats), **health}


def merged_manifest(draft: Manifest, votes: Sequence[Json]) -> Manifest:
    """Return the manifest of all files; of each statistic the largest value of a rank counts.

    Its health is that of the first rank whose file is not finite.

    Raises:
        RanksOutOfStep: A vote is malformed.
        SaveFailed: The ranks encrypt differently.
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
    health = next(filter(None, map(_health, votes)), None)
    return replace(
        draft,
        file=entries[0],
        shards=entries,
        world_size=len(entries),
        stats=stats,
        health=health,
    )


def chosen_series(answers: Sequence[Json]) -> str:
    """Return the series that rank 0 has chosen, from the prefix and the choice of each rank.

    Raises:
        RanksOutOfStep: The ranks have different prefixes, or an answer is malformed.
    """
    choices = [answer if isinstance(answer, list) and answer else [answer] for answer in answers]
    for rank, (prefix, *_) in enumerate(choices):
        if prefix != choices[0][0]:
            raise RanksOutOfStep(
                f"rank {rank} saves under the prefix {prefix!r}, but rank 0 under {choices[0][0]!r}",
                hint="give all ranks the same prefix and directory; their files have their numbers in their names",
            )
    series = choices[0][-1]
    if len(choices[0]) == 1 or not isinstance(series, str):
        raise RanksOutOfStep(f"rank 0 runs another version: {series!r} is no series")
    return series


def _health(vote: Json) -> str | None:
    found = vote.get("health") if isinstance(vote, Mapping) else None
    return found if isinstance(found, str) else None


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
