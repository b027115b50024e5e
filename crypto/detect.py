# SPDX-License-Identifier: Apache-2.0
"""Detection of the cipher of an encrypted file without a key. Nothing here is authenticated."""

from __future__ import annotations

from .container.header import CONTAINER_MAGIC
from .container.unlock import find_copies
from .errors import CryptoError
from .mindspore.records import read_bytes, sniff_mode
from .source import Ciphertext


def cipher_of(source: Ciphertext) -> str | None:
    """Return the cipher mode of a container or of MindSpore's records; None for all other files."""
    first = read_bytes(source, 0, length=min(len(CONTAINER_MAGIC), source.size))
    if first != CONTAINER_MAGIC:
        return sniff_mode(first)
    try:
        return find_copies(source)[0].header.fixed.suite.mode
    except CryptoError:
        return None
