# SPDX-License-Identifier: Apache-2.0
"""The state of one rank from a checkpoint that any number of ranks saved.

| | tensors that all have alike | what differs from rank to rank |
|---|---|---|
| as many ranks | its part | its own |
| another number | its part by its layout, or all | its own if it was saved, else its state stays |

Tensors that the ranks have not compared (saved without `remove_redundancy`) can be loaded on
another number of ranks only if all ranks have equal ones, or if a layout describes their parts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ckptmgr.core.errors import (
    CheckpointFileNotFound,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.core.regions import Interval, Region, region_shape
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shards import ShardedCheckpoint, first_difference
from ckptmgr.files.load.state import DATA, SEEN, SKELETON, StoredState
from ckptmgr.formats.tensor import Tensor
from ckptmgr.objects.places import place_of
from ckptmgr.state import tree
from ckptmgr.state.skeleton import leaf_shapes, with_shapes
from ckptmgr.state.skeleton_merge import KEPT, first_differing_path, merge_skeletons
from ckptmgr.state.slices import Slice, Slicer
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)


def read_sharded(
    store: Store,
    manifest: Manifest,
    *,
    options: ReadOptions,
    state: object = None,
    slicer: Slicer | None = None,
) -> StoredState:
    """Return the verified state of one rank from a checkpoint of many ranks.

    Raises:
        CorruptCheckpoint, KeyProblem: A needed file is damaged, or does not open with the key.
        UnsupportedCheckpoint: The number of ranks changed, and their tensors cannot be joined.
    """
    with ShardedCheckpoint(store, manifest, options=options) as files:
        return _Reading(files, options, state, slicer).run()


def load_sharded(
    path: str | os.PathLike[str], *, options: ReadOptions, choose: Callable[[str], bool]
) -> dict[str, np.ndarray]:
    """Return the chosen tensors of many ranks, whole; if ranks differ, those of the first.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        CkptmgrError: As `read_sharded`.
    """
    # An attacker with write permission could otherwise join files of several steps, each sealed.
    store, real, _ = place_of(path, trust=options.trust)
    manifest = store.read_manifest(real.name)
    if manifest is None:
        raise CheckpointFileNotFound("no such checkpoint", path=path)
    with ShardedCheckpoint(store, manifest, options=options) as files:
        chosen = {name: rank for name, rank in files.first_ranks().items() if choose(name)}
        return _Reading(files, options, None, None).whole(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """The flattened state of the reader."""

    skeleton: str | None
    tensors: Mapping[str, Tensor]
    slices: Mapping[str, Slice]
    problem: UnsupportedState | None = None


class _Reading:
    def __init__(
        self,
        files: ShardedCheckpoint,
        options: ReadOptions,
        state: object,
        slicer: Slicer | None,
    ) -> None:
        self._files = files
        self._rank = options.rank or 0
        self._is_same_world = (1 if options.rank is None else options.world) == files.world
        # The number of ranks changed, and they did not compare their tensors: only equal ones can
        # be used.
        self._is_one_for_all = not self._is_same_world and not files.is_compared
        self._home = self._rank if self._rank < files.world else 0
        self._slicer = slicer
        self._own = _own(state, slicer)
        self._has = cache(self._has_tensor)

    def run(self) -> StoredState:
        skeleton, kept = self._skeleton()
        if skeleton is None:
            shapes, kept = self._named()
        else:
            shapes = leaf_shapes(skeleton)
        stored = {name: shape for name, shape in shapes.items() if not name.startswith(KEPT)}
        regions = {name: self._region(name, shape) for name, shape in stored.items()}
        arrays = self.tensors(regions)
        arrays |= {name: self._kept(name) for name in shapes if name.startswith(KEPT)}
        if kept:
            _LOG.warning("%s holds nothing of this rank for %s", self._files.path, ", ".join(kept))
        local = {name: region_shape(one) for name, one in regions.items() if one is not None}
        local |= {KEPT + name: one.lengths for name, one in self._own.slices.items()}
        return StoredState(
            path=self._files.path,
            skeleton=None if skeleton is None else with_shapes(skeleton, local),
            arrays=arrays,
            manifest=self._files.manifest,
            kept=kept,
            data=self._files.metadata(self._home).get(DATA),
            seen=self._files.metadata(self._home).get(SEEN),
        )

    def _named(self) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """Return the shapes of the tensors of this rank, and the names not saved for it."""
        rank = None if self._is_one_for_all else self._rank
        names = self._files.names(self._home if rank is None else rank)
        shapes = {name: self._whole_shape(name, rank) for name in names}
        is_new = self._rank >= self._files.world
        return shapes, tuple(
            name for name in self._files.first_ranks() if is_new and name not in shapes
        )

    def _whole_shape(self, name: str, rank: int | None) -> tuple[int, ...]:
        stored = next(self._files.pieces(name, rank=rank), None)
        return () if stored is None else stored.whole

    def tensors(self, regions: Mapping[str, Region | None]) -> dict[str, np.ndarray]:
        """Return tensors, or parts of them."""
        arrays = self._files.read(
            {name: self._with_item(name, region) for name, region in regions.items()},
            rank=None if self._is_one_for_all else self._rank,
        )
        self._check_same(regions)
        return arrays

    def whole(self, names: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return tensors, each as the given rank has it."""
        if self._is_one_for_all:
            return self.tensors(dict.fromkeys(names))
        arrays: dict[str, np.ndarray] = {}
        for rank in sorted({*names.values()}):
            own = [name for name, first in names.items() if first == rank]
            arrays |= self._files.read(dict.fromkeys(own), rank=rank)
        return {name: arrays[name] for name in names}

    def _skeleton(self) -> tuple[str | None, tuple[str, ...]]:
        first = self._files.metadata(self._home).get(SKELETON)
        others = range(self._files.world) if not self._is_same_world else ()
        if first is None or self._is_same_world:
            return first, ()
        if self._is_one_for_all:
            for rank in others:
                self._check_same_skeleton(first, self._files.metadata(rank).get(SKELETON), rank)
            return first, ()
        if self._rank < self._files.world:
            return first, ()
        texts = [self._files.metadata(rank).get(SKELETON, first) for rank in others]
        found = merge_skeletons(first, texts, self._own.skeleton, has=self._has)
        if found.kept and self._own.problem is not None:
            raise self._own.problem  # the values that stay cannot be read
        return found.skeleton, found.kept

    def _has_tensor(self, name: str) -> bool:
        return any(True for _ in self._files.pieces(name, rank=self._rank))

    def _check_same_skeleton(self, first: str, other: str | None, rank: int) -> None:
        if other != first:
            where = "the state" if other is None else first_differing_path(first, other)
            raise self._differs(where, rank)

    def _check_same(self, regions: Mapping[str, Region | None]) -> None:
        """Check that tensors without a layout, if not compared by the ranks, are equal on all."""
        if not self._is_one_for_all:
            return
        for name, region in regions.items():
            if any(one.piece.ranks is not None for one in self._files.pieces(name, rank=None)):
                rank = first_difference(self._files, name, self._with_item(name, region))
                if rank is not None:
                    raise self._differs(repr(name), rank)

    def _differs(self, what: str, rank: int) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            f"was saved by {self._files.world} ranks, each its own state, and {what} differs between ranks 0 and {rank}",
            path=self._files.path,
            hint="start as many ranks; a save with remove_redundancy=True, or with layouts, can be loaded by any number",
        )

    def _region(self, name: str, shape: tuple[int, ...]) -> Region | None:
        own = self._own.slices.get(name)
        if own is not None and own.shape == shape:
            return own.region
        return None if self._slicer is None else self._slicer.region(name, shape)

    def _with_item(self, name: str, region: Region | None) -> Region | None:
        """Return a region in the stored dimensions, which may be those of element bytes."""
        if region is None:
            return None
        stored = next(iter(self._files.pieces(name, rank=None)), None)
        more = () if stored is None else stored.whole[len(region) :]
        return (*region, *(Interval(0, length) for length in more))

    def _kept(self, name: str) -> np.ndarray:
        tensor = self._own.tensors.get(name.removeprefix(KEPT))
        if tensor is None:
            raise CorruptCheckpoint("a tensor is missing", path=self._files.path, tensor=name)
        flat: np.ndarray = np.frombuffer(tensor.content(), np.uint8)
        return flat.view(tensor.spec.dtype.to_numpy()).reshape(tensor.spec.shape)


def _own(state: object, slicer: Slicer | None) -> _Own:
    nothing = _Own(skeleton=None, tensors={}, slices={})
    if state is None:
        return nothing
    try:
        flat = tree.flatten(state, slicer)
    except UnsupportedState as error:
        # Such as an object that can only be filled: the stored state shows later whether it fits.
        return replace(nothing, problem=error.with_traceback(None))
    return _Own(
        skeleton=flat.skeleton,
        tensors={tensor.spec.name: tensor for tensor in flat.tensors},
        slices=flat.slices,
    )
