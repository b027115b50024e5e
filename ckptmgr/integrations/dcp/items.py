# SPDX-License-Identifier: Apache-2.0
"""The items of DCP's save plans as tensors of our files."""

from __future__ import annotations

import io
from functools import partial

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.integrations.dcp.index import dcp_piece_name
from ckptmgr.integrations.dcp.metadata import tensor_data
from ckptmgr.state.leaves import stored_as
from ckptmgr.state.torch_memory import torch_bytes
from ckptmgr.state.torch_values import dtype_name

_UINT8 = BY_NAME["uint8"]


def stored(item: WriteItem, planner: SavePlanner) -> Tensor:
    """Return an item as a file stores it; its content is looked up when it is called.

    Raises:
        UnsupportedState: A value cannot be stored without pickling.
    """
    if item.type == WriteItemType.BYTE_IO:
        return bytes_tensor(dcp_piece_name(item.index.fqn, None), _object(item, planner))
    data = tensor_data(item)
    dtype = data.properties.dtype
    row, shape, _ = stored_as(dtype_name(dtype), tuple(data.chunk.sizes), dtype.itemsize)
    spec = TensorSpec(dcp_piece_name(item.index.fqn, data.chunk.offsets), row, shape)
    return Tensor(spec=spec, content=partial(_content, item, planner))


def bytes_tensor(name: str, data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor."""
    spec = TensorSpec(name=name, dtype=_UINT8, shape=(len(data),))
    return Tensor(spec=spec, content=lambda: memoryview(data))


def _object(item: WriteItem, planner: SavePlanner) -> bytes:
    value = planner.resolve_data(item)
    data = value.getvalue() if isinstance(value, io.BytesIO) else b""
    if detect(BytesSource(data)) is not Kind.SAFETENSORS:
        raise UnsupportedState(
            f"{type(planner).__name__} has pickled {item.index.fqn!r}",
            hint="give dcp.save the planner ckptmgr.integrations.dcp.SavePlanner()",
        )
    return data


def _dispatch_of(kind: type[torch.Tensor]) -> object:
    return getattr(kind, "__torch_dispatch__", None)


def _content(item: WriteItem, planner: SavePlanner) -> memoryview:
    value, data = planner.resolve_data(item), tensor_data(item)
    fqn = item.index.fqn
    if not isinstance(value, torch.Tensor):
        raise UnsupportedState(f"{fqn!r} is planned as a tensor, but is none")
    is_wrapper = _dispatch_of(type(value)) is not _dispatch_of(torch.Tensor)
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or is_wrapper:
        raise UnsupportedState(
            f"{fqn!r} is a {type(value).__qualname__} that is sparse, quantized, or has its content elsewhere",
            hint="save it as a dense tensor",
        )
    found, planned = (
        (value.dtype, value.shape),
        (data.properties.dtype, data.chunk.sizes),
    )
    if found != planned:
        raise UnsupportedState(f"{fqn!r} is {_shown(*found)}, but is planned as {_shown(*planned)}")
    return torch_bytes(value)


def _shown(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"
