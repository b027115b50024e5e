# SPDX-License-Identifier: Apache-2.0
"""Keys that a person typed where something else belongs: they are not repeated on the screen, which logs keep."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ckptmgr.crypto.keys.source_names import spells_key

_LEAST_PIECE = 12
_NOT_SHOWN = "(not shown: it looks like a key)"


def is_misplaced_key(text: str) -> bool:
    """Return whether a text is a key and not the name of a file that is there."""
    return spells_key(text) and not os.path.lexists(text)


def misplaced_keys(arguments: Iterable[str]) -> list[str]:
    """Return the keys among the arguments of a command line, those of options included, the longest first."""
    values = [text for one in arguments for text in (one, *_values_of_option(one))]
    return sorted({text for text in values if is_misplaced_key(text)}, key=len, reverse=True)


def _values_of_option(argument: str) -> tuple[str, ...]:
    """Return what follows in `--option=VALUE` or `-oVALUE`."""
    return (argument.partition("=")[2], argument[2:]) if argument.startswith("-") else ()


def without_keys(text: str, keys: Sequence[str]) -> str:
    """Return a text with a remark in the place of the keys and of the pieces that parsers cut out of them."""
    for key in keys:
        text = _without(text, key, least=min(_LEAST_PIECE, len(key)))
    return text


def _without(text: str, key: str, *, least: int) -> str:
    parts, start, position = [], 0, 0
    while position <= len(text) - least:
        end = position + least
        if text[position:end] not in key:
            position += 1
            continue
        while end < len(text) and text[position : end + 1] in key:
            end += 1
        parts += [text[start:position], _NOT_SHOWN]
        start = position = end
    return "".join((*parts, text[start:]))
