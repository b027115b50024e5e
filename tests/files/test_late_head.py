# SPDX-License-Identifier: Apache-2.0
"""A file that states a CRC32 in its head is written in one pass: the head, which comes first, is made last."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import load_checkpoint, save_checkpoint
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.files.save.compressed import frames_sealer, plan_of, read_image, write_frames
from ckptmgr.files.save.pipeline import container_for, sealer_for, write_image
from ckptmgr.files.save.streams import CHUNK_BYTES
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.image import MOST_LATE_BYTES, Image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.source import BytesSource, Source, read_bytes
from ckptmgr.formats.tensor import Tensor
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, digest_of
from tests.support import api
from tests.support.stored import image_bytes, read_safetensors
from tests.support.strategies import named_tensor

_KEY = api.Key(bytes(range(16)))
_NOISE = np.random.default_rng(0).bytes(2 * RANGE_BYTES)
_MODES = ("AES-GCM", "AES-CBC", "SM4-GCM", "SM4-CBC")
_WAYS = [
    (mode, is_compressed)
    for mode in (None, "AES-GCM", "AES-CBC")
    for is_compressed in (False, True)
]


class _MemoryFile:
    """A new file in memory."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        raise AssertionError("the store reserves")

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._lock:
            self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
            self.content[offset : offset + len(data)] = data

    def sync(self) -> None:
        raise AssertionError("the store syncs")

    def close(self) -> None:
        raise AssertionError("the store closes")


def _noise(name: str, size: int) -> Tensor:
    return named_tensor(name, "uint8", (size,), _NOISE[:size])


def _write(image: Image, mode: str | None, *, is_compressed: bool) -> tuple[bytes, FileDigest]:
    """Write a file; return its plaintext and the digest that was reported, which is checked."""
    file = _MemoryFile()
    if is_compressed:
        frames = frames_sealer(image.size, _KEY, mode) if mode else None
        plan, read = plan_of(image), read_image(image)
        written = write_frames(plan, read, file, level=1, sealer=frames, is_head_late=True)
        digest = written.digest
    else:
        sealer = container_for(image, _KEY, mode) if mode else None
        digest = write_image(image, file, sealer=sealer).digest
    assert digest == digest_of(BytesSource(file.content), blank_bytes=8192 if mode else 0)
    source: Source = BytesSource(file.content)
    source = open_container(source, [RawKey(_KEY)]) if mode else source
    source = open_frames(source) if is_compressed else source
    return read_bytes(source, 0, source.size), digest


@pytest.mark.parametrize(("mode", "is_compressed"), _WAYS)
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [1],
        [0, 5000, 5000],
        [CHUNK_BYTES - 5000],
        [CHUNK_BYTES + 1],
        [100, RANGE_BYTES - 500],
        [RANGE_BYTES - 12288 - 4 * 32 - 256],
        [3_000_000] * 9 + [7],
    ],
)
def test_file_is_the_image_at_every_edge(
    sizes: list[int], mode: str | None, is_compressed: bool
) -> None:
    items = [_noise(f"t{number}", size) for number, size in enumerate(sizes)]
    image = build_safetensors_image(items, crc=True)
    content, _ = _write(image, mode, is_compressed=is_compressed)
    assert content == image_bytes(image)
    read_safetensors(content, crc=True)


@pytest.mark.parametrize("mode", [None, *_MODES])
def test_longest_late_head_fits_where_it_is_made(mode: str | None) -> None:
    long = {"a": "b" * (MOST_LATE_BYTES - 192)}
    image = build_safetensors_image([_noise("w", 5_000_000)], metadata=long, crc=True)
    assert image.head_bytes == MOST_LATE_BYTES
    for is_compressed in (False, True):
        content, _ = _write(image, mode, is_compressed=is_compressed)
        assert content == image_bytes(image)


def _changing(name: str, size: int) -> Tensor:
    """Return a tensor that gives other bytes each time."""
    times = itertools.count(1)
    tensor = _noise(name, size)
    return tensor._replace(content=lambda: memoryview(bytes([next(times) % 256]) * size))


@pytest.mark.parametrize(("mode", "is_compressed"), _WAYS)
def test_crc_is_of_the_bytes_that_are_in_the_file(mode: str | None, is_compressed: bool) -> None:
    small = [_changing(f"small{number}", 100) for number in range(9)]
    large = [_changing(f"t{number}", 6_000_000) for number in range(6)]
    image = build_safetensors_image([*small, *large], crc=True)
    content, _ = _write(image, mode, is_compressed=is_compressed)
    assert len(read_safetensors(content, crc=True)) == 15


@pytest.mark.parametrize(("mode", "is_compressed"), _WAYS)
@pytest.mark.parametrize("size", [100, 2 * RANGE_BYTES])
def test_scalar_that_became_negative_fails_the_save(
    size: int, mode: str | None, is_compressed: bool
) -> None:
    values = itertools.chain([1], itertools.repeat(-1))
    scalar = named_tensor("n", "int8", ())
    items = [
        scalar._replace(content=lambda: memoryview(bytes([next(values) % 256]))),
        _noise("w", size),
    ]
    image = build_safetensors_image(items, crc=True)
    before = set(threading.enumerate())
    with pytest.raises(UnsupportedError, match=r"negative scalar \(-1\).*'n'"):
        _write(image, mode, is_compressed=is_compressed)
    assert set(threading.enumerate()) <= before


def test_tensors_that_fail_beside_the_head_leave_all_memory_for_the_next_save() -> None:
    short = named_tensor("a", "uint8", (9_000_000,), b"")
    items = [short._replace(content=lambda: memoryview(b"lost")), _noise("b", 20_000_000)]
    for _ in range(5):
        with pytest.raises(FormatError, match=r"has 4 bytes.*'a'"):
            _write(build_safetensors_image(items, crc=True), None, is_compressed=False)
    image = build_safetensors_image(items[1:], crc=True)
    assert _write(image, None, is_compressed=False)[0] == image_bytes(image)


@pytest.mark.parametrize("mode", [None, "AES-GCM"])
def test_several_saves_at_once_do_not_wait_for_each_other_forever(mode: str | None) -> None:
    images = [build_safetensors_image([_noise("w", 20_000_000 + n)], crc=True) for n in range(5)]
    contents: dict[int, bytes] = {}

    def save(number: int) -> None:
        contents[number] = _write(images[number], mode, is_compressed=False)[0]

    threads = [threading.Thread(target=save, args=(number,), daemon=True) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [contents[number] for number in range(5)] == list(map(image_bytes, images))


def test_image_with_a_late_head_is_not_sealed_in_blocks() -> None:
    image = build_safetensors_image([_noise("w", 100)], crc=True)
    with pytest.raises(ValueError, match="in its late head"):
        write_image(image, _MemoryFile(), sealer=sealer_for(image, _KEY, "AES-GCM"))


@pytest.mark.parametrize("key", [None, bytes(32)])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_saved_checkpoint_has_its_crc(
    tmp_path: Path, compression: str | None, key: bytes | None
) -> None:
    values = {"w": np.frombuffer(_NOISE, np.float32)[:5_000_000], "n": np.int64(3)}
    path = save_checkpoint(
        values,
        tmp_path / "net",
        format="safetensors",
        crc_check=True,
        compression=compression,
        enc_key=key,
    ).path
    loaded = load_checkpoint(path, crc_check=True, dec_key=key)
    assert np.asarray(loaded["w"]).tobytes() == values["w"].tobytes()
