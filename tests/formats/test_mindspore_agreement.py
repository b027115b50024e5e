# SPDX-License-Identifier: Apache-2.0
"""The real MindSpore loads what we write, whatever it is, to the same values."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ckptmgr.formats.dtypes import BY_MINDSPORE, BY_NAME
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.tensor import Item, Tensor
from tests.support.stored import Stored, StoredItem, image_bytes, stored_items
from tests.support.strategies import MINDSPORE_DTYPES, ckpt_items, item_name, metadata, tensors

pytestmark = [
    pytest.mark.interop,
    # MindSpore's own imports warn.
    pytest.mark.filterwarnings("ignore"),
]
one_folder = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def load(path: Path, data: bytes, **options: object) -> dict[str, StoredItem]:
    mindspore: Any = importlib.import_module("mindspore")
    path.write_bytes(data)
    loaded = mindspore.load_checkpoint(str(path), **options)
    return {name: stored(value) for name, value in loaded.items()}


def stored(value: Any) -> StoredItem:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return tuple(Stored(str(part.dtype), part.shape, part.tobytes()) for part in value)
    content = value.get_bytes() if value.size else b""
    return Stored(BY_MINDSPORE[str(value.dtype)].name, tuple(value.shape), content)


def as_mindspore_reads(value: StoredItem) -> StoredItem:
    # dims [0] without content is an empty tensor here, and a scalar zero there.
    if isinstance(value, Stored) and value.shape == (0,):
        return Stored(value.dtype, (), bytes(BY_NAME[value.dtype].item_bytes))
    return value


def can_hash(item: Tensor) -> bool:
    """Whether MindSpore can compute its CRC, and without a gigabyte of zeros."""
    if item.spec.dtype.name == "bfloat16":
        return False
    if item.spec.shape != () or "int" not in item.spec.dtype.name:
        return True
    signed = not item.spec.dtype.name.startswith("u")
    return 0 <= int.from_bytes(bytes(item.content()), "little", signed=signed) < 10**6


@one_folder
@given(
    items=ckpt_items(),
    crc=st.booleans(),
    slice_bytes=st.integers(1, 40),
    has_metadata=st.booleans(),
)
def test_ckpt_of_ours_loads_in_mindspore(
    tmp_path: Path, items: list[Item], crc: bool, slice_bytes: int, has_metadata: bool
) -> None:
    meta = {"a": "ü"} if has_metadata else None
    data = image_bytes(build_ckpt_image(items, crc=crc, slice_bytes=slice_bytes, metadata=meta))
    expected = {name: as_mindspore_reads(item) for name, item in stored_items(items).items()}
    assert load(tmp_path / "x.ckpt", data, crc_check=crc) == expected


@one_folder
@given(
    items=st.lists(tensors(dtypes=MINDSPORE_DTYPES), min_size=1, max_size=5, unique_by=item_name),
    crc=st.booleans(),
    meta=metadata(),
)
def test_safetensors_of_ours_loads_in_mindspore(
    tmp_path: Path, items: list[Tensor], crc: bool, meta: dict[str, str]
) -> None:
    assume(not crc or all(map(can_hash, items)))
    data = image_bytes(build_safetensors_image(items, crc=crc, metadata=meta))
    loaded = load(tmp_path / "x.safetensors", data, crc_check=crc, format="safetensors")
    assert loaded == stored_items(items)
