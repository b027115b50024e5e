# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the content of a checkpoint: names, tensors, texts, map parameters, metadata."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from ckptmgr.formats.dtypes import BY_NAME, DTYPES, DType
from ckptmgr.formats.mindspore.fields import MAP_DTYPES
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, TensorSpec, Text

MINDSPORE_DTYPES = tuple(dtype for dtype in DTYPES if dtype.mindspore is not None)
SAFETENSORS_DTYPES = tuple(
    dtype for dtype in DTYPES if dtype.safetensors is not None or dtype.name == "int4"
)
_RESERVED_NAMES = frozenset({"__metadata__", "format", "crc_num"})


def encodable_texts(*, max_size: int = 12) -> st.SearchStrategy[str]:
    """Unicode without lone surrogates: what UTF-8 can hold."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=max_size)


def names() -> st.SearchStrategy[str]:
    """Names that every format can hold, odd ones included (empty, spaces, `../x`, controls)."""
    usual = st.sampled_from(["w", "fc1.weight", "", "../x", "a b", "\n", "名前", "moments.fc1"])
    return st.one_of(usual, encodable_texts()).filter(lambda name: name not in _RESERVED_NAMES)


def metadata() -> st.SearchStrategy[dict[str, str]]:
    """Metadata whose keys are no names drawn by `names`."""
    return st.dictionaries(
        encodable_texts().map(lambda key: f"meta:{key}"), encodable_texts(), max_size=3
    )


def texts() -> st.SearchStrategy[str]:
    """Texts a `.ckpt` can hold: any code points, lone surrogates included, no NUL at the end."""
    return st.text(max_size=12).filter(lambda text: not text.endswith("\0"))


def shapes(*, min_dims: int = 0, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes: scalars, empty ones, up to 4 along each of 3 dimensions."""
    sides = st.lists(st.integers(0, 4), min_size=min_dims, max_size=max_dims)
    return sides.map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    name: st.SearchStrategy[str] | None = None,
    dtypes: Sequence[DType] = MINDSPORE_DTYPES,
    shape: st.SearchStrategy[tuple[int, ...]] | None = None,
) -> Tensor:
    """A tensor of any bytes (NaN payloads and negative zeros included); bools are 0 or 1."""
    spec = TensorSpec(
        name=draw(name if name is not None else names()),
        dtype=draw(st.sampled_from(list(dtypes))),
        shape=draw(shape if shape is not None else shapes()),
    )
    content = draw(st.binary(min_size=spec.size_bytes, max_size=spec.size_bytes))
    if spec.dtype.name == "bool":
        content = bytes(byte & 1 for byte in content)
    return tensor_of(spec, content)


def tensor_of(spec: TensorSpec, content: bytes) -> Tensor:
    """Return a tensor over bytes in memory."""
    return Tensor(spec=spec, content=lambda: memoryview(content))


def named_tensor(
    name: str, dtype: str = "float32", shape: tuple[int, ...] = (2,), content: bytes | None = None
) -> Tensor:
    """Return a tensor whose bytes count up from 0 unless given."""
    spec = TensorSpec(name=name, dtype=BY_NAME[dtype], shape=shape)
    if content is None:
        values = [index % (2 if dtype == "bool" else 251) for index in range(prod(shape))]
        content = b"".join(bytes([value]) * spec.dtype.item_bytes for value in values)
    return tensor_of(spec, content)


def is_negative_scalar(item: Tensor) -> bool:
    """Return whether a tensor is a 0-d integer below 0, for which MindSpore has no CRC."""
    is_scalar = item.spec.shape == () and item.spec.dtype.name.startswith("int")
    return is_scalar and item.content()[-1] > 0x7F


@st.composite
def map_tensors(draw: st.DrawFn) -> MapTensors:
    """A map parameter with up to 5 rows."""
    rows = draw(st.integers(0, 5))
    dtypes = [BY_NAME[name] for name in sorted(MAP_DTYPES)]
    width = draw(shapes(max_dims=2))
    flat = st.just((rows,))
    return MapTensors(
        name=draw(names()),
        key=draw(tensors(name=st.just("key"), dtypes=dtypes, shape=flat)),
        value=draw(tensors(name=st.just("value"), dtypes=dtypes, shape=st.just((rows, *width)))),
        status=draw(tensors(name=st.just("status"), dtypes=dtypes, shape=flat)),
    )


def item_name(item: Item) -> str:
    """Return the name of any item."""
    return item.spec.name if isinstance(item, Tensor) else item.name


def ckpt_items(*, min_size: int = 1) -> st.SearchStrategy[list[Item]]:
    """Everything a `.ckpt` can hold, under different names."""
    text_items = st.builds(lambda name, text: Text(name=name, text=text), names(), texts())
    item: st.SearchStrategy[Item] = st.one_of(tensors(), text_items, map_tensors())
    return st.lists(item, min_size=min_size, max_size=5, unique_by=item_name)


def safetensors_items() -> st.SearchStrategy[list[Tensor]]:
    """Everything a `.safetensors` file can hold, under different names."""
    tensor = tensors(dtypes=SAFETENSORS_DTYPES)
    return st.lists(tensor, max_size=5, unique_by=lambda item: item.spec.name)
