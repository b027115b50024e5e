# SPDX-License-Identifier: Apache-2.0
"""Check of one file of a checkpoint: digests, cipher blocks, CRC32, structure and contents."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ckptmgr.core.error_translation import unproven_error
from ckptmgr.core.errors import ChecksumMismatch, CkptmgrError, CorruptCheckpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.container.source import ContainerSource
from ckptmgr.crypto.container.unlock import CopyState, find_copies
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.mindspore.blocks import open_blocks_with, sniff_mode
from ckptmgr.crypto.mindspore.records import find_records
from ckptmgr.files.load.bulk import check_values, read_every_byte, read_through
from ckptmgr.files.load.container import (
    container_mode,
    format_in,
    open_container_file,
    unit_of,
)
from ckptmgr.files.load.in_place import tensors_to_fill
from ckptmgr.files.load.inspection import indexed_tensors
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import check_kind, check_mode, kind_of, refuse_unsigned
from ckptmgr.files.load.shard_pieces import PIECES
from ckptmgr.files.load.state import checked_skeleton
from ckptmgr.files.load.statistics import stats_of
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.index import read_tensor_into
from ckptmgr.formats.source import HeadSource, Source, read_bytes
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.digest import (
    RANGE_BYTES,
    FileDigest,
    RangeDigests,
    VerifyingSource,
    check_size,
    differing_ranges,
)
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.page_cache import bypass_page_cache
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.maintenance.verdict import Level, Status
from ckptmgr.state import tree
from ckptmgr.state.paths import TreeError
from ckptmgr.state.values import values_of
from ckptmgr.store.manifest.codec import Manifest

_MAGIC_BYTES = 16
_MOST_FILLED_BYTES = 256 << 20  # bytes, and states of generators
_MAX_GAP_BYTES = 64 << 10
_HEAD_BYTES = 1 << 14  # of a file that is checked quickly: headers of small ones, and magics


@dataclass(slots=True, kw_only=True)
class Findings:
    """Findings of the checks of a checkpoint's files so far; fields as of `Verification`."""

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    nonfinite: dict[str, tuple[int, int]] = field(default_factory=dict)
    status: Status = Status.OK


class FileCheck:
    """One check of one file; adds to `findings`, which stay when a later step fails."""

    def __init__(
        self, path: str, *, level: Level, options: ReadOptions, findings: Findings
    ) -> None:
        self._path = path
        self._level = level
        self._options = options
        self._findings = findings
        self._was_read = False
        self._is_checkpoint = True

    def run(self, file: InputFile, manifest: Manifest | None) -> None:
        """Check an open file, and close it.

        Raises:
            CkptmgrError, CryptoError, FormatError, OSError: It is damaged, or cannot be read.
        """
        # A deep check reads twice; the second time comes from the page cache. A quick one reads
        # little, and the first bytes several times.
        with contextlib.closing(
            bypass_page_cache(file) if self._level is Level.FULL else file
        ) as opened:
            raw = HeadSource(opened, _HEAD_BYTES) if self._level is Level.QUICK else opened
            refuse_unsigned(manifest, path=self._path, options=self._options)
            if manifest is not None:
                self._findings.checked.append("manifest")
                if manifest.signed_by is not None:
                    self._findings.checked.append("signature")
                self._was_read = self._read_in_one_pass(manifest, raw)
                self._check_against(manifest, raw)
            kind = kind_of(raw, name=self._path)
            check_kind(kind, manifest, path=self._path)
            if kind is Kind.MINDSPORE_ENCRYPTED:
                self._check_encrypted(raw, manifest)
            elif kind is Kind.CKPTMGR_CONTAINER:
                self._check_container(raw, manifest)
            else:
                self._check_plain(raw, manifest)
            if manifest is None and self._is_checkpoint and self._options.trust.is_strict:
                raise unproven_error(self._path, self._options.trust)

    def _check_against(self, manifest: Manifest, raw: Source) -> None:
        check_size(raw.size, manifest.file.digest, path=self._path)
        self._findings.checked.append("size")
        if self._level is not Level.QUICK:
            if not self._was_read:
                check_digests(raw, manifest.file.digest, path=self._path)
            self._findings.checked.append("digests")

    def _read_in_one_pass(self, manifest: Manifest, raw: Source) -> bool:
        """Try to check digests and contents in one reading; return whether both are right.

        Where they are not, or the file does not allow it, they are checked one after the other, so
        that the error names the part that is wrong.
        """
        if self._level is not Level.FULL:
            return False
        options = self._content_options()
        with contextlib.suppress(CkptmgrError, CryptoError, FormatError):
            checks = verify_in_one_pass(raw, manifest.file.digest, path=self._path, options=options)
            self._findings.checked += checks or ()
            return checks is not None
        return False

    def _content_options(self) -> ReadOptions:
        """Return the options without the public keys, which prove the manifest alone."""
        trust = self._options.trust
        if not trust.trusted_keys:
            return self._options
        return replace(self._options, trust=replace(trust, trusted_keys=()))

    def _check_sealed_contents(self, raw: Source) -> None:
        if self._was_read:
            self._findings.checked.append("structure")
        else:
            self._check_contents(self._open(raw), is_encrypted=True)
        self._findings.checked.append("cipher blocks")

    def _check_encrypted(self, raw: Source, manifest: Manifest | None) -> None:
        mode = str(sniff_mode(read_bytes(raw, 0, min(_MAGIC_BYTES, raw.size))))
        check_mode(mode, manifest, path=self._path)
        if self._was_read:
            self._findings.checked += ["records", "seal", "structure", "cipher blocks"]
            return
        find_records(raw, mode_of(mode))
        self._findings.checked.append("records")
        key = self._options.trust.keys
        if key is None:
            self._findings.unchecked.append(
                f"seal and contents: encrypted ({mode}), and no key was given"
            )
            if self._level is not Level.QUICK and not _is_signed(manifest):
                self._findings.status = Status.PARTIAL
            return
        is_sealed = open_blocks_with(
            raw, key, mode, allow_unsealed=self._options.trust.accepts_unsealed
        ).is_sealed
        if is_sealed:
            self._findings.checked.append("seal")
        if self._level is not Level.QUICK:
            self._check_sealed_contents(raw)
        if not is_sealed and manifest is None:
            self._findings.unchecked.append(
                "order and number of the cipher blocks: no seal, no manifest"
            )
            self._findings.status = Status.UNVERIFIED

    def _check_container(self, raw: Source, manifest: Manifest | None) -> None:
        mode, key = container_mode(raw), self._options.trust.keys
        check_mode(mode, manifest, path=self._path)
        if key is None:
            self._findings.unchecked.append(
                f"header and contents: encrypted ({mode}), and no key was given"
            )
            if len({copy.data for copy in find_copies(raw)}) != 1 or len(find_copies(raw)) != 2:
                self._findings.unchecked.append(
                    "header copies: they differ; ckptmgr rekey mends that"
                )
            # Digests leave out the header copies; damage there can only keep a file from opening.
            if self._level is not Level.QUICK and not _is_signed(manifest):
                self._findings.status = Status.PARTIAL
            return
        container = open_container_file(raw, raw, path=self._path, key=key, mode=None)
        self._findings.checked.append("header")
        for name, state in zip("AB", container.unlocked.states, strict=True):
            if state is not CopyState.CURRENT:
                self._findings.unchecked.append(
                    f"header copy {name}: {state.value}; the other one opens, ckptmgr rekey mends it"
                )
        self._is_checkpoint = format_in(container) != OPAQUE
        if self._level is Level.QUICK:
            return
        if not self._is_checkpoint:
            read_every_byte(container, unit_bytes=unit_of(container))
            self._findings.checked.append("cipher blocks")
        else:
            self._check_sealed_contents(raw)

    def _check_plain(self, raw: Source, manifest: Manifest | None) -> None:
        if self._was_read:
            self._findings.checked.append("structure")
            return
        opened = self._open(raw)
        if self._level is not Level.QUICK:
            self._check_contents(opened, is_encrypted=False)
        has_checksums = opened.index.crc is not None or opened.compressed_bytes is not None
        if manifest is None and (self._level is Level.QUICK or not has_checksums):
            why = "no manifest" if self._level is Level.QUICK else "no manifest, no CRC32"
            self._findings.unchecked.append(f"contents: {why}")
            self._findings.status = Status.UNVERIFIED

    def _open(self, raw: Source) -> OpenCheckpoint:
        # The digests of the manifest are checked apart from the contents.
        options = self._content_options()
        opened = open_source(raw, path=self._path, options=options)
        self._findings.checked.append("structure")
        return opened

    def _check_contents(self, opened: OpenCheckpoint, *, is_encrypted: bool) -> None:
        has_crc = opened.index.crc is not None
        checked_skeleton(opened)
        if has_crc or is_encrypted or opened.compressed_bytes is not None:
            read_through(opened, check_crc=True)
        check_values(opened)
        if has_crc:
            self._findings.checked.append("CRC32")
        if opened.compressed_bytes is not None:
            self._findings.checked.append("frames")
        if self._level is Level.DEEP:
            self._decode(opened)

    def _decode(self, opened: OpenCheckpoint) -> None:
        for name, entry in indexed_tensors(opened):
            stats = stats_of(opened.source, entry)
            if stats.nan_count or stats.inf_count:
                self._findings.nonfinite[name] = (stats.nan_count, stats.inf_count)
        self._findings.checked.append("every tensor")
        skeleton = checked_skeleton(opened)
        if skeleton is not None:
            self._rebuild(opened, skeleton)

    def _rebuild(self, opened: OpenCheckpoint, skeleton: str) -> None:
        """Rebuild the state of a file as a load does, over memory that is reserved and not read."""
        entries = {one.name: one for one in tensors_to_fill(opened)}
        arrays: dict[str, np.ndarray] = {}
        filled_bytes = 0

        def read(name: str) -> np.ndarray:
            spec = entries[name].spec
            return arrays.setdefault(name, np.empty(spec.shape, spec.dtype.to_numpy()))

        def fill(name: str) -> None:
            nonlocal filled_bytes
            filled_bytes += arrays[name].nbytes
            if filled_bytes > _MOST_FILLED_BYTES:
                raise MemoryError
            read_tensor_into(opened.source, entries[name], flat_memory(arrays[name]))

        try:
            if PIECES in opened.metadata:  # the other ranks have the rest of its tensors
                values_of(skeleton)
            else:
                tree.unflatten(skeleton, read, fill=fill)
        except MemoryError:
            self._findings.unchecked.append("state tree: it needs too much memory")
        except TreeError as error:
            if error.hint is None:
                raise CorruptCheckpoint(error.message, path=self._path) from error
            self._findings.unchecked.append(f"state tree: {error.message}; {error.hint}")
        else:
            self._findings.checked.append("state tree")


def _is_signed(manifest: Manifest | None) -> bool:
    """Return whether a trusted signature vouches for the digests, and so for every byte."""
    return manifest is not None and manifest.signed_by is not None


def check_digests(raw: Source, digest: FileDigest, *, path: str) -> None:
    """Compare a file with the digests in its manifest, ranges in parallel.

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


def verify_in_one_pass(
    raw: Source, digest: FileDigest, *, path: str, options: ReadOptions
) -> tuple[str, ...] | None:
    """Check digests, contents and CRC32 (where there is one) of a sealed or plain file, read once.

    Returns `("CRC32",)` or `()`; None where the file cannot be read like this and was not checked.

    Raises:
        CkptmgrError, CryptoError, FormatError, OSError: It is damaged, or cannot be read.
    """
    if digest.range_bytes != RANGE_BYTES:
        return None
    source = HashingSource(raw, digest, path=path)
    opened = open_source(source, path=path, options=options, is_for_loading=True)
    checks = () if opened.index.crc is None else ("CRC32",)
    if opened.source is source:
        checked = VerifyingSource(raw, digest, path=path)
        read_through(replace(opened, source=checked, unit_bytes=RANGE_BYTES), check_crc=True)
        check_values(opened)
        return checks
    if not opened.is_sealed or not opened.unit_bytes:
        return None
    container = opened.source if isinstance(opened.source, ContainerSource) else None
    source.start(head_bytes=0 if container is None else container.head_bytes)
    # Pieces of a range in order: one that comes early is copied and waits for its turn.
    read_through(opened, check_crc=True, units_at_once=RANGE_BYTES // opened.unit_bytes)
    if not source.finish():
        return None
    check_values(opened)
    return checks


class HashingSource:
    """Source that hashes the bytes read through it between `start` and `finish`; `finish` compares.

    Reads must be pieces of at most 4 MiB, none of them twice; `finish` reads the remaining ranges.
    The digest must have ranges of 16 MiB.
    """

    def __init__(self, raw: Source, digest: FileDigest, *, path: str) -> None:
        self._raw = raw
        self._verifying = VerifyingSource(raw, digest, path=path)
        self._range_count = len(digest.ranges)
        self._digests: RangeDigests | None = None
        self._taken: list[tuple[int, int]] = []
        self._spare = SpareBuffers(PIECE_BYTES)
        self.size = raw.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; raises the errors of the file, and ChecksumMismatch."""
        self._raw.read_into(offset, buffer)
        if self._digests is not None:
            self._take(self._digests, offset, buffer)

    def start(self, *, head_bytes: int) -> None:
        """Hash from now on, beginning with the head, which no other read will fetch."""
        self._digests = RangeDigests(self._verifying)
        self._read(self._digests, 0, head_bytes)

    def finish(self) -> bool:
        """Read the remaining bytes; return whether each byte was hashed once and all digests match.

        Raises:
            ChecksumMismatch: A range does not match its digest.
        """
        digests, self._digests = self._digests, None
        if digests is None:
            return False
        end = 0
        for start, length in [*sorted(self._taken), (self.size, 0)]:
            if start < end:
                return False
            self._read(digests, end, start - end)
            end = start + length
        return digests.checked_count == self._range_count

    def _read(self, digests: RangeDigests, offset: int, length: int) -> None:
        for start in range(offset, offset + length, PIECE_BYTES):
            view = memoryview(bytearray(min(PIECE_BYTES, offset + length - start)))
            self._verifying.read_unchecked(start, view)  # the head counts as zeros
            self._take(digests, start, view)

    def _take(self, digests: RangeDigests, offset: int, view: memoryview) -> None:
        self._taken.append((offset, view.nbytes))
        for start, piece in digests.pieces(offset, view):
            self._close_gap(digests, start)
            if digests.next_in(start // RANGE_BYTES) >= start:  # no other thread moves past it
                digests.take(start, piece, _nothing)
                continue
            buffer = self._spare.take()
            copy_into(buffer[: piece.nbytes], piece)
            digests.take(start, buffer[: piece.nbytes], partial(self._spare.give_back, buffer))

    def _close_gap(self, digests: RangeDigests, start: int) -> None:
        """Hash the few bytes before a piece whose block another thread is about to read."""
        first = digests.next_in(start // RANGE_BYTES)
        if 0 < start - first <= _MAX_GAP_BYTES:
            gap = memoryview(bytearray(start - first))
            self._verifying.read_unchecked(first, gap)
            digests.take(first, gap, _nothing)


def _nothing() -> None:
    """Do nothing: the piece was hashed while its memory was valid."""
