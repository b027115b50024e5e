# SPDX-License-Identifier: Apache-2.0
"""Single tensors out of an object store: the cost of a read in requests and bytes, and that nothing wrong comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CkptmgrError,
    KeyProblem,
    RangeSource,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    TruncatedError,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.signing import SigningKey
from ckptmgr.formats.source import BytesSource
from ckptmgr.maintenance import convert

MIB = 1 << 20
KEY = bytes(range(32))
STATE = {f"w{number}": np.full((1024, 1024), number, np.float32) for number in range(6)}  # 4 MiB
HEAD = 128 * 1024


class Bucket:
    """An object store that notes its requests."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def get(self, start: int, length: int) -> bytes:
        self.asked.append((start, length))
        return self.data[start : start + length]

    def source(self) -> RangeSource:
        return RangeSource(self.get, size_bytes=len(self.data), name="s3://runs/net-1")

    @property
    def asked_bytes(self) -> int:
        return sum(length for _, length in self.asked)


def stored(directory: Path, **options: Any) -> Bucket:
    return Bucket(save_checkpoint(STATE, directory / "net-1", **options).path.read_bytes())


def container_of_a_ckpt(directory: Path) -> Bucket:
    plain = save_checkpoint(STATE, directory / "net-1").path
    target = plain.with_name("net-1.ckpt.ckpe")
    return Bucket(convert.encrypt_file(plain, target, key=Key(KEY)).target.path.read_bytes())


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-GCM", "SM4-CBC"])
def test_tensor_of_a_container_costs_its_segments_and_that_of_the_header(
    tmp_path: Path, mode: str
) -> None:
    bucket = stored(tmp_path, format="safetensors", enc_key=KEY, enc_mode=mode)
    with open_checkpoint(bucket.source(), dec_key=KEY) as reader:
        assert (reader.is_verified, reader.format) == (True, "safetensors")
        assert np.array_equal(reader.read("w4"), STATE["w4"])
    # The head, the segment with the names, and two segments of 4 MiB that the tensor lies in.
    assert len(bucket.asked) <= 5
    assert bucket.asked_bytes <= HEAD + 3 * 4 * MIB
    assert len(bucket.data) > 6 * 4 * MIB


@pytest.mark.parametrize("kind", ["plain", "compressed", "compressed and encrypted"])
def test_tensor_of_other_files_costs_itself(tmp_path: Path, kind: str) -> None:
    compression = None if kind == "plain" else "zstd"
    key = KEY if "encrypted" in kind else None
    bucket = stored(tmp_path, format="safetensors", compression=compression, enc_key=key)
    with open_checkpoint(bucket.source(), dec_key=key) as reader:
        assert reader.is_verified == (key is not None)
        assert np.array_equal(reader.read("w4", rows=slice(10, 20)), STATE["w4"][10:20])
    assert len(bucket.asked) <= 6
    assert bucket.asked_bytes <= HEAD + min(len(bucket.data), 4 * MIB) + 65536


def test_block_of_an_encrypted_ckpt_is_one_request(tmp_path: Path) -> None:
    bucket = stored(tmp_path, enc_key=KEY)
    with open_checkpoint(bucket.source(), dec_key=KEY) as reader:
        before = len(bucket.asked)
        assert np.array_equal(reader.read("w4"), STATE["w4"])
    assert len(bucket.asked) - before <= 2


def test_tensors_of_a_ckpt_in_a_container_can_be_read(tmp_path: Path) -> None:
    bucket = container_of_a_ckpt(tmp_path)
    with open_checkpoint(bucket.source(), dec_key=KEY) as reader:
        assert reader.names() == tuple(STATE)
        before = bucket.asked_bytes
        assert np.array_equal(reader.read("w4"), STATE["w4"])
    assert bucket.asked_bytes - before <= 2 * 4 * MIB


def test_any_source_will_do_and_is_not_closed(tmp_path: Path) -> None:
    bucket = stored(tmp_path, format="safetensors", enc_key=KEY)
    source = BytesSource(bucket.data)
    for _ in range(2):
        with open_checkpoint(source, dec_key=KEY) as reader:
            assert np.array_equal(reader.read("w3"), STATE["w3"])


def test_error_names_the_object(tmp_path: Path) -> None:
    bucket = stored(tmp_path, format="safetensors", enc_key=KEY)
    with pytest.raises(KeyProblem, match="s3://runs/net-1"):
        open_checkpoint(bucket.source())
    with pytest.raises(KeyProblem, match="<source>"):
        open_checkpoint(BytesSource(bucket.data))


def test_plain_object_is_refused_where_a_key_or_a_signature_is_wanted(tmp_path: Path) -> None:
    bucket = stored(tmp_path, format="safetensors")
    with pytest.raises(UnsealedCheckpoint):
        open_checkpoint(bucket.source(), dec_key=KEY)
    with pytest.raises(UnsealedCheckpoint):
        open_checkpoint(bucket.source(), trusted_keys=[SigningKey.generate().public_key])


def test_object_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="only files"):
        open_checkpoint(stored(tmp_path).source(), mmap=True)


def test_what_is_neither_path_nor_source_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="a path or a source"):
        open_checkpoint(7)  # type: ignore[arg-type]


def test_object_that_is_replaced_meanwhile_gives_nothing_of_the_new_one(tmp_path: Path) -> None:
    bucket = stored(tmp_path, format="safetensors", enc_key=KEY)
    with open_checkpoint(bucket.source(), dec_key=KEY) as reader:
        other = {name: array + 1 for name, array in STATE.items()}
        path = save_checkpoint(other, tmp_path / "net-2", format="safetensors", enc_key=KEY).path
        bucket.data = path.read_bytes()
        with pytest.raises(TamperedCheckpoint):
            reader.read("w4")


@pytest.mark.parametrize("given", [0, 1, -1])
def test_fewer_or_more_bytes_than_asked_for_are_an_error(tmp_path: Path, given: int) -> None:
    data = stored(tmp_path, format="safetensors").data
    source = RangeSource(
        lambda start, length: data[start : start + length + given] if given else b"",
        size_bytes=len(data),
    )
    with pytest.raises(TruncatedCheckpoint, match="given"):
        open_checkpoint(source)


def test_size_that_is_a_lie_is_an_error(tmp_path: Path) -> None:
    bucket = stored(tmp_path, format="safetensors", enc_key=KEY)
    for size_bytes in (0, 20000, len(bucket.data) - 1, len(bucket.data) + 1, 1 << 62):
        with pytest.raises(CkptmgrError):
            open_checkpoint(RangeSource(bucket.get, size_bytes=size_bytes), dec_key=KEY)


def test_error_of_the_store_passes_through(tmp_path: Path) -> None:
    def get(start: int, length: int) -> bytes:
        raise ConnectionResetError(f"{start} {length}")

    with pytest.raises(ConnectionResetError):
        open_checkpoint(RangeSource(get, size_bytes=100))


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (99, 2), (100, 1), (1 << 63, 1)])
def test_range_outside_is_never_asked_for(offset: int, length: int) -> None:
    bucket = Bucket(bytes(100))
    with pytest.raises(TruncatedError):
        bucket.source().read_into(offset, memoryview(bytearray(length)))
    assert bucket.asked == []


def test_nothing_is_read_without_asking() -> None:
    bucket = Bucket(b"")
    bucket.source().read_into(0, memoryview(bytearray()))
    assert bucket.asked == []


def test_memory_that_is_given_may_be_used_again() -> None:
    data = bytes(range(256)) * 1024
    memory = bytearray(HEAD)

    def get(start: int, length: int) -> memoryview:
        memory[:length] = data[start : start + length]
        return memoryview(memory)[:length]

    source, first = RangeSource(get, size_bytes=len(data)), bytearray(4)
    source.read_into(0, memoryview(first))
    source.read_into(HEAD + 7, memoryview(bytearray(4)))
    source.read_into(0, memoryview(first))
    assert first == data[:4]


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        RangeSource(lambda start, length: bytes(length), size_bytes=-1)
