# SPDX-License-Identifier: Apache-2.0
"""Texts of others (files, servers, libraries) as messages, logs and pages show them."""

from __future__ import annotations

from ckptmgr.core.errors import CkptmgrError

MOST_CHARACTERS = 500
"""Of a text of others within a message."""


def printable(text: str, most: int | None = None) -> str:
    r"""Return a text without control characters, which are spelled out, and at most `most` long.

    >>> printable("no such bucket\n\x1b[31m"), printable("x" * 100, 8)
    ('no such bucket\\n\\x1b[31m', 'xxxxx...')
    """
    if most is not None and len(text) > most:
        text = f"{text[: most - 3]}..."
    if text.isprintable():
        return text
    spelled = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
    return spelled if most is None else printable(spelled, most)


def error_text(error: BaseException) -> str:
    """Return an error for a log: ours as it is, of others one line of limited length."""
    text = str(error)
    return text if isinstance(error, CkptmgrError) else printable(text, MOST_CHARACTERS)


def quoted(text: str) -> str:
    """Return a text of others in quotes, for a message."""
    return f'"{printable(text, MOST_CHARACTERS)}"'
