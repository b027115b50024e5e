# SPDX-License-Identifier: Apache-2.0
"""Compressed checkpoints: saved in every way, listed, loaded, verified, and refused for each defect."""

from __future__ import annotations

import errno
import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ChecksumMismatch,
    CorruptCheckpoint,
    StoreFull,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.core.names import parse_name, parse_step_name, restart_prefix
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.files.load.compressed import check_frames, read_frames
from ckptmgr.files.load.inspection import inspect_file
from ckptmgr.files.load.open import open_source
from ckptmgr.files.save.compressed import frames_sealer, plan_of, read_image, write_frames
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.io.scatter import Placement
from ckptmgr.maintenance import convert
from ckptmgr.parallel.mindspore.rank_files import find_rank_files
from tests.files.test_frame_writer import MemoryFile, image_with
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on
from tests.support.saved import flip, only, overwrite

KEY = bytes(range(16))
RNG = np.random.default_rng(0)
VALUES: dict[str, np.ndarray] = {
    "large": (RNG.standard_normal((1500, 900)) * 0.02).astype(np.float32),
    "half": np.zeros(7000, np.float16),
    "flags": np.array([True, False, True]),
    "none": np.zeros((0, 4), np.int64),
    "step": np.array(3, np.int64),
}


def save(directory: Path, *, key: bytes | None = None, crc: bool = False) -> Path:
    target = directory / "net-1_10.safetensors"
    return save_checkpoint(
        VALUES, target, format="safetensors", compression="zstd", enc_key=key, crc_check=crc
    ).path


def verify(
    path: Path, level: api.Level = api.Level.FULL, *, key: bytes | None = None
) -> api.Verification:
    secret = None if key is None else api.Key(key)
    store = api.place(path.parent, keys=secret, allow_unencrypted=True)
    return api.verify(store, only(store), level=level, keys=secret)


def assert_same(values: dict[str, np.ndarray]) -> None:
    assert values.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert values[name].dtype == value.dtype
        np.testing.assert_array_equal(values[name], value)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("crc", [False, True])
def test_saved_file_is_listed_loaded_and_verified(
    tmp_path: Path, key: bytes | None, crc: bool
) -> None:
    path = save(tmp_path, key=key, crc=crc)
    assert path.name == f"net-1_10.safetensors.ckp{'z' if key is None else 'e'}"
    assert path.stat().st_size < sum(value.nbytes for value in VALUES.values()) * 0.95
    checkpoint = only(api.place(tmp_path))
    assert (checkpoint.format, checkpoint.step, checkpoint.series) == ("safetensors", 0, "net")
    assert_same(load_checkpoint(path, dec_key=key, crc_check=crc))
    checks = [verify(path, level, key=key) for level in api.Level]
    assert [one.status for one in checks] == [api.Status.OK] * 3
    assert "frames" in checks[-1].checked


@pytest.mark.parametrize("async_save", [False, "thread", "process"])
@pytest.mark.parametrize("key", [None, KEY])
def test_run_saves_and_resumes_compressed_in_every_way(
    tmp_path: Path, async_save: Literal["thread", "process"] | bool, key: bytes | None
) -> None:
    config = CheckpointConfig(
        format="safetensors", compression="zstd", async_save=async_save, enc_key=key
    )
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, VALUES)
    state = {name: np.zeros_like(value) for name, value in VALUES.items()}
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        assert manager.resume(state).step == 1
    assert_same(state)


def test_run_without_compression_resumes_from_a_compressed_checkpoint(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors", compression="zstd", compression_level=5)
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, VALUES)
    state = {name: np.zeros_like(value) for name, value in VALUES.items()}
    with CheckpointManager(tmp_path, prefix="net") as manager:
        assert manager.resume(state).step == 1
    assert_same(state)


@pytest.mark.parametrize("key", [None, KEY])
def test_parts_are_read_without_the_rest(tmp_path: Path, key: bytes | None) -> None:
    path = save(tmp_path, key=key)
    with open_checkpoint(path, dec_key=key) as reader:
        assert reader.is_verified
        rows = reader.read("large", rows=slice(700, 702))
        np.testing.assert_array_equal(np.asarray(rows), VALUES["large"][700:702])
        np.testing.assert_array_equal(np.asarray(reader.read("large")), VALUES["large"])
    large = np.empty_like(VALUES["large"])
    load_checkpoint(path, dec_key=key, into={"large": large})
    np.testing.assert_array_equal(large, VALUES["large"])


def test_damage_elsewhere_does_not_keep_a_tensor_from_being_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    (tmp_path / api.manifest_name(path.name)).unlink()  # its digest covers all of so small a file
    flip(path, 5000)
    with open_checkpoint(path) as reader:
        assert reader.read("step") == 3
        with pytest.raises(ChecksumMismatch, match="compressed frame"):
            reader.read("large")


def test_compressed_file_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="is compressed"):
        open_checkpoint(save(tmp_path), mmap=True)


def test_stock_reader_refuses_the_file_at_once(tmp_path: Path) -> None:
    path = save(tmp_path)
    with pytest.raises(SafetensorError, match=r"[Hh]eader"), safe_open(path, framework="np"):
        pass


def test_decrypted_file_is_the_ordinary_one_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = save_checkpoint(VALUES, tmp_path / "plain/n.safetensors", format="safetensors").path
    target = tmp_path / "n.safetensors"
    convert.decrypt_file(save(tmp_path, key=KEY), target, options=api.reading(keys=api.Key(KEY)))
    assert target.read_bytes() == plain.read_bytes()


def test_compressed_file_can_be_encrypted(tmp_path: Path) -> None:
    target = tmp_path / "n.safetensors.ckpe"
    convert.encrypt_file(save(tmp_path), target, key=api.Key(KEY))
    assert_same(load_checkpoint(target, dec_key=KEY))


def test_contents_tell_how_much_was_saved(tmp_path: Path) -> None:
    path = save(tmp_path)
    store = api.place(tmp_path)
    plain = inspect_file(store, only(store), options=api.reading()).plain
    assert plain is not None
    assert plain.compressed_bytes == path.stat().st_size
    assert plain.size_bytes > sum(value.nbytes for value in VALUES.values())


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_flipped_byte_anywhere_is_damage(
    tmp_path: Path, key: bytes | None, with_manifest: bool
) -> None:
    path = save(tmp_path, key=key)
    if not with_manifest:
        (tmp_path / api.manifest_name(path.name)).unlink()
    start = 0 if key is None else 12_288
    offsets = [0, 9, 12, *range(100, path.stat().st_size - start, 900_001), -1, -20, -50, -100]
    for offset in offsets:
        at = offset + start if offset >= 0 else path.stat().st_size + offset
        flip(path, at)
        assert verify(path, key=key).status in (api.Status.DAMAGED, api.Status.UNREADABLE), at
        with pytest.raises((CorruptCheckpoint, UnsupportedCheckpoint)):
            load_checkpoint(path, dec_key=key)
        flip(path, at)
    is_proven = key is None or with_manifest
    assert verify(path, key=key).status is (api.Status.OK if is_proven else api.Status.UNPROVEN)


@pytest.mark.parametrize("key", [None, KEY])
def test_cut_file_is_truncated(tmp_path: Path, key: bytes | None) -> None:
    path = save(tmp_path, key=key)
    content = path.read_bytes()
    for length in (20, 15_000, len(content) - 1, len(content) - 16):
        overwrite(path, content[:length])
        with pytest.raises(TruncatedCheckpoint):
            load_checkpoint(path, dec_key=key)
        (manifest,) = tmp_path.glob("*.manifest.json")
        kept = manifest.read_bytes()
        manifest.unlink()
        with pytest.raises((TruncatedCheckpoint, CorruptCheckpoint)):
            load_checkpoint(path, dec_key=key)
        manifest.write_bytes(kept)


def test_frames_of_another_file_are_found_by_the_manifest(tmp_path: Path) -> None:
    path = save(tmp_path)
    other = MemoryFile()
    image = image_with(large=np.ones((1500, 900), np.float32))
    write_frames(plan_of(image), read_image(image), other, level=1)
    overwrite(path, bytes(other.content))
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(path)


def test_key_is_not_satisfied_by_a_compressed_plain_file(tmp_path: Path) -> None:
    path = save(tmp_path)
    with pytest.raises(UnsealedCheckpoint, match="allow-unencrypted"):
        load_checkpoint(path, dec_key=KEY)
    assert_same(load_checkpoint(path, dec_key=KEY, allow_unencrypted=True))


def test_header_that_states_another_size_is_refused() -> None:
    image = image_with(w=np.ones(100))
    file = MemoryFile()
    sealer = frames_sealer(image.size + 1, api.Key(KEY), "AES-GCM")
    write_frames(plan_of(image), read_image(image), file, level=1, sealer=sealer)
    with pytest.raises(CorruptCheckpoint, match="the header says"):
        open_source(BytesSource(file.content), path="x", options=api.reading(keys=api.Key(KEY)))


def test_last_segment_of_another_file_is_tampering(tmp_path: Path) -> None:
    content = bytearray(save(tmp_path, key=KEY).read_bytes())
    (tmp_path / "other").mkdir()
    content[-200:] = save(tmp_path / "other", key=KEY).read_bytes()[-200:]
    path = tmp_path / "spliced.safetensors.ckpe"
    path.write_bytes(content)
    with pytest.raises(TamperedCheckpoint):
        load_checkpoint(path, dec_key=KEY)


def test_full_disk_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.ENOSPC, operation="write_at", call=1, is_lasting=True
    )
    config = CheckpointConfig(format="safetensors", compression="zstd")
    manager = manager_on(tmp_path, config, fs=disk, prefix="net")
    with pytest.raises(StoreFull, match="became full while saving") as caught:
        manager.save(1, VALUES)
    assert "0 bytes needed" not in str(caught.value)
    assert not [name for name in tmp_path.iterdir() if "safetensors" in name.name]


def test_small_parts_of_many_frames_are_scattered(tmp_path: Path) -> None:
    content = save(tmp_path).read_bytes()
    source = open_frames(BytesSource(content))
    expected = read_bytes(source, 0, source.size)
    places = [(0, 10), (90, 500_000), (4_300_000, 1_000_000), (source.size - 5, 5)]
    targets = [memoryview(bytearray(size)) for _, size in places]
    read_frames(
        source,
        [Placement(at, target) for (at, _), target in zip(places, targets, strict=True)],
    )
    for (at, size), target in zip(places, targets, strict=True):
        assert bytes(target) == expected[at : at + size]


def test_file_of_zeros_that_expands_a_thousandfold_is_checked_in_little_memory() -> None:
    file = MemoryFile()
    image = image_with(z=np.zeros(96 << 20, np.uint8))
    write_frames(plan_of(image), read_image(image), file, level=1)
    assert len(file.content) < image.size / 1000
    source = open_frames(BytesSource(file.content))
    tracemalloc.start()
    try:
        check_frames(source)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_names_of_compressed_files_are_understood(tmp_path: Path) -> None:
    assert parse_name("net-3_40.safetensors.ckpz") is not None
    assert parse_step_name("net-40-r1.safetensors.ckpz") is not None
    assert restart_prefix("net", ["net-3_40.safetensors.ckpz"]) == "net_1"
    shard = parse_shard_name("net-40.0-of-2.67d2f1a41f0c9a2e.safetensors.ckpz")
    assert shard is not None
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0/net.safetensors.ckpz").touch()
    assert list(find_rank_files(tmp_path, format="safetensors")) == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "gzip"}, "None or 'zstd'"),
        ({"compression": "zstd", "format": "ckpt"}, "MindSpore"),
        ({"compression": "zstd", "compression_level": 0}, "1 .fast. to 19"),
        ({"compression": "zstd", "compression_level": 20}, "1 .fast. to 19"),
        ({"compression": "zstd", "compression_level": True}, "1 .fast. to 19"),
        ({"compression": "zstd", "compression_level": "9"}, "1 .fast. to 19"),
    ],
)
def test_unusable_compression_is_refused_at_once(
    tmp_path: Path, arguments: dict[str, str | int], message: str
) -> None:
    given = {"format": "safetensors", **arguments}
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        save_checkpoint(VALUES, tmp_path / "n", **given)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
