# SPDX-License-Identifier: Apache-2.0
"""Finds elements that are not finite in the float tensors of an image, while its bytes are read to be saved.

Each piece is looked at just before it is copied or encrypted, so its bytes are read from memory
once. Two kinds of value count: NaN, and infinities; but a piece that has nothing but zeros and
negative infinities is a mask, as of attention, and counts as finite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from .dtypes import BY_NAME
from .tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

_HasNone = Callable[[memoryview], bool]


def _are_finite(memory: memoryview, *, dtype: str) -> bool:
    import numpy as np

    return bool(np.isfinite(np.frombuffer(memory, dtype)).all())


def _are_below(memory: memoryview, *, bits: int, top: int) -> bool:
    """Return whether all numbers are below a bit pattern, whatever their sign.

    From `top` on they are infinite, or no numbers. Two maxima need a third of the time of
    `isfinite`, which first converts these types.
    """
    import numpy as np

    positive, negative = (np.frombuffer(memory, f"<{kind}{bits // 8}") for kind in "iu")
    sign = 1 << bits - 1
    return bool(positive.max(initial=0) < top and negative.max(initial=0) < sign + top)


def _has_no_byte(memory: memoryview, *, value: bytes) -> bool:
    return value not in bytes(memory)


_TESTS: Mapping[str, _HasNone] = {
    "float16": partial(_are_below, bits=16, top=0x7C00),
    "bfloat16": partial(_are_below, bits=16, top=0x7F80),
    **{name: partial(_are_finite, dtype="<f4") for name in ("float32", "complex64")},
    **{name: partial(_are_finite, dtype="<f8") for name in ("float64", "complex128")},
    "float8_e4m3fn": partial(_are_below, bits=8, top=0x7F),
    "float8_e5m2": partial(_are_below, bits=8, top=0x7C),
    "float8_e4m3fnuz": partial(_has_no_byte, value=b"\x80"),
    "float8_e5m2fnuz": partial(_has_no_byte, value=b"\x80"),
    "float8_e8m0fnu": partial(_has_no_byte, value=b"\xff"),
}
"""Types with values that are not finite, and the functions that find whether there are none."""

FLOATS = frozenset(_TESTS)


def not_finite(dtype: str, memory: memoryview) -> int:
    """Return how many elements of a type in `FLOATS` are not finite; 0 for a mask."""
    if _TESTS[dtype](memory):
        return 0
    import numpy as np

    values: np.ndarray = np.frombuffer(memory, BY_NAME[dtype].to_numpy())
    if values.dtype.kind != "c":
        with np.errstate(invalid="ignore"):  # NaN that signals
            values = values.astype(np.float64)
    is_bad = ~np.isfinite(values)
    is_mask = not values[~is_bad].any() and bool((values[is_bad] == -np.inf).all())
    return 0 if is_mask else int(is_bad.sum())


class FiniteWatch:
    """Counts the elements that are not finite. Safe to use from several threads.

    `true_types` has the types of tensors that are stored as bytes, by name.
    """

    def __init__(self, true_types: Mapping[str, str]) -> None:
        self._true_types = true_types
        self._found: dict[tuple[int, int], tuple[str, int]] = {}
        self._lock = threading.Lock()

    @property
    def first(self) -> str | None:
        """Name of the first tensor in the file that is not finite; None where all are."""
        return self._found[min(self._found)][0] if self._found else None

    @property
    def count(self) -> int:
        """Number of elements that are not finite."""
        return sum(count for _, count in self._found.values())

    def see(self, index: int, tensor: Tensor, content: memoryview, start: int, stop: int) -> None:
        """Look at the elements that begin in `content[start:stop]`.

        `index` is the place of the content in the file; it begins with an element of the tensor.
        """
        dtype = self._type_of(tensor)
        if dtype is not None:
            item = BY_NAME[dtype].item_bytes
            first, last = (-(-one // item) * item for one in (start, stop))
            self._note((index, start), tensor, not_finite(dtype, content[first:last]))

    def see_parts(
        self,
        index: int,
        parts: Sequence[bytes | Tensor],
        starts: Sequence[int],
        content: memoryview,
    ) -> None:
        """Look at small tensors among the parts of a content, which begin at `starts`."""
        floats: dict[str, list[tuple[Tensor, int, int]]] = {}
        for one, start, stop in zip(parts, starts, [*starts[1:], len(content)], strict=True):
            if type(one) is Tensor and (dtype := self._type_of(one)) is not None:
                floats.setdefault(dtype, []).append((one, start, stop))
        for dtype, found in floats.items():
            joined = b"".join([content[start:stop] for _, start, stop in found])
            if _TESTS[dtype](memoryview(joined)):
                continue  # together, as a call for each takes longer than its bytes
            for tensor, start, stop in found:
                self._note((index, start), tensor, not_finite(dtype, content[start:stop]))

    def _type_of(self, tensor: Tensor) -> str | None:
        name = tensor.spec.dtype.name
        name = self._true_types.get(tensor.spec.name, name) if name == "uint8" else name
        return name if name in FLOATS else None

    def _note(self, at: tuple[int, int], tensor: Tensor, count: int) -> None:
        if count:
            with self._lock:
                self._found[at] = tensor.spec.name, count
