# SPDX-License-Identifier: Apache-2.0
"""Two-phase commit of a checkpoint of many ranks: all write and vote, then rank 0 commits.

| round | action of a rank | after a failure |
|---|---|---|
| write | writes its file durably, votes with its digests | without all votes there is no commit |
| commit | rank 0 creates the manifest exclusively, and reports it | the storage decides |

* Only rank 0 commits, after all votes, and not after the time in the name of the attempt.
* Each rank removes its own file, and only when it is certain that no checkpoint will have it: a
  rank has voted no, or rank 0 has reported that it did not commit. Otherwise the file stays until
  the attempt has expired.
* A rank without an answer from rank 0 looks for the manifest. If it exists and names this attempt,
  the save succeeded.
* A rank that comes back after the others gave it up has the id of an attempt that no rank uses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.coordinator import Coordinator, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import RankFailed
from ckptmgr.parallel.proposal import SaveProposal, merged_manifest, vote_of
from ckptmgr.parallel.rounds import CollectiveRounds
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.shards import RankFiles
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
# Share of the time for a save that is left for the answer of the commit.
_ANSWER_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Deadlines of a save on the monotonic clock: of the commit on rank 0, and of all waiting."""

    commit_by: float
    end: float

    @classmethod
    def after(cls, start: float, timeout_s: float) -> Deadline:
        """Return the deadline of a save that starts at `start`."""
        return cls(commit_by=start + (1 - _ANSWER_SHARE) * timeout_s, end=start + timeout_s)


class TwoPhaseSave:
    """The part of one rank in one save."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        rounds: CollectiveRounds,
        proposal: SaveProposal,
        *,
        deadline: Deadline,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._files = RankFiles(store)
        self._rounds = rounds
        self._proposal = proposal
        self._deadline = deadline
        self._monotonic = monotonic
        self._is_first = coordinator.rank == 0
        self.file_name = proposal.file_name(coordinator.rank, world=coordinator.world)

    def commit(self, draft: Manifest, *, mode: int) -> Manifest:
        """Vote with the manifest of this rank's file; return that of all once it is durable.

        Raises:
            RankFailed: A rank could not do its part. There is no such checkpoint.
            SaveFailed: The ranks contradict each other, or some did not come, and the storage holds
                no commit.
        """
        return self._vote(lambda: vote_of(draft), draft, mode=mode)

    def abandon(self, error: Exception) -> None:
        """Vote against the save: this rank could not write its file.

        Raises:
            RankFailed: Always; names the ranks that failed.
            SaveFailed: Some ranks did not come, or sent malformed answers.
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
            manifest = merged_manifest(draft, votes)
        except (RanksMissing, RanksOutOfStep) as doubt:
            # Other ranks may know what this one does not: its file may be part of a checkpoint.
            return self._settled(doubt, is_open=not self._is_first)
        except CkptmgrError:
            self._files.withdraw(self.file_name)
            raise
        return self._commit(manifest, mode=mode)

    def _commit(self, manifest: Manifest, *, mode: int) -> Manifest:
        def commit() -> Json:
            if not self._is_first:
                return None
            if self._monotonic() >= self._deadline.commit_by:
                raise SaveFailed("all ranks have voted, but too late")
            problem = self._files.commit(manifest, mode=mode)
            return None if problem is None else str(problem)

        try:
            answers: Sequence[Json] = self._rounds.together(
                "commit", commit, stop=self._deadline.end
            )
        except RankFailed:
            self._files.withdraw(self.file_name)
            raise
        except RanksOutOfStep as doubt:
            return self._settled(doubt, is_open=True)
        except RanksMissing as missing:
            if 0 not in missing.found:
                return self._settled(missing, is_open=True)
            _LOG.warning("%s was saved, but then %s", self._proposal.set_name, missing.message)
            answers = [missing.found[0]]
        if answers[0] is not None:
            raise SaveFailed(
                f"all ranks have saved, but the commit may not be durable: rank 0: {answers[0]}",
                path=self._store.directory / self._proposal.set_name,
            )
        return manifest

    def _settled(self, doubt: RanksMissing | RanksOutOfStep, *, is_open: bool) -> Manifest:
        """Return the stored manifest; look only if rank 0 may have committed (`is_open`)."""
        stored = self._stored() if is_open else None
        if stored is not None:
            _LOG.warning("%s was saved, but %s", self._proposal.set_name, doubt.message)
            return stored
        if not is_open:
            self._files.withdraw(self.file_name)
        raise SaveFailed(
            f"{doubt.message}; the storage holds no commit of this save",
            path=self._store.directory / self._proposal.set_name,
            hint=doubt.hint,
        ) from doubt

    def _stored(self) -> Manifest | None:
        """Return the manifest if this attempt was committed; None also after a disk error."""
        with suppress(CkptmgrError, OSError):
            # Rank 0 may have died between making the manifest and making it durable.
            self._store.fs.sync_directory(self._store.directory)
            manifest = self._store.read_manifest(self._proposal.set_name)
            if manifest is not None and self.file_name in (e.name for e in manifest.shards):
                return manifest
        return None
