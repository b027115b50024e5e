# SPDX-License-Identifier: Apache-2.0
"""Reads, authenticates and decrypts whole blocks of an encrypted file in one step, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise

from ..buffers import SpareBuffers, shared_buffers
from ..cbc_batches import MIN_LANES, FindLanes, Message, batch_of, decrypt_end, decrypt_together
from ..ciphers import CipherMode, GcmMode, read_in_pieces
from ..errors import DecryptionError, TamperedError
from ..keys.key import Key
from ..sm4_ipp import Sm4Lanes
from ..source import Ciphertext, is_remote
from .layout import BlockLayout
from .records import RecordHead, head_size, parse_head
from .seal import block_digest

_MAX_BATCHED_RECORD_BYTES = 1 << 20  # a batch holds sixteen of them
_MIN_BATCHED_CIPHER_BYTES = 48


class BlockReader:
    """Decrypts blocks. Safe to use from several threads.

    `batch` is the number of blocks that are best read at once; `buffers` hold one record each.
    """

    def __init__(
        self,
        source: Ciphertext,
        key: Key,
        *,
        mode: CipherMode,
        layout: BlockLayout,
        find_lanes: FindLanes,
    ) -> None:
        self._source = source
        self._key = key
        self._mode = mode
        self._records = layout.record_starts
        self._starts = layout.plaintext_starts
        self._seal = layout.seal
        largest = max((b - a for a, b in pairwise(self._records)), default=0)
        self._lanes = None if largest > _MAX_BATCHED_RECORD_BYTES else find_lanes(mode)
        self.batch = batch_of(self._lanes)
        self.buffers = shared_buffers(largest)
        self._batch_buffers = SpareBuffers(largest * self.batch)

    def read_into(self, index: int, buffer: memoryview) -> int:
        """Fill `buffer` with block `index`, and more if that is faster; return the bytes filled.

        Raises:
            TamperedError: A block is not the one the seal lists.
            DecryptionError: A block of an unsealed file does not open.
        """
        lanes = self._lanes
        count = self._count_together(index, buffer.nbytes)
        size = self._starts[index + count] - self._starts[index]
        if lanes is None or count < MIN_LANES:
            size = self._starts[index + 1] - self._starts[index]
            self._read_one(index, buffer[:size])
        else:
            self._read_many(lanes, range(index, index + count), buffer[:size])
        return size

    def _count_together(self, index: int, size: int) -> int:
        """Return how many blocks from `index` on have one length and fit into `size` bytes."""
        last = min(index + self.batch, len(self._starts) - 1)
        length = self._records[index + 1] - self._records[index]
        if length < head_size(self._mode) + _MIN_BATCHED_CIPHER_BYTES:
            return 0
        for stop in range(index + 1, last + 1):
            if (
                self._starts[stop] - self._starts[index] > size
                or self._records[stop] - self._records[stop - 1] != length
            ):
                return stop - 1 - index
        return last - index

    def _read_one(self, index: int, plaintext: memoryview) -> None:
        start, stop = self._records[index], self._records[index + 1]
        buffer = self.buffers.take()
        try:
            record = buffer[: stop - start]
            if isinstance(self._mode, GcmMode) and not is_remote(self._source):
                self._decrypt_pieces(self._mode, index, record, plaintext)
                return
            self._source.read_into(start, record)
            head, ciphertext = self._authenticated(index, record)
            with self._block_errors(index):
                self._mode.decrypt_into(
                    self._key, iv=head.iv, tag=head.tag, ciphertext=ciphertext, plaintext=plaintext
                )
        finally:
            self.buffers.give_back(buffer)

    def _decrypt_pieces(
        self, mode: GcmMode, index: int, record: memoryview, plaintext: memoryview
    ) -> None:
        """Decrypt a block while it is read, through `record`: its head holds the tag."""
        start = self._records[index]
        pieces = read_in_pieces(lambda at, view: self._source.read_into(start + at, view), record)
        first = next(pieces)
        head = self._head(index, first)
        rest = first[head_size(mode) :]
        decryption = mode.decryption(self._key, iv=head.iv, plaintext=plaintext)
        with self._block_errors(index), decryption:
            for piece in chain([rest], pieces):
                decryption.update(piece)
            decryption.finish(head.tag)

    def _read_many(self, lanes: Sm4Lanes, indices: range, plaintext: memoryview) -> None:
        first = self._records[indices.start]
        buffer = self._batch_buffers.take()
        try:
            records = buffer[: self._records[indices.stop] - first]
            self._source.read_into(first, records)
            messages = [
                self._message(index, records, plaintext, first=indices.start) for index in indices
            ]
            decrypt_together(lanes, self._key, messages)
            for index, message in zip(indices, messages, strict=True):
                with self._block_errors(index):
                    decrypt_end(self._mode, self._key, message)
        finally:
            self._batch_buffers.give_back(buffer)

    def _message(
        self, index: int, records: memoryview, plaintext: memoryview, *, first: int
    ) -> Message:
        start, stop = (one - self._records[first] for one in self._records[index : index + 2])
        head, ciphertext = self._authenticated(index, records[start:stop])
        low, high = (one - self._starts[first] for one in self._starts[index : index + 2])
        return Message(iv=head.iv, plaintext=plaintext[low:high], ciphertext=ciphertext)

    def _authenticated(self, index: int, record: memoryview) -> tuple[RecordHead, memoryview]:
        return self._head(index, record), record[head_size(self._mode) :]

    def _head(self, index: int, record: memoryview) -> RecordHead:
        """Return the head of a record after comparing it with the seal.

        In AES-GCM the start of the record is enough.
        """
        offset, head_bytes = self._records[index], head_size(self._mode)
        if self._seal is not None and block_digest(self._mode, record) != self._seal.digest(index):
            raise TamperedError(
                f"block {index} is not the one the seal lists: it was changed, moved or replaced",
                offset=offset,
            )
        head = parse_head(self._mode, bytes(record[:head_bytes]), offset=offset)
        if head.cipher_size != self._records[index + 1] - offset - head_bytes:
            raise TamperedError(f"block {index} changed while the file was open", offset=offset)
        return head

    @contextmanager
    def _block_errors(self, index: int) -> Iterator[None]:
        try:
            yield
        except DecryptionError as error:
            offset = self._records[index]
            if self._seal is not None:
                raise TamperedError(f"block {index} was changed", offset=offset) from None
            raise DecryptionError(
                f"block {index} does not open: {error.message}", offset=offset
            ) from None
