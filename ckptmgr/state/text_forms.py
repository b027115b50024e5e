# SPDX-License-Identifier: Apache-2.0
"""Text forms of standard values without parts: times, paths, decimal numbers and ranges.

Each value has one spelling. Decoding refuses every other one, because a skeleton may be untrusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ckptmgr.state.paths import Node, TreeError, shown

_FOLD = " fold=1"  # the second of two equal times when clocks are set back; ISO 8601 has no word
_MAX_DIGITS = 1000
_MAX_EXPONENT = 999_999  # the range of Python's default decimal context
_MAX_RANGE = 2**63
_MAX_PATH_CHARS = 65_536


class _TextForm(NamedTuple):
    """The spelling of the values of one type.

    Attributes:
        kind: Kind of the skeleton node.
        encode: Returns the text; raises ValueError for a value that it cannot express.
        decode: Returns the value of a text; the caller compares its spelling.
        max_chars: Maximum length of the text.
    """

    kind: str
    encode: Callable[[Any], str]
    decode: Callable[[str], Any]
    max_chars: int = 100


def _with_fold(value: datetime | time) -> str:
    if value.tzinfo is not None and isinstance(value, time) and value.utcoffset() is None:
        raise ValueError("has a time zone whose offset depends on the date")
    offset = value.utcoffset()
    if offset and abs(offset) < timedelta(seconds=1):  # fromisoformat takes it for UTC
        raise ValueError("has a time zone less than a second from UTC")
    return value.isoformat() + (_FOLD if value.fold else "")


def _datetime_of(text: str) -> datetime:
    plain = text.removesuffix(_FOLD)
    return datetime.fromisoformat(plain).replace(fold=int(plain != text))


def _time_of(text: str) -> time:
    plain = text.removesuffix(_FOLD)
    return time.fromisoformat(plain).replace(fold=int(plain != text))


def _range_text(value: range) -> str:
    if not all(abs(part) < _MAX_RANGE for part in (value.start, value.stop, value.step)):
        raise ValueError("has bounds or a step beyond 64 bits")
    return f"{value.start} {value.stop} {value.step}"


def _decimal_text(value: Any) -> str:
    if len(value.as_tuple().digits) > _MAX_DIGITS or (
        value.is_finite() and abs(value.adjusted()) > _MAX_EXPONENT
    ):
        raise ValueError(f"has more than {_MAX_DIGITS} digits or an exponent over {_MAX_EXPONENT}")
    return str(value)


def _decimal_of(text: str) -> object:
    from decimal import Decimal

    return Decimal(text)


_DECIMAL = _TextForm("decimal", _decimal_text, _decimal_of, _MAX_DIGITS + 20)
_FORMS: dict[type, _TextForm] = {
    datetime: _TextForm("datetime", _with_fold, _datetime_of),
    date: _TextForm("date", date.isoformat, date.fromisoformat),
    time: _TextForm("time", _with_fold, _time_of),
    timedelta: _TextForm(
        "timedelta",
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: timedelta(*map(int, text.split(" "))),
    ),
    range: _TextForm("range", _range_text, lambda text: range(*map(int, text.split(" ")))),
    type(Path()): _TextForm("path", str, Path, _MAX_PATH_CHARS),
    PurePosixPath: _TextForm("pureposixpath", str, PurePosixPath, _MAX_PATH_CHARS),
    PureWindowsPath: _TextForm("purewindowspath", str, PureWindowsPath, _MAX_PATH_CHARS),
}
_BY_KIND = {form.kind: form for form in (*_FORMS.values(), _DECIMAL)}
TEXT_KINDS = frozenset(_BY_KIND)
"""Kinds of the nodes with a text form."""


def _form_of(kind: type) -> _TextForm | None:
    form = _FORMS.get(kind)
    if form is None and kind.__module__ == "decimal" and kind is sys.modules["decimal"].Decimal:
        return _DECIMAL
    return form


def has_text_form(value: object) -> bool:
    """Return whether a value is of a type with a text form."""
    return _form_of(type(value)) is not None


def encode_text_form(value: object) -> Node:
    """Return the node of a value; None if its type has no text form, or not for this value."""
    form = _form_of(type(value))
    if form is None or text_problem(value) is not None:
        return None
    return {form.kind: form.encode(value)}


def text_problem(value: object) -> str | None:
    """Return why the text form of its type cannot express a value; None if it can."""
    form = _form_of(type(value))
    if form is None:
        return None
    try:
        text = form.encode(value)
    except ValueError as error:
        return str(error)
    return None if len(text) <= form.max_chars else f"has more than {form.max_chars} characters"


def decode_text_form(kind: str, body: object) -> object:
    """Return the value of a node; raise TreeError for any other spelling than its own."""
    form = _BY_KIND[kind]
    if isinstance(body, str) and len(body) <= form.max_chars:
        try:
            value: object = form.decode(body)
            if form.encode(value) == body:
                return value
        except (ValueError, TypeError, ArithmeticError):  # OverflowError, too
            pass
    raise TreeError(f"a {kind} is spelled {shown(body)}")
