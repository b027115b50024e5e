# SPDX-License-Identifier: Apache-2.0
"""Spill files: staged bytes that do not fit in memory wait on a disk.

* A spill file has no name (`O_TMPFILE`, or unlinked at once where the file system lacks that), so
  that `kill -9` leaves nothing behind. It never outlives the process, so it is never synced.
* It is written in requests of a given size, a few at a time; that bounds the memory of the writing,
  too.
* It holds plaintext. Overwriting does not reliably erase the blocks of a modern disk: keep spill
  files on a disk that is encrypted, or trusted like memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckptmgr.core.errors import StagingExhausted
from ckptmgr.engine.budget import next_region_id
from ckptmgr.io.descriptors import reserve_standard_descriptors
from ckptmgr.io.threads import for_each

Job = tuple[int, Callable[[], memoryview]]


class SpillFile:
    """A nameless file; a write beyond its size makes it grow.

    A missing folder is created with mode 0700. The `id` is never used again for another region of
    this process.
    """

    def __init__(
        self, directory: Path, *, size_bytes: int, block_bytes: int, writes_in_flight: int
    ) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with reserve_standard_descriptors():
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - until close()
        self.id = next_region_id()
        self._path = directory
        self._block_bytes = block_bytes
        self._writes_in_flight = writes_in_flight
        try:
            os.ftruncate(self._file.fileno(), size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._file.fileno()

    def write(self, jobs: Iterable[Job], *, size_bytes: int) -> None:
        """Write contents at their offsets; `size_bytes` is their sum.

        Each content is computed right before it is written.

        Raises:
            StagingExhausted: The disk is full.
            BaseException: From a content.
        """
        blocks = -(-size_bytes // self._block_bytes)
        threads = min(self._writes_in_flight, max(1, blocks))
        for_each(self._blocks(jobs), self._write_block, threads=threads)

    def view(self) -> memoryview:
        """Return the content, backed by the file; the view stays valid after `close`."""
        with reserve_standard_descriptors():
            return memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a flat buffer with the bytes written at `offset`."""
        while buffer.nbytes:
            count = os.preadv(self.descriptor, [buffer], offset)
            if count == 0:
                raise ValueError(f"nothing was written at offset {offset} of this spill file")
            offset += count
            buffer = buffer[count:]

    def close(self) -> None:
        """Give the disk space back once no view is left."""
        self._file.close()

    def _blocks(self, jobs: Iterable[Job]) -> Iterator[tuple[int, memoryview]]:
        for offset, content in jobs:
            view = content()
            for start in range(0, view.nbytes, self._block_bytes):
                yield offset + start, view[start : start + self._block_bytes]

    def _write_block(self, block: tuple[int, memoryview]) -> None:
        offset, view = block
        try:
            while view.nbytes:
                count = os.pwrite(self.descriptor, view, offset)
                offset += count
                view = view[count:]
        except OSError as error:
            raise StagingExhausted(
                f"a spill file cannot be written: {error.strerror}",
                path=self._path,
                hint="free disk space, or choose another spill_directory (offload_path)",
            ) from error
