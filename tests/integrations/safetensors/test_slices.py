# SPDX-License-Identifier: Apache-2.0
"""`get_slice` of an encrypted file: integers and results as in the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import ckptmgr

KEY = bytes(range(32))
TENSORS: dict[str, Any] = {
    "weight": np.arange(50, dtype=np.float32).reshape(10, 5),
    "scalar": np.array(7, np.int32),
}


def both(folder: Path, framework: str, name: str, index: Any) -> tuple[Any, Any]:
    """Return the answers of the library and of ckptmgr for an index: a value or an error."""
    ckptmgr.save_file(TENSORS, folder / "plain")
    ckptmgr.save_file(TENSORS, folder / "sealed", key=KEY)
    found: list[Any] = []
    with (
        safetensors.safe_open(folder / "plain", framework) as theirs,
        ckptmgr.safe_open(folder / "sealed", framework, key=KEY) as ours,
    ):
        for file in (theirs, ours):
            try:
                found.append(file.get_slice(name)[index])
            except (safetensors.SafetensorError, TypeError) as error:
                found.append(error)
    return found[0], found[1]


@pytest.mark.parametrize("framework", ["np", "jax"])
@pytest.mark.parametrize(
    "index",
    [np.int64(1), (np.int64(-1), np.uint8(2)), np.array(3), (slice(np.int64(1), np.array(3)), 0)],
    ids=repr,
)
def test_integers_of_numpy_index_as_in_the_library(
    tmp_path: Path, framework: str, index: Any
) -> None:
    if framework == "jax":
        pytest.importorskip("jax")
    expected, found = both(tmp_path, framework, "weight", index)
    assert (type(found), found.shape) == (type(expected), expected.shape)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("index", [np.int64(10), np.int64(-11), slice(0, 1.5)], ids=repr)
def test_integer_of_numpy_outside_and_fraction_give_the_librarys_error(
    tmp_path: Path, index: Any
) -> None:
    expected, found = both(tmp_path, "np", "weight", index)
    assert isinstance(found, Exception)
    assert (type(found), str(found)) == (type(expected), str(expected))


@pytest.mark.parametrize("index", [np.bool_(True), np.arange(2), 1.5], ids=repr)
def test_what_is_no_integer_is_refused_as_in_the_library(tmp_path: Path, index: Any) -> None:
    expected, found = both(tmp_path, "np", "weight", index)
    assert type(found) is type(expected) is safetensors.SafetensorError
    assert "is neither a number nor a range" in str(found)


@pytest.mark.parametrize(("name", "index"), [("weight", (3, 4)), ("scalar", ()), ("scalar", ...)])
def test_one_element_is_an_array_without_dimensions_as_in_the_library(
    tmp_path: Path, name: str, index: Any
) -> None:
    expected, found = both(tmp_path, "np", name, index)
    assert type(found) is type(expected) is np.ndarray
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype) == ((), expected.dtype)
    assert found.flags.writeable
    assert found == expected == TENSORS[name][index]
