# SPDX-License-Identifier: Apache-2.0
"""A container that the pipeline writes opens to the image, wherever segments, chunks and tensors end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.container.writer import SEGMENT_BYTES
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.files.save.container_stream import ContainerStream
from ckptmgr.files.save.pipeline import container_for, write_image
from ckptmgr.files.save.streams import CHUNK_BYTES
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.image import Extent, Image
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.io.digest import RANGE_BYTES, digest_of
from tests.support import api

KEY = api.Key(bytes(range(16)))
POOL = np.random.default_rng(0).bytes(3 * RANGE_BYTES)
CONTENT = SEGMENT_BYTES - 32  # of a segment


class MemoryFile:
    """A new file in memory."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        raise AssertionError("the store reserves, not the pipeline")

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._lock:
            missing = offset + len(data) - len(self.content)
            self.content.extend(bytes(max(0, missing)))
            self.content[offset : offset + len(data)] = data


def image_of(sizes: list[int]) -> tuple[Image, bytes]:
    parts = [POOL[number : number + size] for number, size in enumerate(sizes)]
    return Image(map(Extent.of, parts)), b"".join(parts)


def opened(content: bytes) -> bytes:
    source = open_container(BytesSource(content), [RawKey(KEY)])
    return read_bytes(source, 0, source.size)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [CONTENT - 1],
        [CONTENT],
        [CONTENT, 1],
        [CHUNK_BYTES - 12288 - 32],
        [CHUNK_BYTES - 12288 - 31],
        [100, RANGE_BYTES - 12288 - 4 * 32 - 100],
        [100, RANGE_BYTES - 12288 - 4 * 32 - 99],
        [5_000_000, 3, 2 * RANGE_BYTES + 7],
    ],
)
def test_container_opens_to_the_image_at_every_edge(sizes: list[int], mode: str) -> None:
    image, expected = image_of(sizes)
    file = MemoryFile()
    written = write_image(image, file, sealer=container_for(image, KEY, mode))  # type: ignore[arg-type]
    content = bytes(file.content)
    assert opened(content) == expected
    assert written.digest == digest_of(BytesSource(content), blank_bytes=8192)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_ranges_are_made_in_any_order_by_several_threads(is_reversed: bool) -> None:
    image, expected = image_of([2 * RANGE_BYTES - 100_000, 150_000])
    sealer = container_for(image, KEY, "AES-GCM")
    stream = ContainerStream(image, sealer)
    content = memoryview(bytearray(stream.size))
    starts = list(range(0, stream.size, RANGE_BYTES))

    def produce(start: int) -> int:
        buffer, offset = memoryview(bytearray(CHUNK_BYTES)), start
        stop = min(start + RANGE_BYTES, stream.size)
        while offset < stop:
            count = stream.produce(offset, [buffer])
            content[offset : offset + count] = buffer[:count]
            offset += count
        return offset - start

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(produce, starts[::-1] if is_reversed else starts))
    assert sum(counts) == stream.size
    assert stream.tail() == b""
    assert opened(bytes(content)) == expected


def test_tensor_that_gives_other_bytes_than_promised_fails_the_save() -> None:
    whole, short = memoryview(POOL[: 9 * 2**20]), memoryview(b"short")
    image = Image([Extent(lambda: whole, 0, whole.nbytes), Extent(lambda: short, 0, 2**23)])
    with pytest.raises(FormatError, match="gave 5 bytes"):
        write_image(image, MemoryFile(), sealer=container_for(image, KEY, "AES-GCM"))  # type: ignore[arg-type]
