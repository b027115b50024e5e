# SPDX-License-Identifier: Apache-2.0
"""A state tree in a checkpoint file: its tensors, and its skeleton in the metadata strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckptmgr.core.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.formats.file_crc import crc32
from ckptmgr.formats.strict_json import check_memory, most_memory
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.state import tree
from ckptmgr.state.part import part_of, tensors_of
from ckptmgr.state.paths import StateMismatch
from ckptmgr.state.skeleton import with_shapes
from ckptmgr.store.manifest.codec import Manifest

if TYPE_CHECKING:  # a save needs none of these
    from ckptmgr.files.load.in_place import InPlaceState
    from ckptmgr.files.load.open import OpenCheckpoint
    from ckptmgr.files.load.shard_pieces import Index
    from ckptmgr.state.read_back import ReadBack
    from ckptmgr.state.slices import Slice
    from ckptmgr.state.stored_arrays import ReadTensor
    from ckptmgr.state.surroundings import Surroundings

_OWN_PREFIX = "ckptmgr."
# Metadata of a safetensors file: for which library it is, and MindSpore's CRC32.
_FORMAT_NAMES = ("format", "crc_num")
SKELETON = "ckptmgr.tree"
SKELETON_CRC = "ckptmgr.tree_crc32"
"""Decimal CRC-32 of the skeleton's UTF-8 text, in safetensors files that have MindSpore's CRC."""


SEEN = "ckptmgr.seen"
"""What the training of a state depends on besides; see `state.surroundings`."""
DATA = "ckptmgr.data"
"""Where the data loaders of a run stand, beside its state; other programs need not know it."""


def state_metadata(flat: tree.FlatState) -> dict[str, str]:
    """Return the metadata strings that are needed to restore the state, and its second names.

    Raises:
        UnsupportedState: A second name is one that the library keeps for itself.
    """
    for alias, name in flat.aliases.items():
        if alias.startswith(_OWN_PREFIX):
            raise UnsupportedState(
                f"{alias!r}, a second name of the tensor {name!r}, is reserved in the metadata",
                hint=f"rename it: names that begin with {_OWN_PREFIX!r} are those of this library",
            )
    # A second name serves other libraries only, which read these two correctly.
    aliases = {name: one for name, one in flat.aliases.items() if name not in _FORMAT_NAMES}
    found = {**aliases, SKELETON: flat.skeleton}
    stored = {tensor.spec.name: tensor.spec for tensor in flat.tensors}
    slices = {name: one for name, one in flat.slices.items() if name in stored}
    if slices:
        from ckptmgr.files.load.shard_pieces import PIECES

        found[PIECES] = index_of(slices, stored).to_text()
    return found


def with_skeleton_crc(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return metadata with a CRC of the skeleton, which MindSpore's `crc_num` does not cover.

    One that is there stays: it was computed when the state was saved.
    """
    if SKELETON not in metadata:
        return metadata
    return {SKELETON_CRC: str(_crc_of(metadata[SKELETON])), **metadata}


def check_documents(metadata: Mapping[str, str], *, stored_bytes: int) -> None:
    """Raise FormatError where a document of this library in some metadata takes too much memory.

    It is asked before every write, and before anything reads one of them; see `most_memory`.
    """
    most_bytes = most_memory(stored_bytes)
    for name, text in metadata.items():
        if name.startswith(_OWN_PREFIX):
            check_memory(text, what=f"text {name!r}", most_bytes=most_bytes)


def checked_skeleton(opened: OpenCheckpoint) -> str | None:
    """Return the skeleton in an opened file, or None; raise ChecksumMismatch if it is damaged."""
    metadata = opened.metadata
    skeleton, crc = metadata.get(SKELETON), metadata.get(SKELETON_CRC)
    if skeleton is not None and crc is not None and crc != str(_crc_of(skeleton)):
        raise ChecksumMismatch("the CRC32 of the state tree does not match", path=opened.path)
    return skeleton


def _crc_of(skeleton: str) -> int:
    return crc32(skeleton.encode("utf-8", "surrogatepass"))


def as_held_here(flat: tree.FlatState) -> tree.FlatState:
    """Return a state whose skeleton has the shapes of this process's slices, not of tensors."""
    lengths = {name: one.lengths for name, one in flat.slices.items()}
    return replace(flat, skeleton=with_shapes(flat.skeleton, lengths), objects=())


def index_of(slices: Mapping[str, Slice], stored: Mapping[str, TensorSpec]) -> Index:
    """Return the index of a file in which the tensors in `slices` are parts of larger ones."""
    from ckptmgr.files.load.shard_pieces import Index, Piece

    pieces = {}
    for name, one in slices.items():
        # Elements of types without a format are stored as bytes, which adds a dimension.
        more = stored[name].shape[len(one.lengths) :]
        pieces[name] = Piece(
            tensor=name, shape=(*one.shape, *more), start=(*one.start, *(0 for _ in more))
        )
    return Index(pieces=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """The verified content of a checkpoint; `skeleton` is None in a file of plain named tensors.

    `kept` lists paths in the state that no rank saved for this process, and that stay as they are.
    `data` says where the data loaders of the run stood, if it was saved with them, and `seen` what
    its training depends on besides; see `state.surroundings`. `renames` are applied when it is
    compared; see `state.renames`.
    """

    path: Path
    skeleton: str | None
    arrays: Mapping[str, np.ndarray]
    manifest: Manifest | None
    kept: tuple[str, ...] = ()
    data: str | None = None
    seen: str | None = None
    renames: Mapping[str, str] | None = None

    @classmethod
    def read(
        cls,
        opened: OpenCheckpoint,
        *,
        path: Path,
        manifest: Manifest | None,
        only: Sequence[str] | None = None,
    ) -> StoredState:
        """Read everything, or only these parts of the state; raises as `read_values` does.

        A CRC32 in the file is checked where nothing stronger vouches for the content.
        """
        from ckptmgr.files.load.options import everything
        from ckptmgr.files.load.values import read_arrays, read_values

        skeleton = checked_skeleton(opened)
        choose: Callable[[str], bool] = everything
        if only is not None:
            skeleton = cut_skeleton(skeleton, only, path=path)
            choose = tensors_of(skeleton).__contains__
        is_proven = opened.has_digests or opened.is_sealed
        has_crc = opened.index.crc is not None and not is_proven
        arrays: Mapping[str, np.ndarray]
        if skeleton is None:  # the order is that of the result
            values = read_values(opened, choose=choose, check_crc=has_crc)
            arrays = {name: one for name, one in values.items() if isinstance(one, np.ndarray)}
        else:
            arrays = read_arrays(opened, choose=choose, check_crc=has_crc)
        data, seen = opened.metadata.get(DATA), opened.metadata.get(SEEN)
        return cls(
            path=path, skeleton=skeleton, arrays=arrays, manifest=manifest, data=data, seen=seen
        )

    def cut(self, only: Sequence[str]) -> StoredState:
        """Return these parts of the state."""
        return replace(self, skeleton=cut_skeleton(self.skeleton, only, path=self.path))

    def put_back(self, state: object, how: ReadBack | None = None) -> object:
        """Restore into `state`, or new objects; raises as `plan_restore`, before any change."""
        return self.plan_restore(state, how)()

    def plan_restore(self, state: object, how: ReadBack | None = None) -> Callable[[], object]:
        """Return a function that restores into `state`, or returns new objects if it is None.

        Raises:
            StateMismatch: It does not fit.
            CorruptCheckpoint: A tensor is missing.
            UnsupportedCheckpoint: The file has no state tree, and there is a state to restore into.
        """
        if self.skeleton is not None:
            skeleton = under_names(self.skeleton, self.renames)
            return plan_put_back(state, skeleton, self._array, how, seen=surroundings_in(self.seen))
        if state is None:
            return lambda: dict(self.arrays)
        raise UnsupportedCheckpoint(
            "this file holds named tensors without a state tree (neither save_state nor a CheckpointManager wrote it)",
            path=self.path,
            hint="load it with ckptmgr.load_checkpoint",
        )

    def _array(self, name: str) -> np.ndarray:
        try:
            return self.arrays[name]
        except KeyError:
            raise CorruptCheckpoint("a tensor is missing", path=self.path, tensor=name) from None


def verified_state(
    opened: OpenCheckpoint,
    file: ExitStack,
    *,
    path: Path,
    manifest: Manifest | None,
    state: object,
    only: Sequence[str] | None = None,
    renames: Mapping[str, str] | None = None,
) -> StoredState | InPlaceState:
    """Return the verified content of an opened file, or its parts `only`, to be restored into `state`.

    Its tensors are in memory. If `state` can take them in place, they are still in the file, and
    what `file` closes stays open until then. `renames` as in `StoredState`.
    """
    from ckptmgr.files.load.in_place import in_place

    skeleton = checked_skeleton(opened)
    if state is not None and skeleton is not None and only is None:
        found = in_place(opened, state, skeleton=skeleton, manifest=manifest, renames=renames)
        if found is not None:
            found.close_with(file.pop_all())
            return found
    read = StoredState.read(opened, path=path, manifest=manifest, only=only)
    return replace(read, renames=renames)


def cut_skeleton(skeleton: str | None, only: Sequence[str], *, path: Path) -> str:
    """Return the skeleton of parts of a state.

    Raises:
        UnsupportedCheckpoint: The file has no nested state.
        StateMismatch: The state lacks one of them.
    """
    if skeleton is None:
        raise UnsupportedCheckpoint(
            "this file holds named tensors without a state tree, so it has no parts",
            path=path,
            hint="load it without only; load_checkpoint takes specify_prefix",
        )
    try:
        return part_of(skeleton, only)
    except StateMismatch as error:
        raise StateMismatch(error.message, path=path, hint=error.hint) from None


def under_names(skeleton: str, renames: Mapping[str, str] | None) -> str:
    """Return a skeleton under the names of the live state; raises as `renamed_skeleton`."""
    if not renames:
        return skeleton
    from ckptmgr.state.renames import renamed_skeleton

    return renamed_skeleton(skeleton, renames)


def surroundings_in(seen: str | None) -> Surroundings | None:
    """Return the surroundings of a state; None where they are not known."""
    if seen is None:
        return None
    from ckptmgr.state.surroundings import Surroundings

    return Surroundings.from_text(seen)


def plan_put_back(
    state: object,
    skeleton: str,
    read: ReadTensor,
    how: ReadBack | None = None,
    *,
    seen: Surroundings | None = None,
) -> Callable[[], object]:
    """Return a function that restores a state tree into `state`, or into new objects."""
    if state is not None:
        return tree.plan_restore(state, skeleton, read, how, seen=seen)
    restored = tree.unflatten(skeleton, read)
    return lambda: restored
