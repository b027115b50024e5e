# SPDX-License-Identifier: Apache-2.0
"""Notes on exceptions of others."""

from __future__ import annotations

from contextlib import suppress


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception; one that refuses attributes, as a frozen dataclass, has none."""
    with suppress(Exception):
        error.add_note(text)
