# SPDX-License-Identifier: Apache-2.0
"""DCP's default planners without pickles: values but tensors become safetensors files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsupportedState
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.state import StoredState, state_metadata
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.source import BytesSource
from ckptmgr.integrations.dcp.dedup import (
    ComparedPlan,
    balanced,
    has_peers,
    is_part,
    rows_of,
    with_digests,
    without_conflicts,
    without_digests,
)
from ckptmgr.state import tree

_NOWHERE = Path()


class SavePlanner(DefaultSavePlanner):
    """`DefaultSavePlanner` with its options; never pickles, balances bytes over ranks."""

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank, with digests of tensors that other ranks may have, too."""
        super().create_local_plan()
        self._own: dict[str, list[WriteItem]] = {}
        # All items, also with plan caching: equal tensors may differ since the last save.
        for item in self.plan.items:
            self._own.setdefault(item.index.fqn, []).append(item)
        is_alone = self.is_coordinator and not has_peers()
        return without_digests(self.plan) if is_alone else with_digests(self.plan, self)

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        if len(all_plans) > 1:
            all_plans = [
                with_digests(plan, self)
                if isinstance(plan, ComparedPlan) and plan.digests is None
                else plan
                for plan in all_plans
            ]
        plans = without_conflicts(all_plans)
        if self.dedup_save_to_lowest_rank:
            return super()._dedup_save_plans(plans)
        return balanced(plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the content of an item: a tensor, some rows of one, or bytes."""
        for item in self._own.get(write_item.index.fqn, ()):
            if is_part(write_item, item):
                tensor = super().resolve_data(item)
                assert isinstance(tensor, torch.Tensor)  # noqa: S101 - values have no parts
                return rows_of(tensor, item, write_item)
        return super().resolve_data(write_item)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans of all ranks, whole even with `enable_plan_caching`."""
        _, metadata = super().create_global_plan(all_plans)
        return self.global_plan, metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor unchanged, others as bytes; raises as `encode_python_object`."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        return io.BytesIO(encode_python_object(write_item.index.fqn, object))


class LoadPlanner(DefaultLoadPlanner):
    """`DefaultLoadPlanner`, with the same options, that never unpickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into the state; raises as `decode_object`."""
        fqn = read_item.dest_index.fqn
        found = decode_object(fqn, value.getvalue())
        if self.flatten_state_dict:
            _put(self.original_state_dict, self.mappings[fqn], found)
        else:
            self.state_dict[fqn] = found


def encode_python_object(fqn: str, value: object) -> bytes:
    """Return any state that `ckptmgr.tree` takes as a safetensors file; `fqn` is named in messages.

    Raises:
        UnsupportedState: It cannot be stored without pickling; names its path.
    """
    try:
        flat = tree.flatten(value)
    except UnsupportedState as error:
        raise UnsupportedState(f"{fqn!r}: {error.message}", hint=error.hint) from error
    image = build_safetensors_image(flat.tensors, metadata=state_metadata(flat))
    return b"".join(image.views(0, image.size))


def decode_object(fqn: str, data: bytes) -> object:
    """Return the value that `encode_python_object` was given; imports and calls nothing in it.

    Raises:
        CorruptCheckpoint: It is something else.
    """
    try:
        opened = open_source(BytesSource(data), path=repr(fqn), options=ReadOptions())
        stored = StoredState.read(opened, path=_NOWHERE, manifest=None)
        if stored.skeleton is None:
            raise CorruptCheckpoint("it has no state tree", tensor=fqn)
        return stored.put_back(None)
    except CkptmgrError as error:
        raise CorruptCheckpoint(
            f"the value of {fqn!r} is damaged: {error.message}", tensor=fqn
        ) from error


def _put(state: Any, path: tuple[str | int, ...], value: object) -> None:
    """Put a value into a nested state, at a path from DCP."""
    *parents, last = path
    for key in parents:
        state = state[_own_key(state, key)]
    state[_own_key(state, last)] = value


def _own_key(container: object, key: str | int) -> object:
    # DCP makes strings of all keys, also of the numbers under which optimizers keep their states.
    if not isinstance(container, Mapping) or key in container:
        return key
    return next((own for own in container if str(own) == key), key)
