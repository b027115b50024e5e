# SPDX-License-Identifier: Apache-2.0
"""`open_checkpoint`: what one tensor costs, and that it is checked like everything else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointNotFound,
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.values import MapArrays
from ckptmgr.files.open_checkpoint import CheckpointReader
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item
from tests.formats.test_mutations import ITEMS
from tests.support import api
from tests.support.descriptors import nothing_stays_open
from tests.support.saved import GOLDEN_FILES, flip, save_run
from tests.support.stored import image_bytes
from tests.support.surface import KEY, comparable

MIB = 1 << 20
WAYS: dict[str, tuple[dict[str, Any], bytes | None]] = {
    "ckpt": ({}, None),
    "safetensors": ({"format": "safetensors"}, None),
    "gcm": ({"enc_key": KEY}, KEY),
    "cbc": ({"enc_key": KEY, "enc_mode": "AES-CBC"}, KEY),
    "sm4": ({"enc_key": KEY, "enc_mode": "SM4-CBC"}, KEY),
}
LARGE = {f"w{n}": np.full((2048, 2048), n, np.float32) for n in range(4)}  # 16 MiB each


def saved(directory: Path, state: dict[str, Any], **options: Any) -> Path:
    path = directory / f"x.{options.get('format', 'ckpt')}"
    save_checkpoint(state, path, **options)
    return path


class Counted(BytesSource):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_bytes += buffer.nbytes
        super().read_into(offset, buffer)


@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_and_every_row_is_what_was_saved(tmp_path: Path, way: str) -> None:
    options, key = WAYS[way]
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {
        "large": rng.random((1500, 1024)),
        "small": rng.random(3, np.float32),
        "flags": rng.random(9) > 0.5,
        "scalar": np.array(7),
        "empty": np.zeros((0, 4)),
    }
    path = saved(tmp_path, state, **options)
    with open_checkpoint(path, dec_key=key) as reader:
        assert sorted(reader.names()) == sorted(state)
        assert reader.is_verified
        assert reader.format == path.suffix[1:]
        for name, array in state.items():
            spec = reader.spec(name)
            assert (spec.dtype.name, spec.shape) == (array.dtype.name, array.shape)
            assert np.array_equal(reader.read(name), array)
        assert np.array_equal(
            reader.read("large", rows=slice(1000, 1003)), state["large"][1000:1003]
        )
        assert np.array_equal(reader.read("large", rows=slice(None, 1200)), state["large"][:1200])


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose tensors lie in pieces of 16 bytes, with its manifest."""
    directory = tmp_path_factory.mktemp("sliced")
    (path,) = save_run(directory, [1], content=ITEMS)
    manifest = directory / api.manifest_name(path.name)
    manifest.unlink()
    path.chmod(0o600)
    path.write_bytes(image_bytes(build_ckpt_image(ITEMS, slice_bytes=16)))
    return path


@given(
    start=st.none() | st.integers(-5, 5),
    stop=st.none() | st.integers(-5, 5),
    name=st.sampled_from(["fc.weight", "mask", "half", "empty"]),
)
def test_rows_are_those_of_a_slice(
    sliced: Path, name: str, start: int | None, stop: int | None
) -> None:
    with open_checkpoint(sliced) as reader:
        whole = reader.read(name)
        part = reader.read(name, rows=slice(start, stop))
    assert isinstance(whole, np.ndarray)
    assert isinstance(part, np.ndarray)
    assert part.tobytes() == whole[start:stop].tobytes()
    assert part.shape == whole[start:stop].shape


def test_texts_and_maps_are_read_whole(sliced: Path) -> None:
    with open_checkpoint(sliced) as reader:
        assert reader.read("note") == "hello"
        assert isinstance(reader.read("map"), MapArrays)
        values = {name: reader.read(name) for name in reader.names()}
        assert not reader.is_verified
    assert comparable(values) == comparable(load_checkpoint(sliced))


def test_texts_and_maps_of_a_saved_file_are_checked(tmp_path: Path) -> None:
    content: list[Item] = list(ITEMS)
    (path,) = save_run(tmp_path, [1], content=content)
    with open_checkpoint(path) as reader:
        assert reader.read("note") == "hello"
        assert isinstance(reader.read("map"), MapArrays)
        assert reader.metadata == {}


@pytest.mark.parametrize(("way", "most"), [("ckpt", 33), ("safetensors", 33), ("gcm", 53)])
def test_tensor_costs_the_ranges_it_lies_in(tmp_path: Path, way: str, most: int) -> None:
    options, key = WAYS[way]
    path = saved(tmp_path, LARGE, **options)
    source = Counted(path.read_bytes())
    reading = api.reading(keys=None if key is None else api.Key(key))
    opened = open_source(
        source,
        path=str(path),
        options=reading,
        manifest=api.place(tmp_path).read_manifest(path.name),
        is_for_loading=True,
    )
    reader = CheckpointReader(opened)
    before = source.read_bytes
    array = reader.read("w2", rows=slice(100, 200))
    assert np.array_equal(array, LARGE["w2"][100:200])
    # 0.8 MiB in one or two ranges of 16 MiB, and what describes the tensor in another one.
    assert source.read_bytes - before < most * MIB
    assert source.read_bytes < 64 * MIB


@given(data=st.data())
@settings(max_examples=25)
@pytest.mark.parametrize("way", ["ckpt", "safetensors", "gcm"])
def test_flipped_bit_is_never_read_as_a_value(
    tmp_path_factory: pytest.TempPathFactory, way: str, data: st.DataObject
) -> None:
    options, key = WAYS[way]
    state = {"a": np.arange(300.0), "b": np.ones(3, np.float32)}
    path = saved(tmp_path_factory.mktemp("flipped"), state, **options)
    if data.draw(st.booleans(), label="without manifest") and key is not None:
        api.manifest_of(path).unlink()
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises((CorruptCheckpoint, KeyProblem)):
        everything_in(path, key)


def everything_in(path: Path, key: bytes | None) -> dict[str, Any]:
    with open_checkpoint(path, dec_key=key) as reader:
        return {name: reader.read(name) for name in reader.names()}


def test_damage_elsewhere_does_not_keep_a_tensor_from_being_read(tmp_path: Path) -> None:
    path = saved(tmp_path, LARGE)
    flip(path, 40 * MIB)  # in w2
    with open_checkpoint(path) as reader:
        assert np.array_equal(reader.read("w0"), LARGE["w0"])
        with pytest.raises(ChecksumMismatch):
            reader.read("w2")


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """A file of which one bit was flipped, in the name of the last tensor: `head` became `heae`."""
    first = np.zeros(20 * MIB, np.uint8)
    path = saved(tmp_path, {"first": first, "n": np.array(1), "head": np.zeros(3, np.float32)})
    flip(path, path.read_bytes().index(b"head") + 3)
    return path


ASKED: dict[str, Callable[[CheckpointReader], object]] = {
    "names": lambda reader: reader.names(),
    "spec": lambda reader: reader.spec("heae"),
    "read": lambda reader: reader.read("heae"),
    "missing spec": lambda reader: reader.spec("head"),
    "missing value": lambda reader: reader.read("head"),
    "scalar rows": lambda reader: reader.read("n", rows=slice(1)),
    "missing rows": lambda reader: reader.read("head", rows=slice(1)),
}


@pytest.mark.parametrize("rows", [3, (0, 2), [0, 2]])
def test_rows_that_are_no_slice_are_refused_with_the_way_out(tmp_path: Path, rows: Any) -> None:
    with (
        open_checkpoint(saved(tmp_path, LARGE)) as reader,
        pytest.raises(TypeError, match=r"rows is a slice, such as slice\(0, 2\), but got"),
    ):
        reader.read("w0", rows=rows)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_flipped_bit_in_a_name_is_damage_whatever_is_asked(
    renamed: Path, ask: Callable[[CheckpointReader], object]
) -> None:
    with open_checkpoint(renamed) as reader:
        for _ in range(2):
            with pytest.raises(ChecksumMismatch):
                ask(reader)


def test_flipped_bit_in_another_name_does_not_keep_a_tensor_from_being_read(renamed: Path) -> None:
    with open_checkpoint(renamed) as reader:
        assert reader.spec("first").shape == (20 * MIB,)
        assert not np.asarray(reader.read("first", rows=slice(9))).any()


def test_descriptions_are_checked_once(tmp_path: Path) -> None:
    path = saved(tmp_path, LARGE)
    source = Counted(path.read_bytes())
    manifest = api.place(tmp_path).read_manifest(path.name)
    opened = open_source(
        source, path=str(path), options=api.reading(), manifest=manifest, is_for_loading=True
    )
    reader = CheckpointReader(opened)
    assert set(reader.names()) == set(LARGE)
    before = source.read_bytes
    assert set(reader.names()) == set(LARGE)
    assert reader.spec("w2").shape == (2048, 2048)
    with pytest.raises(CheckpointNotFound):
        reader.spec("w9")
    assert source.read_bytes == before


def test_sealed_index_is_checked_when_the_file_is_opened(tmp_path: Path) -> None:
    path = saved(tmp_path, LARGE, enc_key=KEY)
    api.manifest_of(path).unlink()
    flip(path, 16 * MIB + 100)
    with pytest.raises(TamperedCheckpoint):
        open_checkpoint(path, dec_key=KEY)


def test_unknown_name_is_a_lookup_error(tmp_path: Path) -> None:
    with open_checkpoint(saved(tmp_path, {"w": np.zeros(1)})) as reader:
        for ask in (reader.read, reader.spec):
            with pytest.raises(CheckpointNotFound, match="there is no value 'v'"):
                ask("v")


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("name", ["note", "map"])
def test_only_tensors_have_a_spec_and_rows(sliced: Path, name: str) -> None:
    with open_checkpoint(sliced) as reader:
        with pytest.raises(UnsupportedCheckpoint, match="not a tensor"):
            reader.spec(name)
        with pytest.raises(UnsupportedCheckpoint, match="not a tensor"):
            reader.read(name, rows=slice(1))


def test_scalar_has_no_rows_and_rows_have_no_steps(sliced: Path) -> None:
    with open_checkpoint(sliced) as reader:
        with pytest.raises(UnsupportedCheckpoint, match="a scalar"):
            reader.read("step", rows=slice(1))
        with pytest.raises(ValueError, match="step of 1, not of 2"):
            reader.read("mask", rows=slice(0, 4, 2))


def test_plain_file_is_refused_with_a_key_unless_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.zeros(1)})
    with pytest.raises(UnsealedCheckpoint):
        open_checkpoint(path, dec_key=KEY)
    with pytest.raises(UnsealedCheckpoint, match="allow-unencrypted"):
        open_checkpoint(path, dec_key=KEY, allow_unsealed=True)
    open_checkpoint(path, dec_key=KEY, allow_unencrypted=True).close()


def test_another_mode_than_the_files_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.zeros(1)}, enc_key=KEY)
    open_checkpoint(path, dec_key=KEY, dec_mode="AES-GCM").close()
    with pytest.raises(KeyProblem):
        open_checkpoint(path, dec_key=KEY, dec_mode="AES-CBC")


def test_file_that_cannot_be_opened_stays_closed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": np.zeros(1)}, format="safetensors")
    flip(path, -1)
    with nothing_stays_open(), pytest.raises(CorruptCheckpoint):
        open_checkpoint(path)


def test_file_of_mindspore_itself_is_read_if_that_is_allowed(tmp_path: Path) -> None:
    path = Path(shutil.copy(GOLDEN_FILES / "gcm_all_dtypes.ckpt", tmp_path))
    key = bytes(range(0x20, 0x40))
    with open_checkpoint(path, dec_key=key, allow_unsealed=True) as reader:
        values = {name: reader.read(name) for name in reader.names()}
    loaded = load_checkpoint(path, dec_key=key, allow_unsealed=True)
    assert comparable(values) == comparable(loaded)
