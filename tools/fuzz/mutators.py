# SPDX-License-Identifier: Apache-2.0
"""Change an input a little: its bytes, or their meaning as JSON, protobuf or text.

A change of the meaning keeps lengths and quotes right, so that it gets past the first checks of a parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

from ckptmgr.formats.mindspore.wire import encode_varint

Mutate = Callable[[Random, bytes], bytes]

MAX_INPUT_BYTES = 1 << 16
_NUMBERS = (0, 1, 2, 3, 7, 8, 16, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 1 << 20)
_EDGES = tuple((1 << bits) + more for bits in (31, 32, 53, 63, 64) for more in (-1, 0, 1))
INTEGERS = (*_NUMBERS, *_EDGES, *(-number for number in (*_NUMBERS, *_EDGES)), 8456394893526610284)
# What `json.dumps` cannot write; put into the text in place of these strings.
_SPELLED = {
    '"@digits"': "9" * 5000,
    '"@deep"': "[" * 2000,
    '"@float"': "1e999",
    '"@minus"': "-0",
    '"@fraction"': "1.5",
}
_SCALARS: tuple[Any, ...] = (
    *INTEGERS, None, True, False, float("nan"), float("inf"), 0.1, "", "a", "\0", "\ud800", "é", "/",
    "..", "__metadata__", "a" * 300, [], {}, [[]], [0, 0], {"a": 1}, [[1], [2]], "@digits", "@deep",
    "@float", "@minus", "@fraction", "00", "0x1", "1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59",
)  # fmt: skip


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Change, insert, repeat or remove some bytes; sometimes cut the input."""
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(4) >> 1 or 1):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(8)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice((0, 1, 0x20, 0x22, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 8)))
        elif kind == 3:
            del changed[at : at + rng.choice((1, 1, 2, 4, 8, 64))]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.randrange(1, 65)]
        elif kind == 5:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(INTEGERS) % (1 << 8 * size)
            changed[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 6:
            start = rng.randrange(len(changed) + 1)
            length = rng.randrange(1, 17)
            changed[at : at + length] = changed[start : start + length]
        elif kind == 7 and rng.randrange(4) == 0:
            del changed[at:]
    return bytes(changed)


def tokens_of(words: Sequence[str]) -> Mutate:
    """Return a mutation of a text made of such words: insert, replace, repeat or remove one."""
    pattern = re.compile(rb"\w+|\s+|.", re.DOTALL)
    spare = [word.encode() for word in words]

    def mutate(rng: Random, data: bytes) -> bytes:
        parts = pattern.findall(data[:4096])
        for _ in range(rng.randrange(1, 4)):
            at, kind = rng.randrange(len(parts) + 1), rng.randrange(5)
            if kind == 0:
                parts.insert(at, rng.choice(spare))
            elif kind == 1:
                parts[at : at + 1] = [rng.choice(spare)]
            elif kind == 2:
                del parts[at : at + rng.randrange(1, 4)]
            elif kind == 3:
                parts[at:at] = parts[at : at + 4] * rng.choice((1, 1, 2, 50))
            else:
                parts[at : at + 1] = [str(rng.choice(INTEGERS)).encode()]
        return b"".join(parts)

    return mutate


def mutate_json(rng: Random, data: bytes) -> bytes:
    """Change a JSON text in one or two places; a text that is no JSON has its bytes changed."""
    value = _loaded(data)
    if value is None:
        return mutate_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = changed_json(rng, value)
    return dumped(rng, value)


def dumped(rng: Random, value: Any) -> bytes:
    """Return a value as JSON, which may be odd."""
    is_ascii = rng.randrange(4) > 0
    text = json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":"))
    if '"@' in text:
        for mark, spelling in _SPELLED.items():
            text = text.replace(mark, spelling)
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data) if rng.randrange(12) == 0 else data


@lru_cache(maxsize=512)
def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def changed_json(rng: Random, value: Any) -> Any:
    """Return a value with one node changed; all nodes that are not on the way there are shared with the old one."""
    if isinstance(value, dict) and value:
        return _changed_dict(rng, value)
    if isinstance(value, list) and value:
        return _changed_list(rng, value)
    if isinstance(value, str) and rng.randrange(2):
        return mutate_bytes(rng, value.encode("utf-8", "surrogatepass")).decode(errors="replace")
    if type(value) is int and rng.randrange(2):
        return value + rng.choice((-1, 1, 8, -8, 1 << 62, 1 << 63))
    return rng.choice(_SCALARS)


def _changed_dict(rng: Random, value: dict[str, Any]) -> Any:
    name = rng.choice(list(value))
    kind = rng.randrange(16)
    if kind > 4:
        return {**value, name: changed_json(rng, value[name])}
    if kind == 0:
        return {other: one for other, one in value.items() if other != name}
    if kind == 1:
        return {**value, str(rng.choice(_SCALARS)): value[name]}
    if kind == 2:
        return {**value, name: rng.choice(list(value.values()))}
    if kind == 3:
        return {f"{name}{number}": value[name] for number in range(rng.choice((2, 20, 200)))}
    return rng.choice(_SCALARS)


def _changed_list(rng: Random, value: list[Any]) -> Any:
    at, kind = rng.randrange(len(value)), rng.randrange(16)
    if kind > 5:
        return [*value[:at], changed_json(rng, value[at]), *value[at + 1 :]]
    if kind == 0:
        return [*value[:at], *value[at + 1 :]]
    if kind == 1:
        return [*value[:at], *value[at:] * 2]
    if kind == 2:
        return [*value[:at], *[value[at]] * rng.choice((2, 20, 200)), *value[at:]]
    if kind == 3:
        return [*value[:at], rng.choice(_SCALARS), *value[at:]]
    if kind == 4:
        return [*value[:at], rng.choice(value), *value[at + 1 :]]
    return rng.choice(_SCALARS)


# A field is [number, wire type, value]: an int, bytes, or a list of fields.
_Fields = list[list[Any]]


def mutate_wire(rng: Random, data: bytes) -> bytes:
    """Change a protobuf message in one or two fields; lengths stay right."""
    fields = _parsed_wire(data)
    if fields is None:
        return mutate_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        fields = _changed_fields(rng, fields)
    encoded = _encoded(fields)
    return mutate_bytes(rng, encoded) if rng.randrange(12) == 0 else encoded


@lru_cache(maxsize=512)
def _parsed_wire(data: bytes, depth: int = 0) -> _Fields | None:
    """Return the fields of a message, or None where the bytes are no such thing."""
    fields: _Fields = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if at < 0 or not 0 < tag >> 3 < 1 << 29 or tag & 7 not in (0, 2):
            return None
        value, at = _varint(data, at)
        if at < 0:
            return None
        content: Any = value
        if tag & 7 == 2:
            if at + value > len(data):
                return None
            content, at = data[at : at + value], at + value
            content = (_parsed_wire(content, depth + 1) if depth < 4 else None) or content
        fields.append([tag >> 3, tag & 7, content])
    return fields or None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return 0, -1


def _encoded(fields: _Fields) -> bytes:
    parts = []
    for number, wire_type, content in fields:
        parts.append(encode_varint(number << 3 | wire_type))
        if isinstance(content, int):
            parts.append(encode_varint(content))
        else:
            body = _encoded(content) if isinstance(content, list) else content
            parts += [encode_varint(len(body)), body]
    return b"".join(parts)


def _changed_fields(rng: Random, fields: _Fields) -> _Fields:
    if not fields:
        return [[rng.randrange(1, 8), 0, rng.choice(INTEGERS) % (1 << 64)]]
    at, kind = rng.randrange(len(fields)), rng.randrange(16)
    number, wire_type, content = fields[at]
    before, after = fields[:at], fields[at + 1 :]
    if kind > 6:
        return [*before, [number, wire_type, _changed_content(rng, content)], *after]
    if kind == 0:
        return before + after
    if kind == 1:
        return [*before, *[fields[at]] * rng.choice((2, 3, 70)), *after]
    if kind == 2:
        return [*before, [rng.choice((1, 2, 3, 4, 7, 17229, 99)), wire_type, content], *after]
    if kind == 3:
        return [*before, [number, rng.randrange(8), content], *after]
    if kind == 4:
        return [*before, [number, 0, rng.choice(INTEGERS) % (1 << 64)], *after]
    if kind == 5:
        return [*before, fields[at], [number, wire_type, _changed_content(rng, content)], *after]
    return [*before, *after, fields[at]]


def _changed_content(rng: Random, content: Any) -> Any:
    if isinstance(content, list):
        return _changed_fields(rng, content)
    if isinstance(content, int):
        if rng.randrange(2):
            return (content + rng.choice((-1, 1, 2, 128))) % (1 << 64)
        return rng.choice(INTEGERS) % (1 << 64)
    if rng.randrange(4) == 0:
        return rng.choice((b"Float32", b"Bool", b"Int4", b"str", b"float32", b"", content * 2))
    return mutate_bytes(rng, content)
