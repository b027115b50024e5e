# SPDX-License-Identifier: Apache-2.0
"""Every file of MindSpore 2.10 in tests/golden/files, sound and broken, through `load_checkpoint`.

The manifests say what MindSpore saved and what its own loader made of each file. Where ours answers otherwise, the tables
below say so and why; each is checked to be exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import (
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from tests.support.stored import StoredItem
from tests.support.surface import GOLDEN, comparable, recorded

FILES = GOLDEN / "files"

_Answer = dict[str, Any]


def _sound_cases() -> list[dict[str, Any]]:
    manifest: dict[str, Any] = json.loads((FILES / "manifest.json").read_text(encoding="utf-8"))
    return list(manifest["files"])


def _broken_cases() -> list[tuple[str, dict[str, Any], _Answer]]:
    manifest = json.loads((FILES / "broken" / "manifest.json").read_text(encoding="utf-8"))
    return [
        (Path(case["file"]).name, answer["load_kw"], answer["answer"])
        for case in manifest["cases"]
        for answer in case["answers"]
    ]


def _label(name: str, load_kw: dict[str, Any]) -> str:
    words = []
    if "dec_key" in load_kw:
        key = bytes.fromhex(load_kw["dec_key"])
        words += [
            load_kw.get("dec_mode", "AES-GCM"),
            f"{len(key)} bytes",
            *(["other"] * (key[1:2] == b"\0")),
        ]
    if load_kw.get("crc_check"):
        words.append("crc")
    return f"{name} ({', '.join(words)})" if words else name


def _load(
    path: Path, load_kw: dict[str, Any], *, allow_unsealed: bool = True
) -> dict[str, StoredItem]:
    arguments = dict(load_kw)
    if "dec_key" in arguments:
        arguments["dec_key"] = bytes.fromhex(arguments["dec_key"])
    return comparable(load_checkpoint(path, allow_unsealed=allow_unsealed, **arguments))


def _outcome(
    path: Path, load_kw: dict[str, Any]
) -> dict[str, StoredItem] | CkptmgrError | ValueError:
    try:
        return _load(path, load_kw)
    except (CkptmgrError, ValueError) as error:
        return error


# What ours does with a sound file where MindSpore does otherwise: the class, or None when it loads, and why.
SOUND_DIFFERENCES: dict[str, tuple[type[CkptmgrError] | None, str]] = {
    "complex64.ckpt": (
        UnsupportedCheckpoint,
        "MindSpore raises a plain ValueError from a KeyError",
    ),
    "enc_and_crc_UNLOADABLE.ckpt": (
        None,
        "MindSpore wrote it and can never load it; ours drops the trailer",
    ),
    "ckpt_empty_tensors_async.ckpt": (
        None,
        "MindSpore loads (0,) as a scalar 0; ours as what was saved",
    ),
}

_ZEROS = "MindSpore fills what is missing with zeros"
_CUT = "MindSpore writes past the tensor, or cuts"
_NO_CRC = "MindSpore only logs that there is no CRC to check; the end of the file may be cut off"

# What ours raises for a broken file that MindSpore loads: the class, and why.
REFUSED: dict[str, tuple[type[CkptmgrError], str]] = {
    "flip_type.ckpt": (CorruptCheckpoint, _ZEROS),
    "content_short.ckpt": (CorruptCheckpoint, _ZEROS),
    "content_odd.ckpt": (CorruptCheckpoint, _ZEROS),
    "content_long.ckpt": (CorruptCheckpoint, _CUT),
    "dims_zero2_with_content.ckpt": (CorruptCheckpoint, _CUT),
    "type_Int4.ckpt": (CorruptCheckpoint, _CUT),
    "type_BFloat16.ckpt": (CorruptCheckpoint, _CUT),
    "type_bool_2.ckpt": (CorruptCheckpoint, "a bool is 0 or 1; NumPy makes nonsense of others"),
    "dup_not_adjacent.ckpt": (CorruptCheckpoint, "MindSpore lets the last of two win"),
    "dup_adjacent_types_differ.ckpt": (CorruptCheckpoint, "MindSpore takes the last type"),
    "crc_truncated_at_entry.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "flip_payload.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "flip_tag.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "dims_zero_with_content.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "no_dims.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "type_bool_2.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "str_len1.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "tag_empty.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
    "dup_adjacent.ckpt (crc)": (ChecksumMismatch, _NO_CRC),
}

# What ours loads although MindSpore refuses it, and why.
ACCEPTED: dict[str, str] = {
    "st_unordered.safetensors": "the stock library allows any order in the header",
    "st_unknown_dtype.safetensors": "F8_E4M3 is known here",
    "st_meta_name_clash.safetensors": "metadata describes tensors only where it says Int4",
}

# What ours raises where MindSpore refuses, too.
BOTH_REFUSE: dict[str, type[CkptmgrError]] = {
    "empty_file.ckpt": TruncatedCheckpoint,
    "one_byte.ckpt": TruncatedCheckpoint,
    "text.ckpt": CorruptCheckpoint,
    "zeros.ckpt": CorruptCheckpoint,
    "truncated_mid_first.ckpt": TruncatedCheckpoint,
    "crc_cut_trailer_1.ckpt": CorruptCheckpoint,
    "crc_flip_marker.ckpt": CorruptCheckpoint,
    "crc_flip_payload.ckpt (crc)": ChecksumMismatch,
    "crc_flip_trailer.ckpt (crc)": ChecksumMismatch,
    "crc_zero.ckpt (crc)": ChecksumMismatch,
    "flip_type_unknown.ckpt": UnsupportedCheckpoint,
    "zero_appended.ckpt": CorruptCheckpoint,
    "dims_huge.ckpt": CorruptCheckpoint,
    "str_empty.ckpt": CorruptCheckpoint,
    "str_invalid_codepoint.ckpt": CorruptCheckpoint,
    "type_float32.ckpt": UnsupportedCheckpoint,
    "type_Float.ckpt": UnsupportedCheckpoint,
    "type_Complex64.ckpt": UnsupportedCheckpoint,
    "type_bool.ckpt": UnsupportedCheckpoint,
    "gcm_flip_ct.ckpt": KeyProblem,
    "gcm_flip_iv.ckpt": KeyProblem,
    "gcm_flip_tag.ckpt": KeyProblem,
    "gcm_flip_len.ckpt": TamperedCheckpoint,
    "gcm_trunc.ckpt": TruncatedCheckpoint,
    "gcm_trunc_half.ckpt": TruncatedCheckpoint,
    "gcm_trunc_header.ckpt": TruncatedCheckpoint,
    "gcm_junk_appended.ckpt": TamperedCheckpoint,
    "gcm_flip_last.ckpt": KeyProblem,
    "cbc_intact.ckpt": KeyProblem,
    "cbc_flip_magic.ckpt": UnsupportedCheckpoint,
    "cbc_trunc_half.ckpt": TruncatedCheckpoint,
    "cbc_junk_appended.ckpt": TamperedCheckpoint,
    "cbc_magic_only.ckpt": TruncatedCheckpoint,
    "cbc_flip_last.ckpt": KeyProblem,
    "sm4_intact.ckpt": KeyProblem,
    "sm4_flip_magic.ckpt": UnsealedCheckpoint,  # not known as encrypted any more
    "sm4_trunc_header.ckpt": TruncatedCheckpoint,
    "sm4_magic_only.ckpt": TruncatedCheckpoint,
    "sm4_flip_last.ckpt": KeyProblem,
    "gcm_blocks_drop_last.ckpt": TruncatedCheckpoint,
    "gcm_blocks_drop_first.ckpt": CorruptCheckpoint,
    "gcm_blocks_swap.ckpt": CorruptCheckpoint,
    "cbc_blocks_drop_last.ckpt": TruncatedCheckpoint,
    "cbc_blocks_drop_first.ckpt": CorruptCheckpoint,
    "sm4_blocks_drop_last.ckpt": TruncatedCheckpoint,
    "sm4_blocks_drop_first.ckpt": CorruptCheckpoint,
    "st_7bytes.safetensors": TruncatedCheckpoint,
    "st_trunc_data.safetensors": TruncatedCheckpoint,
    "st_junk_appended.safetensors": CorruptCheckpoint,
    "st_header_101MB.safetensors": CorruptCheckpoint,
    "st_crc_flip_data.safetensors (crc)": ChecksumMismatch,
    "st_hole.safetensors": CorruptCheckpoint,
    "st_size_mismatch.safetensors": CorruptCheckpoint,
}

# Of MindSpore's encrypted files no byte is authenticated as a whole: blocks that were moved open one by one.
MOVED_BLOCKS = tuple(
    f"{mode}_blocks_{what}_middle.ckpt"
    for mode in ("gcm", "cbc", "sm4")
    for what in ("swap", "replace")
)


def _keys(name: str, load_kw: dict[str, Any]) -> tuple[str, str]:
    """Return the names under which a table may list a case: with its arguments, and for all arguments."""
    return _label(name, load_kw), name


def _listed(table: dict[str, Any], name: str, load_kw: dict[str, Any]) -> str | None:
    return next((key for key in _keys(name, load_kw) if key in table), None)


@pytest.mark.parametrize("case", _sound_cases(), ids=lambda case: str(case["file"]))
def test_sound_file_loads_to_what_was_saved(case: dict[str, Any]) -> None:
    outcome = _outcome(FILES / case["file"], case["load_kw"])
    answer = case["load"]
    difference = SOUND_DIFFERENCES.get(case["file"])
    if difference is not None and difference[0] is None:
        assert outcome == recorded(case["expected"])
        assert not answer["ok"] or answer["items"] != "= expected"
    elif difference is not None:
        assert type(outcome) is difference[0]
        assert not answer["ok"]
    elif answer["ok"]:
        items = case["expected"] if answer["items"] == "= expected" else answer["items"]
        assert isinstance(outcome, dict)
        assert outcome == recorded(items)
        assert case["file"].endswith(".safetensors") or list(outcome) == list(recorded(items))
    else:
        assert type(outcome) is ValueError
        assert str(outcome) == answer["message"]


def test_sound_differences_name_files_that_are_replayed() -> None:
    assert set(SOUND_DIFFERENCES) <= {case["file"] for case in _sound_cases()}


@pytest.mark.parametrize(
    ("name", "load_kw", "answer"),
    _broken_cases(),
    ids=[_label(name, load_kw) for name, load_kw, _ in _broken_cases()],
)
def test_broken_file_gets_the_answer_of_mindspore_or_a_listed_one(
    name: str, load_kw: dict[str, Any], answer: _Answer
) -> None:
    outcome = _outcome(FILES / "broken" / name, load_kw)
    if not answer["ok"] and name in ACCEPTED:
        assert isinstance(outcome, dict)
    elif not answer["ok"]:
        key = _listed(BOTH_REFUSE, name, load_kw)
        assert key is not None
        assert type(outcome) is BOTH_REFUSE[key]
        assert isinstance(outcome, ValueError), "a program catches what MindSpore raises"
    elif (key := _listed(REFUSED, name, load_kw)) is not None:
        assert type(outcome) is REFUSED[key][0]
    else:
        assert outcome == recorded(answer["items"])


def test_tables_of_broken_files_are_exact() -> None:
    refused: set[str] = set()
    loaded: set[str] = set()
    for name, load_kw, answer in _broken_cases():
        (loaded if answer["ok"] else refused).update(_keys(name, load_kw))
    assert set(REFUSED) <= loaded
    assert set(ACCEPTED) | set(BOTH_REFUSE) <= refused
    assert not set(ACCEPTED) & set(BOTH_REFUSE)


def _encrypted_files() -> list[tuple[Path, dict[str, Any]]]:
    found = [
        (FILES / "broken" / name, load_kw)
        for name, load_kw, answer in _broken_cases()
        if answer["ok"] and "dec_key" in load_kw
    ]
    found += [
        (FILES / case["file"], case["load_kw"])
        for case in _sound_cases()
        if "dec_key" in case["load_kw"]
    ]
    return found


@pytest.mark.parametrize(
    ("path", "load_kw"),
    _encrypted_files(),
    ids=[_label(path.name, kw) for path, kw in _encrypted_files()],
)
def test_encrypted_file_of_mindspore_is_refused_without_allow_unsealed(
    path: Path, load_kw: dict[str, Any]
) -> None:
    with pytest.raises(UnsealedCheckpoint, match="allow_unsealed"):
        _load(path, load_kw, allow_unsealed=False)


def test_moved_blocks_are_among_the_files_that_are_refused() -> None:
    assert set(MOVED_BLOCKS) <= {path.name for path, _ in _encrypted_files()}
