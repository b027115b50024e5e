# SPDX-License-Identifier: Apache-2.0
"""Every unencrypted file of MindSpore 2.10 in tests/golden/files, sound and broken, replayed.

The manifests say what MindSpore saved and what its own loader made of each file. Where ours answers differently on purpose,
the tables below say so; they must be exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import TruncatedError
from ckptmgr.formats.dtypes import BY_MINDSPORE, BY_NAME
from ckptmgr.formats.errors import ChecksumError, FormatError, UnsupportedError
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image, read_safetensors_index
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, TensorSpec, Text
from tests.support.stored import Stored, StoredItem, image_bytes, read_ckpt, read_safetensors
from tests.support.strategies import tensor_of

FILES = Path(__file__).parents[1] / "golden" / "files"
ENCRYPTED_NAMES = ("gcm", "cbc", "sm4")


def sound_cases() -> list[dict[str, Any]]:
    manifest = json.loads((FILES / "manifest.json").read_text())
    return [case for case in manifest["files"] if "enc_key" not in case["save"]]


def broken_cases() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    manifest = json.loads((FILES / "broken" / "manifest.json").read_text())
    return [
        (Path(case["file"]).name, answer["load_kw"], answer["answer"])
        for case in manifest["cases"]
        for answer in case["answers"]
        if not Path(case["file"]).name.startswith(ENCRYPTED_NAMES)
    ]


def read(path: Path, *, crc: bool) -> dict[str, StoredItem]:
    """Read a file as MindSpore does: a CRC that is asked for and absent is no error there."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        has_crc = read_safetensors_index(BytesSource(data)).crc is not None
        return dict(sorted(read_safetensors(data, crc=crc and has_crc).items()))
    has_crc = data[-17:-10] == b"crc_num"
    return read_ckpt(data, crc=crc and has_crc)


def recorded(items: list[dict[str, Any]]) -> dict[str, StoredItem]:
    stored: dict[str, StoredItem] = {}
    for item in items:
        if "string" in item:
            stored[item["name"]] = item["string"]
        elif "map" in item:
            stored[item["name"]] = tuple(_array(*part) for part in item["map"])
        else:
            dtype = BY_MINDSPORE[item["dtype"]].name
            content = bytes.fromhex(item["raw_hex"])
            stored[item["name"]] = Stored(dtype, tuple(item["shape"]), content)
    return stored


def _array(dtype: str, shape: list[int], values: list[Any]) -> Stored:
    import numpy as np

    array = np.array(values, BY_NAME[dtype].to_numpy()).reshape(shape)
    return Stored(dtype, tuple(shape), array.tobytes())


def items_of(stored: dict[str, StoredItem]) -> list[Item]:
    items: list[Item] = []
    for name, value in stored.items():
        if isinstance(value, str):
            items.append(Text(name=name, text=value))
        elif isinstance(value, Stored):
            spec = TensorSpec(name=name, dtype=BY_NAME[value.dtype], shape=value.shape)
            items.append(tensor_of(spec, value.content))
    return items


SOUND_DIFFERENCES = {
    "ckpt_empty_tensors_sync.ckpt": "MindSpore itself dropped the empty tensors while saving",
    "complex64.ckpt": "MindSpore wrote a type that it cannot load: UnsupportedError",
}


@pytest.mark.parametrize("case", sound_cases(), ids=lambda case: str(case["file"]))
def test_sound_file_reads_to_what_was_saved(case: dict[str, Any]) -> None:
    path = FILES / case["file"]
    expected = recorded(case["expected"]) if path.name != "complex64.ckpt" else {}
    try:
        stored = read(path, crc="crc_check" in case["save"])
    except UnsupportedError:
        stored = {"refused": ""}
    if path.suffix == ".safetensors":
        expected = dict(sorted(expected.items()))
    assert (list(stored.items()) == list(expected.items())) == (path.name not in SOUND_DIFFERENCES)


@pytest.mark.parametrize(
    "name",
    [
        "ckpt_all_dtypes.ckpt",
        "ckpt_all_dtypes_async.ckpt",
        "ckpt_empty_tensors_async.ckpt",
        "slices_sync.ckpt",
        "slices_sync_crc.ckpt",
    ],
)
def test_ckpt_written_from_the_same_values_is_identical(name: str) -> None:
    (case,) = [case for case in sound_cases() if case["file"] == name]
    items = items_of(recorded(case["expected"]))
    image = build_ckpt_image(items, crc="crc_check" in case["save"], slice_bytes=1024)
    assert image_bytes(image) == (FILES / name).read_bytes()


@pytest.mark.parametrize(
    "name",
    [case["file"] for case in sound_cases() if case["file"].startswith(("st_", "int4"))],
)
def test_safetensors_written_from_the_same_values_has_the_same_metadata(name: str) -> None:
    (case,) = [case for case in sound_cases() if case["file"] == name]
    index = read_safetensors_index(BytesSource((FILES / name).read_bytes()))
    names = ("format", "remove_redundancy")
    metadata = {key: index.metadata[key] for key in names if key in index.metadata}
    items = items_of(recorded(case["expected"]))
    written = image_bytes(
        build_safetensors_image(items, metadata=metadata, crc=index.crc is not None)
    )
    ours = read_safetensors_index(BytesSource(written))
    assert dict(ours.metadata) == dict(index.metadata) or name == "st_no_tensors.safetensors"
    assert ours.crc == index.crc


# What ours does where MindSpore answers otherwise: the error (None: it loads), and why.
BROKEN_DIFFERENCES: dict[str, tuple[type[FormatError] | None, str]] = {
    "content_short.ckpt": (FormatError, "MindSpore fills the missing tail with zeros"),
    "content_long.ckpt": (FormatError, "MindSpore writes past the tensor and cuts"),
    "content_odd.ckpt": (FormatError, "MindSpore fills the missing byte with zero"),
    "flip_type.ckpt": (FormatError, "MindSpore fills half of the tensor with zeros"),
    "dims_zero2_with_content.ckpt": (FormatError, "MindSpore drops the content"),
    "type_Int4.ckpt": (FormatError, "four bytes for one element: MindSpore cuts"),
    "type_BFloat16.ckpt": (FormatError, "four bytes for one element: MindSpore cuts"),
    "type_bool_2.ckpt": (FormatError, "a bool that is neither 0 nor 1"),
    "dup_not_adjacent.ckpt": (FormatError, "MindSpore lets the last of two parameters win"),
    "dup_adjacent_types_differ.ckpt": (FormatError, "MindSpore takes the type of the last slice"),
    "st_unordered.safetensors": (None, "the stock library allows any header order"),
    "st_unknown_dtype.safetensors": (None, "F8_E4M3 is known here"),
    "st_meta_name_clash.safetensors": (None, "metadata is no description of tensors, but for Int4"),
}

# What ours raises where MindSpore refuses, too.
BROKEN_ERRORS: dict[str, type[FormatError]] = {
    "empty_file.ckpt": FormatError,
    "one_byte.ckpt": TruncatedError,
    "text.ckpt": FormatError,
    "zeros.ckpt": FormatError,
    "truncated_mid_first.ckpt": TruncatedError,
    "crc_cut_trailer_1.ckpt": FormatError,
    "crc_flip_payload.ckpt": ChecksumError,
    "crc_flip_trailer.ckpt": ChecksumError,
    "crc_flip_marker.ckpt": FormatError,
    "crc_zero.ckpt": ChecksumError,
    "flip_type_unknown.ckpt": UnsupportedError,
    "zero_appended.ckpt": FormatError,
    "dims_huge.ckpt": FormatError,
    "str_empty.ckpt": FormatError,
    "str_invalid_codepoint.ckpt": FormatError,
    "type_float32.ckpt": UnsupportedError,
    "type_Float.ckpt": UnsupportedError,
    "type_Complex64.ckpt": UnsupportedError,
    "type_bool.ckpt": UnsupportedError,
    "st_7bytes.safetensors": TruncatedError,
    "st_trunc_data.safetensors": TruncatedError,
    "st_junk_appended.safetensors": FormatError,
    "st_header_101MB.safetensors": FormatError,
    "st_crc_flip_data.safetensors": ChecksumError,
    "st_hole.safetensors": FormatError,
    "st_size_mismatch.safetensors": FormatError,
}


@pytest.mark.parametrize(
    ("name", "load_kw", "answer"),
    broken_cases(),
    ids=[f"{name}-{'crc' if 'crc_check' in kw else 'plain'}" for name, kw, _ in broken_cases()],
)
def test_broken_file_gets_mindspores_answer_or_a_listed_one(
    name: str, load_kw: dict[str, Any], answer: dict[str, Any]
) -> None:
    error: type[FormatError] | None = None if answer["ok"] else BROKEN_ERRORS.get(name)
    if name in BROKEN_DIFFERENCES:
        error = BROKEN_DIFFERENCES[name][0]
        assert (error is None) != answer["ok"], "the tables name only differences"
    path = FILES / "broken" / name
    if error is None:
        stored = read(path, crc="crc_check" in load_kw)
        assert not answer["ok"] or stored == recorded(answer["items"])
        return
    with pytest.raises(FormatError) as caught:
        read(path, crc="crc_check" in load_kw)
    assert type(caught.value) is error


def test_tables_name_only_files_that_exist_and_are_replayed() -> None:
    replayed = {name for name, _, _ in broken_cases()}
    assert {*BROKEN_DIFFERENCES, *BROKEN_ERRORS} <= replayed
    refused = {name for name, _, answer in broken_cases() if not answer["ok"]}
    assert refused - set(BROKEN_ERRORS) <= set(BROKEN_DIFFERENCES)
    assert not set(BROKEN_DIFFERENCES) & set(BROKEN_ERRORS)
    assert set(SOUND_DIFFERENCES) <= {case["file"] for case in sound_cases()}
