# SPDX-License-Identifier: Apache-2.0
"""Divides a file into frames, before any of them is compressed.

* The bytes of a frame are elements of one size, so that they can be grouped, and at most 4 MiB.
* A tensor of 1 MiB or more has its own frames, which are expanded straight into its memory.
* Smaller neighbours share a frame: a frame costs 56 bytes and a call, and zstd uses their
  similarity.

>>> [one.size for one in plan_frames([ElementRun("header", 1, 100), ElementRun("float32", 4, 5 << 20)])]
[100, 4194304, 1048576]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..safetensors_file import SafetensorsIndex
from .table import FRAME_BYTES, check_frame_count

HEADER = "header"
MIXED = "mixed"
_OWN_FRAMES_BYTES = 1 << 20


class ElementRun(NamedTuple):
    """Neighbouring bytes that are elements of one type, `label`; `size` in bytes."""

    label: str
    item_bytes: int
    size: int


class PlannedFrame(NamedTuple):
    """A frame to be made; `label` is `mixed` for tensors of several types of one size."""

    start: int
    size: int
    item_bytes: int
    label: str


def runs_of(index: SafetensorsIndex, size_bytes: int) -> Iterator[ElementRun]:
    """Yield the runs of a safetensors file: the header, then its tensors in file order."""
    header = index.entries[0].pieces[0].offset if index.entries else size_bytes
    yield ElementRun(HEADER, 1, header)
    for entry in index.entries:
        dtype = entry.spec.dtype
        parts = 2 if dtype.name == "complex64" else 1  # two float32
        yield ElementRun(dtype.name, dtype.item_bytes // parts, entry.spec.size_bytes)


def plan_frames(runs: Iterable[ElementRun]) -> list[PlannedFrame]:
    """Return the frames of a file of these runs, in file order."""
    frames: list[PlannedFrame] = []
    shared: PlannedFrame | None = None
    start = 0
    for run in runs:
        is_joining = (
            shared is not None
            and run.size < _OWN_FRAMES_BYTES
            and shared.item_bytes == run.item_bytes
            and shared.size + run.size <= FRAME_BYTES
        )
        if shared is not None and is_joining:
            label = shared.label if shared.label == run.label else MIXED
            shared = shared._replace(size=shared.size + run.size, label=label)
        else:
            frames += [] if shared is None else [shared]
            shared = None
            if run.size < _OWN_FRAMES_BYTES:
                shared = PlannedFrame(start, run.size, run.item_bytes, run.label)
            else:
                frames += _frames_of(run, start)
        start += run.size
    frames += [] if shared is None else [shared]
    check_frame_count(len(frames))
    return [frame for frame in frames if frame.size]


def _frames_of(run: ElementRun, start: int) -> Iterator[PlannedFrame]:
    for at in range(0, run.size, FRAME_BYTES):
        size = min(FRAME_BYTES, run.size - at)
        yield PlannedFrame(start + at, size, run.item_bytes, run.label)
