# SPDX-License-Identifier: Apache-2.0
"""A file of the writer of compressed files expands to the image; when it fails, it leaves nothing running."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.files.save.compressed import (
    FrameFigures,
    WrittenFrames,
    frames_sealer,
    plan_of,
    read_image,
    read_once,
    write_frames,
)
from ckptmgr.files.save.compressed_chunks import SequentialDigests, Spool, Stopped
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.dtypes import dtype_of
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.image import Image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.source import BytesSource, Source, read_bytes
from ckptmgr.formats.tensor import Tensor, TensorSpec, tensor_from_array
from ckptmgr.io.digest import RANGE_BYTES, digest_of
from ckptmgr.io.source_image import SourceImage
from tests.support import api

KEY = api.Key(bytes(range(32)))
MODES = (None, "AES-GCM", "AES-CBC", "SM4-GCM", "SM4-CBC")
NOISE = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)


class MemoryFile:
    """A new file in memory; the write numbered `fail_at` fails."""

    def __init__(self, *, fail_at: int = -1) -> None:
        self.content = bytearray()
        self._writes = 0
        self._fail_at = fail_at
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        raise AssertionError("the size is not known")

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._lock:
            self._writes += 1
            if self._writes - 1 == self._fail_at:
                raise OSError(5, "disk is gone")
            self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
            self.content[offset : offset + len(data)] = data

    def sync(self) -> None: ...

    def close(self) -> None: ...


def image_with(**arrays: np.ndarray) -> Image:
    return build_safetensors_image([tensor_from_array(name, a) for name, a in arrays.items()])


def written_into(file: MemoryFile, image: Image, mode: str | None = None) -> WrittenFrames:
    sealer = None if mode is None else frames_sealer(image.size, KEY, mode)
    return write_frames(plan_of(image), read_image(image), file, level=1, sealer=sealer)


def bytes_of(image: Image) -> bytes:
    return b"".join(bytes(view) for view in image.views(0, image.size))


def expanded(file: MemoryFile, mode: str | None) -> bytes:
    source: Source = BytesSource(file.content)
    if mode is not None:
        source = open_container(source, [RawKey(KEY)])
    frames = open_frames(source)
    return read_bytes(frames, 0, frames.size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 1, 5000, 4 << 20, 9 << 20])
def test_file_expands_to_the_image_and_its_digests_are_right(mode: str | None, size: int) -> None:
    image = image_with(noise=NOISE[:size], w=np.arange(700, dtype=np.float32), e=np.zeros((0, 2)))
    file = MemoryFile()
    written = written_into(file, image, mode)
    assert expanded(file, mode) == bytes_of(image)
    blank_bytes = 0 if mode is None else 8192
    assert written.digest == digest_of(BytesSource(file.content), blank_bytes=blank_bytes)


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 << 20), max_size=12),
    spread=st.sampled_from([1, 4, 256]),
    mode=st.sampled_from([None, "AES-GCM"]),
)
def test_any_tensors_come_back(sizes: list[int], spread: int, mode: str | None) -> None:
    pool = NOISE % np.uint8(spread) if spread < 256 else NOISE
    image = image_with(**{f"t{index}": pool[:size] for index, size in enumerate(sizes)})
    file = MemoryFile()
    written_into(file, image, mode)
    assert expanded(file, mode) == bytes_of(image)


def test_source_is_compressed_as_an_image_is() -> None:
    image = image_with(noise=NOISE[:5_000_000], w=np.arange(700, dtype=np.float32))
    file = MemoryFile()
    source = SourceImage(BytesSource(bytes_of(image)), image.size)
    write_frames(plan_of(image), read_once(source), file, level=3)
    assert expanded(file, None) == bytes_of(image)


def test_memory_in_which_planes_are_made_is_wiped() -> None:
    weights = np.random.default_rng(0).standard_normal(50_000, np.float32)
    low_bytes, exponents = weights.view("<u2")[::2], weights.view("<u4") >> 23
    image, seen = image_with(w=weights), []
    write_frames(
        plan_of(image),
        read_image(image),
        MemoryFile(),
        level=1,
        wipe=lambda view: seen.append(bytes(view)),
    )
    for plane in (low_bytes, exponents.astype(np.uint8)):
        assert any(plane.tobytes() in memory for memory in seen)


def test_figures_tell_each_element_type() -> None:
    image = image_with(noise=NOISE[:5000], w=np.zeros(7000, np.float32))
    by_dtype = written_into(MemoryFile(), image).by_dtype
    assert by_dtype.keys() == {"header", "float32", "uint8"}
    assert by_dtype["uint8"].ratio == 1.0
    assert by_dtype["float32"].raw_bytes == 28_000
    assert by_dtype["float32"].ratio < 0.01
    assert by_dtype["float32"].gigabytes_per_s > 0
    assert (FrameFigures().ratio, FrameFigures().gigabytes_per_s) == (1.0, 0.0)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("mode", [None, "AES-GCM"])
def test_failed_write_is_raised_and_nothing_keeps_running(fail_at: int, mode: str | None) -> None:
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="disk is gone"):
        written_into(MemoryFile(fail_at=fail_at), image_with(n=NOISE), mode)
    assert set(threading.enumerate()) <= before


def test_tensor_that_cannot_be_read_stops_the_writer() -> None:
    spec = TensorSpec(name="w", dtype=dtype_of("uint8"), shape=(9 << 20,))
    image = build_safetensors_image([Tensor(spec=spec, content=lambda: memoryview(b"short"))])
    with pytest.raises(FormatError, match="5 bytes"):
        written_into(MemoryFile(), image)


def test_failure_keeps_no_tensor_alive() -> None:
    array = NOISE.copy()
    gone = weakref.ref(array)
    image = image_with(n=array)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            written_into(MemoryFile(fail_at=0), image)
    finally:
        gc.enable()
    del array, image
    assert gone() is None


def test_stopped_spool_accepts_nothing_more() -> None:
    spool = Spool(MemoryFile(), None)
    spool.stop()
    with pytest.raises(Stopped):
        spool.append(b"frame")


def test_writer_that_waits_for_room_hears_that_the_others_failed() -> None:
    spool = Spool(MemoryFile(), None)  # no thread writes the appended bytes
    raised: list[Stopped] = []

    def fill() -> None:
        try:
            for _ in range(9):
                spool.append(bytes(4 << 20))
        except Stopped as error:
            raised.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    spool.stop()
    thread.join()
    assert len(raised) == 1


def test_digests_of_pieces_are_those_of_the_whole() -> None:
    content = bytes(NOISE) * 2
    digests = SequentialDigests(blank_bytes=3)
    digests.update(memoryview(bytes(3)))
    for start in range(3, len(content), 1_000_003):
        digests.update(memoryview(content)[start : start + 1_000_003])
    assert digests.value() == digest_of(BytesSource(content), blank_bytes=3)
    whole = SequentialDigests()
    whole.update(memoryview(content)[:RANGE_BYTES])
    assert len(whole.value().ranges) == 1
