# SPDX-License-Identifier: Apache-2.0
"""The decrypted bytes of a container as a source: random access to authenticated bytes only.

* A segment is read, authenticated and decrypted in one step, from the same bytes in memory.
* The offset of each segment follows from the authenticated header.
* A segment that a buffer covers is decrypted directly into it; other reads go through a small
  cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..buffers import UnitCache, shared_buffers
from ..errors import TamperedError, TruncatedCiphertextError
from ..slots import Identity
from ..source import Ciphertext, is_remote
from .header import Content
from .unlock import UnlockedContainer, unlock
from .writer import plaintext_range, segment_range


def open_container(source: Ciphertext, identities: Sequence[Identity]) -> ContainerSource:
    """Open the container in `source`.

    Raises:
        DecryptionError: It is for another key, a passphrase is wrong, or it is no container.
        TamperedError: The key fits, and the header, the slot or the start of the payload was
            changed.
        TruncatedCiphertextError: The file ends too early.
        UnsupportedSuiteError: A newer version wrote it, or a slot asks for more than is accepted.
    """
    container = ContainerSource(source, unlock(source, identities))
    if container.size == 0:
        container.check_empty()
    return container


class ContainerSource:
    """The decrypted bytes of a container. Safe to read from several threads.

    `unlocked` is its header, for a rewrite; it holds the data key.
    """

    def __init__(self, source: Ciphertext, unlocked: UnlockedContainer) -> None:
        self._source = source
        self.is_remote = is_remote(source)
        self.unlocked = unlocked
        self._fixed = unlocked.header.fixed.with_stored_size(source.size)
        self._message = unlocked.message
        self._full = self._fixed.parameters.plaintext_bytes
        largest = min(self._fixed.segment_bytes, self._fixed.file_size)
        self._buffers = shared_buffers(largest)
        self._cache = UnitCache(self._buffers)

    @property
    def size(self) -> int:
        """Bytes of the plaintext."""
        return self._fixed.plaintext_size

    @property
    def mode(self) -> str:
        """The cipher mode."""
        return self._fixed.suite.mode

    @property
    def content(self) -> Content:
        """The kind of the plaintext."""
        return self._fixed.content

    @property
    def file_id(self) -> bytes:
        """16 bytes that name this file."""
        return self._fixed.file_id

    @property
    def block_count(self) -> int:
        """The number of segments."""
        return self._fixed.segment_count

    @property
    def block_bytes(self) -> int:
        """Plaintext bytes of every segment but the last: the best unit to read."""
        return self._full

    @property
    def head_bytes(self) -> int:
        """Bytes of the file before the first segment: headers and the start of the payload."""
        return self._fixed.segments_offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the plaintext from `offset` on.

        Raises:
            TruncatedCiphertextError: The range reaches past the end.
            TamperedError: A segment is not the one that belongs there.
        """
        if offset < 0 or offset + buffer.nbytes > self.size:
            raise TruncatedCiphertextError(
                f"{buffer.nbytes} bytes wanted at {offset}, but the plaintext has {self.size}"
            )
        while buffer.nbytes:
            index, at = divmod(offset, self._full)
            length = plaintext_range(self._fixed, index)[1]
            part = buffer[: length - at]
            if part.nbytes == length:
                self._open(index, part)
            else:
                self._copy(index, at=at, part=part, length=length)
            offset += part.nbytes
            buffer = buffer[part.nbytes :]

    def _copy(self, index: int, *, at: int, part: memoryview, length: int) -> None:
        self._cache.copy(
            index, at=at, part=part, decrypt=lambda unit: self._open(index, unit[:length])
        )

    def check_empty(self) -> None:
        """Authenticate the only segment of an empty plaintext, which no read would touch."""
        self._open(0, memoryview(bytearray()))

    def _open(self, index: int, plaintext: memoryview) -> None:
        start, length = segment_range(self._fixed, index)
        buffer = self._buffers.take()
        is_final = index == self.block_count - 1
        try:
            segment = buffer[:length]
            if self.is_remote:
                self._source.read_into(start, segment)
                self._message.open_into(index, segment, plaintext, is_final=is_final)
                return
            self._message.open_from(
                index,
                lambda at, view: self._source.read_into(start + at, view),
                segment,
                plaintext,
                is_final=is_final,
            )
        except TamperedError as error:
            raise TamperedError(error.message, offset=start) from None
        finally:
            self._buffers.give_back(buffer)
