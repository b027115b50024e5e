# SPDX-License-Identifier: Apache-2.0
"""What is said about a damaged file of a checkpoint of many ranks, and reading one that may be too short."""

from __future__ import annotations

from dataclasses import dataclass

from ckptmgr.formats.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """What can be done, or was done, for a damaged file.

    Attributes:
        name: Of the file.
        bad_bytes: Length of the ranges that differ from their digests.
        sources: The files that hold copies of what is damaged.
        problem: Why it cannot be healed, or None.
    """

    name: str
    bad_bytes: int
    sources: tuple[str, ...] = ()
    problem: str | None = None


class PaddedSource:
    """A file at its right size: what is too much is cut off, and zeros stand for what is missing."""

    def __init__(self, raw: Source, size: int) -> None:
        self._raw = raw
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        there = min(max(0, self._raw.size - offset), buffer.nbytes)
        if there:
            self._raw.read_into(offset, buffer[:there])
        buffer[there:] = bytes(buffer.nbytes - there)
