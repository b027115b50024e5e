# SPDX-License-Identifier: Apache-2.0
"""Check a checkpoint for damage and changes. Damage is a result, never an exception.

| level | checks |
|---|---|
| quick | manifest, size, and structure (for `.ckpt` every length and offset; with a key the seal) |
| full | and all digests of the manifest, the CRC32, compressed frames, with a key cipher blocks |
| deep | and every tensor decoded, NaN and Inf counted |

No other library reads the file: MindSpore crashes on contents longer than their shape and fills
shorter ones with zeros, so its files are parsed here first. Contents stream through a few MiB, in
parallel; no array is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import (
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnprovenCheckpoint,
    UnsealedCheckpoint,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.io.passing_errors import PAUSES_S, is_bad_medium, is_gone, may_be_whole, may_pass
from ckptmgr.maintenance.check_file import FileCheck, Findings
from ckptmgr.maintenance.repair import repair_hint
from ckptmgr.maintenance.verdict import CHECKS, Level, Status, Verification
from ckptmgr.observe.observers import REGISTERED, about
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.store import Store

__all__ = [
    "Level",
    "Status",
    "Verification",
    "verify_checkpoint",
    "was_removed",
]

_WORST_FIRST = (
    Status.DAMAGED,
    Status.MISSING,
    Status.UNREADABLE,
    Status.WRONG_KEY,
    Status.UNSEALED,
    Status.UNPROVEN,
)


def verify_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    *,
    level: Level = Level.FULL,
    options: ReadOptions | None = None,
    lineage: Lineage | None = None,
) -> Verification:
    """Check one checkpoint of a store; every fault is part of the answer.

    The key of the store authenticates the manifest; `options` have the one that opens the file.
    `lineage` is of the store's listing: later checkpoints name the one that they came after.
    """
    with REGISTERED.timed("verify", **about(checkpoint)) as facts:
        answer = _verify(store, checkpoint, level, options or ReadOptions(), lineage or Lineage())
        if answer.status not in (Status.OK, Status.UNVERIFIED):
            facts["error"] = "; ".join(answer.problems or answer.unchecked)
            facts["error_type"] = answer.status.value
    return answer


def _verify(
    store: Store,
    checkpoint: Checkpoint,
    level: Level,
    options: ReadOptions,
    lineage: Lineage,
) -> Verification:
    check = _Check(store, checkpoint, level, options, lineage)
    check.run()
    is_again = any(may_pass(one.error) for one in check.failures)
    if is_again:
        store.fs.pause(PAUSES_S[-1])
    while check.failures and (is_again or check.has_another_manifest()):
        is_again = False
        check = _Check(store, checkpoint, level, options, lineage)
        check.run()
    failures, manifest, found = check.failures, check.manifest, check.findings
    worst = min(failures, key=lambda one: _WORST_FIRST.index(one.status), default=None)
    return Verification(
        checkpoint=checkpoint,
        level=level,
        status=found.status if worst is None else worst.status,
        problems=tuple(one.problem for one in failures),
        checked=tuple(sorted(set(found.checked), key=CHECKS.index)),
        unchecked=tuple(dict.fromkeys(found.unchecked)),
        nonfinite=found.nonfinite,
        hint=None if worst is None else (_repair_hint(store, manifest, worst, level) or worst.hint),
        obstacle=next((one.error for one in failures if may_be_whole(one.error)), None),
    )


def was_removed(store: Store, answer: Verification) -> bool:
    """Return whether a checkpoint that failed its check was removed meanwhile."""
    if answer.status in (Status.OK, Status.UNVERIFIED, Status.PARTIAL):
        return False
    path = answer.checkpoint.path
    now = next((one for one in store.scan() if one.path == path), None)
    if now is None:  # a file that is no checkpoint is there, but not listed
        return store.fs.status(path) is None
    return now.state is State.LEFTOVER


def _repair_hint(
    store: Store, manifest: Manifest | None, worst: _Failure, level: Level
) -> str | None:
    """Return the repair that `repair_checkpoint` would make, where one is possible."""
    is_damaged = worst.status in (Status.DAMAGED, Status.MISSING)
    if manifest is None or not manifest.shards or not is_damaged:
        return None
    return None if level is Level.QUICK else repair_hint(store, manifest)


def _status_of(error: Exception, *, is_described: bool) -> Status:
    if isinstance(error, CorruptCheckpoint) or is_bad_medium(error):
        return Status.DAMAGED
    if is_gone(error) and is_described:
        return Status.MISSING
    if isinstance(error, UnprovenCheckpoint):
        return Status.UNPROVEN
    if isinstance(error, UnsealedCheckpoint):
        return Status.UNSEALED
    return Status.WRONG_KEY if isinstance(error, KeyProblem) else Status.UNREADABLE


def _message(error: Exception) -> str:
    return error.message if isinstance(error, CkptmgrError) else str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why a file did not pass."""

    status: Status
    problem: str
    hint: str | None
    error: Exception


class _Check:
    """One check of all files of a checkpoint; a file that fails does not stop the others."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        level: Level,
        options: ReadOptions,
        lineage: Lineage,
    ) -> None:
        self._store = store
        self._lineage = lineage
        self._checkpoint = checkpoint
        self._level = level
        self._options = options
        self._path = str(checkpoint.path)
        self.findings = Findings()
        self.failures: list[_Failure] = []
        self.manifest: Manifest | None = None

    def run(self) -> None:
        with self._noting_failure():
            manifest = self.manifest = self._store.read_manifest(
                self._checkpoint.name, is_bare_taken=True
            )
            if manifest is not None:
                with self._noting_failure():
                    self._check_place(manifest)
            if manifest is None or not manifest.shards:
                self._check_file(manifest)
                return
            for rank, entry in enumerate(manifest.shards):
                self._path = str(self._store.directory / entry.name)
                with self._noting_failure(f"{entry.name}: "):
                    self._check_file(manifest.of_shard(rank))

    def has_another_manifest(self) -> bool:
        """Return whether the manifest was replaced or removed meanwhile: failures may be void."""
        try:
            return (
                self._store.read_manifest(self._checkpoint.name, is_bare_taken=True)
                != self.manifest
            )
        except (CkptmgrError, OSError):
            return False

    @contextmanager
    def _noting_failure(self, prefix: str = "") -> Iterator[None]:
        try:
            with translated_errors(self._path):
                yield
        except (CkptmgrError, OSError) as error:
            hint = error.hint if isinstance(error, CkptmgrError) else None
            problem = prefix + _message(error)
            status = _status_of(error, is_described=self.manifest is not None)
            self.failures.append(_Failure(status=status, problem=problem, hint=hint, error=error))

    def _check_place(self, manifest: Manifest) -> None:
        now = manifest.to_checkpoint(self._store.directory)
        problem = self._lineage.why_replaced(now)
        if problem is not None:
            raise TamperedCheckpoint(
                problem,
                path=self._path,
                hint="an older file was put in its place, or the later one belongs elsewhere; a prune that was undone "
                "after the name had been used again looks alike",
            )

    def _check_file(self, manifest: Manifest | None) -> None:
        check = FileCheck(
            self._path, level=self._level, options=self._options, findings=self.findings
        )
        check.run(self._store.open_data(Path(self._path)), manifest)
