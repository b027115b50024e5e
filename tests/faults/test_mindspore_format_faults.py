# SPDX-License-Identifier: Apache-2.0
"""What MindSpore 2.10 was seen to do with files that are malformed or unusual, and what ours does.

The numbers are those of the sections on formats and behaviour in which it was recorded.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CkptmgrError,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.formats.mindspore.wire import encode_bytes_field, encode_varint_field
from tests.support.surface import bare

_DIMS = encode_varint_field(1, 1)
_TYPE = encode_bytes_field(2, b"Float32")
_CONTENT = encode_bytes_field(3, bytes(4))
_TAG = encode_bytes_field(1, b"w")
_WHOLE = _DIMS + _TYPE + _CONTENT

_MALFORMED = {
    "no tag": encode_bytes_field(2, _WHOLE),
    "no content": _TAG + encode_bytes_field(2, _DIMS + _TYPE),
    "no type": _TAG + encode_bytes_field(2, _DIMS + _CONTENT),
    "no tensor": _TAG,
    "tensor twice": _TAG + encode_bytes_field(2, _WHOLE) * 2,
    "content twice": _TAG + encode_bytes_field(2, _WHOLE + _CONTENT),
    "one gigabyte of dimensions": _TAG
    + encode_bytes_field(2, encode_varint_field(1, 2**31 - 1) + _TYPE + _CONTENT),
    "content of a megabyte": _TAG
    + encode_bytes_field(2, _DIMS + _TYPE + encode_bytes_field(3, bytes(1 << 20))),
}


@pytest.mark.parametrize("what", _MALFORMED)
def test_format_1_4_malformed_entry_is_refused_without_taking_memory(
    tmp_path: Path, what: str
) -> None:
    """MindSpore: fills in missing values, merges double ones, allocates 2 GiB, or crashes with SIGSEGV."""
    path = bare(tmp_path / "x.ckpt", encode_bytes_field(1, _MALFORMED[what]))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint) as caught:
            load_checkpoint(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.offset is not None
    assert peak_bytes < 4 << 20


def test_format_2_tensor_that_ends_like_a_crc_trailer_loads(tmp_path: Path) -> None:
    """MindSpore: cuts the last 17 bytes off and cannot load the file."""
    tail = np.frombuffer(b"crc_num" + bytes(10), np.uint8)
    save_checkpoint({"w": tail}, tmp_path / "x.ckpt")
    assert np.array_equal(load_checkpoint(bare(tmp_path / "x.ckpt"))["w"], tail)


@pytest.mark.parametrize("name", ["format", "crc_num", "__metadata__"])
def test_format_4_tensor_with_a_reserved_name_is_refused_when_saved(
    tmp_path: Path, name: str
) -> None:
    """MindSpore: it saves, and fails with KeyError when it loads."""
    with pytest.raises(UnsupportedCheckpoint, match="metadata key"):
        save_checkpoint(
            {name: np.zeros(1)}, tmp_path / "x.safetensors", format="safetensors", crc_check=True
        )
    assert list(tmp_path.iterdir()) == []


_GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
_VIEWS = {
    "transposed": _GRID.T,
    "columns": _GRID[:, 2:5],
    "every second": _GRID[::2, ::3],
    "reversed": _GRID[::-1],
    "fortran": np.asfortranarray(_GRID),
    "broadcast": np.broadcast_to(_GRID[0], (3, 6)),
    "big endian": _GRID.astype(">f4"),
}


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("view", _VIEWS)
def test_behaviour_4_4_array_of_any_strides_is_saved_as_it_reads(
    tmp_path: Path, view: str, format: str
) -> None:
    """MindSpore with safetensors 0.8.0: writes the memory as it lies, so the values come back in another order."""
    path = tmp_path / f"x.{format}"
    save_checkpoint({"w": _VIEWS[view]}, path, format=format)
    loaded = load_checkpoint(path)["w"]
    assert isinstance(loaded, np.ndarray)
    assert loaded.tolist() == _VIEWS[view].tolist()


def test_error_of_a_damaged_file_names_the_file_the_offset_and_the_tensor(tmp_path: Path) -> None:
    """MindSpore: it says that the file may be corrupted and cannot be parsed."""
    path = bare(tmp_path / "x.ckpt", encode_bytes_field(1, _MALFORMED["no content"]))
    with pytest.raises(
        CkptmgrError, match=r"x\.ckpt: the content is missing \(offset \d+, tensor 'w'\)"
    ):
        load_checkpoint(path)
