# SPDX-License-Identifier: Apache-2.0
"""Collective resume: the newest checkpoint, or copy in memory, that all ranks can load.

Rank 0 lists the candidates, newest first. All ranks try each, and take it when none of them fails,
so they never resume from different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.passing_errors import PAUSES_S
from ckptmgr.parallel.coordinator import Coordinator, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import Failure, ResumeFailed
from ckptmgr.parallel.rounds import CollectiveRounds
from ckptmgr.series.candidates import Candidates, Skipped, load_with_retry

_UNSEEN = "unseen"
_Loaded = TypeVar("_Loaded")


def first_that_all_load(
    rounds: CollectiveRounds,
    coordinator: Coordinator,
    candidates: Candidates[_Loaded],
    disk: FileSystem,
    *,
    prepare: Callable[[], object],
    stop: Callable[[], float],
) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
    """Return the first checkpoint that all ranks can load, its state, and the skipped ones.

    Rank 0 lists the candidates after `prepare`, the others after the list of rank 0. `stop` returns
    the deadline of a round that begins now. `disk` waits before this rank looks again for a
    checkpoint that it does not see.

    Raises:
        ResumeFailed: A rank cannot load any of them, and not because all are damaged; or one may be
            whole, but the disk of a rank does not give it now, and nothing older may take its
            place.
        RanksMissing: Some ranks did not come in time.
    """
    seen: dict[str, Checkpoint] = {}

    def look() -> None:
        seen.update((candidate.name, candidate) for candidate in candidates.listed())

    def names() -> Json:
        if coordinator.rank != 0:
            return None
        prepare()
        look()
        return [*seen]

    skipped: list[Skipped] = []
    refusals: list[Failure] = []
    for index, name in enumerate(
        _candidate_names(rounds.compared("candidates", names, stop=stop())[0])
    ):
        loaded: list[_Loaded] = []

        def attempt(name: str = name, loaded: list[_Loaded] = loaded) -> Json:
            for pause_s in (0, *PAUSES_S):
                if name not in seen:
                    disk.pause(pause_s)
                    look()
            if name not in seen:
                return _UNSEEN
            loaded.append(load_with_retry(candidates, seen[name], disk))
            return None

        answers = rounds.compared(f"try {index}", attempt, stop=stop())
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        _refuse_to_pass_over(name, answers)
        if not failures:
            return seen[name], loaded[0], skipped
        refusals += failures
        skipped.append(
            Skipped(
                checkpoint=seen[name],
                reason=str(failures[0]),
                is_damaged=any(one.is_damage for one in failures),
                may_return=any(one.may_return for one in failures),
            )
        )
    for refusal in refusals:
        if not refusal.is_damage:
            raise ResumeFailed(str(refusal))
    return None, None, skipped


def _refuse_to_pass_over(name: str, answers: Sequence[Json | Failure]) -> None:
    """Raise ResumeFailed when a checkpoint that some ranks cannot load may be whole.

    No rank may fall back then.
    """
    for rank, answer in enumerate(answers):
        if isinstance(answer, Failure) and (answer.may_be_whole or not answer.is_expected):
            error = ResumeFailed(str(answer))
            error.may_be_whole = answer.may_be_whole
            raise error
        if answer == _UNSEEN:
            # This rank may have another disk, or an old listing.
            error = ResumeFailed(
                f"rank {rank}: CheckpointNotFound: {name}, which rank 0 sees, is not in the directory of this rank",
                hint="all ranks need the same directory; mount it, or wait until the file system shows it",
            )
            error.may_be_whole = True
            raise error


_UNCHANGED = "nothing was changed on any rank"


@contextmanager
def all_prepared(
    rounds: CollectiveRounds, *, stop: float, is_changing: bool = False
) -> Iterator[None]:
    """Leave the `with` block once it has ended on all ranks; `is_changing` one changes their states.

    Raises:
        Exception: The error of the block on this rank.
        ResumeFailed: It failed on another rank.
        RanksMissing: Some ranks did not come in time, and this one is ready.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised

    def outcome() -> Json:
        if error is not None:
            raise error
        return None

    try:
        answers = rounds.compared("prepare", outcome, stop=stop)
    except RanksMissing as missing:
        if error is not None:
            raise error from missing
        raise
    if error is not None:
        raise error
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if failures:
        changed = "the states of all ranks are overwritten" if is_changing else _UNCHANGED
        raise ResumeFailed(str(failures[0]), hint=changed)


def steps_of_all(answers: Sequence[Json]) -> list[int]:
    """Return the steps that all ranks have in memory, or raise RanksOutOfStep.

    Each answer, by rank, is the step to go back to, then the steps in memory.
    """
    steps_by_rank = [
        [step for step in answer if isinstance(step, int)] if isinstance(answer, list) else []
        for answer in answers
    ]
    targets = [steps[:1] for steps in steps_by_rank]
    if not targets[0] or any(target != targets[0] for target in targets):
        raise RanksOutOfStep(
            f"the ranks go back to different steps: {', '.join(str(*target) for target in targets)}",
            hint="call rollback() on all ranks after the same step, with the same steps_back",
        )
    return sorted(set.intersection(*(set(steps[1:]) for steps in steps_by_rank)))


def _candidate_names(answer: Json | Failure) -> list[str]:
    """Return the names that rank 0 has sent; raise ResumeFailed if it failed."""
    if isinstance(answer, Failure):
        raise ResumeFailed(str(answer))
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise RanksOutOfStep(f"rank 0 names no checkpoints: {answer!r}")
    return [str(name) for name in answer]
