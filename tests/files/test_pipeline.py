# SPDX-License-Identifier: Apache-2.0
"""The pipeline writes the image into a file, byte for byte; when it fails, it leaves nothing running."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.mindspore.blocks import SM4_BLOCK_BYTES, BlockSealer, open_blocks
from ckptmgr.files.save import pipeline
from ckptmgr.files.save.pipeline import Written, container_for, sealer_for, write_image
from ckptmgr.files.save.streams import CHUNK_BYTES
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.file_crc import encode_trailer
from ckptmgr.formats.image import Extent, Image
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.formats.tensor import Tensor
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, digest_of
from tests.crypto.lanes import Library, finder
from tests.support import api
from tests.support.strategies import named_tensor, tensor_of

_POOL = np.random.default_rng(0).bytes(3 * RANGE_BYTES + 12_345)
_MODES = {
    "AES-GCM": api.Key(bytes(range(32))),
    "AES-CBC": api.Key(bytes(24)),
    "SM4-CBC": api.Key(bytes(16)),
}
_RECORD_CONTENT = CHUNK_BYTES - 48
_SM4_CONTENT = SM4_BLOCK_BYTES


class _MemoryFile:
    """A new file in memory; `writes` counts the calls, and the one numbered `fail_at` raises `error`."""

    def __init__(self, *, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.content = bytearray()
        self.writes = 0
        self._fail_at = fail_at
        self._error = error
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        raise AssertionError("the store reserves, not the pipeline")

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._lock:
            self.writes += 1
            if self.writes - 1 == self._fail_at and self._error is not None:
                raise self._error
            missing = offset + len(data) - len(self.content)
            self.content.extend(bytes(max(0, missing)))
            self.content[offset : offset + len(data)] = data

    def sync(self) -> None:
        raise AssertionError("the store syncs, not the pipeline")

    def close(self) -> None:
        raise AssertionError("the store closes, not the pipeline")


def _image(sizes: list[int], *, crc: bool = False) -> tuple[Image, bytes]:
    """Return an image of segments with these sizes, and its bytes."""
    segments, expected, offset = [], b"", 0
    for size in sizes:
        content = _POOL[offset : offset + size]
        segments.append(Extent.of(content))
        expected += content
        offset += size // 2 + 1
    trailer = encode_trailer(zlib.crc32(expected)) if crc else b""
    return Image(segments, has_crc_trailer=crc), expected + trailer


def _write(image: Image, mode: str | None) -> tuple[bytes, Written]:
    file = _MemoryFile()
    sealer = None if mode is None else sealer_for(image, _MODES[mode], mode)
    written = write_image(image, file, sealer=sealer)
    return bytes(file.content), written


def _write_in_batches(image: Image) -> tuple[bytes, Written]:
    """Write with an accelerator that takes sixteen blocks at once, whatever this machine has."""
    file, key = _MemoryFile(), _MODES["SM4-CBC"]
    sealer = BlockSealer(
        key,
        "SM4-CBC",
        plaintext_size=image.body_size,
        has_crc_trailer=image.has_crc_trailer,
        find_lanes=finder(Library()),
    )
    written = write_image(image, file, sealer=sealer)
    return bytes(file.content), written


def _opened(content: bytes, mode: str | None) -> bytes:
    if mode is None:
        return content
    source = open_blocks(BytesSource(content), _MODES[mode], mode)
    return read_bytes(source, 0, source.size)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


_EDGES = (
    *(1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1),
    *(RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, RANGE_BYTES + CHUNK_BYTES),
    *(2 * RANGE_BYTES - 17, 2 * RANGE_BYTES, 2 * RANGE_BYTES + CHUNK_BYTES + 1),
)


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("size", _EDGES)
def test_plain_file_is_the_image_at_every_edge(size: int, crc: bool) -> None:
    image, expected = _image([size], crc=crc)
    content, written = _write(image, None)
    assert content == expected
    assert written.digest == digest_of(BytesSource(content))


@pytest.mark.parametrize("mode", list(_MODES))
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize(
    "size", [1, _RECORD_CONTENT, _RECORD_CONTENT + 1, 4 * _RECORD_CONTENT, RANGE_BYTES + 5]
)
def test_sealed_file_opens_to_the_image_at_every_edge(size: int, crc: bool, mode: str) -> None:
    image, expected = _image([size], crc=crc)
    content, written = _write(image, mode)
    assert _opened(content, mode) == expected
    assert written.digest == digest_of(BytesSource(content))


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [5 * _SM4_CONTENT + 1],
        [16 * _SM4_CONTENT],
        [16 * _SM4_CONTENT + 1],
        [32 * _SM4_CONTENT],
        [100, 3 * _SM4_CONTENT, 7, 7, 15 * _SM4_CONTENT, 900_000],
    ],
)
def test_file_sealed_in_batches_opens_to_the_image(sizes: list[int], crc: bool) -> None:
    image, expected = _image(sizes, crc=crc)
    content, written = _write_in_batches(image)
    assert _opened(content, "SM4-CBC") == expected
    assert written.digest == digest_of(BytesSource(content))


@pytest.mark.slow
def test_several_saves_in_batches_do_not_wait_for_each_other_forever() -> None:
    images = [_image([33 * _SM4_CONTENT + n]) for n in range(6)]
    contents: dict[int, bytes] = {}

    def save(number: int) -> None:
        contents[number] = _write_in_batches(images[number][0])[0]

    threads = [threading.Thread(target=save, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    opened = [_opened(contents[number], "SM4-CBC") for number in range(6)]
    assert opened == [expected for _, expected in images]


@pytest.mark.parametrize("sealing", [None, sealer_for, container_for])
def test_small_file_is_written_when_all_buffers_but_one_are_lent(
    sealing: Callable[[Image, api.Key, str], BlockSealer | ContainerSealer] | None,
) -> None:
    image, _ = _image([3 << 20])
    sealer = None if sealing is None else sealing(image, _MODES["AES-GCM"], "AES-GCM")
    file = _MemoryFile()
    written: list[Written] = []

    def save() -> None:
        written.append(write_image(image, file, sealer=sealer))

    saving = threading.Thread(target=save, daemon=True)
    lent = pipeline._buffers.take_many(pipeline._BUFFERS - 1)
    try:
        saving.start()
        saving.join(timeout=30)
        assert not saving.is_alive()
    finally:
        for buffer in lent:
            pipeline._buffers.give_back(buffer)
        saving.join(timeout=30)
    blank = 8192 if sealing is container_for else 0
    expected = digest_of(BytesSource(bytes(file.content)), blank_bytes=blank)
    assert [one.digest for one in written] == [expected]


@st.composite
def _sizes(draw: st.DrawFn) -> list[int]:
    small = st.integers(0, 5000)
    large = st.sampled_from(_EDGES[1:8]).flatmap(lambda edge: st.integers(edge - 3, edge + 3))
    few = draw(st.lists(large, max_size=2))
    return draw(st.permutations(few + draw(st.lists(small, min_size=1, max_size=30))))


@settings(max_examples=25)
@given(sizes=_sizes(), crc=st.booleans(), mode=st.sampled_from([None, "AES-GCM"]))
def test_file_of_any_segments_is_the_image(sizes: list[int], crc: bool, mode: str | None) -> None:
    image, expected = _image(sizes, crc=crc)
    content, written = _write(image, mode)
    assert _opened(content, mode) == expected
    assert written.digest == digest_of(BytesSource(content))


@pytest.mark.parametrize("mode", [None, "AES-GCM"])
def test_image_of_nothing_is_written(mode: str | None) -> None:
    content, written = _write(Image([]), mode)
    assert _opened(content, mode) == b""
    assert written.digest == digest_of(BytesSource(content))


def test_empty_file_has_no_ranges() -> None:
    content, written = _write(Image([]), None)
    assert (content, written.digest) == (b"", FileDigest(size_bytes=0, ranges=()))


def test_tail_that_crosses_a_range_is_digested_in_both() -> None:
    # Body and trailer together are 5 bytes longer than a range.
    image, expected = _image([RANGE_BYTES - 12], crc=True)
    content, written = _write(image, None)
    assert content == expected
    assert len(written.digest.ranges) == 2
    assert written.digest == digest_of(BytesSource(content))


def test_same_image_is_sealed_differently_each_time() -> None:
    image, _ = _image([1000])
    assert _write(image, "AES-GCM")[0] != _write(image, "AES-GCM")[0]


@pytest.mark.parametrize("mode", [None, "AES-GCM"])
def test_failing_write_is_the_error_whichever_it_is(mode: str | None) -> None:
    image, _ = _image([2 * RANGE_BYTES + 100], crc=True)
    file = _MemoryFile()
    write_image(image, file, sealer=sealer_for(image, _MODES["AES-GCM"], mode) if mode else None)
    for position in range(file.writes):
        error = OSError(28, "No space left on device")
        failing = _MemoryFile(fail_at=position, error=error)
        sealer = sealer_for(image, _MODES["AES-GCM"], mode) if mode else None
        with pytest.raises(OSError, match="No space left") as caught:
            write_image(image, failing, sealer=sealer)
        assert caught.value is error


def test_failing_write_of_a_small_file_is_the_error() -> None:
    image, _ = _image([100], crc=True)
    for position in range(2):
        with pytest.raises(OSError, match="gone"):
            write_image(image, _MemoryFile(fail_at=position, error=OSError(5, "gone")))


def test_save_after_many_failed_ones_has_all_its_buffers() -> None:
    image, expected = _image([RANGE_BYTES + 1])
    for position in range(5):
        for _ in range(4):
            with pytest.raises(OSError, match="gone"):
                write_image(image, _MemoryFile(fail_at=position % 3, error=OSError(5, "gone")))
    assert _write(image, None)[0] == expected


def test_several_saves_at_once_do_not_mix() -> None:
    images = [_image([RANGE_BYTES + n, 7], crc=True) for n in range(4)]
    contents: dict[int, bytes] = {}

    def save(number: int) -> None:
        contents[number] = _write(images[number][0], None)[0]

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [contents[number] for number in range(4)] == [expected for _, expected in images]


class _InterruptedFile(_MemoryFile):
    """Presses Ctrl-C in the first write, and goes on with it once the main thread has heard."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing = False
        self._heard = threading.Event()

    def hear(self, *_: object) -> None:
        self._heard.set()
        raise KeyboardInterrupt

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        if offset == 0:
            self.is_writing = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert self._heard.wait(timeout=60)
            super().write_at(offset, _POOL[: RANGE_BYTES // 2])  # some work, so that it lasts
            self.is_writing = False


@pytest.mark.parametrize("size", [2 * RANGE_BYTES, 100])
def test_ctrl_c_stops_the_save_only_when_nobody_writes_any_more(size: int) -> None:
    file = _InterruptedFile()
    before = signal.signal(signal.SIGINT, file.hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_image(_image([size])[0], file)
    finally:
        signal.signal(signal.SIGINT, before)
    assert file.is_writing == (size < CHUNK_BYTES)  # a small file is written by the main thread


def _image_of_a_failed_save() -> weakref.ref[Image]:
    def lost() -> memoryview:
        raise OSError(5, "gone")

    image = Image([Extent(lost, 0, 2 * RANGE_BYTES)])
    with contextlib.suppress(OSError):
        write_image(image, _MemoryFile())
    return weakref.ref(image)


def test_failure_does_not_keep_the_tensors_alive() -> None:
    gc.disable()  # a cycle would be found sooner or later; until then it holds gigabytes
    try:
        assert _image_of_a_failed_save()() is None
    finally:
        gc.enable()


def _lying(size_bytes: int, *, by: int) -> Tensor:
    honest = named_tensor("large", "uint8", (size_bytes,), content=b"")
    return tensor_of(honest.spec, _POOL[: size_bytes + by])


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("size", [100, RANGE_BYTES + CHUNK_BYTES])
@pytest.mark.parametrize("mode", [None, "AES-GCM"])
def test_tensor_that_gives_other_bytes_than_promised_is_named(
    mode: str | None, size: int, by: int
) -> None:
    image = build_ckpt_image([named_tensor("small"), _lying(size, by=by)])
    with pytest.raises(FormatError, match=f"{size + by} bytes") as caught:
        _write(image, mode)
    assert caught.value.tensor == "large"


def test_tensor_whose_content_raises_stops_the_save() -> None:
    def lost() -> memoryview:
        raise RuntimeError("device lost")

    spec = named_tensor("w", "uint8", (2 * RANGE_BYTES,), content=b"").spec
    with pytest.raises(RuntimeError, match="device lost"):
        _write(build_ckpt_image([Tensor(spec=spec, content=lost)]), None)


def test_written_seconds_are_those_of_the_stream() -> None:
    image, _ = _image([100])
    assert _write(image, None)[1].write_s > 0
