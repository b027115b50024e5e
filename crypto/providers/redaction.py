# SPDX-License-Identifier: Apache-2.0
"""The output of another program for a message: short, printable, and without possible keys.

>>> redact(b"denied for AKIB7Q2ZC0FFEE1234567890 AccessDeniedException", secrets=())
'denied for (not shown) AccessDeniedException'
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

MAX_SHOWN_CHARACTERS = 400

_NOT_SHOWN = "(not shown)"
# Twenty characters of hex or base64 (either alphabet, plain or escaped in JSON) may be a key ...
_RUN = re.compile(r"(?:[A-Za-z0-9+/_=-]|\\/|\\u00(?:2[BbFf]|3[Dd])){20,}")
# ... unless they are joined words, as in names of errors; random text is that once in ten thousand.
_WORDS = re.compile(r"[A-Z]{0,5}[a-z]{2,}(?:[A-Z][a-z]{2,})*")

# Bytes in groups, as in 41:42:43, 0x41, 0x42 or a line of a hexdump with its column of text.
_BYTES = r"(?:[0-9A-Fa-f]{2}){1,8}"
_GROUPS = re.compile(
    rf"(?<![0-9A-Za-z])(?:0x|\\x)?({_BYTES}(?:(?:[\s:,;._-]{{1,8}}(?:0x)?|\\[xn]){_BYTES})+)(?![0-9A-Za-z])"
    r"(?:[ \t]{2,}[^\n]{1,18})?"
)
_MIN_GROUPED_DIGITS = 24


def redact(output: bytes, *, secrets: Sequence[bytes]) -> str:
    """Return the end of `output` as one line, without the secrets and anything that looks like one.

    `secrets` are hidden in every spelling, however short.
    """
    for secret in secrets:
        for form in spellings(secret):
            pattern = re.escape(form) + rb"={0,2}"
            output = re.sub(pattern, _NOT_SHOWN.encode(), output, flags=re.IGNORECASE)
    # Redacted before it is cut, because half a key is also secret.
    text = _GROUPS.sub(_shown_groups, output.decode("utf-8", "replace"))
    text = _RUN.sub(_shown, text)
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    cut = len(line) > MAX_SHOWN_CHARACTERS
    return f"... {line[-MAX_SHOWN_CHARACTERS:]}" if cut else line


def spellings(secret: bytes) -> tuple[bytes, ...]:
    """Return the forms of a secret: raw, hex, hex with colons, both alphabets of base64."""
    return (
        secret,
        secret.hex().encode(),
        secret.hex(":").encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
    )


def _shown(match: re.Match[str]) -> str:
    text = match.group()
    return text if _WORDS.fullmatch(text) else _NOT_SHOWN


def _shown_groups(match: re.Match[str]) -> str:
    # A date with its time has up to twenty digits, and no key has fewer than 32.
    digits = sum(map(len, re.findall(_BYTES, match[1])))
    return match[0] if digits < _MIN_GROUPED_DIGITS else _NOT_SHOWN
