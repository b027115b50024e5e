# SPDX-License-Identifier: Apache-2.0
"""One watched directory on the disk: its listing, and the work on its checkpoints."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import UNFINISHED, Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.core.printable import MOST_CHARACTERS, printable
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.io.leases import LEASE_SUFFIX, holders_in, lease_path, read_text
from ckptmgr.io.temp_names import final_name, parse_temp
from ckptmgr.maintenance.prune import carry_out, propose
from ckptmgr.maintenance.prune_plan import PolicyOf, RunPlanner, Spared, nothing_spared
from ckptmgr.maintenance.quarantine import quarantine
from ckptmgr.maintenance.verify import Level, Verification, verify_checkpoint, was_removed
from ckptmgr.maintenance.watch.model import Listing, Seen, SeriesHolder
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.applied import Applied
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import TRASH_NAME

_TIMED = 9  # newest saves of a series whose duration is read


class WatchedDirectory:
    """A directory that is looked at again and again.

    Attributes:
        is_replaced: Whether the last look found another directory under the path than the one before.
    """

    def __init__(self, path: Path, *, trust: Trust) -> None:
        self.path = path
        self.store = Store(path, trust=trust)
        self.is_replaced = False
        self._identity: tuple[int, int] | None = None
        self._durations: dict[str, tuple[str | None, float | None]] = {}

    def look(self, *, at: float, removed_temps: Iterable[str] = ()) -> Listing:
        """Return the listing.

        Raises:
            CheckpointNotFound: The directory is gone.
            OSError: It cannot be listed.
        """
        self._identify()
        found = self.store.scan()
        names = self.store.fs.names(self.path)
        durations = self._durations_of(found)
        return Listing(
            at=at,
            seen=tuple(self._seen(one, durations.get(one.name)) for one in found),
            holders=self._holders(names),
            free_bytes=self.store.fs.free_bytes(self.path),
            given_up=tuple(final_name(one) for one in removed_temps if self._is_of_live(one)),
        )

    def _identify(self) -> None:
        try:
            status = self.path.stat()
            if not self.path.is_dir():
                raise CheckpointNotFound("is no directory", path=self.path)
        except FileNotFoundError:
            self._identity = None
            raise CheckpointNotFound(
                "the directory is gone: removed, renamed or unmounted", path=self.path
            ) from None
        identity = (status.st_dev, status.st_ino)
        self.is_replaced, self._identity = identity != self._identity, identity

    def verify(self, seen: Seen, level: Level) -> Verification | None:
        """Verify a checkpoint; None if it was removed meanwhile."""
        store = self.store
        answer = verify_checkpoint(
            store,
            seen.checkpoint,
            level=level,
            options=ReadOptions(trust=store.trust),
            lineage=Lineage(store.scan()),
        )
        return None if was_removed(store, answer) else answer

    def prune(
        self,
        series: str,
        policy: RetentionPolicy | PolicyOf,
        *,
        at: float,
        grace: timedelta,
        stays: Spared = nothing_spared,
    ) -> Applied:
        """Apply retention to one series, into the trash; remove expired batches from the trash.

        `stays` says which checkpoints stay whatever the policy says.

        Raises:
            CkptmgrError, OSError: The policy is refused, or the disk fails.
        """
        with self.store.fs.hold_directory(self.path):
            now = datetime.fromtimestamp(at, UTC)
            planner = RunPlanner(self.store, stays)
            proposal = propose(self.store, policy, planner, now=now, series=series, grace=grace)
            done = Applied() if proposal.is_empty else carry_out(self.store, proposal, planner)
            done.failures += proposal.refused
            if len(proposal.undecided) > len(proposal.refused):
                done.failures.append(
                    CkptmgrError(
                        f"no retention policy: a run of series {series} has recorded none",
                        path=self.path,
                        hint="pass --keep",
                    )
                )
            return done

    def quarantine(self, seen: Seen, *, at: float) -> Path:
        """Move a damaged checkpoint into the quarantine; errors as of `quarantine`."""
        return quarantine(self.store, seen.checkpoint, now=datetime.fromtimestamp(at, UTC))

    def _seen(self, one: Checkpoint, duration_s: float | None) -> Seen:
        if one.state in UNFINISHED:
            return Seen(checkpoint=one, fingerprint="", changed_at=0.0)
        paths = [self.path / name for name in one.shards] or [one.path]
        parts, changed_at = [one.id or "", one.state.value], 0.0
        for path in paths:
            status = self.store.fs.status(path)
            if status is None:
                parts.append("-")
                continue
            changed_ns = status.changed_ns or int(status.modified_at * 1e9)
            parts.append(f"{status.identity[1]:x}.{status.size_bytes:x}.{changed_ns:x}")
            changed_at = max(changed_at, changed_ns / 1e9)
        return Seen(
            checkpoint=one,
            fingerprint=" ".join(parts),
            changed_at=changed_at,
            duration_s=duration_s,
        )

    def _durations_of(self, found: Iterable[Checkpoint]) -> dict[str, float | None]:
        """Return how long the newest saves of each series wrote, by name, from their manifests."""
        of_series: dict[str, list[Checkpoint]] = defaultdict(list)
        for one in found:
            if one.state is State.OK:
                of_series[one.series].append(one)
        chosen = [
            one
            for ones in of_series.values()
            for one in sorted(ones, key=lambda one: one.order)[-_TIMED:]
        ]
        known = self._durations
        self._durations = {
            one.name: known[one.name]
            if known.get(one.name, ("", None))[0] == one.id
            else (one.id, self._duration_of(one))
            for one in chosen
        }
        return {name: duration_s for name, (_, duration_s) in self._durations.items()}

    def _duration_of(self, one: Checkpoint) -> float | None:
        try:
            manifest = self.store.read_manifest(one.name)
        except (CkptmgrError, OSError):
            return None
        stats = {} if manifest is None else manifest.stats
        return stats.get("until_synced_s") or stats.get("write_s")

    def _holders(self, names: Iterable[str]) -> dict[str, SeriesHolder]:
        holders = {}
        for name in names:
            series = name.removeprefix(".").removesuffix(LEASE_SUFFIX)
            is_lease = name == f".{series}{LEASE_SUFFIX}"
            if is_lease and series != TRASH_NAME and not series.endswith(DATA_SUFFIXES):
                holder = self._holder(series)
                if holder is not None:
                    holders[series] = holder
        return holders

    def _holder(self, series: str) -> SeriesHolder | None:
        """Return the holder of a lease file, or None if it is gone."""
        path = lease_path(self.path, series)
        try:
            text = read_text(self.store.fs, path)
            found = [one for one in holders_in(text) if one is not None]
            deaths = [self.store.processes.is_dead(one.token) for one in found]
            name = found[0].description or "another process"
            if not all(death is True for death in deaths):
                return SeriesHolder("live" if False in deaths else "unknown", name)
            # A run that closes removes the file before its process ends, maybe since it was read.
            if read_text(self.store.fs, path) == text:
                return SeriesHolder("dead", name)
        except FileNotFoundError:
            return None
        except OSError:
            return SeriesHolder("unknown", "another process")
        return self._holder(series)

    def _is_of_live(self, temp: str) -> bool:
        token = parse_temp(temp)
        is_own = token is not None and token[0] == self.store.processes.token()
        return token is not None and not is_own and self.store.processes.is_dead(token[0]) is False


def problem_of(error: CkptmgrError | OSError) -> str:
    """Return an error as one sentence that names its path."""
    if isinstance(error, CkptmgrError):
        return error.message if error.path is None else f"{error.path}: {error.message}"
    path = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{path}{printable(error.strerror or str(error), MOST_CHARACTERS)}"
