# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint many ranks go on from: the newest one that every one of them can load.

Rank 0 says which there are, newest first. Each is tried by all ranks, and taken when none of them objects, so they never go
on from different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptmgr.errors import CheckpointNotFound
from ckptmgr.model import Checkpoint
from ckptmgr.parallel.coordinator import Coordinator, Json, RanksOutOfStep
from ckptmgr.parallel.rank_errors import Failure, ResumeFailed
from ckptmgr.parallel.rounds import Rounds
from ckptmgr.resume import Skipped

_Loaded = TypeVar("_Loaded")


def first_that_all_load(
    rounds: Rounds,
    coordinator: Coordinator,
    candidates: Sequence[Checkpoint],
    load: Callable[[Checkpoint], _Loaded],
    *,
    prepare: Callable[[], object],
    stop: Callable[[], float],
) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
    """Return the first checkpoint that all ranks can load, what this rank loaded, and the ones skipped before it.

    Args:
        rounds: Of this resumption.
        coordinator: The ranks.
        candidates: What this rank sees, newest first.
        load: Loads one; nothing may be changed before all agree.
        prepare: What rank 0 does first; a failure is told to all.
        stop: Until when to wait for a round that begins now.

    Raises:
        ResumeFailed: A rank cannot go on from any of them, and not because all are damaged.
        RanksMissing: Some ranks did not come in time.
    """

    def names() -> Json:
        if coordinator.rank != 0:
            return None
        prepare()
        return [candidate.name for candidate in candidates]

    seen = {candidate.name: candidate for candidate in candidates}
    skipped: list[Skipped] = []
    objections: list[Failure] = []
    for index, name in enumerate(_offered(rounds.compared("candidates", names, stop=stop())[0])):
        loaded: list[_Loaded] = []

        def attempt(name: str = name, loaded: list[_Loaded] = loaded) -> Json:
            if name not in seen:
                # No damage: this rank may look at another disk, and starting over would lose the run.
                raise CheckpointNotFound(
                    f"{name}, which rank 0 sees, is not in the directory of this rank",
                    hint="all ranks need the same directory; mount it, or wait until the file system shows it",
                )
            loaded.append(load(seen[name]))
            return None

        answers = rounds.compared(f"try {index}", attempt, stop=stop())
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if not failures:
            return seen[name], loaded[0], skipped
        unexpected = [failure for failure in failures if not failure.is_expected]
        if unexpected:
            raise ResumeFailed(str(unexpected[0]))
        objections += failures
        if name in seen:
            skipped.append(Skipped(checkpoint=seen[name], reason=str(failures[0])))
    for objection in objections:
        if not objection.is_damage:
            raise ResumeFailed(str(objection))
    return None, None, skipped


def _offered(answer: Json | Failure) -> list[str]:
    """Return the names that rank 0 has said.

    Raises:
        ResumeFailed: It could not say any.
        RanksOutOfStep: They are no names.
    """
    if isinstance(answer, Failure):
        raise ResumeFailed(str(answer))
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise RanksOutOfStep(f"rank 0 names no checkpoints: {answer!r}")
    return [str(name) for name in answer]
