# SPDX-License-Identifier: Apache-2.0
"""The fields of a manifest, read strictly: every value has the type and the range that the format gives it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ckptmgr.core.model import Link

_MAX_COUNT = (1 << 64) - 1
# More than any manifest has digests; the shortest values need 26 bytes of memory for each byte
# read.
_MAX_COMMAS = 1 << 21
_ID = re.compile(r"[0-9a-f]{64}")


def strict_json(data: bytes) -> Any:
    """Parse JSON in UTF-8 without repeated names, NaN, or numbers beyond all doubles.

    Raises:
        ValueError, RecursionError: It is no such JSON.
    """
    if data.count(b",") > _MAX_COMMAS:
        raise ValueError(f"more than {_MAX_COMMAS} values")
    return _DECODER.decode(data.decode("utf-8", "surrogatepass"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# A new one for each manifest would cost half of its parsing.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant
)


def link_to_document(link: Link) -> dict[str, Any]:
    """Return a predecessor link as JSON."""
    return {"name": link.name, "sequence": link.sequence, "run_id": link.run_id, "id": link.id}


def link_from_document(document: Mapping[str, Any] | None) -> Link | None:
    """Return the predecessor link in a JSON document.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is no such document.
    """
    if document is None:
        return None
    identity = typed(document["id"], str)
    if not _ID.fullmatch(identity):
        raise ValueError(f"{identity[:80]!r} is not the id of a checkpoint")
    return Link(
        name=base_name(document["name"]),
        sequence=count(document, "sequence"),
        run_id=typed(document["run_id"], str),
        id=identity,
    )


def typed(value: object, kind: type[str]) -> str:
    """Return a value of a type, or raise TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def base_name(value: object) -> str:
    """Return a file name without directories, or raise ValueError."""
    name = typed(value, str)
    if not name or not _fits_file_name(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is not a base name")
    return name


def series_name(value: object) -> str:
    """Return the name of a series, which becomes a part of file names, or raise ValueError."""
    name = typed(value, str)
    if not _fits_file_name(name):
        raise ValueError(f"{name!r} is not the name of a series")
    return name


def _fits_file_name(text: str) -> bool:
    """Return whether a file name can hold a text."""
    try:
        text.encode(errors="surrogateescape")  # the lone surrogates of names that are no UTF-8
    except UnicodeEncodeError:
        return False
    return "/" not in text and "\0" not in text


def optional_text(value: object) -> str | None:
    """Return a text or None, or raise TypeError."""
    return None if value is None else typed(value, str)


def count(document: Mapping[str, Any], name: str) -> int:
    """Return an unsigned integer of 64 bits, or raise ValueError."""
    value: object = document[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        is_huge = isinstance(value, int) and abs(value) > _MAX_COUNT  # too long for Python to print
        shown = "too large" if is_huge else repr(value)
        raise ValueError(f"the {name} is {shown}, not an integer from 0 to 2**64 - 1")
    return value


def utc_time(value: object) -> datetime:
    """Return a time in UTC; raise ValueError if it is no time, or has no zone."""
    time = datetime.fromisoformat(typed(value, str))
    if time.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return time.astimezone(UTC)


def time_text(time: datetime) -> str:
    """Return a time in the form that manifests use."""
    return time.astimezone(UTC).isoformat()


def number_to_json(value: float) -> float | str:
    """Return a number for JSON; NaN and infinities become strings."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def number_from_json(value: object) -> float:
    """Return a number, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{value!r} is not a number")
    return float(value)
