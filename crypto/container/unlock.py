# SPDX-License-Identifier: Apache-2.0
"""Finds the header copies of a container and opens the newest authentic one.

A copy counts only if one of its slots opens, its MAC is right under that data key, and the payload
commits to the same data key and immutable bytes. So a copy that is torn, damaged, or of another
file does not prevent the use of the other one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import (
    CryptoError,
    DecryptionError,
    StretchingError,
    TamperedError,
    TruncatedCiphertextError,
    UnsupportedSuiteError,
)
from ..keys.key import Key
from ..mindspore.records import read_bytes
from ..slots import DATA_KEY_BYTES, Identity, Slot
from ..source import Ciphertext
from .floe import HEADER_BYTES, SEGMENT_LENGTH_BYTES, FloeMessage, read_length, start_decryption
from .header import (
    CONTAINER_MAGIC,
    COPY_SIZES,
    FIXED_BYTES,
    Content,
    FixedHeader,
    HeaderCopy,
    is_authentic,
    parse_copy,
    parse_fixed,
)
from .writer import segment_range


class CopyState(enum.Enum):
    """The state of a header copy."""

    CURRENT = "current"
    OUTDATED = "outdated"
    """Whole, but of an earlier generation: a rewrite was interrupted."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlockedContainer:
    """A container whose header is authenticated; `states` are those of copy A and of copy B.

    `message` is the payload, with its header checked. The data key is never shown.
    """

    header: HeaderCopy
    data_key: Key = field(repr=False)
    message: FloeMessage = field(repr=False)
    states: tuple[CopyState, CopyState]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCopy:
    """A header copy that could be parsed, at `offset`; not authenticated."""

    offset: int
    data: bytes = field(repr=False)
    header: HeaderCopy


def find_copies(source: Ciphertext) -> list[FoundCopy]:
    """Return the header copies that can be parsed, the newest first. Nothing is authenticated.

    Raises:
        DecryptionError: The file is no container.
        CryptoError: No copy can be parsed; the error is that of one of them.
    """
    copies, failures = [], []
    for offset in (0, *COPY_SIZES):
        try:
            data = _copy_at(source, offset)
            if data is not None:
                header = parse_copy(data, offset=offset)
                copies.append(FoundCopy(offset=offset, data=data, header=header))
        except CryptoError as error:
            failures.append(error)
    if not copies:
        raise _most_telling(failures) if failures else _no_container(source)
    return sorted(copies, key=lambda copy: (-copy.header.generation, copy.offset))


def unlock(source: Ciphertext, identities: Sequence[Identity]) -> UnlockedContainer:
    """Open the header of a container with the first slot that opens for one of the identities.

    Raises:
        DecryptionError: No slot is for these identities, or a passphrase is wrong.
        TamperedError: A key fits, but the data it protects was changed.
        TruncatedCiphertextError: The file ends too early.
        UnsupportedSuiteError: A newer version wrote it, or a slot asks for more than is accepted.
    """
    copies = find_copies(source)
    opener = _Opener(source, identities)
    failures: list[CryptoError] = []
    for copy in copies:
        try:
            data_key, message = opener.open(copy)
        except CryptoError as error:
            failures.append(error)
            continue
        _check_size(source, copy)
        a, b = (_state(copies, copy, data_key, offset) for offset in _offsets(copy))
        return UnlockedContainer(
            header=copy.header, data_key=data_key, message=message, states=(a, b)
        )
    raise _most_telling(failures)


class _Opener:
    """Tries identities on slots; no slot is tried twice."""

    def __init__(self, source: Ciphertext, identities: Sequence[Identity]) -> None:
        self._source = source
        self._identities = identities
        self._tried: dict[tuple[bytes, bytes], tuple[list[Key], list[CryptoError]]] = {}

    def open(self, copy: FoundCopy) -> tuple[Key, FloeMessage]:
        fixed = copy.data[:FIXED_BYTES]
        failures: list[CryptoError] = []
        for slot in copy.header.slots:
            keys, errors = self._unwrap(slot, fixed)
            failures += errors
            for data_key in keys:
                try:
                    return data_key, self._checked(copy, data_key)
                except CryptoError as error:
                    failures.append(error)
        raise _most_telling(failures) if failures else _no_slot(copy)

    def _unwrap(self, slot: Slot, fixed: bytes) -> tuple[list[Key], list[CryptoError]]:
        known = self._tried.get((fixed, slot.pack()))
        if known is None:
            known = [], []
            for identity in self._identities:
                try:
                    data_key = identity.unwrap(slot, bound=fixed)
                    if data_key is not None:
                        known[0].append(_data_key(data_key))
                except CryptoError as error:
                    known[1].append(error)
            self._tried[fixed, slot.pack()] = known
        return known

    def _checked(self, copy: FoundCopy, data_key: Key) -> FloeMessage:
        fixed = copy.header.fixed
        if not is_authentic(copy.data, fixed, data_key):
            raise TamperedError(
                "the header was changed: its MAC does not match", offset=copy.offset
            )
        end = fixed.segments_offset
        if self._source.size < end:
            raise TruncatedCiphertextError(f"the file ends inside its first {end} bytes")
        between = read_bytes(self._source, 2 * fixed.copy_bytes, length=end - 2 * fixed.copy_bytes)
        if any(between[:-HEADER_BYTES]):
            raise TamperedError(
                "reserved bytes before the payload are not zero", offset=2 * fixed.copy_bytes
            )
        try:
            return start_decryption(
                fixed.parameters, data_key.raw, aad=fixed.pack(), header=between[-HEADER_BYTES:]
            )
        except DecryptionError:
            raise TamperedError(
                "the payload does not belong to the header, or its start was changed",
                offset=end - HEADER_BYTES,
            ) from None


def _copy_at(source: Ciphertext, offset: int) -> bytes | None:
    """Return the bytes of the header copy at `offset`, or None if none can start there."""
    if source.size < offset + FIXED_BYTES:
        return None
    start = read_bytes(source, offset, length=FIXED_BYTES)
    if not start.startswith(CONTAINER_MAGIC):
        return None
    size = parse_fixed(start, offset=offset).copy_bytes
    if offset not in (0, size):
        return None
    if source.size < offset + size:
        raise TruncatedCiphertextError("the file ends inside its header", offset=offset)
    return read_bytes(source, offset, length=size)


def _offsets(copy: FoundCopy) -> tuple[int, int]:
    return 0, copy.header.fixed.copy_bytes


def _state(
    copies: Sequence[FoundCopy], current: FoundCopy, data_key: Key, offset: int
) -> CopyState:
    copy = next((copy for copy in copies if copy.offset == offset), None)
    if copy is None or copy.header.fixed != current.header.fixed:
        return CopyState.DAMAGED
    if not is_authentic(copy.data, copy.header.fixed, data_key):
        return CopyState.DAMAGED
    is_current = copy.header.generation == current.header.generation
    return CopyState.CURRENT if is_current else CopyState.OUTDATED


def _check_size(source: Ciphertext, copy: FoundCopy) -> None:
    if copy.header.fixed.content is Content.FRAMES:
        _check_end(source, copy.header.fixed)
        return
    expected = copy.header.fixed.file_size
    if source.size < expected:
        raise TruncatedCiphertextError(
            f"the file ends {expected - source.size} bytes too early", offset=source.size
        )
    if source.size > expected:
        raise TamperedError("bytes were added behind the last segment", offset=expected)


def _check_end(source: Ciphertext, fixed: FixedHeader) -> None:
    """Refuse a file that was cut off or extended; only its last segment proves that it is whole."""
    try:
        actual = fixed.with_stored_size(source.size)
    except ValueError as error:
        raise TruncatedCiphertextError(
            f"the file ends too early: {error}", offset=source.size
        ) from None
    start, length = segment_range(actual, actual.segment_count - 1)
    stated = read_length(read_bytes(source, start, length=SEGMENT_LENGTH_BYTES))
    if stated is None or stated > length:
        raise TruncatedCiphertextError("the file ends before its last segment", offset=source.size)
    if stated < length:
        raise TamperedError("bytes were added behind the last segment", offset=start + stated)


def _data_key(raw: bytes) -> Key:
    if len(raw) != DATA_KEY_BYTES:
        raise TamperedError(f"a key slot holds {len(raw)} bytes, not {DATA_KEY_BYTES}")
    return Key(raw)


def _no_slot(copy: FoundCopy) -> DecryptionError:
    labels = ", ".join(slot.label for slot in copy.header.slots)
    return DecryptionError("the file is encrypted for another key", hint=f"it opens with: {labels}")


def _no_container(source: Ciphertext) -> CryptoError:
    start = read_bytes(source, 0, length=min(len(CONTAINER_MAGIC), source.size))
    if CONTAINER_MAGIC.startswith(start):
        return TruncatedCiphertextError(
            f"a file of {source.size} bytes holds no container", offset=0
        )
    return DecryptionError(
        "the file is not a container",
        offset=0,
        hint="a plain file is read without a key; otherwise its first bytes are damaged",
    )


_RANKS: Sequence[type[CryptoError]] = (
    TamperedError,
    TruncatedCiphertextError,
    UnsupportedSuiteError,
    StretchingError,
    DecryptionError,
)


def _most_telling(failures: Sequence[CryptoError]) -> CryptoError:
    """Return the most specific failure: one under a proven key before a possibly wrong key."""
    ranks = {kind: rank for rank, kind in enumerate(_RANKS)}
    return min(failures, key=lambda error: ranks.get(type(error), len(ranks)))
