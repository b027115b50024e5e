# SPDX-License-Identifier: Apache-2.0
"""`open_source` and `read_values`: each stage checks its result, and only requested bytes are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from ckptmgr import (
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    save_checkpoint,
)
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.crypto import errors as crypto_errors
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.values import read_values
from ckptmgr.formats import errors as format_errors
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, VerifyingSource, digest_of
from ckptmgr.io.scatter import read_checked, read_scattered
from ckptmgr.io.threads import PIECE_BYTES
from tests.support import api
from tests.support.surface import KEY

MIB = 1 << 20
_PLAIN = api.reading()
_KEYED = api.reading(keys=api.Key(KEY))


class _Counting(BytesSource):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_bytes += buffer.nbytes
        super().read_into(offset, buffer)


def _file(
    directory: Path, state: dict[str, np.ndarray], name: str = "x.ckpt", **options: Any
) -> bytes:
    save_checkpoint(state, directory / name, **options)
    return (directory / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "metadata"), [("x.ckpt", {}), ("x.safetensors", {"format": "pt"})]
)
def test_open_checkpoint_tells_format_and_metadata(
    tmp_path: Path, name: str, metadata: dict[str, str]
) -> None:
    format = name.partition(".")[2]
    save_checkpoint({"w": np.zeros(1)}, tmp_path / name, format=format)
    source = BytesSource((tmp_path / name).read_bytes())
    opened = open_source(source, path=name, options=_PLAIN)
    assert (opened.format, opened.metadata) == (format, metadata)
    assert (opened.cipher, opened.is_sealed, opened.has_digests) == (None, False, False)


def test_sealed_file_is_opened_without_a_mode_by_what_it_says(tmp_path: Path) -> None:
    save_checkpoint({"w": np.zeros(1)}, tmp_path / "x.ckpt", enc_key=KEY, enc_mode="SM4-CBC")
    source = BytesSource((tmp_path / "x.ckpt").read_bytes())
    opened = open_source(source, path="x.ckpt", options=_KEYED)
    assert (opened.cipher, opened.is_sealed) == ("SM4-CBC", True)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_one_tensor_costs_the_bytes_of_that_tensor(tmp_path: Path, key: bytes | None) -> None:
    state = {f"w{n}": np.full(8 * MIB // 4, n, np.float32) for n in range(4)}
    save_checkpoint(state, tmp_path / "x.ckpt", enc_key=key)
    source = _Counting((tmp_path / "x.ckpt").read_bytes())
    options = _PLAIN if key is None else _KEYED
    opened = open_source(source, path="x.ckpt", options=options)
    values = read_values(opened, choose=lambda name: name == "w2")
    assert np.array_equal(values["w2"], state["w2"])
    # The headers of the others lie in other blocks of 4 MiB; of an encrypted block all is read.
    assert source.read_bytes < (8 * MIB + 4096 * 20 if key is None else 28 * MIB)


def test_nothing_chosen_is_nothing_read(tmp_path: Path) -> None:
    source = _Counting(_file(tmp_path, {"w": np.zeros(MIB, np.float32)}))
    opened = open_source(source, path="x.ckpt", options=_PLAIN)
    assert read_values(opened, choose=lambda _: False) == {}
    assert source.read_bytes < 100_000


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_crc_covers_what_was_not_chosen_too(tmp_path: Path, name: str) -> None:
    state = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    save_checkpoint(state, tmp_path / name, format=name.partition(".")[2], crc_check=True)
    content = bytearray((tmp_path / name).read_bytes())
    at = content.rindex(bytes(8), 0, len(content) - (17 if name == "x.ckpt" else 0))
    content[at] ^= 1
    opened = open_source(BytesSource(bytes(content)), path=name, options=_PLAIN)
    with pytest.raises(ChecksumMismatch, match="the CRC32 is"):
        read_values(opened, choose=lambda name: name == "a", check_crc=True)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_whole_file_with_its_crc_is_read_once(tmp_path: Path, format: str) -> None:
    name = f"x.{format}"
    state = {"w": np.zeros(MIB, np.float32)}
    data = _file(tmp_path, state, name, crc_check=True, format=format)
    source = _Counting(data)
    read_values(open_source(source, path=name, options=_PLAIN), check_crc=True)
    assert source.read_bytes < len(data) + 100_000


def _manifest(store: api.Place, name: str, data: bytes, range_bytes: int) -> api.Manifest:
    """Return the manifest of a saved file, with digests of ranges of that length."""
    manifest = store.read_manifest(name)
    assert manifest is not None
    ranges = tuple(
        blake3(data[start : start + range_bytes]).digest()
        for start in range(0, len(data), range_bytes)
    )
    digest = FileDigest(size_bytes=len(data), ranges=ranges, range_bytes=range_bytes)
    return replace(manifest, file=replace(manifest.file, digest=digest))


def _with_another_crc(data: bytes, format: str) -> bytes:
    at = len(data) - 1
    if format == "safetensors":
        start = data.index(b"crc_num") + len("crc_num")
        at = next(place for place in range(start, at) if data[place : place + 1].isdigit())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("range_bytes", [None, RANGE_BYTES, 1 << 20])
def test_crc_is_checked_whatever_the_digests_are(
    tmp_path: Path, format: str, range_bytes: int | None
) -> None:
    state = {"w": np.arange(9 << 20, dtype=np.uint8), "step": np.array(7), "b": np.array([True])}
    name = f"x.{format}"
    right = _file(tmp_path, state, name, crc_check=True, format=format)

    def opened(data: bytes) -> OpenCheckpoint:
        store = api.place(tmp_path)
        manifest = None if range_bytes is None else _manifest(store, name, data, range_bytes)
        return open_source(
            BytesSource(data), path=name, options=_PLAIN, manifest=manifest, is_for_loading=True
        )

    values = read_values(opened(right), check_crc=True)
    assert all(np.array_equal(values[name], one) for name, one in state.items())
    read_through(opened(right), check_crc=True)
    wrong = _with_another_crc(right, format)
    with pytest.raises(ChecksumMismatch, match="the CRC32 is"):
        read_values(opened(wrong), check_crc=True)
    with pytest.raises(format_errors.ChecksumError, match="the CRC32 is"):
        read_through(opened(wrong), check_crc=True)


def test_manifest_of_another_file_does_not_vouch_for_this_one(tmp_path: Path) -> None:
    _file(tmp_path, {"w": np.zeros(2, np.float32)})
    other = _file(tmp_path, {"w": np.ones(2, np.float32)}, "y.ckpt")
    manifest = api.place(tmp_path).read_manifest("x.ckpt")
    with pytest.raises(ChecksumMismatch):
        open_source(BytesSource(other), path="x.ckpt", options=_PLAIN, manifest=manifest)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (format_errors.FormatError("m", offset=3, tensor="w"), CorruptCheckpoint),
        (format_errors.TruncatedError("m", offset=3, tensor="w"), TruncatedCheckpoint),
        (format_errors.ChecksumError("m", offset=3, tensor="w"), ChecksumMismatch),
        (format_errors.UnsupportedError("m", offset=3, tensor="w"), UnsupportedCheckpoint),
        (crypto_errors.DecryptionError("m", offset=3, hint="h"), KeyProblem),
        (crypto_errors.TamperedError("m", offset=3, hint="h"), TamperedCheckpoint),
        (crypto_errors.TruncatedCiphertextError("m", offset=3, hint="h"), TruncatedCheckpoint),
        (crypto_errors.UnsealedError("m", offset=3, hint="h"), UnsealedCheckpoint),
        (crypto_errors.UnsupportedSuiteError("m", offset=3, hint="h"), UnsupportedCheckpoint),
        (crypto_errors.KeyLengthError("m", offset=3, hint="h"), KeyProblem),
        (crypto_errors.KeySourceError("m", offset=3, hint="h"), KeyProblem),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_error_of_a_lower_layer_becomes_ours_with_the_file_and_the_place(
    error: Exception, expected: type[CkptmgrError]
) -> None:
    def fail() -> None:
        with translated_errors("/runs/x.ckpt"):
            raise error

    with pytest.raises(CkptmgrError) as caught:
        fail()
    assert type(caught.value) is expected
    assert caught.value.__cause__ is error
    assert caught.value.path == "/runs/x.ckpt"
    assert "offset 3" in str(caught.value)
    if isinstance(caught.value, CorruptCheckpoint):
        assert caught.value.offset == 3


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyboardInterrupt])
def test_other_exceptions_pass_untouched(kind: type[BaseException]) -> None:
    def work() -> None:
        with translated_errors("/runs/x.ckpt"):
            raise kind("as it was")

    with pytest.raises(kind, match="as it was"):
        work()


class _Replaced(BytesSource):
    """A file whose tensor names change once they have been read."""

    is_replaced = False

    def read_into(self, offset: int, buffer: memoryview) -> None:
        super().read_into(offset, buffer)
        if self.is_replaced and offset == 0:
            buffer[6] ^= 1


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_file_that_changes_between_index_and_contents_is_noticed(
    tmp_path: Path, key: bytes | None
) -> None:
    save_checkpoint({"w": np.zeros(MIB, np.float32)}, tmp_path / "x.ckpt", enc_key=key)
    source = _Replaced((tmp_path / "x.ckpt").read_bytes())
    opened = open_source(
        source,
        path="x.ckpt",
        options=_PLAIN if key is None else _KEYED,
        manifest=api.place(tmp_path).read_manifest("x.ckpt"),
        is_for_loading=True,
    )
    source.is_replaced = True
    with pytest.raises(CorruptCheckpoint):
        read_values(opened)


def test_unit_that_no_source_checks_is_refused() -> None:
    with pytest.raises(ValueError, match="is no unit"):
        read_scattered(BytesSource(b""), [], unit_bytes=PIECE_BYTES + 1)


@pytest.mark.parametrize("start", [0, RANGE_BYTES - 3, RANGE_BYTES + 5])
def test_few_bytes_are_read_checked_in_pieces(start: int) -> None:
    content = np.random.default_rng(0).bytes(RANGE_BYTES + MIB)
    raw = _Counting(content)
    checked = VerifyingSource(raw, digest_of(BytesSource(content)), path="x")
    assert read_checked(checked, start, 7) == content[start : start + 7]
    touched = {start // RANGE_BYTES, (start + 6) // RANGE_BYTES}
    assert raw.read_bytes == sum(
        len(content[RANGE_BYTES:]) if one else RANGE_BYTES for one in touched
    )


@pytest.mark.parametrize("damaged", [0, 9 * MIB, RANGE_BYTES - 1])
def test_few_bytes_of_a_damaged_range_are_refused(damaged: int) -> None:
    content = bytearray(RANGE_BYTES)
    digest = digest_of(BytesSource(bytes(content)))
    content[damaged] = 1
    with pytest.raises(ChecksumMismatch):
        read_checked(VerifyingSource(BytesSource(bytes(content)), digest, path="x"), 4, 4)
