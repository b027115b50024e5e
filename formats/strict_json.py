# SPDX-License-Identifier: Apache-2.0
"""Strict JSON: one UTF-8 object, no duplicate keys or NaN, bounded depth and size.

Numbers are integers of at most 20 characters, unless the caller takes all that a float can hold.

>>> parse_object(b'{"a": 1}', what="header", offset=8)
{'a': 1}
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, NoReturn, TypeAlias

from .errors import FormatError, UnsupportedError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A JSON value."""

# Enough for every unsigned 64-bit number; Python's own limit of 4300 digits would raise a bare
# ValueError.
_MAX_DIGITS = 20
MAX_VALUES = 1 << 21
"""Of one object: a value takes as little as two bytes of JSON, but hundreds of memory."""
FREE_DOCUMENT_BYTES = 384 << 20
"""Memory of one document, whatever the size of its file: `MAX_TENSORS` leaves of a state take it."""
_BYTES_PER_STORED = 12  # of memory; the texts of numbers take 11
_BYTES_PER_START = {b"{": 200, b"[": 88, b",": 64}  # of CPython 3.11 to 3.14, and the value itself
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_PART = re.compile(rb'(?:[^"]{1,200}+|"[^"\\]*+(?:\\.[^"\\]*+)*+"?){1,20000}+', re.DOTALL)
_STARTS_OF_VALUES = (b",", b"[", b"{")
_MANY_DIGITS = b"0" * _MAX_DIGITS
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdigit() else 0 for byte in range(128)) + bytes(128)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _as_it_is(value: dict[str, object]) -> object:
    return value


def parse_object(
    data: bytes,
    *,
    what: str,
    offset: int,
    shorten: Callable[[dict[str, object]], object] = _as_it_is,
    takes_fractions: bool = False,
) -> dict[str, object]:
    """Parse one JSON object: UTF-8 that starts with `{`; white space may follow it.

    `what` names the object in messages; `offset` is its position in the file. `shorten` takes each
    inner object and returns its replacement: with many of them, dicts cost more than parsing.

    Raises:
        UnsupportedError: More than `MAX_VALUES` values.
        FormatError: Anything else.
    """
    if not data.startswith(b"{"):
        raise FormatError(f"the {what} does not start with '{{'", offset=offset)
    if has_too_many_values(data):
        raise UnsupportedError(f"the {what} has more than {MAX_VALUES} values", offset=offset)
    if takes_fractions:
        decoder = _decoder(int_parser(data, otherwise=_finite), shorten, parse_float=_finite)
    else:
        decoder = _decoder(int_parser(data, otherwise=_refuse_long_integer), shorten)
    try:
        value: object = decoder.decode(data.decode())
    except UnicodeDecodeError as error:
        raise FormatError(f"the {what} is not UTF-8", offset=offset + error.start) from None
    except json.JSONDecodeError as error:
        raise FormatError(f"the {what} is not JSON: {error}", offset=offset) from None
    except RecursionError:
        raise FormatError(f"the {what} is nested too deeply", offset=offset) from None
    except _RefusedError as error:
        raise FormatError(f"the {what} {error}", offset=offset) from None
    if not isinstance(value, dict):
        raise FormatError(f"the {what} is no table of names", offset=offset)
    return value


def has_too_many_values(data: bytes) -> bool:
    """Return whether some JSON has more than `MAX_VALUES` values, without building any of them."""
    return len(data) > MAX_VALUES and _exceeds(data, _starts_in, MAX_VALUES)


def most_memory(stored_bytes: int = 0) -> int:
    """Return how much memory the values of a text may take, in a file of that size.

    A few bytes of a compressed file can stand for a long text, and two bytes of a text for a value.
    """
    return FREE_DOCUMENT_BYTES + _BYTES_PER_STORED * stored_bytes


def fits_memory(text: str, most_bytes: int) -> bool:
    """Return whether the values of some JSON take no more memory, without building any of them."""
    if len(text) * max(_BYTES_PER_START.values()) <= most_bytes:
        return True
    return not _exceeds(text.encode("utf-8", "surrogatepass"), _memory_of, most_bytes)


def check_memory(text: str, *, what: str, most_bytes: int) -> None:
    """Raise FormatError unless some JSON `fits_memory`."""
    if not fits_memory(text, most_bytes):
        raise FormatError(
            f"the values of the {what} would take more memory than the {most_bytes >> 20} MiB that it may"
        )


def parse_bounded(text: str, *, what: str, most_bytes: int | None = None) -> Any:
    """Return the value of some JSON of bounded memory, by default that of a text in a text.

    Raises:
        ValueError: It is no JSON, or too large (FormatError).
        RecursionError: It is nested too deeply.
    """
    check_memory(text, what=what, most_bytes=most_memory() if most_bytes is None else most_bytes)
    return json.loads(text)


def _exceeds(data: bytes, measure: Callable[[bytes], int], most: int) -> bool:
    """Return whether a sum over the parts of some JSON exceeds `most`; strings do not count."""
    if measure(data) <= most:
        return False
    found = 0
    for part in _PART.finditer(data):  # part by part: each string that is cut out costs memory
        found += measure(_STRING.sub(b"", part[0]))
        if found > most:
            return True
    return False


def _starts_in(data: bytes) -> int:
    return sum(data.count(start) for start in _STARTS_OF_VALUES)


def _memory_of(data: bytes) -> int:
    return sum(each * data.count(start) for start, each in _BYTES_PER_START.items())


def parse_value(text: str, start: int) -> tuple[object, int] | None:
    """Parse the JSON value at `start`; return it and its end, or None if it is invalid."""
    try:
        return _decoder(_bounded_int(_refuse_long_integer), _as_it_is).raw_decode(text, start)
    except (ValueError, RecursionError, _RefusedError):
        return None


def _decoder(
    parse_int: Callable[[str], Any],
    shorten: Callable[[dict[str, object]], object],
    *,
    parse_float: Callable[[str], float] | None = None,
) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=lambda pairs: shorten(_unique(pairs)),
        parse_int=parse_int,
        parse_float=parse_float or _refuse_number,
        parse_constant=_refuse_number,
    )


def parse_strings(value: object, *, what: str, offset: int) -> dict[str, str]:
    """Return `value` as an object of encodable strings, or raise FormatError."""
    if not isinstance(value, dict):
        raise FormatError(f"the {what} is not an object", offset=offset)
    strings: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(text, str):
            raise FormatError(f"the value of {key!r} in the {what} is no string", offset=offset)
        if not (is_encodable(key) and is_encodable(text)):
            raise FormatError(f"{key!r} in the {what} holds a lone surrogate", offset=offset)
        strings[key] = text
    return strings


def encode_object(value: Mapping[str, object], *, what: str) -> bytes:
    """Return an object as compact UTF-8 JSON, or raise FormatError for a lone surrogate."""
    text = _ENCODER.encode(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise FormatError(f"the {what} holds a lone surrogate, which UTF-8 cannot encode") from None


quoted: Callable[[str], str] = encode_basestring
"""Returns a string as JSON, spelled as in `encode_object`."""


def is_encodable(text: str) -> bool:
    """Return whether UTF-8 can encode a text: it holds no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _RefusedError(Exception):
    """Raised by the hooks of the decoder; never leaves this module."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _RefusedError(f"has the key {counts.most_common(1)[0][0]!r} twice")
    return value


def int_parser(data: bytes, *, otherwise: Callable[[str], float]) -> Callable[[str], float]:
    """Return the `parse_int` of some JSON: `int`, or `otherwise` for more than 20 characters.

    Calling Python code for each number would take most of the time, so only JSON that has a long
    run of digits gets it.
    """
    may_be_long = _MANY_DIGITS in data.translate(_DIGITS_AS_ZEROS)
    return _bounded_int(otherwise) if may_be_long else int


def _bounded_int(otherwise: Callable[[str], float]) -> Callable[[str], float]:
    return lambda text: otherwise(text) if len(text) > _MAX_DIGITS else int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _RefusedError(f"has the number {text[:_MAX_DIGITS]}, which is out of range")
    return value


def _refuse_long_integer(text: str) -> NoReturn:
    raise _RefusedError(f"has a number of {len(text)} digits")


def _refuse_number(text: str) -> NoReturn:
    raise _RefusedError(f"has the number {text[:_MAX_DIGITS]}, where only integers are allowed")
