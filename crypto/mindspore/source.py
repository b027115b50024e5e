# SPDX-License-Identifier: Apache-2.0
"""The plaintext of an encrypted MindSpore `.ckpt` as a source: random access, authenticated.

* A block is read, authenticated and decrypted in one step, from the same bytes in memory.
* With a seal, a failing block is tampering, because the seal proved the key; without one the key
  may be wrong.
* A block that a buffer covers is decrypted directly into it; other reads go through a small cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from blake3 import blake3
from cryptography.hazmat.primitives import constant_time

from ..buffers import UnitCache
from ..cbc_batches import FindLanes, lanes_for
from ..ciphers import IV_BYTES, CipherMode, check_key, mode_of
from ..errors import TruncatedCiphertextError
from ..keys.key import Key
from ..source import Ciphertext, is_remote
from .layout import BlockLayout, read_layout
from .reader import BlockReader
from .records import head_size, read_bytes
from .seal import crc_trailer


def open_blocks(
    source: Ciphertext,
    key: Key,
    mode: str,
    *,
    allow_unsealed: bool = False,
    find_lanes: FindLanes = lanes_for,
) -> BlockSource:
    """Open the encrypted `.ckpt` in `source` with `mode` `AES-GCM`, `AES-CBC` or `SM4-CBC`.

    With `allow_unsealed`, also open a file without a seal: order, number and end of its blocks are
    then not authenticated, and in the CBC modes nothing is. A lone CRC trailer behind the last
    record is ignored.

    Raises:
        KeyLengthError: The key does not fit the mode.
        UnsupportedSuiteError: The mode is unknown, the file is of MindSpore 1.x, or a newer version
            sealed it.
        DecryptionError: The key or the mode is wrong, the seal was changed, or the file is not
            encrypted.
        UnsealedError: The file has no seal.
        TruncatedCiphertextError: The file ends inside a record.
        TamperedError: The records are not those the seal lists, or a record head is inconsistent.
    """
    suite = mode_of(mode)
    check_key(key, suite)
    layout = read_layout(source, key, mode=suite, allow_unsealed=allow_unsealed)
    return BlockSource(source, key, mode=suite, layout=layout, find_lanes=find_lanes)


class BlockSource:
    """The decrypted bytes of a file. Made by `open_blocks`; safe to read from several threads.

    Attributes:
        block_count: The number of blocks without the seal.
        file_id: 16 bytes that name this save, or None without a seal.
        batch: How many blocks one `read_into` best covers.
        crc: CRC32 that the seal stores of the plaintext before its CRC trailer, or None.
    """

    def __init__(
        self,
        source: Ciphertext,
        key: Key,
        *,
        mode: CipherMode,
        layout: BlockLayout,
        find_lanes: FindLanes = lanes_for,
    ) -> None:
        self._source = source
        self.is_remote = is_remote(source)
        self._key = key
        self._mode = mode
        self._records = layout.record_starts
        self._starts = layout.plaintext_starts
        self._ivs = layout.ivs
        self._seal = seal = layout.seal
        self._seal_digest = layout.seal_digest
        self.block_count = len(self._starts) - 1
        self.file_id = None if seal is None else seal.file_id
        self.crc = None if seal is None else seal.crc
        self._trailer = b"" if self.crc is None else crc_trailer(self.crc)
        self._blocks = BlockReader(source, key, mode=mode, layout=layout, find_lanes=find_lanes)
        self.batch = self._blocks.batch
        self._cache = UnitCache(self._blocks.buffers)

    @property
    def size(self) -> int:
        """Bytes of the plaintext, including MindSpore's CRC trailer if there is one."""
        return self._starts[-1] + len(self._trailer)

    @property
    def is_sealed(self) -> bool:
        """Whether order, number and end of the blocks are authenticated."""
        return self._seal is not None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the plaintext from `offset` on.

        Raises:
            TruncatedCiphertextError: The range reaches past the end.
            TamperedError: A block is not the one the seal lists.
            DecryptionError: A block of an unsealed file does not open.
        """
        self._fill(offset, buffer, self._read_block)

    @property
    def block_bytes(self) -> int | None:
        """Plaintext bytes of every block but the last, or None without a seal."""
        return None if self._seal is None else self._seal.block_size

    @property
    def seal_offset(self) -> int:
        """Offset of the last record: the seal, if there is one."""
        return self._records[-1]

    def is_sealed_by(self, record: bytes) -> bool:
        """Return whether a record, with its head, is the seal that this source was opened with."""
        return constant_time.bytes_eq(blake3(record).digest(), self._seal_digest)

    def peek_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with plaintext that is NOT authenticated, decrypting only the covered blocks.

        For navigation in a file whose blocks are all read afterwards: the caller must compare the
        bytes of this method with those of `read_into`.

        Raises:
            TruncatedCiphertextError: The range reaches past the end.
        """
        self._fill(offset, buffer, self._peek)

    def _fill(
        self, offset: int, buffer: memoryview, fill: Callable[[int, int, memoryview], int]
    ) -> None:
        """Fill `buffer` block by block; `fill` returns the number of bytes it filled."""
        if offset < 0 or offset + buffer.nbytes > self.size:
            raise TruncatedCiphertextError(
                f"{buffer.nbytes} bytes wanted at {offset}, but the plaintext has {self.size}"
            )
        while buffer.nbytes:
            if offset >= self._starts[-1]:
                at = offset - self._starts[-1]
                buffer[:] = self._trailer[at : at + buffer.nbytes]
                return
            index = bisect_right(self._starts, offset) - 1
            filled = fill(index, offset - self._starts[index], buffer)
            offset += filled
            buffer = buffer[filled:]

    def _read_block(self, index: int, at: int, buffer: memoryview) -> int:
        size = self._starts[index + 1] - self._starts[index]
        part = buffer[: size - at]
        if part.nbytes == size:
            return self._blocks.read_into(index, buffer)
        self._cache.copy(
            index, at=at, part=part, decrypt=lambda unit: self._blocks.read_into(index, unit[:size])
        )
        return part.nbytes

    def _peek(self, index: int, at: int, buffer: memoryview) -> int:
        part = buffer[: self._starts[index + 1] - self._starts[index] - at]
        content = self._records[index] + head_size(self._mode)
        first, skip = divmod(at, IV_BYTES)
        start = content + first * IV_BYTES
        stop = min(
            self._records[index + 1], start + -(-(skip + part.nbytes) // IV_BYTES) * IV_BYTES
        )
        iv = self._ivs[index * IV_BYTES : (index + 1) * IV_BYTES]
        # One read: in an uncached file, the block before may be in another page.
        before = IV_BYTES if first else 0
        stored = read_bytes(self._source, start - before, length=stop - start + before)
        clear = self._mode.peek_at(
            self._key,
            iv=iv,
            preceding=stored[:before] or iv,
            first_block=first,
            ciphertext=memoryview(stored)[before:],
        )
        part[:] = clear[skip : skip + part.nbytes]
        return part.nbytes
