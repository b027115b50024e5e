# SPDX-License-Identifier: Apache-2.0
"""Tensors with the names of the metadata that a file of a state has: loaded as they were, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CkptmgrError, UnsupportedState, load_state, save_state
from tests.support import api
from tests.support.saved import overwrite

OWN = ["ckptmgr.tree", "ckptmgr.tree_crc32", "ckptmgr.pieces", "ckptmgr.data"]
OF_THE_FORMAT = ["format", "crc_num"]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("crc_check", [False, True])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("name", [*OWN, *OF_THE_FORMAT, "__metadata__"])
def test_tensor_of_a_reserved_name_comes_back_or_is_refused_by_name(
    tmp_path: Path, name: str, format: str, crc_check: bool, is_tied: bool
) -> None:
    values = np.arange(4.0)
    state = {"a": values, name: values} if is_tied else {name: values}
    path = tmp_path / f"x.{format}"
    is_alias = is_tied and name in OWN
    is_key = name in ("ckptmgr.tree", "format") or (
        crc_check and name in ("ckptmgr.tree_crc32", "crc_num")
    )
    if is_alias or (is_key and format == "safetensors" and not is_tied):
        with pytest.raises(CkptmgrError, match=repr(name)):
            save_state(state, path, crc_check=crc_check)
        assert not path.exists()
    else:
        save_state(state, path, crc_check=crc_check)
        loaded: Any = load_state(path)
        np.testing.assert_array_equal(loaded[name], values)


@pytest.mark.parametrize("name", OWN)
def test_second_name_that_the_library_keeps_for_itself_is_refused(
    tmp_path: Path, name: str
) -> None:
    values = np.arange(4.0)
    with pytest.raises(UnsupportedState, match=f"{name!r}, a second name of the tensor 'a'"):
        save_state({"a": values, name: values}, tmp_path / "x.ckpt")


@pytest.mark.parametrize("name", OF_THE_FORMAT)
def test_second_name_that_a_safetensors_file_uses_otherwise_is_left_out(
    tmp_path: Path, name: str
) -> None:
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    values, path = np.arange(4.0), tmp_path / "x.safetensors"
    save_state({"a": values, name: values}, path)
    assert list(safetensors_numpy.load_file(path)) == ["a"]
    assert b'"format":"pt"' in path.read_bytes()


def test_second_names_are_covered_by_the_manifest_and_by_no_crc(tmp_path: Path) -> None:
    values, path = np.arange(4.0), tmp_path / "x.safetensors"
    save_state({"a": values, "tied": values}, path, crc_check=True)
    overwrite(path, path.read_bytes().replace(b'"tied":"a"', b'"tide":"a"'))
    with pytest.raises(CkptmgrError):
        load_state(path)
    (tmp_path / api.manifest_name(path.name)).unlink()
    loaded: Any = load_state(path)
    np.testing.assert_array_equal(loaded["tied"], values)
