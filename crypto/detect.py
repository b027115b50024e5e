# SPDX-License-Identifier: Apache-2.0
"""Name the cipher of an encrypted file without a key. It is what the file says; nothing here is proven."""

from __future__ import annotations

from .container.header import MAGIC
from .container.unlock import find_copies
from .errors import CryptoError
from .mindspore.records import read_bytes, sniff_mode
from .source import Source


def cipher_of(source: Source) -> str | None:
    """Return the cipher mode of a container or of MindSpore's records; None for anything else, or a damaged header."""
    first = read_bytes(source, 0, length=min(len(MAGIC), source.size))
    if first != MAGIC:
        return sniff_mode(first)
    try:
        return find_copies(source)[0].header.fixed.suite.mode
    except CryptoError:
        return None
