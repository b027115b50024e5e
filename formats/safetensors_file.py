# SPDX-License-Identifier: Apache-2.0
"""Write and read `.safetensors` files that the stock library and MindSpore both accept.

* Header order is data order in written files; `safetensors_layout` says which, and how the data is
  aligned.
* Reading is bounded, and takes all that the stock library takes, also where MindSpore refuses: tensors in
  another order than the data, white space before the header, unknown fields beside the
  three of a tensor, and `"__metadata__":null`, as MLX writes it. Not taken are
  - a name twice in one object: readers differ in which one they take, and a flipped bit looks alike;
  - a `crc_num` that is no number: so does a flipped bit in MindSpore's;
  - arrays that NumPy does not have: over 64 dimensions (32 before NumPy 2), or sizes from 2**63 on;
  - spellings that no writer has: a tensor as a list, a type as an object.

Source: safetensors 0.8.0 (README, "Format"); `parallel/transform_safetensors.py` of MindSpore 2.10.

>>> from .tensor import TensorSpec
>>> w = Tensor(spec=TensorSpec(name="w", dtype=BY_NAME["uint8"], shape=(2,)), content=lambda: memoryview(b"hi"))
>>> image = build_safetensors_image([w])
>>> b"".join(bytes(view) for view in image.views(8, image.size - 8)).decode().replace(" ", "")
'{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}hi'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

from .dtypes import BY_NAME, BY_SAFETENSORS, PACKED_BITS, DType, packed_dtype
from .errors import FormatError, TruncatedError, UnsupportedError
from .file_crc import FileCrc
from .image import MOST_LATE_BYTES, Image, ImageBuilder, LateHead
from .index import READ_BYTES, ContentRun, TensorEntry, check_buffer, check_content
from .safetensors_crc import ContentsCrc, check_scalar, fold_crc
from .safetensors_fast import read_plain_header
from .safetensors_header import (
    CRC_KEY,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    METADATA,
    HeaderText,
    spelling_of,
)
from .safetensors_layout import (
    COMPACT_ALIGNMENT,
    LIBRARY_ALIGNMENT,
    in_library_order,
    in_listed_order,
    in_own_order,
)
from .source import Source, read_bytes
from .strict_json import is_encodable, parse_object, parse_strings
from .tensor import Item, Tensor, TensorSpec, check_count, check_shape, content_of

JSON_SPACE = b" \t\n\r"
FORMAT_KEY = "format"
DEFAULT_FORMAT = "pt"
"""Hugging Face's libraries refuse a file of another format; MindSpore reads every one."""
MINDSPORE_METADATA = {FORMAT_KEY: "ms"}
"""The metadata that MindSpore itself writes."""

_MAX_RANK = 64
_INT4_MARK = "Int4"
_TENSOR_KEYS = frozenset(("dtype", "shape", "data_offsets"))


def build_safetensors_image(
    items: Sequence[Item],
    *,
    metadata: Mapping[str, str] | None = None,
    crc: bool = False,
    is_crc_for_mindspore: bool = True,
    is_as_library: bool = False,
) -> Image:
    """Return the bytes of a `.safetensors` file; see `safetensors_layout`.

    Without a `format` in the metadata it is `DEFAULT_FORMAT`. With MindSpore's, the layout is that
    of the library, which MindSpore writes with; so is it with `is_as_library`, and then there is no
    metadata but the given. With `is_crc_for_mindspore`, a scalar is refused for which MindSpore has
    no CRC.

    Raises:
        FormatError: A text, a map parameter, or a name the format cannot hold; names the tensor.
        UnsupportedError: An element type without spelling, a scalar without a CRC, or too many
            tensors.
    """
    check_count(len(items))
    stored = {FORMAT_KEY: DEFAULT_FORMAT, **(metadata or {})}
    found = _as_tensors(items)
    if is_as_library or MINDSPORE_METADATA.items() <= stored.items():
        tensors, alignment = in_library_order(found), LIBRARY_ALIGNMENT
    else:
        tensors, alignment = in_own_order(found)
    specs = [tensor.spec for tensor in tensors]
    if is_as_library:
        _check_names(tensors, {}, crc=crc)
        return _image(HeaderText(specs, metadata, alignment=alignment), tensors)
    _check_names(tensors, stored, crc=crc)
    stored.update({t.spec.name: _INT4_MARK for t in tensors if t.spec.dtype.name == "int4"})
    if crc and is_crc_for_mindspore:
        for tensor in tensors:
            check_scalar(tensor)
    return _image(
        HeaderText(specs, stored, alignment=alignment),
        tensors,
        crc=crc,
        is_crc_for_mindspore=is_crc_for_mindspore,
    )


def build_image_in_given_order(tensors: Sequence[Tensor], *, metadata: Mapping[str, str]) -> Image:
    """Return the bytes of a `.safetensors` file whose tensors stay in their order, to be read so.

    Those of larger elements come first, so that each is at a multiple of its item size. Raises as
    `build_safetensors_image`.
    """
    check_count(len(tensors))
    placed = sorted(_as_tensors(tensors), key=lambda one: -one.spec.dtype.item_bytes)
    _check_names(placed, {}, crc=False)
    specs = [tensor.spec for tensor in placed]
    return _image(HeaderText(specs, metadata, alignment=COMPACT_ALIGNMENT), placed)


def _image(
    header: HeaderText,
    tensors: Sequence[Tensor],
    *,
    crc: bool = False,
    is_crc_for_mindspore: bool = True,
) -> Image:
    late_head = _late_head(header, is_for_mindspore=is_crc_for_mindspore) if crc else None
    builder = ImageBuilder()
    if not crc:
        builder.add(header.encode())
    elif late_head is None:
        builder.add(header.encode(_crc_of(tensors)))
    for tensor, size_bytes in zip(tensors, header.sizes_bytes, strict=True):
        builder.add_tensor(tensor, size_bytes=size_bytes)
    return Image(builder.finish(), late_head=late_head)


def _as_tensors(items: Iterable[Item]) -> list[Tensor]:
    """Return the items, checked; each element type once."""
    known: dict[int, DType] = {}
    tensors: list[Tensor] = []
    for item in items:
        if not isinstance(item, Tensor):
            kind = type(item).__name__
            raise FormatError(f"safetensors cannot hold a {kind}; use .ckpt", tensor=item.name)
        name, dtype, shape = item.spec
        if id(dtype) not in known or len(shape) > _MAX_RANK:
            if spelling_of(dtype) is None:
                raise UnsupportedError(
                    f"safetensors cannot hold {dtype.name}; convert it", tensor=name
                )
            if len(item.spec.stated_shape) > _MAX_RANK:
                raise FormatError(f"more than {_MAX_RANK} dimensions", tensor=name)
            known[id(dtype)] = dtype
        tensors.append(item)
    return tensors


def _late_head(header: HeaderText, *, is_for_mindspore: bool) -> LateHead | None:
    """Return the header as a late head, or None if it is too long for one."""
    size_bytes = len(header.encode(0))
    if size_bytes > MOST_LATE_BYTES:
        return None
    start_crc = partial(_start_crc, header.specs, size_bytes, is_for_mindspore)
    return LateHead(size_bytes=size_bytes, start_crc=start_crc, encode=header.encode)


def _start_crc(specs: Sequence[TensorSpec], offset: int, is_for_mindspore: bool) -> ContentsCrc:
    sizes_bytes = [spec.size_bytes for spec in specs]
    pieces = map(ContentRun, accumulate(sizes_bytes, initial=offset), sizes_bytes)
    return ContentsCrc(
        [TensorEntry(spec, (piece,)) for spec, piece in zip(specs, pieces, strict=True)],
        is_for_mindspore=is_for_mindspore,
    )


def _crc_of(tensors: Iterable[Tensor]) -> int:
    return fold_crc((one.spec, partial(_whole_content, one)) for one in tensors)


def _whole_content(tensor: Tensor) -> Iterator[memoryview]:
    yield content_of(tensor)


def _check_names(tensors: Sequence[Tensor], metadata: Mapping[str, str], *, crc: bool) -> None:
    if CRC_KEY in metadata:
        raise FormatError(f"the metadata key {CRC_KEY!r} is reserved; give crc_check=True instead")
    taken = {METADATA, *metadata, *([CRC_KEY] if crc else ())}
    seen: set[str] = set()
    for tensor in tensors:
        name = tensor.spec.name
        if name in taken:
            raise FormatError("the name is also a metadata key; rename one", tensor=name)
        if name in seen:
            raise FormatError("two items have this name; rename one", tensor=name)
        if not is_encodable(name):
            raise FormatError("the name holds a lone surrogate, not valid in UTF-8", tensor=name)
        seen.add(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsIndex:
    """The contents of a `.safetensors` file, in data order; `crc` is MindSpore's `crc_num`."""

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    crc: int | None
    format: ClassVar[str] = "safetensors"

    @property
    def listed(self) -> Sequence[TensorEntry]:
        """The entries in the order that users see."""
        return in_listed_order(self.entries)

    def start_crc(self) -> FileCrc:
        """Return a new computation of the CRC32 in the file."""
        return ContentsCrc(self.entries)

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return every tensor, in data order."""
        return self.entries


def read_safetensors_index(source: Source) -> SafetensorsIndex:
    """Return the index of a file without reading its contents.

    Raises:
        FormatError: The header or the layout is not allowed; names offset and tensor.
        TruncatedError: The file is shorter than it says.
        UnsupportedError: An element type this version does not know.
    """
    encoded = _read_header(source)
    metadata, entries = _read_plain(encoded, source.size) or _read_strictly(encoded, source.size)
    return SafetensorsIndex(entries=tuple(entries), metadata=metadata, crc=_stored_crc(metadata))


_Described = tuple[dict[str, str], list[TensorEntry]]


def _read_plain(encoded: bytes, size: int) -> _Described | None:
    """Return the contents of a header in the usual layout; None for any other."""
    data_start = LENGTH_BYTES + len(encoded)
    plain = read_plain_header(encoded, data_start=data_start)
    if plain is None:
        return None
    metadata = _strings_of(plain.metadata)
    if _INT4_MARK in metadata.values():
        return None
    if sum(plain.entries[-1].pieces[0]) != size:
        _check_layout(plain.entries, data_start, size)
    return metadata, plain.entries


def _read_strictly(encoded: bytes, size: int) -> _Described:
    """Return the metadata and the tensors of a header of a file of `size` bytes."""
    text = encoded.lstrip(JSON_SPACE)
    header_start = LENGTH_BYTES + len(encoded) - len(text)
    header = parse_object(
        text, what="header", offset=header_start, shorten=_fields, takes_fractions=True
    )
    metadata = _strings_of(header.pop(METADATA, None))
    check_count(len(header))
    data_start = LENGTH_BYTES + len(encoded)
    # Removed one by one, so that the header and the entries do not both take their full memory.
    entries = [_read_entry(name, header.pop(name), metadata, data_start) for name in list(header)]
    entries.sort(key=lambda entry: entry.pieces[0])
    _check_layout(entries, data_start, size)
    return metadata, entries


def _strings_of(metadata: object) -> dict[str, str]:
    return {} if metadata is None else parse_strings(metadata, what=METADATA, offset=LENGTH_BYTES)


def read_safetensors_into(
    source: Source, index: SafetensorsIndex, buffers: Callable[[TensorEntry], memoryview | None]
) -> int:
    """Read every content once, in file order, and return MindSpore's CRC32 of names and contents.

    `buffers` returns the memory for a tensor (flat, writable, format B, `spec.size_bytes` bytes),
    or None if only its CRC is needed.

    Raises:
        FormatError: A bool is neither 0 nor 1.
    """
    return fold_crc(
        (entry.spec, partial(_stream, source, entry, buffers(entry))) for entry in index.entries
    )


def _stream(source: Source, entry: TensorEntry, wanted: memoryview | None) -> Iterator[memoryview]:
    offset, length = entry.pieces[0]
    if wanted is not None:
        check_buffer(entry, wanted)
    scratch = memoryview(bytearray(0 if wanted is not None else min(READ_BYTES, length)))
    for start in range(0, length, READ_BYTES):
        count = min(READ_BYTES, length - start)
        view = scratch[:count] if wanted is None else wanted[start : start + count]
        source.read_into(offset + start, view)
        if wanted is not None:
            check_content(entry, view, offset=offset + start)
        yield view


def _read_header(source: Source) -> bytes:
    if source.size < LENGTH_BYTES:
        raise TruncatedError(f"the file has only {source.size} bytes", offset=source.size)
    header_bytes = int.from_bytes(read_bytes(source, 0, LENGTH_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise FormatError(
            f"the header claims {header_bytes} bytes; at most {MAX_HEADER_BYTES}", offset=0
        )
    return read_bytes(source, LENGTH_BYTES, header_bytes)


def _fields(value: dict[str, object]) -> object:
    """Return the known fields of a tensor's object as a tuple; every other object unchanged."""
    if value.keys() >= _TENSOR_KEYS:
        shape, offsets = value["shape"], value["data_offsets"]
        if isinstance(shape, list) and isinstance(offsets, list):
            return value["dtype"], tuple(shape), tuple(offsets)
    return value


def _read_entry(
    name: str, value: object, metadata: Mapping[str, str], data_start: int
) -> TensorEntry:
    if not is_encodable(name):
        raise FormatError("the name holds a lone surrogate", offset=LENGTH_BYTES, tensor=name)
    if not isinstance(value, tuple):
        if isinstance(value, list) and len(value) == len(_TENSOR_KEYS):
            raise UnsupportedError(
                "a tensor is spelled as a list", offset=LENGTH_BYTES, tensor=name
            )
        if isinstance(value, dict) and value.keys() >= _TENSOR_KEYS:
            raise _not_integers(
                name, "data_offsets" if isinstance(value["shape"], list) else "shape"
            )
        raise FormatError(
            "a tensor needs dtype, shape and data_offsets", offset=LENGTH_BYTES, tensor=name
        )
    spelling, shape, offsets = value
    dtype = _read_dtype(name, spelling, metadata)
    _check_integers(name, shape, "shape")
    _check_integers(name, offsets, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError("data_offsets are not a range", offset=LENGTH_BYTES, tensor=name)
    start, stop = offsets
    if spelling in PACKED_BITS:
        try:
            dtype, shape = packed_dtype(spelling, shape)
        except ValueError as error:
            raise FormatError(str(error), offset=data_start + start, tensor=name) from None
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    needed = spec.size_bytes
    if stop - start != needed:
        raise FormatError(
            f"the content has {stop - start} bytes, but {dtype.name}{list(spec.stated_shape)} needs"
            f" {needed}",
            offset=data_start + start,
            tensor=name,
        )
    check_shape(spec, offset=data_start + start)
    return TensorEntry(spec, (ContentRun(data_start + start, stop - start),))


def _read_dtype(name: str, spelling: object, metadata: Mapping[str, str]) -> DType:
    dtype = None
    if isinstance(spelling, str):
        is_packed = spelling in PACKED_BITS
        dtype = BY_NAME["uint8"] if is_packed else BY_SAFETENSORS.get(spelling)
    if dtype is None:
        raise UnsupportedError(f"unknown dtype {spelling!r}", offset=LENGTH_BYTES, tensor=name)
    if dtype.name == "int8" and metadata.get(name) == _INT4_MARK:
        return BY_NAME["int4"]
    return dtype


def _check_integers(name: str, values: tuple[object, ...], what: str) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 2**64:
            raise _not_integers(name, what)


def _not_integers(name: str, what: str) -> FormatError:
    return FormatError(
        f"{what} is not a list of integers from 0 to 2**64 - 1", offset=LENGTH_BYTES, tensor=name
    )


def _check_layout(entries: Sequence[TensorEntry], data_start: int, size: int) -> None:
    end = data_start
    for entry in entries:
        offset, length = entry.pieces[0]
        if offset != end:
            what = "overlaps the one before" if offset < end else "leaves a gap before it"
            raise FormatError(f"the content {what}", offset=offset, tensor=entry.name)
        end += length
        if end > size:
            raise TruncatedError(
                f"the content ends at {end}, the file at {size}", offset=offset, tensor=entry.name
            )
    if end != size:
        raise FormatError(f"{size - end} bytes follow the last tensor", offset=end)


def _stored_crc(metadata: Mapping[str, str]) -> int | None:
    text = metadata.get(CRC_KEY)
    if text is not None and not re.fullmatch(r"[0-9]{1,20}", text):
        raise FormatError(f"{CRC_KEY} is {text[:40]!r}, not a number", offset=LENGTH_BYTES)
    return None if text is None else int(text)
