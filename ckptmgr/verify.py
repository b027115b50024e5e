# SPDX-License-Identifier: Apache-2.0
"""Check that a checkpoint is what was saved. Damage is an answer, never an exception.

| level | what is checked |
|---|---|
| quick | manifest, size, and how the file is put together (for `.ckpt` every length and offset; with a key the seal) |
| full | and every digest of the manifest, the CRC32, every compressed frame, and with a key every cipher block |
| deep | and every tensor decoded, NaN and Inf counted |

Nothing is handed to another library: MindSpore crashes on contents longer than their shape and fills shorter ones with
zeros, so its files are taken apart here first. Contents stream through a few MiB, in parallel; no array is kept.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ckptmgr.chain import contradiction
from ckptmgr.cold_files import read_once
from ckptmgr.container_reader import (
    container_mode,
    format_in,
    kind_of,
    open_container_file,
    unit_of,
)
from ckptmgr.contents import tensors_of
from ckptmgr.crypto.block_keys import open_blocks_with
from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.container_unlock import CopyState, find_copies
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.mindspore_blocks import sniff_mode
from ckptmgr.crypto.records import find_records
from ckptmgr.digest import FileDigest, check_size, differing_ranges
from ckptmgr.digested import checked_at_once
from ckptmgr.errors import (
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnsealedCheckpoint,
)
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.loader import (
    OpenCheckpoint,
    ReadOptions,
    open_source,
    read_every_byte,
    read_through,
)
from ckptmgr.lower_errors import translated_errors
from ckptmgr.manifest import Manifest
from ckptmgr.model import Checkpoint
from ckptmgr.naming import OPAQUE
from ckptmgr.observe import EVERYBODY, about
from ckptmgr.plaintext import refuse_unsigned
from ckptmgr.repair import healing_hint
from ckptmgr.store import Store
from ckptmgr.stored_kind import check_kind, check_mode
from ckptmgr.tensor_stats import stats_of

_HEAD_BYTES = 16
_CHECKS = (
    "manifest",
    "signature",
    "size",
    "digests",
    "records",
    "header",
    "seal",
    "cipher blocks",
    "frames",
    "structure",
    "CRC32",
    "every tensor",
)
_NONE: Mapping[str, tuple[int, int]] = MappingProxyType({})


class Level(enum.Enum):
    """How thoroughly to look."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


class Status(enum.Enum):
    """What came out."""

    OK = "ok"
    """Everything the level promises was checked and is right."""
    UNVERIFIED = "unverified"
    """Well-formed, but it has no checksum: nothing vouches for its contents."""
    PARTIAL = "partial"
    """Right as far as it could be checked; without the key or a signature, that is not all."""
    UNSEALED = "unsealed"
    """A key was given, but the file is not authenticated as a whole."""
    WRONG_KEY = "wrong key"
    """It does not open with this key."""
    UNREADABLE = "unreadable"
    """The disk failed, or this version does not know such files."""
    DAMAGED = "damaged"
    """It is not what was saved."""


_WORST_FIRST = (Status.DAMAGED, Status.UNREADABLE, Status.WRONG_KEY, Status.UNSEALED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is known about a checkpoint after a check.

    Attributes:
        checkpoint: The checkpoint.
        level: How thoroughly it was checked.
        status: The verdict.
        problems: What is wrong, one sentence each; of many ranks' files each that failed, after its name.
        checked: What was checked and is right, a word or two each.
        unchecked: What could not be checked, and why.
        nonfinite: With `Level.DEEP`: tensor to (number of NaN, number of Inf), where there are any.
        hint: What to do next, or None.
    """

    checkpoint: Checkpoint
    level: Level
    status: Status
    problems: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    nonfinite: Mapping[str, tuple[int, int]] = field(default_factory=lambda: _NONE, hash=False)
    hint: str | None = None


def verify_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    *,
    level: Level = Level.FULL,
    options: ReadOptions | None = None,
    present: Sequence[Checkpoint] = (),
) -> Verification:
    """Check one checkpoint of a store; whatever is wrong with it is in the answer.

    Args:
        store: The directory it lies in; its key authenticates the manifest.
        checkpoint: As listed by the store.
        level: How thoroughly.
        options: The key, and whether files without a seal are accepted.
        present: All that the store lists; those saved later say whether this file is the one they came after.
    """
    with EVERYBODY.timed("verify", **about(checkpoint)) as told:
        answer = _verify(store, checkpoint, level, options or ReadOptions(), present)
        if answer.status not in (Status.OK, Status.UNVERIFIED):
            told["error"] = "; ".join(answer.problems or answer.unchecked)
            told["error_type"] = answer.status.value
    return answer


def _verify(
    store: Store,
    checkpoint: Checkpoint,
    level: Level,
    options: ReadOptions,
    present: Sequence[Checkpoint],
) -> Verification:
    check = _Check(store, checkpoint, level, options, present)
    check.run()
    while check.failures and check.has_another_manifest():
        check = _Check(store, checkpoint, level, options, present)
        check.run()
    failures, manifest = check.failures, check.manifest
    worst = min(failures, key=lambda one: _WORST_FIRST.index(one.status), default=None)
    return Verification(
        checkpoint=checkpoint,
        level=level,
        status=check.status if worst is None else worst.status,
        problems=tuple(one.problem for one in failures),
        checked=tuple(sorted(set(check.checked), key=_CHECKS.index)),
        unchecked=tuple(dict.fromkeys(check.unchecked)),
        nonfinite=check.nonfinite,
        hint=None if worst is None else (_cure(store, manifest, worst, level) or worst.hint),
    )


def verify_all(
    store: Store,
    checkpoints: Sequence[Checkpoint],
    *,
    level: Level = Level.FULL,
    options: ReadOptions | None = None,
) -> Iterator[Verification]:
    """Yield the answer for each checkpoint in turn."""
    present = store.scan()
    for checkpoint in checkpoints:
        yield verify_checkpoint(store, checkpoint, level=level, options=options, present=present)


def _cure(store: Store, manifest: Manifest | None, worst: _Failure, level: Level) -> str | None:
    """Return how the damage can be healed, where that was looked for and is possible."""
    if manifest is None or not manifest.shards or worst.status is not Status.DAMAGED:
        return None
    return None if level is Level.QUICK else healing_hint(store, manifest)


def _status_of(error: Exception) -> Status:
    if isinstance(error, CorruptCheckpoint):
        return Status.DAMAGED
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


class _Check:
    """One check; what was found so far stays when a later step fails, and the other files are checked all the same."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        level: Level,
        options: ReadOptions,
        present: Sequence[Checkpoint],
    ) -> None:
        self._store = store
        self._present = present
        self._checkpoint = checkpoint
        self._level = level
        self._options = options
        self._path = str(checkpoint.path)
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        self.nonfinite: dict[str, tuple[int, int]] = {}
        self.status = Status.OK
        self.failures: list[_Failure] = []
        self._was_read = False
        self.manifest: Manifest | None = None

    def run(self) -> None:
        with self._noting_failure():
            manifest = self.manifest = self._store.read_manifest(self._checkpoint.name)
            if manifest is not None:
                with self._noting_failure():
                    self._check_place(manifest)
            if manifest is None or not manifest.shards:
                self._check_file(self._checkpoint.path, manifest)
                return
            for rank, entry in enumerate(manifest.shards):
                self._path = str(self._store.directory / entry.name)
                with self._noting_failure(f"{entry.name}: "):
                    self._check_file(self._store.directory / entry.name, manifest.of_shard(rank))

    def has_another_manifest(self) -> bool:
        """Return whether it was replaced or removed since its manifest was read; then the failures may be none."""
        try:
            return self._store.read_manifest(self._checkpoint.name) != self.manifest
        except (CkptmgrError, OSError):
            return False

    @contextlib.contextmanager
    def _noting_failure(self, prefix: str = "") -> Iterator[None]:
        try:
            with translated_errors(self._path):
                yield
        except (CkptmgrError, OSError) as error:
            hint = error.hint if isinstance(error, CkptmgrError) else None
            problem = prefix + _message(error)
            self.failures.append(_Failure(status=_status_of(error), problem=problem, hint=hint))

    def _check_file(self, path: Path, manifest: Manifest | None) -> None:
        file = self._store.fs.open(path)
        # What is decoded after it was checked is read twice; the page cache is then the shorter way.
        with contextlib.closing(file if self._level is Level.DEEP else read_once(file)) as raw:
            refuse_unsigned(manifest, path=self._path, options=self._options)
            if manifest is not None:
                self.checked.append("manifest")
                if manifest.signed_by is not None:
                    self.checked.append("signature")
                self._was_read = self._read_in_one_pass(manifest, raw)
                self._check_against(manifest, raw)
            kind = kind_of(raw, name=path.name)
            check_kind(kind, manifest, path=self._path)
            if kind is Kind.MINDSPORE_ENCRYPTED:
                self._check_encrypted(raw, manifest)
            elif kind is Kind.CKPTMGR_CONTAINER:
                self._check_container(raw, manifest)
            else:
                self._check_plain(raw, manifest)

    def _check_place(self, manifest: Manifest) -> None:
        now = manifest.to_checkpoint(self._store.directory)
        problem = contradiction(now, self._present)
        if problem is not None:
            raise TamperedCheckpoint(
                problem,
                path=self._path,
                hint="an older file was put in its place, or the later one belongs elsewhere; a prune that was undone "
                "after the name had been used again looks alike",
            )

    def _check_against(self, manifest: Manifest, raw: Source) -> None:
        check_size(raw.size, manifest.file.digest, path=self._path)
        self.checked.append("size")
        if self._level is not Level.QUICK:
            if not self._was_read:
                check_digests(raw, manifest.file.digest, path=self._path)
            self.checked.append("digests")

    def _read_in_one_pass(self, manifest: Manifest, raw: Source) -> bool:
        """Try to check the digests and the contents of a file in one reading; return whether both are right.

        Where they are not, or that does not suit the file, one is checked after the other, and says what is wrong.
        """
        if self._level is not Level.FULL:
            return False
        options = replace(self._options, trusted_keys=())
        with contextlib.suppress(CkptmgrError, CryptoError, FormatError):
            checks = checked_at_once(raw, manifest.file.digest, path=self._path, options=options)
            self.checked += checks or ()
            return checks is not None
        return False

    def _check_sealed_contents(self, raw: Source) -> None:
        if self._was_read:
            self.checked.append("structure")
        else:
            self._check_contents(self._open(raw), is_encrypted=True)
        self.checked.append("cipher blocks")

    def _check_encrypted(self, raw: Source, manifest: Manifest | None) -> None:
        mode = str(sniff_mode(read_bytes(raw, 0, min(_HEAD_BYTES, raw.size))))
        check_mode(mode, manifest, path=self._path)
        find_records(raw, mode_of(mode))
        self.checked.append("records")
        key = self._options.key
        if key is None:
            self.unchecked.append(f"seal and contents: encrypted ({mode}), and no key was given")
            if self._level is not Level.QUICK and not _is_signed(manifest):
                self.status = Status.PARTIAL
            return
        is_sealed = open_blocks_with(
            raw, key, mode, allow_unsealed=self._options.allow_unsealed
        ).is_sealed
        if is_sealed:
            self.checked.append("seal")
        if self._level is not Level.QUICK:
            self._check_sealed_contents(raw)
        if not is_sealed and manifest is None:
            self.unchecked.append("order and number of the cipher blocks: no seal, no manifest")
            self.status = Status.UNVERIFIED

    def _check_container(self, raw: Source, manifest: Manifest | None) -> None:
        mode, key = container_mode(raw), self._options.key
        check_mode(mode, manifest, path=self._path)
        if key is None:
            self.unchecked.append(f"header and contents: encrypted ({mode}), and no key was given")
            if len({copy.data for copy in find_copies(raw)}) != 1 or len(find_copies(raw)) != 2:
                self.unchecked.append("header copies: they differ; ckptmgr rekey mends that")
            # Digests leave the header copies out; but what does not open holds nothing that could be wrong.
            if self._level is not Level.QUICK and not _is_signed(manifest):
                self.status = Status.PARTIAL
            return
        container = open_container_file(raw, raw, path=self._path, key=key, mode=None)
        self.checked.append("header")
        for name, state in zip("AB", container.unlocked.states, strict=True):
            if state is not CopyState.CURRENT:
                self.unchecked.append(
                    f"header copy {name}: {state.value}; the other one opens, ckptmgr rekey mends it"
                )
        if self._level is Level.QUICK:
            return
        if format_in(container) == OPAQUE:
            read_every_byte(container, unit_bytes=unit_of(container))
            self.checked.append("cipher blocks")
        else:
            self._check_sealed_contents(raw)

    def _check_plain(self, raw: Source, manifest: Manifest | None) -> None:
        if self._was_read:
            self.checked.append("structure")
            return
        opened = self._open(raw)
        if self._level is not Level.QUICK:
            self._check_contents(opened, is_encrypted=False)
        has_checksums = opened.index.crc is not None or opened.compressed_bytes is not None
        if manifest is None and (self._level is Level.QUICK or not has_checksums):
            why = "no manifest" if self._level is Level.QUICK else "no manifest, no CRC32"
            self.unchecked.append(f"contents: {why}")
            self.status = Status.UNVERIFIED

    def _open(self, raw: Source) -> OpenCheckpoint:
        # What the manifest says about the bytes is checked apart from what they hold.
        options = replace(self._options, trusted_keys=())
        opened = open_source(raw, path=self._path, options=options)
        self.checked.append("structure")
        return opened

    def _check_contents(self, opened: OpenCheckpoint, *, is_encrypted: bool) -> None:
        has_crc = opened.index.crc is not None
        if has_crc or is_encrypted or opened.compressed_bytes is not None:
            read_through(opened, check_crc=True)
        if has_crc:
            self.checked.append("CRC32")
        if opened.compressed_bytes is not None:
            self.checked.append("frames")
        if self._level is Level.DEEP:
            self._decode(opened)

    def _decode(self, opened: OpenCheckpoint) -> None:
        for name, entry in tensors_of(opened):
            stats = stats_of(opened.source, entry)
            if stats.nan_count or stats.inf_count:
                self.nonfinite[name] = (stats.nan_count, stats.inf_count)
        self.checked.append("every tensor")


def _is_signed(manifest: Manifest | None) -> bool:
    """Return whether digests vouch for every byte, and somebody who is trusted for the digests."""
    return manifest is not None and manifest.signed_by is not None


def check_digests(raw: Source, digest: FileDigest, *, path: str) -> None:
    """Compare all of a file with the digests in its manifest, ranges in parallel.

    Raises:
        ChecksumMismatch: Names the first range that differs and how many do.
    """
    bad = differing_ranges(raw, digest)
    if bad:
        more = f" (and {len(bad) - 1} more ranges)" if len(bad) > 1 else ""
        raise ChecksumMismatch(
            f"the bytes {bad[0][0]}..{bad[0][1]} do not match the digest in the manifest{more}",
            path=path,
            offset=bad[0][0],
            hint="the file was damaged or replaced after it was saved; use an older checkpoint",
        )
