# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoint files, and which prefixes and directories are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.names import (
    FORMATS,
    ParsedName,
    breakpoint_name,
    check_directory,
    check_prefix,
    check_prefix_result,
    checkpoint_name,
    parse_name,
    restart_prefix,
    step_in_epoch,
)

_GOLDEN = json.loads(
    (Path(__file__).parent.parent / "golden" / "naming.json").read_text(encoding="utf-8")
)
_RENAMES: list[tuple[list[str], str, bool, str]] = _GOLDEN["rename"]
_FILES: list[str] = _GOLDEN["managed"]["files"]
_PREFIXES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=12)
_NUMBERS = st.integers(min_value=0, max_value=10**18 - 1)

# MindSpore counts these as its own and deletes them when their turn comes, though no run of it writes such names.
_NOT_OURS = {"CKP-(1).ckpt", "CKP--9.ckpt", "CKP-.ckpt", "CKP-1.ckpt", "CKP-1_2.5.ckpt"}


@pytest.mark.parametrize(("names", "prefix", "is_breakpoint", "expected"), _RENAMES)
def test_restart_prefix_equals_the_recorded_one(
    names: list[str], prefix: str, is_breakpoint: bool, expected: str
) -> None:
    assert restart_prefix(prefix, names, is_breakpoint=is_breakpoint) == expected


def test_restart_prefix_takes_the_highest_number() -> None:
    assert (
        restart_prefix("net", ["net-1_1.ckpt", "net_9-1_1.safetensors", "net_2-1_1.ckpt"])
        == "net_10"
    )


@pytest.mark.parametrize(
    "name",
    [
        "net.ckpt",
        "net_²-1_1.ckpt",
        "net_" + "9" * 5000 + "-1_1.ckpt",
        "net_-1_1.ckpt",
        "netX5-1_1.ckpt",
    ],
)
def test_restart_prefix_with_a_name_without_a_number_ignores_it(name: str) -> None:
    assert restart_prefix("net", [name]) == "net"


def test_restart_prefix_of_a_name_equal_to_the_prefix_ignores_it() -> None:
    assert restart_prefix("net.ckpt", ["net.ckpt"]) == "net.ckpt"


@pytest.mark.parametrize("format", FORMATS)
def test_parse_name_accepts_what_mindspore_counts_less_what_it_never_writes(format: str) -> None:
    recorded = set(_GOLDEN["managed"][format])
    ours = set()
    for name in _FILES:
        parsed = parse_name(name)
        if (
            parsed
            and parsed.prefix == "CKP"
            and parsed.format == format
            and not parsed.is_breakpoint
        ):
            ours.add(name)
    assert ours == recorded - _NOT_OURS


@pytest.mark.parametrize(
    "name",
    [
        "CKP-2023.12.ckpt",
        "CKP-1_1 copy.ckpt",
        "CKP-1_0.ckpt",
        "CKP-01_1.ckpt",
        "CKP-1_1.ckpt\n",
        "CKP-\u0661_1.ckpt",
        "CKP-1_" + "9" * 5000 + ".ckpt",
        "a/CKP-1_1.ckpt",
        "CKP-1_1.tmp",
        "CKP1_1.ckpt",
        "",
    ],
)
def test_parse_name_of_a_name_no_run_writes_is_none(name: str) -> None:
    assert parse_name(name) is None


@given(_PREFIXES, _NUMBERS, _NUMBERS.filter(bool), st.sampled_from(FORMATS))
def test_parse_name_of_a_checkpoint_name_gives_its_parts(
    prefix: str, epoch: int, step: int, format: str
) -> None:
    name = checkpoint_name(prefix, epoch, step_in_epoch=step, format=format)
    assert parse_name(name) == ParsedName(prefix, epoch, step, False, format)


@given(_PREFIXES, _NUMBERS, _NUMBERS, st.sampled_from(FORMATS))
def test_parse_name_of_a_breakpoint_name_gives_its_parts(
    prefix: str, epoch: int, step: int, format: str
) -> None:
    name = breakpoint_name(prefix, epoch, step_in_epoch=step, format=format)
    assert parse_name(name) == ParsedName(prefix, epoch, step, True, format)


@given(st.text(max_size=30))
def test_parse_name_of_any_text_never_fails(text: str) -> None:
    parsed = parse_name(text)
    assert parsed is None or text.startswith(f"{parsed.prefix}-")


@given(_PREFIXES, st.lists(st.integers(min_value=0, max_value=30), max_size=6))
def test_restart_prefix_is_never_taken(prefix: str, numbers: list[int]) -> None:
    taken = [f"{prefix}_{number}" if number else prefix for number in numbers]
    names = [checkpoint_name(one, 1, step_in_epoch=1, format="ckpt") for one in taken]
    new = restart_prefix(prefix, names)
    assert checkpoint_name(new, 1, step_in_epoch=1, format="ckpt") not in names


@pytest.mark.parametrize(("step", "expected"), [(1, 1), (4, 4), (5, 1), (9, 1)])
def test_step_in_epoch_counts_from_one_in_each_epoch(step: int, expected: int) -> None:
    assert step_in_epoch(step, batch_num=4) == expected


def test_step_in_epoch_of_an_empty_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_num must be at least 1, but got 0"):
        step_in_epoch(1, batch_num=0)


def test_check_prefix_returns_a_usable_one() -> None:
    assert check_prefix("net") == "net"


def test_check_prefix_returns_a_callable() -> None:
    assert check_prefix(str.upper) == str.upper


@pytest.mark.parametrize("prefix", ["a/b", "a\0b", 5, None])
def test_check_prefix_of_an_unusable_one_is_refused(prefix: object) -> None:
    with pytest.raises(ValueError, match="it must be callable or string that does not contain '/'"):
        check_prefix(prefix)


@pytest.mark.parametrize("check", [check_prefix, check_prefix_result])
@pytest.mark.parametrize("prefix", [".net", ".", "a\ud800"])
def test_check_prefix_that_gives_files_nobody_finds_is_refused(
    check: Callable[[object], object], prefix: str
) -> None:
    with pytest.raises(ValueError, match=r"starts with '\.'|no file name can hold"):
        check(prefix)


def test_check_prefix_of_bytes_that_are_no_utf8_is_accepted() -> None:
    assert check_prefix("net\udcff") == "net\udcff"


def test_check_prefix_result_returns_a_usable_one() -> None:
    assert check_prefix_result("net") == "net"


@pytest.mark.parametrize("prefix", ["a/b", "a\0b", 5, None])
def test_check_prefix_result_of_an_unusable_one_is_refused(prefix: object) -> None:
    with pytest.raises(
        ValueError, match="is callable, it must return a string that does not contain"
    ):
        check_prefix_result(prefix)


def test_check_directory_that_is_missing_is_accepted(tmp_path: Path) -> None:
    assert check_directory(str(tmp_path / "new")) == tmp_path / "new"


def test_check_directory_as_a_path_is_accepted(tmp_path: Path) -> None:
    assert check_directory(tmp_path) == tmp_path


def test_check_directory_through_a_link_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert check_directory(tmp_path / "link") == tmp_path / "real"


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("", "The path is invalid, it should be non-blank."),
        ("  ", "The path is invalid, it should be non-blank."),
        ("a\0b", "The path is invalid, it should not contain a NUL character."),
        ("d/" * 1000, "The path length is too long, it should be limited in 1024."),
    ],
)
def test_check_directory_with_an_unusable_name_is_refused(directory: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_directory(directory)


@pytest.mark.parametrize("directory", [5, None, b"d"])
def test_check_directory_of_another_type_is_refused(directory: object) -> None:
    with pytest.raises(TypeError, match=r"^The path is invalid, the type should be string\.$"):
        check_directory(directory)


def test_check_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match="is a file path, it should be a directory path"):
        check_directory(str(file))
