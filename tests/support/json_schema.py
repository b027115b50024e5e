# SPDX-License-Identifier: Apache-2.0
"""Checks a JSON value against a schema of `docs/schemas`, as far as those schemas go."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN = {
    *("$schema", "$id", "title", "description", "const", "enum", "type", "required"),
    *("properties", "additionalProperties", "items", "pattern", "oneOf"),
}


def violations(value: Any, schema: Mapping[str, Any], place: str = "$") -> Iterator[str]:
    """Yield how a value differs from a schema; a keyword that is not known here is an error."""
    assert set(schema) <= _KNOWN, set(schema) - _KNOWN
    if "const" in schema and value != schema["const"]:
        yield f"{place}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is none of {schema['enum']}"
    if "type" in schema and not _is_of(value, schema["type"]):
        yield f"{place}: {value!r} is no {schema['type']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if "oneOf" in schema:
        answers = [list(violations(value, one, place)) for one in schema["oneOf"]]
        if answers.count([]) != 1:
            yield f"{place}: fits {answers.count([])} of the alternatives: {answers}"
    if isinstance(value, dict):
        named = schema.get("properties", {})
        yield from (
            f"{place}: no {name}" for name in schema.get("required", ()) if name not in value
        )
        for name, one in value.items():
            inner = named.get(name, schema.get("additionalProperties", {}))
            if inner is False:
                yield f"{place}: {name} is not in the schema"
            else:
                yield from violations(one, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from violations(one, schema.get("items", {}), f"{place}[{number}]")


def _is_of(value: object, names: str | list[str]) -> bool:
    kinds = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[kind]) for kind in kinds)
