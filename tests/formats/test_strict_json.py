# SPDX-License-Identifier: Apache-2.0
"""JSON from strangers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.strict_json import encode_object, parse_object, parse_strings
from tests.support.strategies import encodable_texts


@given(st.dictionaries(encodable_texts(), encodable_texts()))
def test_strings_encoded_parse_back(value: dict[str, str]) -> None:
    encoded = encode_object(value, what="metadata")
    parsed = parse_object(encoded, what="metadata", offset=0)
    assert parse_strings(parsed, what="metadata", offset=0) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not start with"),
        (b"[]", "does not start with"),
        (b" {}", "does not start with"),
        (b"\xef\xbb\xbf{}", "does not start with"),
        ('{"a":1}'.encode("utf-16"), "does not start with"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "key 'b' twice"),
        (b'{"a": NaN}', "number NaN"),
        (b'{"a": -Infinity}', "number -Infinity"),
        (b'{"a": 1.5}', "number 1.5"),
        (b'{"a": 1e400}', "number 1e400"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "10000 digits"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    ],
)
def test_object_malformed_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_object(data, what="header", offset=8)


def test_number_of_20_digits_is_read_beside_a_key_of_many() -> None:
    data = b'{"000000000000000000000001": 18446744073709551615}'
    assert parse_object(data, what="header", offset=8) == {"0" * 23 + "1": 2**64 - 1}


def test_object_not_utf8_names_the_byte() -> None:
    with pytest.raises(FormatError) as caught:
        parse_object(b'{"\xff": 1}', what="header", offset=8)
    assert caught.value.offset == 8 + 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "not an object"),
        ({"a": 1}, "no string"),
        ({"a": None}, "no string"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\udfff": "a"}, "lone surrogate"),
    ],
)
def test_strings_of_other_kinds_are_refused(value: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_strings(value, what="metadata", offset=0)


def test_object_with_lone_surrogate_is_not_encoded() -> None:
    with pytest.raises(FormatError, match="lone surrogate"):
        encode_object({"a": "\ud800"}, what="metadata")


@given(st.binary(max_size=40).map(lambda tail: b"{" + tail))
def test_object_of_any_bytes_parses_as_json_does_or_is_refused(data: bytes) -> None:
    try:
        parsed = parse_object(data, what="header", offset=0)
    except FormatError:
        return
    assert parsed == json.loads(data)
