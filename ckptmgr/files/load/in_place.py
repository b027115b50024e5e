# SPDX-License-Identifier: Apache-2.0
"""Restore of tensors straight from the file into the memory of a state.

Every byte is verified before the first one of the state is written, so that a damaged checkpoint
changes nothing. So the file is read twice, for its digests and for its contents, but there is no
second copy of the state in memory. Many small tensors are read first and copied, which takes less
time than a place for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.notes import add_note
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.files.load.bulk import fill_arrays, read_through
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.load.state import DATA, SEEN, surroundings_in, under_names
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.index import TensorEntry, read_tensor_into
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.state.read_back import ReadBack
from ckptmgr.state.tree import Restoration
from ckptmgr.store.manifest.codec import Manifest

_MIN_SHARE = 0.5  # of the bytes; below, reading the file twice costs more than the copies
_MANY_TENSORS = 1000
_SMALL_BYTES = 16 << 10  # the mean of small tensors
_MOST_BYTES = 64 << 20  # of a second copy


class InPlaceState:
    """A verified checkpoint and where its tensors go; made by `in_place`."""

    kept: tuple[str, ...] = ()

    def __init__(
        self,
        opened: OpenCheckpoint,
        plan: Restoration,
        arrays: Mapping[str, np.ndarray],
        *,
        manifest: Manifest | None,
    ) -> None:
        self.manifest = manifest
        self.data, self.seen = opened.metadata.get(DATA), opened.metadata.get(SEEN)
        self._opened = opened
        self._plan = plan
        self._arrays = {**arrays, **plan.direct}
        self._file = contextlib.ExitStack()

    def close_with(self, file: contextlib.ExitStack) -> None:
        """Own the open file, which is closed when the state is restored."""
        self._file = file

    def plan_restore(self, state: object, how: ReadBack | None = None) -> Callable[[], object]:
        """Return a function that fills the state that it was compared with."""
        return lambda: self.put_back(state, how)

    def put_back(self, state: object, how: ReadBack | None = None) -> object:
        """Fill the state that it was compared with, and return it.

        Raises:
            CorruptCheckpoint, OSError: The file changed or became unreadable after it was verified.
            StateMismatch: The restored state is another than the stored one.
        """
        del state
        entries = [one for one in tensors_to_fill(self._opened) if one.name in self._arrays]
        arrays = {id(one): self._arrays[one.name] for one in entries}
        try:
            with self._file, translated_errors(self._opened.path):
                fill_arrays(self._opened, entries, arrays)
        except BaseException as error:
            add_note(error, "the file was verified before, but the state is partly overwritten now")
            raise
        return self._plan.finish(how)


def tensors_to_fill(opened: OpenCheckpoint) -> list[TensorEntry]:
    """Return the tensors of a file, without those of map parameters."""
    return [one for one in opened.index.entries if isinstance(one, TensorEntry)]


def in_place(
    opened: OpenCheckpoint,
    state: object,
    *,
    skeleton: str,
    manifest: Manifest | None,
    renames: Mapping[str, str] | None = None,
) -> InPlaceState | None:
    """Return a checkpoint that was verified and compared with `state`, or None.

    With None the caller loads it normally, which is faster, or raises the error that was found
    here.
    """
    is_parallel = opened.unit_bytes or opened.compressed_bytes is not None
    if not is_parallel or not (opened.has_digests or opened.is_sealed):
        return None
    count = len(opened.index.entries)
    if count >= _MANY_TENSORS and opened.source.size <= min(_MOST_BYTES, count * _SMALL_BYTES):
        return None
    entries = {one.name: one for one in tensors_to_fill(opened)}
    arrays: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        spec = entries[name].spec
        arrays[name] = np.empty(spec.shape, spec.dtype.to_numpy())
        return arrays[name]

    def fill(name: str) -> None:
        read_tensor_into(opened.source, entries[name], flat_memory(arrays[name]))

    with contextlib.suppress(CkptmgrError, FormatError, CryptoError):
        seen = surroundings_in(opened.metadata.get(SEEN))
        skeleton = under_names(skeleton, renames)
        plan = Restoration(state, skeleton, read, fill=fill, seen=seen)
        # A bool is checked again when it is read, which may be too late.
        for name in [name for name in plan.direct if arrays[name].dtype == np.bool_]:
            del plan.direct[name]
        if _bytes(plan.direct) < _MIN_SHARE * max(1, _bytes(arrays)):
            return None
        read_through(opened)
        return InPlaceState(opened, plan, arrays, manifest=manifest)
    return None


def _bytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(one.nbytes for one in arrays.values())
