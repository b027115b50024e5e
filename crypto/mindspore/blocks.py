# SPDX-License-Identifier: Apache-2.0
"""Writes encrypted `.ckpt` files that MindSpore loads, with a seal over the whole file.

* Blocks are independent: several threads seal different blocks of one file, straight into the
  memory to be written.
* The size of the file is known before the first byte is sealed, and every full record is exactly 4
  MiB (SM4-CBC: 512 KiB): aligned for direct I/O.
* Every block has its own random nonce or IV; a block is sealed once.

>>> key, data = Key(bytes(16)), b"weights and biases"
>>> sealer = BlockSealer(key, "AES-GCM", plaintext_size=len(data))
>>> sealed = bytearray(sealer.sealed_size)
>>> for index in range(sealer.block_count):
...     start, size = sealer.plaintext_range(index)
...     at, record_bytes = sealer.record_range(index)
...     record = memoryview(sealed)[at : at + record_bytes]
...     sealer.seal_into(index, memoryview(data)[start : start + size], record)
>>> end = sealer.finish()
>>> sealed[-len(end) :] = end

`open_blocks_with` opens such a file with several keys: a file has one, and its seal shows which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ..cbc_batches import MIN_LANES, FindLanes, Message, batch_of, encrypt_together, lanes_for
from ..ciphers import CipherMode, Random, check_key, mode_of
from ..errors import CryptoError, DecryptionError, KeyLengthError, KeySourceError, UnsealedError
from ..keys.key import Key
from ..keys.ring import Keys, one_key_error, ring_of
from ..sm4_ipp import Sm4Lanes
from ..source import Ciphertext
from .records import RecordHead, head_size, pack_head, record_size, sniff_mode
from .seal import SEAL_FILE_ID_BYTES, Seal, block_digest, encode_seal, seal_record_size
from .source import BlockSource, open_blocks

__all__ = ["PLAINTEXT_BLOCK_BYTES", "BlockSealer", "BlockSource", "open_blocks", "sniff_mode"]

PLAINTEXT_BLOCK_BYTES = 4 * 2**20 - 48
"""A full record has 4 MiB: 48 + n in AES-GCM, 32 + n + 16 of padding in the CBC modes."""

SM4_BLOCK_BYTES = 512 * 2**10 - 48
"""SM4-CBC is sealed sixteen blocks at a time: 8 MiB for each thread."""

MAX_PLAINTEXT_BLOCK_BYTES = 64 * 2**20
"""MindSpore's own block size, and the largest it reads in every mode."""

_CIPHER_BLOCK_BYTES = 16
_MANY_BLOCKS = 2**20  # half of what one seal can list


class BlockSealer:
    """Cuts a plaintext into blocks, encrypts each, and ends the file with a seal.

    Args:
        key: The user's key.
        mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`.
        plaintext_size: Bytes of the whole plaintext; with `has_crc_trailer`, without that trailer.
        has_crc_trailer: Whether the plaintext ends in MindSpore's CRC trailer. The caller passes
            only the CRC32, to `finish`; the seal stores it, and MindSpore and `BlockSource` find
            the trailer in its place.
        block_bytes: Plaintext bytes per block, a multiple of 16; by default the fastest for the
            mode.
        random: Returns that many unpredictable bytes.
        find_lanes: Returns the accelerator of a mode, or None.

    Attributes:
        batch: How many blocks one `seal_many` best takes; 1 if `seal_into` is as good.
        record_bytes: Bytes of every record but the last.
        block_count: The number of blocks without the seal; 0 for an empty plaintext.
        sealed_size: Bytes of the finished file.

    Raises:
        UnsupportedSuiteError: There is no such mode.
        KeyLengthError: The key does not fit the mode.
        ValueError: A size is out of range.
    """

    def __init__(
        self,
        key: Key,
        mode: str,
        *,
        plaintext_size: int,
        has_crc_trailer: bool = False,
        block_bytes: int | None = None,
        random: Random = os.urandom,
        find_lanes: FindLanes = lanes_for,
    ) -> None:
        if plaintext_size < 0:
            raise ValueError(f"the plaintext size {plaintext_size} is negative")
        self._mode = mode_of(mode)
        check_key(key, self._mode)
        if block_bytes is None:
            block_bytes = _default_block_bytes(self._mode, plaintext_size)
        if block_bytes % _CIPHER_BLOCK_BYTES or not 0 < block_bytes <= MAX_PLAINTEXT_BLOCK_BYTES:
            raise ValueError(f"a block of {block_bytes} bytes is no multiple of 16 up to 64 MiB")
        self._key = key
        self._random = random
        self._has_crc = has_crc_trailer
        self._plaintext_size = plaintext_size
        self._block_bytes = block_bytes
        self._lanes = find_lanes(self._mode)
        self.batch = batch_of(self._lanes)
        self.record_bytes = record_size(self._mode, block_bytes)
        self.block_count = -(-plaintext_size // block_bytes)
        self._seal_offset = self._record_offset(self.block_count)
        seal_size = seal_record_size(self._mode, self.block_count, has_crc=has_crc_trailer)
        self.sealed_size = self._seal_offset + seal_size
        self._digests: list[bytes | None] = [None] * self.block_count
        self._claimed = bytearray(self.block_count)
        self._lock = threading.Lock()

    def plaintext_range(self, index: int) -> tuple[int, int]:
        """Return offset and length of block `index` in the plaintext."""
        self._check_index(index)
        start = index * self._block_bytes
        return start, min(self._block_bytes, self._plaintext_size - start)

    def record_range(self, index: int) -> tuple[int, int]:
        """Return offset and length of the record of block `index` in the file."""
        self._check_index(index)
        start = self._record_offset(index)
        return start, self._record_offset(index + 1) - start

    def seal_into(self, index: int, plaintext: memoryview, record: memoryview) -> None:
        """Encrypt block `index` into its record; several threads may encrypt different blocks.

        `plaintext` are the contiguous bytes of `plaintext_range(index)`, `record` is memory for
        those of `record_range(index)`; they must not overlap.

        Raises:
            ValueError: A length is wrong, or the block was sealed before.
        """
        self._claim(index, plaintext, record)
        self._seal(index, plaintext, record)

    def seal_many(
        self, first: int, plaintexts: Sequence[memoryview], records: Sequence[memoryview]
    ) -> None:
        """Encrypt up to `batch` consecutive blocks, from `first` on, faster than one by one.

        As `seal_into`, but a plaintext may also be in its record, in the place of the ciphertext.

        Raises:
            ValueError: A length is wrong, or a block was sealed before.
        """
        jobs = list(zip(range(first, first + len(records)), plaintexts, records, strict=True))
        for job in jobs:
            self._claim(*job)
        full = [job for job in jobs if job[1].nbytes == self._block_bytes]
        if self._lanes is None or len(full) < MIN_LANES:
            full = []
        else:
            self._seal_together(self._lanes, full)
        for index, plaintext, record in jobs[len(full) :]:
            # A copy, because OpenSSL does not promise to encrypt in place.
            self._seal(index, memoryview(bytes(plaintext)), record)

    def plaintext_room(self, record: memoryview, size: int) -> memoryview:
        """Return the part of a record where `seal_many` accepts a plaintext of `size` bytes."""
        start = head_size(self._mode)
        return record[start : start + size]

    def finish(self, *, crc: int | None = None) -> bytes:
        """Return the seal record, the last bytes of the file.

        `crc` is the CRC32 of the plaintext, if there is a CRC trailer.

        Raises:
            ValueError: A block was not sealed, or the CRC is missing or not expected.
        """
        digests = [digest for digest in self._digests if digest is not None]
        if len(digests) < self.block_count:
            missing = self._digests.index(None)
            raise ValueError(f"block {missing} of {self.block_count} was not sealed")
        if (crc is not None) != self._has_crc:
            raise ValueError("a CRC is given exactly when the file has a CRC trailer")
        seal = Seal(
            file_id=self._random(SEAL_FILE_ID_BYTES),
            block_size=self._block_bytes,
            plaintext_size=self._plaintext_size,
            digests=b"".join(digests),
            crc=crc,
        )
        plaintext = encode_seal(self._mode, self._key, seal=seal)
        record = bytearray(self.sealed_size - self._seal_offset)
        self._encrypt_into(memoryview(plaintext), memoryview(record))
        return bytes(record)

    def _claim(self, index: int, plaintext: memoryview, record: memoryview) -> None:
        wanted = (self.plaintext_range(index)[1], self.record_range(index)[1])
        if (plaintext.nbytes, record.nbytes) != wanted:
            raise ValueError(
                f"block {index} has {wanted[0]} bytes and a record of {wanted[1]},"
                f" not {plaintext.nbytes} and {record.nbytes}"
            )
        with self._lock:
            if self._claimed[index]:
                raise ValueError(f"block {index} is sealed twice")
            self._claimed[index] = 1

    def _seal(self, index: int, plaintext: memoryview, record: memoryview) -> None:
        self._encrypt_into(plaintext, record)
        self._digests[index] = block_digest(self._mode, record)

    def _seal_together(
        self, lanes: Sm4Lanes, jobs: Sequence[tuple[int, memoryview, memoryview]]
    ) -> None:
        start = head_size(self._mode)
        messages = [
            Message(
                iv=self._mode.new_iv(self._random), plaintext=plaintext, ciphertext=record[start:]
            )
            for _, plaintext, record in jobs
        ]
        encrypt_together(lanes, self._mode, self._key, messages)
        for (index, _, record), message in zip(jobs, messages, strict=True):
            head = RecordHead(tag=b"", iv=message.iv, cipher_size=message.ciphertext.nbytes)
            record[:start] = pack_head(self._mode, head)
            self._digests[index] = block_digest(self._mode, record)

    def _encrypt_into(self, plaintext: memoryview, record: memoryview) -> None:
        start = head_size(self._mode)
        iv = self._mode.new_iv(self._random)
        tag = self._mode.encrypt_into(
            self._key, iv=iv, plaintext=plaintext, ciphertext=record[start:]
        )
        head = RecordHead(tag=tag, iv=iv, cipher_size=record.nbytes - start)
        record[:start] = pack_head(self._mode, head)

    def _record_offset(self, index: int) -> int:
        full, rest = divmod(min(index * self._block_bytes, self._plaintext_size), self._block_bytes)
        size = full * record_size(self._mode, self._block_bytes)
        return size + record_size(self._mode, rest) if rest else size

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.block_count:
            raise ValueError(f"there is no block {index} of {self.block_count}")


def _default_block_bytes(mode: CipherMode, plaintext_size: int) -> int:
    if mode.name == "SM4-CBC" and plaintext_size <= _MANY_BLOCKS * SM4_BLOCK_BYTES:
        return SM4_BLOCK_BYTES
    return PLAINTEXT_BLOCK_BYTES


_MAY_BE_THE_KEY = (DecryptionError, KeyLengthError, UnsealedError)


def open_blocks_with(
    source: Ciphertext, keys: Keys, mode: str, *, allow_unsealed: bool = False
) -> BlockSource:
    """Open an encrypted `.ckpt` with the right one of some keys.

    Passphrases and private keys open no such file. `allow_unsealed` takes one key only, because
    without a seal a wrong key is not always noticed.

    Raises:
        KeySourceError: There is no key; or there are several, and no seal.
        CryptoError: As `open_blocks`, about the right key if it is known, else about the first.
    """
    found = ring_of(keys).raw_keys
    if len(found) == 1:
        return open_blocks(source, found[0], mode, allow_unsealed=allow_unsealed)
    failures: list[CryptoError] = []
    for key in found:
        try:
            return open_blocks(source, key, mode)
        except CryptoError as error:
            failures.append(error)
    # An error under the right key comes before those that a wrong key may cause.
    failures.sort(key=lambda error: isinstance(error, _MAY_BE_THE_KEY))
    if failures and allow_unsealed and isinstance(failures[0], UnsealedError):
        raise KeySourceError(
            f"{len(found)} keys are given, and without a seal nothing tells which is the right one",
            hint="give the one that it was saved with",
        ) from failures[0]
    raise failures[0] if failures else one_key_error(0)
