# SPDX-License-Identifier: Apache-2.0
"""Google's protobuf and ours agree on the content of a `.ckpt`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from hypothesis import given

from ckptmgr.formats.mindspore.fields import MAP_PARTS
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, Text
from tests.support.stored import image_bytes, read_ckpt, stored_items
from tests.support.strategies import ckpt_items

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("google") is None
    or importlib.util.find_spec("google.protobuf") is None,
    reason="needs protobuf",
)

OPTIONAL, REPEATED = 1, 3
INT64, STRING, MESSAGE, BYTES = 3, 9, 11, 12


def checkpoint_class() -> Any:
    """Return the `Checkpoint` message class, described here as `checkpoint.proto` describes it."""
    descriptor_pb2, descriptor_pool, message_factory = (
        importlib.import_module(f"google.protobuf.{name}")
        for name in ("descriptor_pb2", "descriptor_pool", "message_factory")
    )
    file = descriptor_pb2.FileDescriptorProto(name="checkpoint.proto", syntax="proto2")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        described = file.message_type.add(name=name)
        for field_name, number, label, kind, type_name in fields:
            described.field.add(
                name=field_name, number=number, label=label, type=kind, type_name=type_name or None
            )

    message(
        "TensorProto",
        ("dims", 1, REPEATED, INT64, ""),
        ("tensor_type", 2, OPTIONAL, STRING, ""),
        ("tensor_content", 3, OPTIONAL, BYTES, ""),
    )
    message("MapTensorProto", ("tensor", 1, REPEATED, MESSAGE, ".TensorProto"))
    message(
        "Value",
        ("tag", 1, OPTIONAL, STRING, ""),
        ("tensor", 2, OPTIONAL, MESSAGE, ".TensorProto"),
        ("maptensor", 3, OPTIONAL, MESSAGE, ".MapTensorProto"),
    )
    message("Checkpoint", ("value", 1, REPEATED, MESSAGE, ".Value"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Checkpoint"))


def fill(message: Any, dims: tuple[int, ...], type_name: str, content: bytes) -> None:
    message.dims.extend(dims)
    message.tensor_type = type_name
    message.tensor_content = content


def protobuf_bytes(items: list[Item]) -> bytes:
    """Return what protobuf serialises the items to, one message each, as MindSpore does."""
    written = b""
    for item in items:
        checkpoint = checkpoint_class()()
        value = checkpoint.value.add()
        if isinstance(item, Tensor):
            value.tag = item.spec.name
            dtype = item.spec.dtype.mindspore or ""
            fill(value.tensor, item.spec.shape, dtype, bytes(item.content()))
        elif isinstance(item, Text):
            value.tag = item.name
            content = (item.text or "\0").encode("utf-32-le", "surrogatepass")
            fill(value.tensor, (0,), "str", content)
        else:
            value.tag = item.name
            fill_map(value.maptensor, item)
        written += checkpoint.SerializeToString()
    return written


def fill_map(message: Any, item: MapTensors) -> None:
    for part in (getattr(item, name) for name in MAP_PARTS):
        fill(message.tensor.add(), part.spec.shape, part.spec.dtype.name, bytes(part.content()))


@given(ckpt_items())
def test_ckpt_written_by_protobuf_is_byte_for_byte_ours(items: list[Item]) -> None:
    written = protobuf_bytes(items)
    assert written == image_bytes(build_ckpt_image(items))
    assert read_ckpt(written) == stored_items(items)


@given(ckpt_items())
def test_metadata_of_ours_is_an_unknown_field_to_protobuf(items: list[Item]) -> None:
    data = image_bytes(build_ckpt_image(items, metadata={"a": "b"}, slice_bytes=7))
    parsed = checkpoint_class().FromString(data)
    tags = [value.tag for value in parsed.value]
    assert list(dict.fromkeys(tags)) == list(stored_items(items))
