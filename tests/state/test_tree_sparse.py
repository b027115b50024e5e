# SPDX-License-Identifier: Apache-2.0
"""Sparse arrays of SciPy in a state: stored as their arrays, and checked before they are one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, StateMismatch, UnsupportedState
from ckptmgr.state.tree import Restoration, flatten, restore
from tests.support.trees import reader

sparse: Any = pytest.importorskip("scipy.sparse")
FORMATS = ["csr", "csc", "bsr", "coo", "dia"]


def _into(target: object, state: object) -> Any:
    flat = flatten(state)
    return restore(target, flat.skeleton, reader(flat))


def _matrix(layout: str, seed: int = 1) -> Any:
    return sparse.random_array((4, 6), density=0.5, rng=np.random.default_rng(seed)).asformat(
        layout
    )


@pytest.mark.parametrize("layout", FORMATS)
def test_sparse_array_comes_back_as_its_arrays_and_in_kind(layout: str, tmp_path: Path) -> None:
    stored, target = _matrix(layout), {"x": sparse.csr_matrix((4, 6)).asformat(layout)}
    mine = target["x"]
    config = CheckpointConfig()
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, {"x": stored})
    CheckpointManager(tmp_path, config, prefix="net").resume(target)
    assert target["x"] is mine
    assert mine.format == layout
    assert (mine.toarray() == stored.toarray()).all()
    plain: Any = CheckpointManager(tmp_path, config, prefix="net").resume().state
    assert (plain["x"]["format"], plain["x"]["shape"]) == (layout, [4, 6])
    assert (plain["x"]["data"] == stored.data).all()


CSR = {
    "format": "csr",
    "shape": [2, 2],
    "data": np.ones(1),
    "indices": np.array([1], np.int32),
    "indptr": np.array([0, 1, 1], np.int32),
}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"indices": np.array([2], np.int32)}, "stored are no arrays of one"),
        ({"indices": np.array([-1], np.int32)}, "stored are no arrays of one"),
        ({"indptr": np.array([0, 9, 1], np.int32)}, "stored are no arrays of one"),
        ({"indptr": np.array([0, 1], np.int32)}, "stored are no arrays of one"),
        ({"indptr": np.array([0.0, 1, 1])}, "is a sparse array of float64, stored is one of"),
        ({"data": np.ones(1, np.float32)}, "of float64, stored is one of float32"),
        ({"data": [1.0]}, "stored are not its arrays"),
        ({"shape": [2, 3]}, r"is a sparse array \['csr', \[2, 2\]\], stored is"),
        ({"format": "csc"}, "stored is"),
        ({"more": 1}, "in the format 'csr', stored is another"),
    ],
)
def test_sparse_array_that_does_not_fit_is_refused(changed: dict[str, Any], problem: str) -> None:
    target = sparse.csr_array((2, 2))
    with pytest.raises(StateMismatch, match=problem):
        _into({"x": target}, {"x": {**CSR, **changed}})
    assert target.nnz == 0


def test_index_pointer_whose_differences_overflow_is_refused() -> None:
    start = np.array([0, 2**63 - 1, -(2**63), -1, 1], np.int64)
    stored = {**CSR, "shape": [4, 4], "indices": np.zeros(4, np.int64), "indptr": start}
    with pytest.raises(StateMismatch, match="its index pointer leads outside of the array"):
        _into({"x": sparse.csr_array((4, 4))}, {"x": {**stored, "data": np.ones(4)}})


def test_blocks_without_a_size_are_refused() -> None:
    target = sparse.bsr_array((4, 4), blocksize=(2, 2))
    stored = {"format": "bsr", "shape": [4, 4], "data": np.zeros((0, 0, 0))}
    stored |= {"indices": np.zeros(0, np.int32), "indptr": np.zeros(3, np.int32)}
    with pytest.raises(StateMismatch, match="stored are no arrays of one"):
        _into({"x": target}, {"x": stored})


@pytest.mark.parametrize("coords", [5, (np.array([0]), np.array([2])), (np.array([0]), "x")])
def test_coordinates_outside_a_sparse_array_are_refused(coords: object) -> None:
    stored = {"format": "coo", "shape": [2, 2], "data": np.ones(1), "coords": coords}
    with pytest.raises(StateMismatch, match="is a sparse array, stored are"):
        _into({"x": sparse.coo_array((2, 2))}, {"x": stored})


def test_sparse_array_without_arrays_names_the_way_out() -> None:
    with pytest.raises(
        UnsupportedState, match=r"\['x'\] is a sparse array in the format 'lil': .*tocsr"
    ):
        flatten({"x": sparse.lil_array((2, 2))})


def test_sparse_array_is_compared_after_its_contents_are_read() -> None:
    flat = flatten([_matrix("csr")])
    read = reader(flat)
    late: dict[str, np.ndarray] = {}

    def fill(name: str) -> None:
        late[name][...] = read(name)

    def empty(name: str) -> np.ndarray:
        late[name] = np.zeros_like(read(name))
        array: np.ndarray = late[name]
        return array

    restoration = Restoration([sparse.csr_array((4, 6))], flat.skeleton, empty, fill=fill)
    restored: Any = restoration.finish()
    assert (restored[0].toarray() == _matrix("csr").toarray()).all()
