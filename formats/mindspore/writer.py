# SPDX-License-Identifier: Apache-2.0
"""Writes a MindSpore `.ckpt`, byte for byte as MindSpore 2.10, without anything it could not load.

Differences from MindSpore, all on the safe side: tensors without elements are written (its
synchronous save drops them), and items that it writes but cannot load (complex numbers, duplicate
names, 64-bit map keys) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

from ..errors import FormatError, UnsupportedError
from ..image import Extent, Image, ImageBuilder
from ..strict_json import encode_object, is_encodable
from ..tensor import (
    ContentPieces,
    Item,
    MapTensors,
    Tensor,
    TensorSpec,
    Text,
    check_count,
    content_of,
)
from .fields import (
    CHECKPOINT_METADATA,
    CHECKPOINT_VALUE,
    MAP_DTYPES,
    MAP_PARTS,
    MAPTENSOR_TENSOR,
    MAX_DIM,
    MAX_METADATA_BYTES,
    MAX_RANK,
    MAX_TEXT_BYTES,
    SCALAR_DIMS,
    SLICE_BYTES,
    TENSOR_CONTENT,
    TENSOR_DIMS,
    TENSOR_TYPE,
    TEXT_TYPE,
    VALUE_MAPTENSOR,
    VALUE_TAG,
    VALUE_TENSOR,
)
from .wire import MAX_FIELDS, encode_bytes_field, encode_length_prefix, encode_varint_field

# Without the fields of the dimensions.
_TEXT_FIELDS, _TENSOR_FIELDS, _MAP_FIELDS = 6, 5, 12


def build_ckpt_image(
    items: Sequence[Item],
    *,
    metadata: Mapping[str, str] | None = None,
    crc: bool = False,
    slice_bytes: int = SLICE_BYTES,
) -> Image:
    """Return the bytes of a `.ckpt` that holds `items` in the given order.

    `metadata` is stored in a field that MindSpore ignores; None writes no such field. `crc` appends
    MindSpore's CRC32 trailer. Contents are cut after `slice_bytes`, as MindSpore cuts them after
    512 MiB.

    Raises:
        FormatError: A name, text, shape or content that a `.ckpt` cannot hold; names the tensor.
        UnsupportedError: An element type that MindSpore cannot load, or more items than a reader
            takes.

    Source: `checkpoint.proto`, `_exec_save` of MindSpore 2.10.
    """
    if slice_bytes < 1:
        raise ValueError(f"slice_bytes must be at least 1, but is {slice_bytes}")
    if not items and metadata is None:
        raise FormatError("there is nothing to save: a .ckpt without parameters cannot be loaded")
    _check_names(items)
    _check_counts(items, slice_bytes)
    builder = ImageBuilder()
    if metadata is not None:
        builder.add(_metadata_field(metadata))
    for item in items:
        if isinstance(item, Tensor):
            _add_tensor(builder, item, slice_bytes)
        elif isinstance(item, Text):
            builder.add(_text_record(item))
        else:
            _add_map(builder, item, slice_bytes)
    return Image(builder.finish(), has_crc_trailer=crc)


def _check_names(items: Sequence[Item]) -> None:
    seen: set[str] = set()
    for item in items:
        name = _name(item)
        if name in seen:
            raise FormatError("two items have this name; rename one", tensor=name)
        if not is_encodable(name):
            raise FormatError("the name holds a lone surrogate, not valid in UTF-8", tensor=name)
        seen.add(name)


def _check_counts(items: Sequence[Item], slice_bytes: int) -> None:
    """Raise unless a reader takes this many fields.

    A reader parses field by field only the items that are no plain tensors, and the item before
    each.
    """
    check_count(len(items))
    fields = before = 0
    for item in items:
        size, own = _fields_of(item, slice_bytes)
        if size is None or not 0 < size <= slice_bytes:
            fields += before + own
        before = own
    if fields > MAX_FIELDS:
        raise UnsupportedError(
            f"texts, maps, and tensors that are empty or of more than {slice_bytes} bytes take"
            f" {fields} fields, of {MAX_FIELDS}"
        )


def _fields_of(item: Item, slice_bytes: int) -> tuple[int | None, int]:
    """Return the size of a tensor (None for other items) and the number of fields of an item."""
    if isinstance(item, Text):
        return None, _TEXT_FIELDS
    if isinstance(item, Tensor):
        size = item.spec.size_bytes
        return size, max(1, -(-size // slice_bytes)) * (_TENSOR_FIELDS + len(item.spec.shape))
    size = sum(part.spec.size_bytes for part in (item.key, item.value, item.status))
    slices = min(max(1, item.key.spec.size_bytes), 2 * -(-size // slice_bytes) + 1)
    ranks = sum(len(part.spec.shape) for part in (item.key, item.value, item.status))
    return None, slices * (_MAP_FIELDS + ranks)


def _name(item: Item) -> str:
    return item.spec.name if isinstance(item, Tensor) else item.name


def _metadata_field(metadata: Mapping[str, str]) -> bytes:
    encoded = encode_object(dict(metadata), what="metadata")
    if len(encoded) > MAX_METADATA_BYTES:
        raise FormatError(f"the metadata has {len(encoded)} bytes; {MAX_METADATA_BYTES} fit")
    return encode_bytes_field(CHECKPOINT_METADATA, encoded)


def _add_tensor(builder: ImageBuilder, tensor: Tensor, slice_bytes: int) -> None:
    spec = tensor.spec
    if spec.dtype.mindspore is None:
        raise UnsupportedError(
            f"MindSpore cannot load {spec.dtype.name}; convert it, or use safetensors",
            tensor=spec.name,
        )
    _check_shape(spec.shape, spec.name)
    name, size_bytes = spec.name.encode(), spec.size_bytes
    if size_bytes <= slice_bytes:
        head = _tensor_value_head(spec.shape, spec.dtype.mindspore, size_bytes)
        builder.add(_value_head(name, head, size_bytes))
        builder.add_tensor(tensor, size_bytes=size_bytes)
        return
    content = partial(content_of, tensor)
    for start in range(0, size_bytes, slice_bytes):
        stop = min(start + slice_bytes, size_bytes)
        head = _tensor_value_head(spec.shape, spec.dtype.mindspore, stop - start)
        builder.add(_value_head(name, head, stop - start))
        if isinstance(tensor.content, ContentPieces):
            builder.add_pieces(tensor, tensor.content, start, stop)
        else:
            builder.add_extent(Extent(content, start, stop, tensors=(tensor,)))


def _text_record(item: Text) -> bytes:
    if item.text.endswith("\0"):
        raise FormatError("the text ends in a NUL, which MindSpore would drop", tensor=item.name)
    content = (item.text or "\0").encode("utf-32-le", "surrogatepass")
    if len(content) > MAX_TEXT_BYTES:
        raise FormatError(
            f"the text needs {len(content)} bytes; {MAX_TEXT_BYTES} fit", tensor=item.name
        )
    head = _tensor_value_head(SCALAR_DIMS, TEXT_TYPE, len(content))
    return _value_head(item.name.encode(), head, len(content)) + content


def _add_map(builder: ImageBuilder, item: MapTensors, slice_bytes: int) -> None:
    parts = (item.key, item.value, item.status)
    _check_map(item)
    contents = [partial(content_of, part) for part in parts]
    rows = item.key.spec.shape[0]
    step = max(1, slice_bytes * rows // max(1, sum(part.spec.size_bytes for part in parts)))
    for start in range(0, max(rows, 1), step):
        stop = min(start + step, rows)
        named = list(zip(parts, contents, strict=True))
        _add_map_slice(builder, item.name, named, start, stop)


def _add_map_slice(
    builder: ImageBuilder,
    name: str,
    parts: Iterable[tuple[Tensor, Callable[[], memoryview]]],
    start: int,
    stop: int,
) -> None:
    pieces: list[tuple[bytes, Extent]] = []
    for part, content in parts:
        spec = part.spec
        row_bytes = TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape[1:]).size_bytes
        length = (stop - start) * row_bytes
        head = _tensor_head((stop - start, *spec.shape[1:]), spec.dtype.name, length)
        head = encode_length_prefix(MAPTENSOR_TENSOR, len(head) + length) + head
        begin, end = start * row_bytes, stop * row_bytes
        pieces.append((head, Extent(content, begin, end, tensors=(part,))))
    size_bytes = sum(len(head) + part.stop - part.start for head, part in pieces)
    builder.add(
        _value_head(name.encode(), encode_length_prefix(VALUE_MAPTENSOR, size_bytes), size_bytes)
    )
    for head, extent in pieces:
        builder.add(head)
        builder.add_extent(extent)


def _check_map(item: MapTensors) -> None:
    for label, part in zip(MAP_PARTS, (item.key, item.value, item.status), strict=True):
        if part.spec.dtype.name not in MAP_DTYPES:
            raise UnsupportedError(
                f"MindSpore cannot load a map parameter whose {label} is {part.spec.dtype.name};"
                f" convert it to one of {', '.join(sorted(MAP_DTYPES))}",
                tensor=item.name,
            )
        _check_shape(part.spec.shape, item.name)
        if part.spec.shape[:1] != item.key.spec.shape[:1] or not part.spec.shape:
            raise FormatError(
                f"the {label} of a map parameter needs one row per key", tensor=item.name
            )


def _check_shape(shape: tuple[int, ...], name: str) -> None:
    if len(shape) > MAX_RANK:
        raise FormatError(f"{len(shape)} dimensions; at most {MAX_RANK} fit", tensor=name)
    for dim in shape:
        if not 0 <= dim <= MAX_DIM:
            raise FormatError(
                f"dimension {dim} is outside MindSpore's 0 to {MAX_DIM}; reshape it", tensor=name
            )


def _value_head(name: bytes, head: bytes, payload_bytes: int) -> bytes:
    """Return all bytes before the payload; `head` is the part between the name and the payload."""
    tag = encode_length_prefix(VALUE_TAG, len(name)) + name + head
    return encode_length_prefix(CHECKPOINT_VALUE, len(tag) + payload_bytes) + tag


# Many tensors of a model have the same shape and therefore the same head.
@lru_cache(maxsize=1024)
def _tensor_value_head(dims: tuple[int, ...], type_name: str, content_bytes: int) -> bytes:
    head = _tensor_head(dims, type_name, content_bytes)
    return encode_length_prefix(VALUE_TENSOR, len(head) + content_bytes) + head


def _tensor_head(dims: tuple[int, ...], type_name: str, content_bytes: int) -> bytes:
    fields = [encode_varint_field(TENSOR_DIMS, dim) for dim in dims]
    fields.append(encode_bytes_field(TENSOR_TYPE, type_name.encode()))
    fields.append(encode_length_prefix(TENSOR_CONTENT, content_bytes))
    return b"".join(fields)
