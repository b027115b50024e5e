# SPDX-License-Identifier: Apache-2.0
"""One checkpoint of many ranks: every rank writes its file, all vote, and rank 0 commits. It is whole, or it is not there.

| round | what a rank does | when it goes wrong |
|---|---|---|
| write | writes its file durably, and votes with its digests | without the votes of all there is no commit |
| commit | rank 0 creates the manifest exclusively, and says so | the storage decides |

* Only rank 0 commits, after all have voted, and not after the time that the name of the attempt tells.
* Files are removed by their own ranks, and only when it is certain that they will never be part of a checkpoint: a rank has
  voted no, or rank 0 has said that it did not commit. Otherwise they wait until the attempt has expired.
* Who does not hear from rank 0 looks for the manifest. Where it is and names this attempt, the save was good.
* A rank that was given up and comes back holds the id of an attempt that nobody listens to any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.parallel.coordinator import Coordinator, Json, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import RankFailed
from ckptmgr.parallel.offer import Offer, vote_of, whole
from ckptmgr.parallel.rounds import Rounds
from ckptmgr.parallel.shard_store import ShardStore
from ckptmgr.store.manifest.codec import Manifest

_LOG = logging.getLogger(__name__)
# Of the time for a save, this share is left for the news of the commit to spread.
_NEWS_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """How long a save may take, on a clock that never goes back.

    Attributes:
        commit_by: Rank 0 does not commit later than this.
        end: Nobody waits longer than this.
    """

    commit_by: float
    end: float

    @classmethod
    def after(cls, start: float, timeout_s: float) -> Deadline:
        """Return the deadline of a save that starts at `start`."""
        return cls(commit_by=start + (1 - _NEWS_SHARE) * timeout_s, end=start + timeout_s)


class TwoPhaseSave:
    """The part of one rank in one save.

    Args:
        store: The directory, which all ranks see.
        coordinator: The ranks.
        rounds: Of this save.
        offer: What rank 0 has begun.
        deadline: How long it may take.
        monotonic: The clock of the deadline.
    """

    def __init__(
        self,
        store: ShardStore,
        coordinator: Coordinator,
        rounds: Rounds,
        offer: Offer,
        *,
        deadline: Deadline,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rounds = rounds
        self._offer = offer
        self._deadline = deadline
        self._monotonic = monotonic
        self._is_first = coordinator.rank == 0
        self._own_name = offer.file_name(coordinator.rank, world=coordinator.world)

    @property
    def file_name(self) -> str:
        """Name of the file of this rank."""
        return self._own_name

    def commit(self, draft: Manifest, *, mode: int) -> Manifest:
        """Vote for the save with the file of this rank; return the manifest of all once it is durable.

        Args:
            draft: The manifest of this rank's file alone.
            mode: Permission bits of the manifest.

        Raises:
            RankFailed: A rank could not do its part. There is no such checkpoint.
            SaveFailed: The ranks do not fit together, or some did not come, and the storage holds no commit.
        """
        return self._vote(lambda: vote_of(draft), draft, mode=mode)

    def abandon(self, error: Exception) -> None:
        """Vote against the save: this rank could not write its file.

        Raises:
            RankFailed: Always; names the ranks that failed.
            SaveFailed: Some ranks did not come, or were not understood.
        """

        def refuse() -> Json:
            raise error

        self._vote(refuse, None, mode=0)

    def _vote(self, vote: Callable[[], Json], draft: Manifest | None, *, mode: int) -> Manifest:
        deadline = self._deadline
        try:
            stop = deadline.commit_by if self._is_first else deadline.end
            votes = self._rounds.together("write", vote, stop=stop)
            assert draft is not None  # noqa: S101 - a rank that votes no gets no votes, but RankFailed
            manifest = whole(draft, votes)
        except (RanksMissing, RanksOutOfStep) as doubt:
            # Other ranks may know what this one does not: its file may be part of a checkpoint.
            return self._settled(doubt, is_open=not self._is_first)
        except CkptmgrError:
            self._store.withdraw(self._own_name)
            raise
        return self._commit(manifest, mode=mode)

    def _commit(self, manifest: Manifest, *, mode: int) -> Manifest:
        def commit() -> Json:
            if not self._is_first:
                return None
            if self._monotonic() >= self._deadline.commit_by:
                raise SaveFailed("all ranks have voted, but too late")
            problem = self._store.commit(manifest, mode=mode)
            return None if problem is None else str(problem)

        try:
            answers: Sequence[Json] = self._rounds.together(
                "commit", commit, stop=self._deadline.end
            )
        except RankFailed:
            self._store.withdraw(self._own_name)
            raise
        except RanksOutOfStep as doubt:
            return self._settled(doubt, is_open=True)
        except RanksMissing as missing:
            if 0 not in missing.found:
                return self._settled(missing, is_open=True)
            _LOG.warning("%s was saved, but then %s", self._offer.set_name, missing.message)
            answers = [missing.found[0]]
        if answers[0] is not None:
            raise SaveFailed(
                f"all ranks have saved, but the commit may not be durable: rank 0: {answers[0]}",
                path=self._store.directory / self._offer.set_name,
            )
        return manifest

    def _settled(self, doubt: RanksMissing | RanksOutOfStep, *, is_open: bool) -> Manifest:
        """Return what the storage says came of the save.

        Args:
            doubt: Who did not come, or was not understood.
            is_open: Whether rank 0 may have committed it.
        """
        stored = self._stored() if is_open else None
        if stored is not None:
            _LOG.warning("%s was saved, but %s", self._offer.set_name, doubt.message)
            return stored
        if not is_open:
            self._store.withdraw(self._own_name)
        raise SaveFailed(
            f"{doubt.message}; the storage holds no commit of this save",
            path=self._store.directory / self._offer.set_name,
            hint=doubt.hint,
        ) from doubt

    def _stored(self) -> Manifest | None:
        """Return the manifest if this attempt was committed; None also when nobody can tell."""
        with suppress(CkptmgrError, OSError):
            # Rank 0 may have died between making the manifest and making it durable.
            self._store.fs.sync_directory(self._store.directory)
            manifest = self._store.read_manifest(self._offer.set_name)
            if manifest is not None and self._own_name in (e.name for e in manifest.shards):
                return manifest
        return None
