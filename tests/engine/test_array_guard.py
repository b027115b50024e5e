# SPDX-License-Identifier: Apache-2.0
"""Which arrays may be copied later, and which changes are noticed."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.engine.change_guard import Guarded, guard, sample_of
from ckptmgr.engine.staged_state import COPY_PIECE_BYTES
from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.arrays import jax_bytes
from ckptmgr.state.torch_memory import torch_bytes
from ckptmgr.state.tree import flatten

SIZE = 100_000
PIECES = np.zeros(3 * COPY_PIECE_BYTES + 8 * 7 + 5, np.uint8)


def tensor_of(value: object) -> Tensor:
    (tensor,) = flatten([value]).tensors
    return tensor


def guarded(value: object) -> Guarded:
    found = guard(tensor_of(value))
    assert found is not None
    return found


def sampled(array: np.ndarray) -> Guarded:
    """Return what guards an array as it would a tensor."""
    tensor = tensor_of(array)
    return Guarded(tensor, sample=sample_of(tensor.content()))


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def mapped_file(access: int) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return np.frombuffer(mmap.mmap(file.fileno(), SIZE, access=access), np.uint8)


AT_ONCE: dict[str, Callable[[], object]] = {
    "small": lambda: np.zeros(64 << 10, np.uint8),
    "strided": lambda: np.zeros((SIZE, 2))[:, 0],
    "fortran": lambda: np.zeros((300, 400), order="F"),
    "bytearray": lambda: bytearray(SIZE),
    "empty": lambda: np.zeros((SIZE, 0)),
    "owner": lambda: np.zeros(SIZE),
    "read-only": lambda: read_only(np.zeros(SIZE)),
    "read-only buffer of writable": lambda: np.frombuffer(np.zeros(SIZE).data.toreadonly()),
    "read-only view of writable": lambda: read_only(np.zeros(SIZE)[:]),
    "read-only file": lambda: mapped_file(mmap.ACCESS_READ),
    "private file": lambda: read_only(mapped_file(mmap.ACCESS_COPY)),
    "foreign owner": lambda: read_only(np.asarray(Foreign())),
}


@pytest.mark.parametrize("make", AT_ONCE.values(), ids=AT_ONCE)
def test_guard_of_what_must_be_copied_at_once_is_none(make: Callable[[], object]) -> None:
    assert guard(tensor_of(make())) is None


def test_guard_of_overlapping_views_is_none() -> None:
    whole = np.zeros(2 * SIZE)
    (tensor,) = flatten([whole[: SIZE + 5], whole[SIZE:]]).tensors
    assert guard(tensor) is None


IMMUTABLE: dict[str, Callable[[], object]] = {
    "bytes": lambda: bytes(SIZE),
    "array of bytes": lambda: np.frombuffer(bytes(SIZE), np.uint8)[5:],
}


class Foreign:
    """Gives its memory away without being a buffer."""

    def __init__(self) -> None:
        self._array = np.zeros(SIZE)
        self.__array_interface__ = self._array.__array_interface__


@pytest.mark.parametrize("make", IMMUTABLE.values(), ids=IMMUTABLE)
def test_array_is_immutable_only_over_memory_that_nobody_can_make_writable(
    make: Callable[[], object],
) -> None:
    assert guarded(make()).is_immutable
    assert not guarded(make()).is_counted_as_changed()


@given(st.integers(0, 3 * COPY_PIECE_BYTES + 8 * 7), st.booleans())
def test_first_and_last_words_of_each_piece_and_of_all_are_sampled(
    at: int, is_behind: bool
) -> None:
    found = sampled(PIECES)
    # One piece of the copy saw the update, from somewhere to its end or from its start to somewhere.
    piece = at // COPY_PIECE_BYTES * COPY_PIECE_BYTES
    end = min(piece + COPY_PIECE_BYTES, PIECES.nbytes)
    torn = PIECES.copy()
    torn[slice(at, end) if is_behind else slice(piece, at + 1)] = 1
    assert found.differs_from(lambda: torn.data)


@pytest.mark.parametrize(
    "changed", [slice(0, SIZE // 50), slice(SIZE // 2), slice(-SIZE // 50, None)]
)
def test_update_of_the_whole_that_a_copy_saw_in_part_is_noticed(changed: slice) -> None:
    found = sampled(np.zeros(SIZE))
    torn = np.zeros(SIZE)
    torn[changed] = 1.0
    assert found.differs_from(lambda: torn.view(np.uint8).data)


def test_samples_of_a_matrix_do_not_lie_in_one_column() -> None:
    matrix = np.tile(np.arange(128, dtype=np.uint64), (128 * 16, 1))
    assert (
        len(set(np.frombuffer(sample_of(matrix.reshape(-1).view(np.uint8).data), np.uint64))) > 64
    )


@given(st.integers(8192, 200_000), st.integers(0, 7))
def test_samples_are_few_and_no_run_of_a_hundredth_has_none(size_words: int, rest: int) -> None:
    words = np.arange(size_words, dtype=np.uint64)
    content = words.tobytes() + bytes(rest)
    found = np.frombuffer(sample_of(memoryview(content)), np.uint64)[:-1]
    assert len(found) <= 131
    gaps = np.diff(np.append(np.unique(found), len(words)).astype(np.int64))
    assert gaps.max(initial=0) <= len(words) // 100


def test_jax_array_on_one_cpu_is_held_by_a_view() -> None:
    array = np.zeros(SIZE)
    found = jax_guard(array, "cpu")
    assert found.is_immutable
    assert found.sample is None
    assert np.shares_memory(np.frombuffer(found.tensor.content()), array)


@pytest.mark.parametrize("platforms", [("tpu",), ("cpu", "cpu")])
def test_jax_array_elsewhere_is_not_fetched_before_it_is_needed(platforms: tuple[str, ...]) -> None:
    fetched: list[str] = []
    found = jax_guard(np.zeros(SIZE), *platforms, fetched=fetched)
    assert found.is_immutable
    assert fetched == []
    assert found.tensor.content().nbytes == 8 * SIZE
    assert fetched == ["yes"]


def jax_guard(array: np.ndarray, *platforms: str, fetched: list[str] | None = None) -> Guarded:
    class Stored(SimpleNamespace):
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            (fetched if fetched is not None else []).append("yes")
            return array

        def devices(self) -> list[Any]:
            return [SimpleNamespace(platform=platform) for platform in platforms]

    plain = tensor_of(array)
    found = guard(Tensor(spec=plain.spec, content=partial(jax_bytes, Stored())))
    assert found is not None
    return found


def test_real_jax_array_stays_valid_when_it_is_donated() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(SIZE)
    found = guarded(array)
    jax.jit(lambda value: value * 2, donate_argnums=0)(array).block_until_ready()
    assert found.is_immutable
    assert np.unique(np.frombuffer(found.tensor.content(), np.float32)).tolist() == [1.0]


def torch() -> Any:
    return pytest.importorskip("torch")


def test_torch_counts_every_operation_in_place_even_on_one_element_of_a_view() -> None:
    weights = torch().zeros(SIZE)
    found = guarded(weights)
    assert not found.is_counted_as_changed()
    weights.view(2, -1)[1, 7] = 1.0
    assert found.is_counted_as_changed()
    assert not found.differs_from(found.tensor.content)


def test_torch_change_behind_the_counter_is_noticed_by_samples() -> None:
    parameter = torch().nn.Parameter(torch().zeros(SIZE))
    found = guarded(parameter)
    parameter.data.add_(1.0)
    assert not found.is_counted_as_changed()
    assert found.differs_from(found.tensor.content)


def test_torch_parameter_that_gets_other_memory_leaves_the_old_one_to_be_copied() -> None:
    parameter = torch().nn.Parameter(torch().zeros(SIZE))
    found = guarded(parameter)
    parameter.data = torch().ones(SIZE)
    assert not found.differs_from(found.tensor.content)
    assert not any(found.tensor.content())


def test_torch_tensor_that_is_not_contiguous_is_guarded_by_its_counter() -> None:
    matrix = torch().arange(200 * 300.0).reshape(200, 300).t()
    found = guarded(matrix)
    assert found.sample is None
    assert not found.differs_from(found.tensor.content)
    assert np.array_equal(np.frombuffer(found.tensor.content(), np.float32), matrix.reshape(-1))
    matrix.mul_(2)
    assert found.is_counted_as_changed()


def test_torch_tensor_that_changes_in_forward_is_copied_at_once() -> None:
    tensor = torch().zeros(SIZE)
    address = tensor.untyped_storage().data_ptr()
    assert guard(tensor_of(tensor), changing={address}) is None
    assert guard(tensor_of(tensor), changing={address + 1}) is not None


def test_small_jax_array_is_copied_at_once() -> None:
    spec = tensor_of(np.zeros(4)).spec
    assert guard(Tensor(spec=spec, content=partial(jax_bytes, np.zeros(4)))) is None


def test_torch_tensor_on_an_accelerator_is_copied_at_once() -> None:
    class OnDevice:
        device = SimpleNamespace(type="cuda")
        is_cpu = False

    content: Any = partial(torch_bytes, OnDevice())  # type: ignore[arg-type]
    assert guard(Tensor(spec=tensor_of(np.zeros(SIZE)).spec, content=content)) is None
